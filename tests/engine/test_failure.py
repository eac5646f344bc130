"""Failures and cancellation: whoever fails fails alone, with the cause, and everything is given back."""

import numpy as np
import pytest

from jhybrid import Engine, EngineDeadError, QueueFullError, RequestError, SamplingParams
from jhybrid.request import Request
from jhybrid.runner import StepHandle

from .bed import alone, at_most, budget, drain, engine_of, greedy, parameters, prompts, same


class Broken(StepHandle):
    """A step that fails when its result is asked for, as device errors do."""

    def result(self):
        raise RuntimeError("the device fell over")


@pytest.mark.parametrize("when", ["launch", "result"])
def test_a_failed_step_fails_its_sequences_and_no_others(hybrid: Engine, monkeypatch: pytest.MonkeyPatch, when: str):
    lengths = [20, 30, 25]
    requests = [greedy(p, 8, logprobs=0) for p in prompts(hybrid, lengths, seed=1)]
    expected = [alone(hybrid, request) for request in requests]
    run = hybrid.runner.run
    calls = 0

    def fail_third(batch):
        nonlocal calls
        calls += 1
        if calls != 3:
            return run(batch)
        if when == "launch":
            raise RuntimeError("the device fell over")
        return Broken(batch, run(batch)._output)

    monkeypatch.setattr(hybrid.runner, "run", fail_third)
    first = [hybrid.submit(request) for request in requests[:2]]
    with at_most(hybrid, 2):
        later = hybrid.submit(requests[2])
        deltas = drain(hybrid)
    for name in first:
        [end] = [d for d in deltas if d.request_id == name and d.finish_reason]
        assert end.finish_reason == "error"
        assert "the device fell over" in (end.error or "")
    tokens = [t for d in deltas if d.request_id == later for t in d.token_ids]
    assert tokens == expected[2].token_ids


def test_a_failure_that_takes_the_caches_restarts_the_others(hybrid: Engine, monkeypatch: pytest.MonkeyPatch):
    """Sequences that were not in the failed step are recomputed from position 0 in fresh caches."""
    requests = [greedy(p, 8, logprobs=0) for p in prompts(hybrid, [60, 50], seed=2)]
    expected = [alone(hybrid, request) for request in requests]
    run = hybrid.runner.run
    calls = 0

    def fail_fourth(batch):
        nonlocal calls
        calls += 1
        if calls != 4:
            return run(batch)
        for array in hybrid.runner.cache.arrays.values():
            array.delete()
        raise RuntimeError("the caches are gone")

    monkeypatch.setattr(hybrid.runner, "run", fail_fourth)
    with budget(hybrid, 10):  # the second request is not in the first steps
        names = [hybrid.submit(request) for request in requests]
        deltas = drain(hybrid)
    ends = {d.request_id: d.finish_reason for d in deltas if d.finish_reason}
    tokens = [t for d in deltas if d.request_id == names[1] for t in d.token_ids]
    assert ends == {names[0]: "error", names[1]: "length"}
    assert tokens == expected[1].token_ids


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_logits_fail_that_sequence_only(engine: Engine, value: float):
    bad_token = 7
    clean = [[t for t in p if t != bad_token] for p in prompts(engine, [20, 31], seed=3)]
    expected = [alone(engine, greedy(p, 6, logit_bias={bad_token: -100.0})) for p in clean]

    def break_token(path: str, array: np.ndarray) -> np.ndarray:
        if "embed" in path:
            array[bad_token] = value
        return array

    tied = engine.model.config is not None and engine.model.config.tie_word_embeddings
    if tied:
        return  # its output row is the same row, so that every answer has a NaN in it
    with parameters(engine, break_token):
        bad = greedy([*clean[0][:10], bad_token, *clean[0][10:]], 6)
        outputs = engine.generate(
            [
                greedy(clean[0], 6, logit_bias={bad_token: -100.0}),
                bad,
                greedy(clean[1], 6, logit_bias={bad_token: -100.0}),
            ]
        )
    assert outputs[1].finish_reason == "error"
    assert "NaN or infinite" in (outputs[1].error or "")
    assert outputs[1].token_ids == []
    same(outputs[0], expected[0])
    same(outputs[2], expected[1])


