"""The engine on the toy model: what its deltas carry, in the phases where that is easily lost."""

import dataclasses
import time

import pytest

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.errors import RequestError
from jhybrid.request import Delta, Request, SamplingParams
from jhybrid.tokenizer import ByteTokenizer
from tests.toy_model import Fault, ToyRunner, expected_tokens, toy_engine, toy_model

CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, page_size=4, compilation_cache_dir="")
PROMPT = [1, 9, 2, 7]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def engine_with_text(**options: object) -> Engine:
    """The toy's tokens are bytes of text."""
    runner = ToyRunner(CONFIG, **options)  # pyright: ignore[reportArgumentType]
    model = dataclasses.replace(toy_model(runner.router, runner.max_model_len), tokenizer=ByteTokenizer(263))
    return Engine.with_runner(CONFIG, model, runner)  # pyright: ignore[reportArgumentType]


def drain(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize("end", ["abort", "nan", "before", "length"])
def test_text_held_back_for_a_stop_string_comes_with_the_end(end: str):
    """Tokens that were told have their text told too, however the answer ends."""
    told = bytes(expected_tokens(PROMPT, GREEDY)[:3]).decode()
    stop = told[1:] + "never"
    faults = {} if end in ("abort", "length") else {3: Fault(end)}
    engine = engine_with_text(faults=faults)
    sampling = dataclasses.replace(GREEDY, stop=[stop], max_tokens=3 if end == "length" else 12)
    name = engine.submit(Request(prompt_token_ids=PROMPT, sampling=sampling))
    deltas: list[Delta] = []
    while sum(len(delta.token_ids) for delta in deltas) < 3:
        deltas += engine.step()
    if end == "abort":
        assert "".join(delta.text for delta in deltas) == told[:1]
        engine.abort(name)
    deltas += drain(engine)
    assert deltas[-1].finish_reason == {"nan": "error", "before": "error"}.get(end, end)
    assert "".join(delta.text for delta in deltas) == told


@pytest.mark.parametrize(("length", "field"), [(100_000, "prompt"), (10**6, "prompt_token_ids")])
def test_prompts_far_too_long_are_refused_before_they_are_read(
    length: int, field: str, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_with_text()
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    monkeypatch.setattr(Request, "validate", lambda *_: None if field == "prompt" else pytest.fail("it was read"))
    prompt = Request("a" * length) if field == "prompt" else Request(prompt_token_ids=[1] * length)
    with pytest.raises(RequestError, match=rf"^{field}: .*{length} .* max_model_len=\d+.*; shorten it"):
        engine.submit(prompt)


def test_queue_seconds_come_once_and_end_with_the_first_dispatch():
    engine, runner = toy_engine(CONFIG, before_run=lambda _: time.sleep(0.004))
    names = [engine.submit(Request(prompt_token_ids=PROMPT, sampling=GREEDY)) for _ in range(3)]
    deltas = drain(engine)
    waited = {}
    for name in names:
        seconds = [delta.queue_seconds for delta in deltas if delta.request_id == name]
        assert seconds[0] is not None and seconds[1:] == [None] * 11
        waited[name] = seconds[0]
    assert max(waited[names[0]], waited[names[1]]) < 0.004 < 0.04 < waited[names[2]]
    assert not runner.violations


def test_nothing_is_kept_of_those_that_end_early():
    engine, _ = toy_engine(CONFIG, faults={0: Fault("before")})
    names = [engine.submit(Request(prompt_token_ids=PROMPT, sampling=GREEDY)) for _ in range(4)]
    engine.step()
    engine.abort(names[3])
    drain(engine)
    status = engine.status()
    assert not engine._sequences and not status["running"] and not status["waiting"]
