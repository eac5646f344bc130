"""The gRPC service over the real engine: on the model computable by hand, and on a small checkpoint."""

import dataclasses
import shutil
import time
from pathlib import Path

import grpc
import pytest

from jhybrid import Engine, EngineConfig, Request, RequestError, SamplingParams, StepError
from jhybrid.tokenizer import ByteTokenizer
from tests.server.serving import eventually, serving
from tests.toy_model import Fault, ToyRunner, expected_tokens, toy_engine

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "nemotron_h_dense"
CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, page_size=4)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = dataclasses.replace(GREEDY, max_tokens=None)
PROMPT = [1, 9, 2, 7]


def slow_toy(**options: object) -> tuple[Engine, ToyRunner]:
    """Steps take long enough to be overtaken."""
    return toy_engine(CONFIG, max_model_len=4096, before_run=lambda _: time.sleep(0.002), **options)


def all_free(engine: Engine) -> bool:
    pools = (engine.ledger.pages, engine.ledger.slots, engine.ledger.rows)
    return not engine.has_work and not any(pool.used for pool in pools)


def test_tokens_are_the_engines_own():
    engine, runner = toy_engine(CONFIG)
    with serving(lambda: engine) as served:
        sampling = dataclasses.replace(GREEDY, n=2, temperature=0.8, seed=3)
        answer = served.client.generate(Request(prompt_token_ids=PROMPT, sampling=sampling))
        eventually(lambda: all_free(engine))
    for index, completion in enumerate(answer.output.completions):
        assert completion.token_ids == expected_tokens(PROMPT, sampling, index)
    assert not runner.violations


def test_cancel_and_deadline_free_slots_and_pages():
    engine, _ = slow_toy()
    with serving(lambda: engine) as served:
        request = Request(prompt_token_ids=PROMPT, sampling=ENDLESS)
        streams = [served.client.stream(request) for _ in range(4)]  # two run, two wait
        eventually(lambda: len(engine.scheduler.running) == 2 and engine.scheduler.num_waiting == 2)
        for stream in streams:
            stream.cancel()
        eventually(lambda: all_free(engine), 1.0)
        with pytest.raises(grpc.RpcError) as caught:
            served.client.generate(request, timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: all_free(engine), 1.0)
        short = Request(prompt_token_ids=PROMPT, sampling=GREEDY)
        assert served.client.generate(short).output.token_ids == expected_tokens(PROMPT, GREEDY)


def test_timing_tells_the_wait_for_a_place():
    engine, _ = slow_toy()
    with serving(lambda: engine) as served:
        first = [served.client.stream(Request(prompt_token_ids=PROMPT, sampling=ENDLESS)) for _ in range(2)]
        eventually(lambda: len(engine.scheduler.running) == 2)
        second = served.client.stream(Request(prompt_token_ids=PROMPT, sampling=GREEDY))
        eventually(lambda: engine.scheduler.num_waiting == 1)
        time.sleep(0.1)
        for stream in first:
            stream.cancel()
        list(second)
        timing = second.answer().timing
    assert timing.queue_seconds is not None and timing.first_token_seconds is not None
    assert 0.1 < timing.queue_seconds < timing.first_token_seconds < timing.total_seconds


def test_text_held_back_is_written_before_a_failure():
    engine, runner = toy_engine(CONFIG, faults={4: Fault("nan")})
    model = dataclasses.replace(engine.model, tokenizer=ByteTokenizer(263))
    engine = Engine.with_runner(CONFIG, model, runner)  # pyright: ignore[reportArgumentType]
    told = bytes(expected_tokens(PROMPT, GREEDY)[:4]).decode()
    sampling = dataclasses.replace(GREEDY, stop=[told + "never"])
    texts = []
    with serving(lambda: engine) as served, pytest.raises(StepError):
        texts.extend(delta.text for delta in served.client.stream(Request(prompt_token_ids=PROMPT, sampling=sampling)))
    assert "".join(texts) == told


def test_a_failed_step_fails_its_calls_and_no_others():
    engine, _ = toy_engine(CONFIG, faults={0: Fault("before"), 3: Fault("nan")})
    request = Request(prompt_token_ids=PROMPT, sampling=GREEDY)
    with serving(lambda: engine) as served:
        with pytest.raises(StepError, match="the step failed: DeviceFault"):
            served.client.generate(request)
        with pytest.raises(StepError, match="NaN or infinite"):
            served.client.generate(request)
        assert served.client.generate(request).output.token_ids == expected_tokens(PROMPT, GREEDY)
        assert served.client.status().failed_sequences == 2


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt": "no tokenizer here"}),
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("prompt_token_ids", {"prompt_token_ids": [64]}),
        ("prompt_token_ids", {"prompt_token_ids": [-1]}),
        ("prompt_token_ids", {"prompt_token_ids": [1] * 65}),
        ("max_tokens", {"prompt_token_ids": [1], "sampling": SamplingParams(max_tokens=10**9)}),
        ("stop", {"prompt_token_ids": [1], "sampling": SamplingParams(stop=["x"])}),
    ],
)
def test_refusals_are_those_of_the_python_api(field: str, fields: dict):
    engine, _ = toy_engine(CONFIG)
    with pytest.raises(RequestError) as local:
        engine.submit(Request(**fields))
    with serving(lambda: engine) as served, pytest.raises(RequestError) as remote:
        served.client.generate(Request(**fields))
    assert (remote.value.field, str(remote.value)) == (field, str(local.value))


def test_a_checkpoint_answers_over_grpc_as_in_python(tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, tmp_path)
    ByteTokenizer().save(tmp_path)
    engine = Engine(
        EngineConfig(str(tmp_path), dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16)
    )
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    request = Request(prompt="What light? 😀", sampling=sampling)
    [expected] = engine.generate([request])
    with serving(lambda: engine) as served:
        answer = served.client.generate(request)
        info = served.client.model_info()
    assert answer.output.text == expected.text
    assert answer.output.token_ids == expected.token_ids
    assert answer.output.logprobs == expected.logprobs
    assert answer.output.prompt_logprobs == expected.prompt_logprobs
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids) == 1 + len("What light? 😀".encode())
    assert (info.architecture, info.has_tokenizer, info.bos_token_id) == ("NemotronHForCausalLM", True, 256)
