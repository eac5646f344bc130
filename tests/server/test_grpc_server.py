"""The gRPC service over a fake engine: streams, statuses, and who gets their memory back when."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import generate_latest

from jhybrid.errors import ConfigError, EngineDeadError, JhybridError, QueueFullError, RequestError, StepError
from jhybrid.request import Request, SamplingParams
from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server import desk as desk_module
from jhybrid_server import grpc_server
from jhybrid_server.bridge import Bridge, NotReadyError
from jhybrid_server.client import AsyncClient, Client
from jhybrid_server.desk import Desk
from jhybrid_server.grpc_server import MAX_MESSAGE_BYTES, GrpcServer
from jhybrid_server.keys import Keys
from jhybrid_server.scoring import Question
from jhybrid_server.statuses import (
    DETAILS_KEY,
    AbortedError,
    ModelNotFoundError,
    UnauthenticatedError,
    error_of,
    status_of,
)
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.v1.inference_pb2_grpc import InferenceServiceStub
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.serving import Served, eventually, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ENDLESS = SamplingParams(max_tokens=None)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(step_seconds=0.002)


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


def health(target: str, service: str = "") -> int:
    with grpc.insecure_channel(target) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status


def idle(engine: FakeEngine) -> bool:
    return not engine.running and not engine.waiting


def test_a_client_that_stops_reading_is_dropped_and_no_other_notices(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grpc_server, "STALL_SECONDS", 0.5)
    engine.step_seconds = 0.01  # the whole answer takes far longer than the client's patience with it
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with grpc.insecure_channel(served.target, options=narrow) as channel:
        sampling = pb.SamplingParams(max_tokens=1900, n=16, logprobs=20)
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="abc", sampling=sampling))
        next(call)
        other = served.client.generate(Request(prompt="abc", sampling=SamplingParams(max_tokens=5)))
        assert other.output.text == answer_text(4, 5)
        eventually(lambda: bool(engine.aborted) and idle(engine), 20.0)
        with pytest.raises(grpc.RpcError, match="took no message") as dropped:
            list(call)
        assert dropped.value.code() is grpc.StatusCode.ABORTED  # pyright: ignore[reportAttributeAccessIssue]


def test_streams_deltas_and_ends_with_usage_and_timing(served: Served):
    sampling = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=0)
    stream = served.client.stream(Request(prompt="abc", sampling=sampling, request_id="mine"))
    deltas = list(stream)
    assert "".join(d.text for d in deltas) == answer_text(4, 5)  # BOS and three bytes
    assert {d.finish_reason for d in deltas[:-1]} <= {None} and deltas[-1].finish_reason == "length"
    assert {d.request_id for d in deltas} == {"mine"}
    assert [d.logprobs for d in deltas] == [[[(token, -0.5), (98, -1.5)] for token in d.token_ids] for d in deltas]
    assert deltas[0].prompt_logprobs == [None, [(97, -0.25)], [(98, -0.25)], [(99, -0.25)]]
    assert all(d.prompt_logprobs is None for d in deltas[1:])
    answer = stream.answer()
    assert answer.output.text == answer_text(4, 5)
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.completion_tokens) == (4, 3, 5)
    assert answer.timing.first_token_seconds is not None
    assert 0.0 < answer.timing.first_token_seconds < answer.timing.total_seconds < 5.0


def test_token_ids_and_several_answers(served: Served):
    answer = served.client.generate(Request(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=3, n=2)))
    assert [c.text for c in answer.output.completions] == [answer_text(2, 3, 0), answer_text(2, 3, 1)]
    assert [c.finish_reason for c in answer.output.completions] == ["length", "length"]
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize(("fields", "reason"), [({"stop": ["f"]}, "f"), ({"stop_token_ids": [ord("f")]}, ord("f"))])
def test_what_stopped_it_is_told(served: Served, fields: dict, reason: str | int):
    sampling = SamplingParams(max_tokens=20, **fields)
    [completion] = served.client.generate(Request(prompt="abc", sampling=sampling)).output.completions
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)


def test_every_field_reaches_the_engine(served: Served, engine: FakeEngine):
    sampling = SamplingParams(max_tokens=2, temperature=0.3, seed=-5, logit_bias={3: -1.5}, stop=["x"], top_k=7, n=2)
    served.client.generate(Request(prompt="abc", sampling=sampling, priority=4, add_special_tokens=False))
    [got] = engine.submitted
    assert got.sampling == sampling
    assert got.priority == 4
    assert got.prompt_token_ids == [97, 98, 99]


def test_async_client(served: Served):
    async def work() -> str:
        async with AsyncClient(served.target) as client:
            assert (await client.status()).running == 0
            assert (await client.model_info()).vocab_size == 263
            assert await client.tokenize("é") == [256, 0xC3, 0xA9]
            many = (client.generate(Request(prompt="abc", sampling=SamplingParams(max_tokens=4))) for _ in range(8))
            texts = {answer.output.text for answer in await asyncio.gather(*many)}
            with pytest.raises(RequestError, match="n: 0"):
                await client.generate(Request(prompt="abc", sampling=SamplingParams(n=0)))
            return texts.pop()

    assert asyncio.run(work()) == answer_text(4, 4)


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("prompt", {"prompt": "", "add_special_tokens": False}),
        ("prompt", {"prompt": "x" * 2000}),
        ("prompt_token_ids", {"prompt_token_ids": [1, 263]}),
        ("prompt_token_ids", {"prompt_token_ids": [-1]}),
        ("temperature", {"prompt": "a", "sampling": SamplingParams(temperature=math.nan)}),
        ("request_id", {"prompt": "a", "request_id": "x" * 257}),
        ("n", {"prompt": "a", "sampling": SamplingParams(n=0)}),
        ("n", {"prompt": "a", "sampling": SamplingParams(n=10**6)}),
        ("logprobs", {"prompt": "a", "sampling": SamplingParams(logprobs=10**6)}),
        ("stop", {"prompt": "a", "sampling": SamplingParams(stop=["x"] * 10**5)}),
        ("logit_bias", {"prompt": "a", "sampling": SamplingParams(logit_bias={263: 1.0})}),
        ("max_tokens", {"prompt": "a", "sampling": SamplingParams(max_tokens=-1)}),
    ],
)
def test_bad_requests_name_the_field(served: Served, engine: FakeEngine, field: str, request_fields: dict):
    with pytest.raises(RequestError) as caught:
        served.client.generate(Request(**request_fields))
    assert caught.value.field == field
    assert caught.value.__cause__.code() is grpc.StatusCode.INVALID_ARGUMENT  # pyright: ignore
    assert served.client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)
    assert len(engine.submitted) == 1


def test_prompt_missing_and_other_model(served: Served):
    with grpc.insecure_channel(served.target) as channel:
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest()))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("prompt: ")
    with Client(served.target, model="other") as client, pytest.raises(ModelNotFoundError, match="'other'"):
        client.generate(Request(prompt="a"))
    with Client(served.target, model="fake") as client:
        assert client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)


def test_a_failed_sequence_is_internal_with_its_cause(served: Served):
    stream = served.client.stream(Request(prompt="nan", sampling=SamplingParams(max_tokens=5)))
    seen = []
    with pytest.raises(StepError, match="NaN or infinite"):
        seen.extend(delta.text for delta in stream)
    assert "".join(seen) == answer_text(4, 2)
    with pytest.raises(StepError, match=r"answers \[0\] of 2: the model's logits"):
        served.client.generate(Request(prompt="nan", sampling=SamplingParams(max_tokens=5, n=2)))


def test_siblings_of_a_failed_answer_finish(served: Served):
    stream = served.client.stream(Request(prompt="nan", sampling=SamplingParams(max_tokens=5, n=2)))
    deltas = []
    with pytest.raises(StepError):
        deltas.extend(stream)
    assert "".join(d.text for d in deltas if d.index == 1) == answer_text(4, 5, 1)
    assert stream.usage is None  # it would say that the call ended well


def test_a_bug_in_submit_reaches_its_caller_only(served: Served):
    with pytest.raises(grpc.RpcError) as caught:
        served.client.generate(Request(prompt="bug"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert served.client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)


def test_full_queue_is_resource_exhausted_and_passes(served: Served, engine: FakeEngine):
    streams = [served.client.stream(Request(prompt="abc", sampling=ENDLESS)) for _ in range(4)]
    eventually(lambda: len(engine.running) == 4)
    streams += [served.client.stream(Request(prompt="abc", sampling=ENDLESS)) for _ in range(8)]
    eventually(lambda: len(engine.running) == 4 and len(engine.waiting) == 8)
    with pytest.raises(QueueFullError) as caught:
        served.client.generate(Request(prompt="abc"))
    trailer = dict(caught.value.__cause__.trailing_metadata())[DETAILS_KEY]  # pyright: ignore
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_pb2.Status.FromString(trailer).details)
    assert retry.retry_delay.seconds == 1
    for stream in streams:
        stream.cancel()
    eventually(lambda: idle(engine))
    assert served.client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)


def test_cancelling_frees_while_decoding_and_while_queued(served: Served, engine: FakeEngine):
    streams = {
        f"r{i}": served.client.stream(Request(prompt="abc", sampling=ENDLESS, request_id=f"r{i}")) for i in range(6)
    }
    eventually(lambda: len(engine.running) == 4 and len(engine.waiting) == 2)
    queued = next(iter(engine.waiting))
    next(iter(streams[next(iter(engine.running))]))
    streams[queued].cancel()
    eventually(lambda: engine.aborted == [queued])
    for stream in streams.values():
        stream.cancel()
    eventually(lambda: idle(engine))
    assert sorted(engine.aborted) == sorted(streams)
    eventually(lambda: served.desk.running == 0)


def test_leaving_a_stream_early_frees(served: Served, engine: FakeEngine):
    for _ in served.client.stream(Request(prompt="abc", sampling=ENDLESS, request_id="left")):
        break
    eventually(lambda: engine.aborted == ["left"] and idle(engine))


def test_request_id_in_use_is_refused_and_free_again_after(served: Served, engine: FakeEngine):
    first = served.client.stream(Request(prompt="abc", sampling=ENDLESS, request_id="same"))
    next(iter(first))
    with pytest.raises(RequestError, match="request_id: 'same' is already running"):
        served.client.generate(Request(prompt="abc", request_id="same"))
    first.cancel()
    eventually(lambda: idle(engine) and not served.bridge._streams)
    assert served.client.generate(Request(prompt="abc", request_id="same")).output.text == answer_text(4, 16)


def test_deadline_ends_the_call_and_frees(served: Served, engine: FakeEngine):
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        served.client.generate(Request(prompt="abc", sampling=ENDLESS, request_id="late"), timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: idle(engine), 1.0)
    assert engine.aborted == ["late"]
    assert time.monotonic() - started < 1.0


def test_a_call_that_answers_at_once_has_a_deadline_of_its_own(served: Served, engine: FakeEngine):
    stream = served.client.stream(Request(prompt="abc", sampling=ENDLESS))
    next(iter(stream))
    engine.gate.clear()
    eventually(lambda: engine.is_held)  # the engine's thread hangs in a step
    with pytest.raises(grpc.RpcError) as caught:
        served.client.status(timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    engine.gate.set()
    stream.cancel()


def test_client_that_vanishes_frees(served: Served, engine: FakeEngine):
    client = Client(served.target)
    stream = client.stream(Request(prompt="abc", sampling=ENDLESS, request_id="gone"))
    next(iter(stream))
    client.close()
    eventually(lambda: engine.aborted == ["gone"] and idle(engine), 1.0)


def test_slow_reader_holds_up_nobody(served: Served):
    slow = served.client.stream(Request(prompt="abc", sampling=SamplingParams(max_tokens=900, logprobs=20)))
    reader = iter(slow)
    next(reader)
    for _ in range(5):
        assert served.client.generate(Request(prompt="abc"), timeout=5).output.text == answer_text(4, 16)
    *_, last = reader
    assert last.finish_reason == "length"
    assert slow.answer().output.text == answer_text(4, 900)


def test_one_thread_owns_the_engine(served: Served, engine: FakeEngine):
    threads = [threading.Thread(target=served.client.generate, args=(Request(prompt="abc"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    served.client.status()
    for thread in threads:
        thread.join()
    assert len(engine.threads) == 1


def test_an_idle_engine_is_left_alone(served: Served, engine: FakeEngine):
    served.client.generate(Request(prompt="abc"))
    time.sleep(0.05)
    looks = engine.looks
    time.sleep(0.2)
    assert engine.looks == looks


def test_tokenize(served: Served, engine: FakeEngine):
    assert served.client.tokenize("hi") == [256, 104, 105]
    assert served.client.tokenize("hi", add_special_tokens=False) == [104, 105]
    engine.tokenizer = None
    with pytest.raises(RequestError, match="text: this model has no tokenizer"):
        served.client.tokenize("hi")


def test_texts_without_end_are_refused_before_time_is_spent_on_them(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "MAX_TEXT", 5)
    for field, ask in (
        ("text", lambda: served.client.tokenize("abcdef")),
        ("tokens", lambda: served.client.detokenize([97] * 6)),
        ("context", lambda: served.client.score(Question("abcdef", ["a"]))),
        ("continuations[1]", lambda: served.client.score(Question("abc", ["a", "def"]))),
    ):
        with pytest.raises(
            RequestError, match=r"has 6 (characters|entries), at most 5 allowed; send parts of it"
        ) as refused:
            ask()
        assert refused.value.field == field


def test_detokenize(served: Served):
    assert served.client.detokenize([256, 0xC3, 0xA9]) == "<bos>é"
    assert served.client.detokenize([256, 0xC3, 0xA9], skip_special_tokens=True) == "é"
    with pytest.raises(RequestError, match=r"tokens: entry 1 is 263; must be in \[0, 263\)"):
        served.client.detokenize([1, 263])


def test_chat_goes_through_the_template(served: Served, engine: FakeEngine):
    said = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="messages: this model has no chat template"):
        list(served.client.chat(said, SamplingParams()))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ mood }}|{% endfor %}"
    engine.tokenizer = ByteTokenizer(263, chat_template=template)
    stream = served.client.chat(said, SamplingParams(max_tokens=5), chat_template_kwargs={"mood": "!"})
    text = "".join(delta.text for delta in stream)
    prompt = [256, *b"user:hi!|"]
    assert engine.submitted[-1].prompt_token_ids == prompt  # BOS once
    assert text == stream.answer().output.text == answer_text(len(prompt), 5)
    with pytest.raises(RequestError, match="messages: is empty"):
        list(served.client.chat([], SamplingParams()))
    asked = pb.ChatRequest(options=pb.GenerateRequest(text="x"), messages=[pb.ChatMessage(role="user")])
    with grpc.insecure_channel(served.target) as channel, pytest.raises(grpc.RpcError, match=r"options\.prompt"):
        list(InferenceServiceStub(channel).Chat(asked))


def test_scores_are_of_the_continuation_alone(served: Served, engine: FakeEngine):
    first, second = served.client.score(Question("ab", ["cd", [1, 2, 3]], cache_salt="s"))
    assert (first.token_ids, first.logprobs, first.total, first.is_greedy) == ([99, 100], [-0.25] * 2, -0.5, True)
    assert second.token_ids == [1, 2, 3]
    asked = {tuple(request.prompt_token_ids or ()): request for request in engine.submitted}
    assert set(asked) == {(256, 97, 98, 99, 100), (256, 97, 98, 1, 2, 3)}
    for request in asked.values():
        assert (request.sampling.prompt_logprobs_from, request.snapshot_at, request.cache_salt) == (3, [2], "s")
    [alone] = served.client.score(Question("", ["a"]))
    assert alone.token_ids == [97]


@pytest.mark.parametrize(
    ("field", "question"),
    [
        ("continuations", Question("a", [])),
        ("continuations", Question("a", ["b"] * 1025)),
        ("continuations[1]", Question("a", ["b", ""])),
        ("context", Question("", ["a"], add_special_tokens=False)),
        ("context", Question([], ["a"])),
        ("prompt_token_ids", Question([1], [[263]])),
        ("context", Question("a" * 2000, ["b"] * 1000)),
        ("continuations[1]", Question("a", ["b", "b" * 2000])),
    ],
)
def test_what_cannot_be_scored(served: Served, engine: FakeEngine, field: str, question: Question):
    engine.max_queue = 4096
    with pytest.raises(RequestError) as caught:
        served.client.score(question)
    assert caught.value.field == field


def test_more_continuations_than_can_wait_are_refused(served: Served, engine: FakeEngine):
    with pytest.raises(RequestError, match="continuations: 9 given, at most max_queue=8 allowed; send fewer"):
        served.client.score(Question("a", ["b"] * 9))
    assert not engine.submitted


def test_abort_and_flush(served: Served, engine: FakeEngine):
    stream = iter(served.client.stream(Request(prompt="abc", sampling=ENDLESS, request_id="long")))
    next(stream)
    assert served.client.abort("long")
    with pytest.raises(AbortedError):
        list(stream)
    assert not served.client.abort("long")
    eventually(lambda: idle(engine))
    served.client.flush_cache()
    assert engine.flushes == 1


def test_keys_guard_all_but_health(engine: FakeEngine):
    with serving(lambda: engine, keys=Keys(["secret"])) as served:
        for key in (None, "wrong"):
            with Client(served.target, api_key=key) as client:
                for call in (client.status, lambda: client.generate(Request(prompt="a")), lambda: client.tokenize("a")):
                    with pytest.raises(UnauthenticatedError, match="API key"):
                        call()
                with pytest.raises(UnauthenticatedError):
                    list(client.stream(Request(prompt="a")))
        with grpc.insecure_channel(served.target) as channel, pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            list(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
        with Client(served.target, api_key="secret") as client:
            client.wait_until_serving(5)
            assert client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)
        assert len(engine.submitted) == 1


def test_a_message_beyond_the_limit_is_refused(served: Served, engine: FakeEngine):
    with pytest.raises(grpc.RpcError) as caught:
        served.client.tokenize("x" * (MAX_MESSAGE_BYTES + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def nested(depth: int) -> bytes:
    """A ChatRequest whose chat_template_kwargs are lists in lists, by hand: no library writes it."""

    def varint(number: int) -> bytes:
        return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)

    def part(number: int, content: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(content)) + content

    value = b"\x20\x01"
    for _ in range(depth):
        value = part(6, part(1, value))
    [field] = [f for f in pb.ChatRequest.DESCRIPTOR.fields if f.name == "chat_template_kwargs"]
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")])
    request.options.sampling.max_tokens = 1
    return request.SerializeToString() + part(field.number, part(1, part(1, b"x") + part(2, value)))


@pytest.mark.parametrize("method", ["Generate", "Complete", "Chat", "Score", "Tokenize", "Detokenize", "Abort"])
def test_bytes_that_are_no_message_are_a_bad_request(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture, method: str
):
    for raw in (b"\xff", b"\x0a\x05ab", nested(300)):
        if method != "Chat" and len(raw) > 9:
            continue
        with grpc.insecure_channel(served.target) as channel, pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/jhybrid.v1.InferenceService/{method}")(raw, timeout=10))
        error = error_of(caught.value)
        assert isinstance(error, RequestError) and error.field == "message", caught.value
        assert f"none that {method} takes" in str(error)
    assert not caplog.records and not engine.submitted
    assert 'outcome="refused"} 0.0' not in served.run(exposed(served))


@pytest.mark.parametrize(
    "method", ["InferenceService/Generate", "InferenceService/Complete", "InferenceService/GetStatus"]
)
def test_a_call_without_a_message_is_a_bad_request(
    served: Served, engine: FakeEngine, method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with grpc.insecure_channel(served.target) as channel:
        empty = channel.stream_stream(f"/jhybrid.v1.{method}")
        with pytest.raises(grpc.RpcError) as refused:
            list(empty(iter(()), timeout=5))
        error = error_of(refused.value)
        assert isinstance(error, RequestError) and error.field == "message" and "is missing; send" in str(error)
        over = threading.Event()
        empty(_nothing(over), timeout=5).cancel()
        monkeypatch.setattr(grpc_server, "MESSAGE_SECONDS", 0.1)
        with pytest.raises(grpc.RpcError, match=r"did not come within 0\.1 s"):
            list(empty(_nothing(over), timeout=5))
        over.set()
    assert not caplog.records and not engine.submitted


def _nothing(over: threading.Event) -> Iterator[bytes]:
    over.wait(10)
    yield from ()


async def exposed(served: Served) -> str:
    return generate_latest(served.desk.metrics.registry).decode()


def test_values_nested_as_deeply_as_may_be(served: Served, engine: FakeEngine):
    engine.tokenizer = ByteTokenizer(263, chat_template="{{ messages[0].content }}")
    with grpc.insecure_channel(served.target) as channel:
        chat = channel.unary_stream("/jhybrid.v1.InferenceService/Chat", None, pb.GenerateResponse.FromString)
        assert list(chat(nested(30), timeout=10))[-1].finish_reason == pb.FINISH_REASON_LENGTH


def test_long_refusals_have_room_in_the_headers(served: Served, engine: FakeEngine):
    engine.tokenizer = ByteTokenizer(263, chat_template="{{ raise_exception(messages[0].content) }}")
    with pytest.raises(RequestError, match=r"the chat template refused them: (é|🐏)+\.\.\.$") as refused:
        list(served.client.chat([{"role": "user", "content": "é" * 300 + "🐏" * 5000}], SamplingParams()))
    assert refused.value.field == "messages"


def test_model_info_and_status(served: Served, engine: FakeEngine):
    info = served.client.model_info()
    assert (info.model, info.architecture, info.max_model_len) == ("fake", "FakeForCausalLM", 2000)
    assert (info.bos_token_id, list(info.eos_token_ids), info.has_tokenizer) == (256, [257, 258], True)
    stream = served.client.stream(Request(prompt="abc", sampling=ENDLESS))
    next(iter(stream))
    status = served.client.status()
    assert (status.running, status.waiting, status.requests) == (1, 0, 1)
    assert (status.slots.total, status.slots.used, status.pages.free) == (4, 1, 99)
    assert dict(status.memory_bytes) == {"weights": 10, "kv": 20, "state": 30, "scratch": 40}
    stream.cancel()
    eventually(lambda: idle(engine))


def test_health_and_calls_before_and_after_ready(engine: FakeEngine):
    loaded = threading.Event()

    def slow_start() -> FakeEngine:
        loaded.wait(10)
        return engine

    with serving(slow_start, wait=False) as served:
        assert health(served.target) == health(served.target, "jhybrid.v1.InferenceService") == NOT_SERVING
        for call in (
            served.client.status,
            served.client.model_info,
            lambda: served.client.generate(Request(prompt="a")),
        ):
            with pytest.raises(NotReadyError, match="still loading"):
                call()
        loaded.set()
        served.run(served.bridge.ready())
        served.client.wait_until_serving(5)
        assert health(served.target) == health(served.target, "jhybrid.v1.InferenceService") == SERVING
        assert served.client.generate(Request(prompt="abc")).output.text == answer_text(4, 16)


def test_a_start_that_fails_says_why():
    def broken() -> FakeEngine:
        raise ConfigError("model", "'x' is no directory")

    with serving(broken, wait=False) as served:
        with pytest.raises(ConfigError, match="model: 'x' is no directory"):
            served.run(served.bridge.ready())
        with pytest.raises(EngineDeadError, match="'x' is no directory"):
            served.client.status()


def test_reflection_lists_and_describes_the_service(served: Served):
    with grpc.insecure_channel(served.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="jhybrid.v1.InferenceService"),
        ]
        listed, described = stub.ServerReflectionInfo(iter(asked))
    names = {service.name for service in listed.list_services_response.service}
    assert {"jhybrid.v1.InferenceService", "grpc.health.v1.Health"} <= names
    file = described.file_descriptor_response.file_descriptor_proto[0]
    methods = descriptor_pb2.FileDescriptorProto.FromString(file).service[0].method
    assert [method.name for method in methods] == [
        "Generate",
        "Complete",
        "Chat",
        "Score",
        "Tokenize",
        "Detokenize",
        "GetModelInfo",
        "GetStatus",
        "FlushCache",
        "Abort",
    ]


def test_draining_lets_running_calls_finish_and_refuses_new_ones(served: Served, engine: FakeEngine):
    stream = iter(served.client.stream(Request(prompt="abc", sampling=SamplingParams(max_tokens=200))))
    deltas = [next(stream)]
    drained = asyncio.run_coroutine_threadsafe(served.drain(10), served.loop)
    eventually(lambda: health(served.target) == NOT_SERVING)
    with pytest.raises(NotReadyError, match="shutting down"):
        served.client.generate(Request(prompt="abc"))
    deltas.extend(stream)
    drained.result(5)
    assert "".join(d.text for d in deltas) == answer_text(4, 200)
    assert engine.aborted == []


def test_draining_ends_what_takes_too_long(served: Served, engine: FakeEngine):
    stream = iter(served.client.stream(Request(prompt="abc", sampling=ENDLESS, request_id="long")))
    next(stream)
    served.run(served.drain(0.05))
    with pytest.raises(NotReadyError, match="before its answer was complete"):
        list(stream)
    assert engine.aborted == ["long"]


def test_death_of_the_engine_thread_reaches_every_caller(served: Served):
    others = [iter(served.client.stream(Request(prompt="abc", sampling=ENDLESS))) for _ in range(2)]
    for other in others:
        next(other)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        served.client.generate(Request(prompt="die"))
    for other in others:
        with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
            list(other)
    for call in (served.client.status, lambda: served.client.generate(Request(prompt="abc"))):
        with pytest.raises(EngineDeadError):
            call()
    assert isinstance(served.run(served.bridge.death()), RuntimeError)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("n", "0 is too low"), grpc.StatusCode.INVALID_ARGUMENT),
        (ModelNotFoundError("x"), grpc.StatusCode.NOT_FOUND),
        (QueueFullError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineDeadError("x"), grpc.StatusCode.UNAVAILABLE),
        (NotReadyError("x"), grpc.StatusCode.UNAVAILABLE),
        (StepError("x"), grpc.StatusCode.INTERNAL),
        (ConfigError("dtype", "x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_codes_of_errors(error: JhybridError, code: grpc.StatusCode):
    assert status_of(error).grpc is code


def test_a_taken_port_is_refused(served: Served):
    async def bind() -> None:
        GrpcServer(served.desk, "127.0.0.1", served.server.port)

    with pytest.raises(ConfigError, match=f"grpc_port: 127.0.0.1:{served.server.port} cannot be bound"):
        served.run(bind())


def test_a_port_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="grpc_port: 99999 is not in"):
        GrpcServer(Desk(Bridge(FakeEngine), "fake"), port=99999)