def test_nan_in_a_prompt_that_is_scored(nemotron: Engine):
    [prompt] = prompts(nemotron, [40], seed=4)

    def break_token(path: str, array: np.ndarray) -> np.ndarray:
        if "embed" in path:
            array[prompt[20]] = np.nan
        return array

    with parameters(nemotron, break_token):
        [output] = nemotron.generate([greedy(prompt, 0, prompt_logprobs=0)])
    assert output.finish_reason == "error"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 12, 14])
def test_cancel_in_every_phase(engine: Engine, steps: int):
    """Queued, mid-prefill, decoding: nothing comes after the end, nobody else notices, everything is given back."""
    requests = [greedy(p, 10, logprobs=0) for p in prompts(engine, [60, 20, 9], seed=5)]
    expected = [alone(engine, request) for request in requests]
    collected: dict[str, list[int]] = {}
    with budget(engine, 8), at_most(engine, 2):
        names = [engine.submit(request) for request in requests]
        for _ in range(steps):
            for delta in engine.step():
                collected.setdefault(delta.request_id, []).extend(delta.token_ids)
        running = names[0] in engine._sequences
        assert engine.abort(names[0]) is running
        after = drain(engine)
    ends = [d for d in after if d.request_id == names[0]]
    assert [d.finish_reason for d in ends] == ["abort"] * running
    assert not any(d.token_ids for d in ends)
    for delta in after:
        collected.setdefault(delta.request_id, []).extend(delta.token_ids)
    for name, reference in list(zip(names, expected, strict=True))[1:]:
        assert collected[name] == reference.token_ids


def test_the_slot_of_a_cancelled_sequence_is_clean_for_the_next(hybrid: Engine):
    [long, short] = prompts(hybrid, [90, 12], seed=6)
    expected = alone(hybrid, greedy(short, 8))
    with budget(hybrid, 16), at_most(hybrid, 1):
        name = hybrid.submit(greedy(long, 8))
        for _ in range(3):
            hybrid.step()
        hybrid.abort(name)
        [output] = hybrid.generate([greedy(short, 8)])
        assert [delta.finish_reason for delta in drain(hybrid)] == ["abort"]  # kept for whoever steps next
    same(output, expected)


def test_leaving_a_stream_early_aborts_it(nemotron: Engine):
    [prompt] = prompts(nemotron, [5])
    stream = nemotron.stream(greedy(prompt, 50))
    next(stream)
    stream.close()
    drain(nemotron)


def test_an_unknown_request_cannot_be_aborted(nemotron: Engine):
    assert nemotron.abort("nobody") is False


def test_the_queue_is_bounded(nemotron: Engine):
    [prompt] = prompts(nemotron, [5])
    object.__setattr__(nemotron.config, "max_queue", 3)
    try:
        for _ in range(3):
            nemotron.submit(greedy(prompt, 2))
        with pytest.raises(QueueFullError, match="max_queue is 3"):
            nemotron.submit(greedy(prompt, 2))
        assert len({d.request_id for d in drain(nemotron) if d.finish_reason == "length"}) == 3
        assert len(nemotron.generate([greedy(prompt, 2) for _ in range(10)])) == 10
        with pytest.raises(RequestError, match="n: 4 answers never fit in max_queue=3"):
            nemotron.generate([greedy(prompt, 2, n=4)])
    finally:
        object.__setattr__(nemotron.config, "max_queue", 4096)


V = 263


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "prompt"),
        (Request(prompt="x", prompt_token_ids=[1]), "prompt"),
        (Request(prompt="text for a model without tokenizer"), "prompt"),
        (Request(prompt_token_ids=[]), "prompt_token_ids"),
        (Request(prompt_token_ids=[-1]), "prompt_token_ids"),
        (Request(prompt_token_ids=[V]), "prompt_token_ids"),
        (Request(prompt_token_ids=[2**31]), "prompt_token_ids"),
        (Request(prompt_token_ids=[1.5]), "prompt_token_ids"),
        (Request(prompt_token_ids=[True]), "prompt_token_ids"),
        (Request(prompt_token_ids=["5"]), "prompt_token_ids"),
        (Request(prompt_token_ids=[1] * 256), "prompt_token_ids"),
        (Request(prompt_token_ids=[1] * 2560), "prompt_token_ids"),
        (Request(prompt_token_ids=[1] * 250, sampling=SamplingParams(max_tokens=7)), "max_tokens"),
        (Request(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=10**9)), "max_tokens"),
        (Request(prompt_token_ids=5), "prompt_token_ids"),
        (Request(prompt_token_ids="12"), "prompt_token_ids"),
        (Request(prompt_token_ids={1: 2}), "prompt_token_ids"),
        (Request(prompt=b"bytes"), "prompt"),
        (Request(prompt_token_ids=[1], priority=1.5), "priority"),
        (Request(prompt_token_ids=[1], priority="high"), "priority"),
        (Request(prompt_token_ids=[1], priority=None), "priority"),
        (Request(prompt_token_ids=[1], request_id=7), "request_id"),
        (Request(prompt_token_ids=[1], add_special_tokens=3), "add_special_tokens"),
        (Request(prompt_token_ids=[1], sampling=None), "sampling"),
        (Request(prompt_token_ids=[1], sampling={"max_tokens": 3}), "sampling"),
        ({"prompt_token_ids": [1]}, "request"),
    ]
    + [
        (Request(prompt_token_ids=[1], sampling=SamplingParams(**{name: value})), name)
        for name, value in [
            ("max_tokens", -1),
            ("max_tokens", 1.0),
            ("min_tokens", -1),
            ("min_tokens", 17),
            ("min_tokens", True),
            ("ignore_eos", "no"),
            ("ignore_eos", 1),
            ("skip_special_tokens", None),
            ("include_stop_str_in_output", "yes"),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", -0.1),
            ("temperature", "hot"),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("top_k", -2),
            ("min_p", -0.5),
            ("n", 0),
            ("n", 10**6),
            ("n", True),
            ("logprobs", -1),
            ("logprobs", 10**6),
            ("prompt_logprobs", 21),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", 1e-40),
            ("presence_penalty", 3.0),
            ("frequency_penalty", float("nan")),
            ("seed", 1.5),
            ("stop", ""),
            ("stop", ["a"] * 10**5),
            ("stop", 5),
            ("stop", "needs a tokenizer"),
            ("stop_token_ids", [V]),
            ("logit_bias", {V: 1.0}),
            ("logit_bias", {-1: 1.0}),
            ("logit_bias", {"abc": 1.0}),
            ("logit_bias", dict.fromkeys(range(2000), 1.0)),
        ]
    ],
)
def test_a_bad_request_is_refused_with_its_field(nemotron: Engine, request_: Request, field: str):
    with pytest.raises(RequestError) as refusal:
        nemotron.submit(request_)
    assert refusal.value.field.startswith(field)
    assert str(refusal.value).startswith(field)
    assert not nemotron.has_work
    with pytest.raises(RequestError):
        nemotron.generate([request_])


def test_a_refused_request_disturbs_nobody(nemotron: Engine):
    [prompt] = prompts(nemotron, [30], seed=8)
    expected = alone(nemotron, greedy(prompt, 8))
    name = nemotron.submit(greedy(prompt, 8))
    tokens = []
    while nemotron.has_work:
        with pytest.raises(RequestError):
            nemotron.submit(Request(prompt_token_ids=[-1]))
        tokens += [t for d in nemotron.step() if d.request_id == name for t in d.token_ids]
    assert tokens == expected.token_ids


def test_one_id_runs_once(nemotron: Engine):
    request = Request(prompt_token_ids=[1, 2], request_id="mine", sampling=SamplingParams(max_tokens=2))
    nemotron.submit(request)
    with pytest.raises(RequestError, match="already running"):
        nemotron.submit(request)
    drain(nemotron)
    assert nemotron.submit(request) == "mine"
    drain(nemotron)


def test_a_closed_engine_gives_everything_back_and_takes_nothing():
    engine = engine_of("llama")
    twin = Engine.with_runner(engine.config, engine.model, engine.runner)
    with twin:
        for prompt in prompts(twin, [50, 10]):
            twin.submit(greedy(prompt, 10))
        for _ in range(3):
            twin.step()
    assert twin.ledger.pages.used == twin.ledger.rows.used == twin.scheduler.num_waiting == 0
    with pytest.raises(EngineDeadError):
        twin.submit(greedy([1], 1))
    twin.close()
