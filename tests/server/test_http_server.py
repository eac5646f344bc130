"""The HTTP endpoints over a fake engine: answers, errors in OpenAI's shape, and who gets their memory back when."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jhybrid import template_sandbox
from jhybrid.errors import ConfigError, RequestError
from jhybrid.request import SamplingParams
from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server import connections, http_server
from jhybrid_server.http_server import HttpServer
from jhybrid_server.keys import Keys
from jhybrid_server.openai_answers import CompletionAnswers
from jhybrid_server.openai_schema import ChatBody, CompletionBody, parse
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.http_client import Reply, ask, events, hang
from tests.server.serving import Served, eventually, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = {"prompt": "abc", "max_tokens": 1900}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(step_seconds=0.002)
    engine.tokenizer = ByteTokenizer(263, chat_template=TEMPLATE)
    return engine


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


def complete(served: Served, **body: object) -> Reply:
    return ask(served.http.port, COMPLETIONS, {"prompt": "abc", **body})


def chat(served: Served, **body: object) -> Reply:
    return ask(served.http.port, CHAT, {"messages": HELLO, **body})


def idle(engine: FakeEngine) -> bool:
    return not engine.running and not engine.waiting


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{% for m in messages %}",
    ],
)
def test_a_template_that_costs_too_much_or_is_broken_is_a_bad_request(
    served: Served, engine: FakeEngine, template: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 3_000_000)
    engine.tokenizer = ByteTokenizer(263, chat_template=template)
    replies: list[Reply] = []
    asking = [threading.Thread(target=lambda: replies.append(chat(served, max_tokens=1))) for _ in range(2)]
    for thread in asking:
        thread.start()
    assert complete(served, max_tokens=5).status == 200
    for thread in asking:
        thread.join()
    errors = [reply.json["error"] for reply in replies]
    assert [reply.status for reply in replies] == [400, 400] and errors[0] == errors[1]
    assert errors[0]["param"] == "chat_template" and "template 'default'" in errors[0]["message"]
    with pytest.raises(RequestError, match="chat_template: ") as refused:
        list(served.client.chat(HELLO, SamplingParams(max_tokens=1)))
    assert refused.value.field == "chat_template"


def test_completion(served: Served):
    reply = complete(served, max_tokens=5, model="fake")
    assert reply.status == 200
    answer = reply.json
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "fake"
    [choice] = answer["choices"]
    wanted = {"index": 0, "text": answer_text(4, 5), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert choice == wanted
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 3}}
    assert 0 < answer["jhybrid"]["first_token_seconds"] <= answer["jhybrid"]["total_seconds"]


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abc", [4]), ([1, 2], [2]), (["abc", "d"], [4, 2]), ([[1, 2], [3]], [2, 1])],
)
def test_every_form_of_prompt_and_several_answers(served: Served, prompt: object, lengths: list[int]):
    answer = complete(served, prompt=prompt, max_tokens=3, n=2, best_of=2).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(lengths)))
    expected = [answer_text(length, 3, i) for length in lengths for i in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 6 * len(lengths)


def test_stream_ends_with_usage_and_done(served: Served):
    body = {"prompt": ["abc", "d"], "max_tokens": 3, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(served.http.port, COMPLETIONS, body)
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [answer_text(4, 3, 0), answer_text(4, 3, 1), answer_text(2, 3, 0), answer_text(2, 3, 1)]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends.count("length") == 4 and set(ends) <= {"length", None}


def test_echo_and_logprobs(served: Served):
    [choice] = complete(served, echo=True, logprobs=1, max_tokens=2).json["choices"]
    assert choice["text"] == "abc" + answer_text(4, 2)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", "a", "b", "c", *answer_text(4, 2)]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"a": -0.25}]
    assert logprobs["top_logprobs"][4] == {answer_text(4, 1): -0.5, "b": -1.5}
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4]


def test_a_long_answer_is_made_away_from_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    choice = CompletionAnswers.choice
    told = lambda self, *of: (threads.append(threading.get_ident()), choice(self, *of))[1]  # noqa: E731
    monkeypatch.setattr(CompletionAnswers, "choice", told)
    for prompt in ("abc", "x" * 1500):
        [made] = complete(served, prompt=prompt, echo=True, logprobs=1, max_tokens=1).json["choices"]
        assert made["text"] == prompt + answer_text(1 + len(prompt), 1)
    loop = served.run(_ident())
    assert [thread == loop for thread in threads] == [True, False]


async def _ident() -> int:
    return threading.get_ident()


def test_echo_of_several_answers_waits_for_the_prompt(served: Served):
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "n": 2, "max_tokens": 2}
    first: dict[int, dict] = {}
    for event in events(served.http.port, COMPLETIONS, body):
        if event != "[DONE]":
            first.setdefault(event["choices"][0]["index"], event["choices"][0])
    for i in (0, 1):  # one who is behind gets more with it
        assert first[i]["text"].startswith("abc" + answer_text(4, 1, i))
    assert all(len(choice["logprobs"]["tokens"]) >= 5 for choice in first.values())


def test_extensions_reach_the_engine(served: Served, engine: FakeEngine):
    body = {"min_tokens": 1, "top_k": 7, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [9], "stop": ["x", "y"]}
    more = {"repetition_penalty": 1.5, "logit_bias": {"3": -1.5}, "seed": -5, "max_tokens": 2, "temperature": 0}
    hints = {"cache_salt": "me", "priority": 4, "snapshot_at": [2]}
    assert complete(served, **body, **more, **hints).status == 200
    [got] = engine.submitted
    for name, value in {**body, **more, "logit_bias": {3: -1.5}}.items():
        assert getattr(got.sampling, name) == value, name
    assert (got.cache_salt, got.priority, got.snapshot_at) == ("me", 4, [2])


def test_chat_goes_through_the_template(served: Served, engine: FakeEngine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    reply = chat(served, messages=messages, max_completion_tokens=4, logprobs=True, top_logprobs=1)
    [choice] = reply.json["choices"]
    text = b"system:be|user:a\nb|"
    assert engine.submitted[0].prompt_token_ids == [256, *text]  # BOS once
    assert choice["message"] == {"role": "assistant", "content": answer_text(len(text) + 1, 4)}
    assert reply.json["object"] == "chat.completion" and reply.json["usage"]["prompt_tokens"] == len(text) + 1
    entry = choice["logprobs"]["content"][0]
    letter = answer_text(len(text) + 1, 1)
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (letter, -0.5, [ord(letter)])
    assert entry["top_logprobs"] == [{"token": letter, "logprob": -0.5, "bytes": [ord(letter)]}]


def test_chat_stream(served: Served):
    *chunks, done = events(served.http.port, CHAT, {"messages": HELLO, "max_tokens": 3})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert done == "[DONE]" and deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == answer_text(1 + len("user:hello|"), 3)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "["}}],
}
BAD_COMPLETIONS = [
    ("n", {"n": 0}),
    ("n", {"n": 10**6}),
    ("n", {"n": "1"}),
    ("best_of", {"best_of": 3}),
    ("suffix", {"suffix": "z"}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("logprobs", {"logprobs": 10**6}),
    ("logprobs", {"logprobs": True}),
    ("temperature", {"temperature": 1e400}),
    ("stop", {"stop": ["x"] * 10**5}),
    ("stop[0]", {"stop": [1]}),
    ("logit_bias", {"logit_bias": {"263": 1}}),
    ("logit_bias", {"logit_bias": {str(10**9): 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"abc": 1}}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(10**5)}}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [263]}),
    ("prompt", {"prompt": [2**31]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", [1]]}),
    ("prompt", {"prompt": "x" * 2000}),
    ("prompt", {"prompt": ["a"] * 2000}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
    ("max_token", {"max_token": 5}),
    ("guided_regex", {"guided_regex": "("}),
]


@pytest.mark.parametrize(("param", "body"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completions_name_the_field(served: Served, engine: FakeEngine, param: str, body: dict, stream: bool):
    if stream and param == "stream_options":
        return
    started = time.process_time()
    reply = complete(served, **({"stream": stream} | body))
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")
    assert len(reply.error["message"]) < 400
    assert time.process_time() - started < 10.0  # no work that grows with what was asked for
    assert not engine.submitted
    assert complete(served).json["choices"][0]["text"] == answer_text(4, 16)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "x", "tool_calls": []}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "user", "content": "x", "tool_call_id": "x"}]}),
        ("messages[0].reasoning_content", {"messages": [{"role": "user", "content": "x", "reasoning_content": "x"}]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [CALLED]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 3000}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs.x", {"structured_outputs": {"x": 1}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("max_completion_tokens", {"max_completion_tokens": 5, "max_tokens": 6}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("max_tokens", {"max_tokens": -1}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("store", {"store": True}),
    ],
)
def test_bad_chats_name_the_field(served: Served, engine: FakeEngine, param: str, body: dict):
    reply = chat(served, **body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not engine.submitted


def test_variables_of_templates_have_any_name(served: Served):
    names = ("self", "cls", "values", "variables", "loop", "__class__", "raise_exception", "bos_token")
    assert chat(served, max_tokens=1, chat_template_kwargs=dict.fromkeys(names, "x")).status == 200


def test_harmless_values_of_what_is_not_supported(served: Served):
    body = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "user": "me"}
    assert chat(served, max_tokens=1, **body).status == 200
    assert complete(served, suffix=None, user="me").status == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10**5])
def test_what_is_no_json_object(served: Served, raw: bytes):
    reply = ask(served.http.port, COMPLETIONS, raw)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


NESTED: list[tuple[str, str]] = [
    (COMPLETIONS, '{"prompt": %s}'),
    (COMPLETIONS, '{"prompt": "a", "structured_outputs": {"json": {"enum": %s}}}'),
    (COMPLETIONS, '{"prompt": "a", "logit_bias": {"1": %s}}'),
    (COMPLETIONS, '{"prompt": "a", "wat": %s}'),
    (CHAT, '{"messages": [{"role": "user", "content": %s}]}'),
    (CHAT, '{"messages": [], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": %s}}}'),
    (CHAT, '{"messages": [], "tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": %s}}}]}'),
    ("/tokenize", '{"messages": [], "chat_template_kwargs": {"a": %s}}'),
]


@pytest.mark.parametrize(("path", "body"), NESTED)
@pytest.mark.parametrize("depth", [210, 5000])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_bodies_that_are_nested_too_deeply(served: Served, path: str, body: str, depth: int, kind: str):
    value = "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth
    reply = ask(served.http.port, path, (body % value).encode())
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "invalid_request_error", "body")
    assert reply.error["message"] == "body: is nested more than 200 levels deep; flatten it"


def test_what_http_itself_refuses(served: Served, monkeypatch: pytest.MonkeyPatch):
    port = served.http.port
    assert ask(port, "/v1/nothing").status == 404 and ask(port, "/v1/nothing").error["message"] == "Not Found"
    assert ask(port, COMPLETIONS).status == 405
    assert ask(port, COMPLETIONS, {"prompt": "a"}, content_type="text/plain").status == 415
    assert ask(port, COMPLETIONS, {"prompt": "a"}, content_encoding="gzip").status == 415
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 1000)
    assert complete(served, prompt="x" * 1000).status == 413
    with socket.create_connection(("127.0.0.1", port), 10) as chunked:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        chunked.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + b"400\r\n" + b" " * 1024 + b"\r\n")
        assert chunked.recv(100).startswith(b"HTTP/1.1 413")
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", port), 10) as slow:
        slow.sendall(f"{head}content-length: 100\r\n\r\n".encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_another_model_is_not_found(served: Served):
    for reply in (complete(served, model="other"), chat(served, model="other"), ask(served.http.port, "/v1/models/x")):
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_models_tokens_and_version(served: Served):
    port = served.http.port
    [card] = ask(port, "/v1/models").json["data"]
    assert card == ask(port, "/v1/models/fake").json
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 2000)
    assert ask(port, "/tokenize", {"prompt": "é"}).json == {
        "count": 3,
        "max_model_len": 2000,
        "tokens": [256, 0xC3, 0xA9],
    }
    assert ask(port, "/tokenize", {"prompt": "é", "add_special_tokens": False}).json["tokens"] == [0xC3, 0xA9]
    assert ask(port, "/tokenize", {"messages": HELLO}).json["tokens"] == [256, *b"user:hello|"]
    assert ask(port, "/tokenize", {}).error["param"] == "prompt"
    assert ask(port, "/detokenize", {"tokens": [0xC3, 0xA9]}).json == {"prompt": "é"}
    assert ask(port, "/detokenize", {"tokens": [263]}).error["param"] == "tokens"
    info = ask(port, "/tokenizer_info").json
    assert info == {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE, "vocab_size": 263}
    assert ask(port, "/version").json["version"]


def test_a_failed_sequence_is_500_or_the_last_event(served: Served):
    reply = complete(served, prompt="nan", max_tokens=5)
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "NaN or infinite" in reply.error["message"]
    *chunks, last = events(served.http.port, COMPLETIONS, {"prompt": "nan", "max_tokens": 5})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer_text(4, 2)
    assert "NaN or infinite" in last["error"]["message"]


def test_a_bug_is_500_for_its_caller_only(served: Served):
    reply = complete(served, prompt="bug")
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert complete(served).status == 200


def test_full_queue_is_429_with_retry_after(served: Served, engine: FakeEngine):
    hanging = [hang(served.http.port, COMPLETIONS, ENDLESS) for _ in range(4)]
    eventually(lambda: len(engine.running) == 4)
    hanging += [hang(served.http.port, COMPLETIONS, ENDLESS) for _ in range(8)]
    eventually(lambda: len(engine.running) == 4 and len(engine.waiting) == 8)
    for body in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
        reply = complete(served, **body)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "queue_full", "1")
    for each in hanging:
        each.close()
    eventually(lambda: idle(engine))
    assert complete(served).status == 200


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, {"prompt": "a", "structured_outputs": {"json": 3}}, "structured_outputs.json"),
        (ChatBody, {"messages": [], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (ChatBody, {"messages": [], "tool_choice": 3}, "tool_choice"),
        (CompletionBody, {"prompt": "a", "stop": ["a", 3]}, "stop[1]"),
    ],
)
def test_faults_have_the_names_of_the_body(kind: type, body: dict, param: str):
    with pytest.raises(RequestError) as refused:
        parse(kind, json.dumps(body).encode())
    assert refused.value.field == param


def test_several_prompts_are_queued_together_or_not_at_all(served: Served, engine: FakeEngine):
    hanging = [hang(served.http.port, COMPLETIONS, ENDLESS) for _ in range(4)]
    eventually(lambda: len(engine.running) == 4)
    hanging.append(hang(served.http.port, COMPLETIONS, ENDLESS))
    eventually(lambda: len(engine.waiting) == 1)
    assert complete(served, prompt=["a"] * 8).status == 429
    eventually(lambda: len(engine.aborted) == 7 and len(served.bridge._streams) == 5)
    for each in hanging:
        each.close()
    eventually(lambda: idle(engine) and not served.bridge._streams)


def test_more_prompts_than_can_ever_wait_are_a_bad_request(served: Served, engine: FakeEngine):
    for body, counts in (
        ({"prompt": ["a"] * 9}, "9 of n=1 are 9"),
        ({"prompt": ["a", "b", "c"], "n": 3}, "3 of n=3 are 9"),
    ):
        for stream in (False, True):
            reply = complete(served, **body, stream=stream)
            assert (reply.status, reply.error["param"]) == (400, "prompt")
            assert (
                reply.error["message"]
                == f"prompt: {counts} answers, which never fit in max_queue=8; send fewer at a time"
            )
    assert not engine.submitted


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_in_any_phase(served: Served, engine: FakeEngine, stream: bool):
    hanging = [hang(served.http.port, COMPLETIONS, ENDLESS | {"stream": stream}) for _ in range(6)]
    eventually(lambda: len(engine.running) == 4 and len(engine.waiting) == 2)
    for each in hanging:
        each.close()
    eventually(lambda: idle(engine), 1.0)
    assert len(engine.aborted) == 6
    eventually(lambda: served.desk.running == 0)


def test_leaving_a_stream_after_its_first_event_frees(served: Served, engine: FakeEngine):
    for _ in events(served.http.port, CHAT, {"messages": HELLO, "n": 2}):
        break
    eventually(lambda: len(engine.aborted) == 1 and idle(engine), 1.0)


LARGE = {"prompt": "abc", "n": 64, "max_tokens": 100, "logprobs": 20}
"""Its answers are larger than what a narrow connection takes for a client that reads nothing."""


def hang_narrowly(served: Served, body: dict) -> socket.socket:
    """As `hang`, with kernel buffers of some kilobytes at both ends."""
    served.http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return hang(served.http.port, COMPLETIONS, body, receive_buffer=4096)


def open_connections(served: Served) -> int:
    return len(served.http._server.server_state.connections)


def test_a_stalled_reader_holds_up_nobody_and_is_dropped(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jhybrid_server.connections.STALL_SECONDS", 0.3)
    engine.step_seconds = 0.0002
    with hang_narrowly(served, LARGE | {"max_tokens": 1900, "stream": True}):
        eventually(lambda: engine.running != {})
        for _ in range(3):
            assert complete(served).json["choices"][0]["text"] == answer_text(4, 16)
        eventually(lambda: idle(engine) and not open_connections(served), 20.0)
        assert len(engine.aborted) == 1 and not served.desk.running


def test_a_client_that_takes_nothing_of_a_whole_answer_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jhybrid_server.connections.STALL_SECONDS", 0.3)
    with hang_narrowly(served, LARGE):
        eventually(lambda: served.desk.running)
        eventually(lambda: not (open_connections(served) or served.desk.running), 20.0)


def test_a_slow_reader_gets_everything(served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jhybrid_server.connections.STALL_SECONDS", 0.5)
    engine.step_seconds = 0.0
    with hang_narrowly(served, LARGE | {"stream": True}) as connection:
        time.sleep(0.2)
        [protocol] = served.http._server.server_state.connections
        assert protocol.flow.write_paused
        seen = b""
        while b"[DONE]" not in seen[-100:]:
            piece = connection.recv(2048)
            assert piece, seen[-1000:]
            seen += piece
            time.sleep(0.005)
    assert seen.count(b'"finish_reason":"length"') == 64


def test_keys_guard_all_but_the_probes(engine: FakeEngine):
    with serving(lambda: engine, keys=Keys(["secret", "other"])) as served:
        port = served.http.port
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            reply = ask(port, "/v1/models", **headers)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.error["type"] == "authentication_error" and "secret" not in reply.error["message"]
        for path in (COMPLETIONS, CHAT, "/tokenize", "/metrics", "/version", "/v1/internal/status", "/nothing"):
            assert ask(port, path, {"prompt": "a"}).status == 401
        for key in ("secret", "other"):
            assert ask(port, "/v1/models", authorization=f"Bearer {key}").status == 200
        assert ask(port, "/health").status == ask(port, "/ready").status == 200
    with pytest.raises(ConfigError, match="api_key"):
        Keys([""])


def test_health_and_readiness_from_loading_to_draining(engine: FakeEngine):
    loaded = threading.Event()

    def slow_start() -> FakeEngine:
        loaded.wait(10)
        return engine

    with serving(slow_start, wait=False) as served:
        port = served.http.port
        assert ask(port, "/health").status == 200
        assert ask(port, "/metrics").status == 200
        for reply in (ask(port, "/ready"), complete(served), complete(served, stream=True), chat(served)):
            assert (reply.status, reply.error["code"]) == (503, "not_ready")
            assert "still loading" in reply.error["message"]
        loaded.set()
        served.run(served.bridge.ready())
        assert ask(port, "/ready").status == 200
        stream = events(port, COMPLETIONS, {"prompt": "abc", "max_tokens": 200})
        first = next(stream)
        drained = asyncio.run_coroutine_threadsafe(served.drain(10), served.loop)
        eventually(lambda: ask(port, "/ready").status == 503)
        assert ask(port, "/health").status == 200
        reply = complete(served)
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
        *chunks, done = stream
        text = "".join(chunk["choices"][0]["text"] for chunk in [first, *chunks])
        assert (text, done) == (answer_text(4, 200), "[DONE]")
        drained.result(5)


def test_draining_ends_what_takes_too_long_with_an_error_event(served: Served, engine: FakeEngine):
    stream = events(served.http.port, COMPLETIONS, ENDLESS)
    next(stream)
    served.run(served.drain(0.05))
    assert list(stream)[-1]["error"]["code"] == "not_ready"
    assert len(engine.aborted) == 1


def test_an_aborted_request_is_told_so(served: Served, engine: FakeEngine):
    stream = events(served.http.port, COMPLETIONS, ENDLESS)
    name = next(stream)["id"]
    assert served.run(served.desk.abort(name))
    assert list(stream)[-1]["error"]["code"] == "aborted"
    assert not served.run(served.desk.abort(name))


def test_death_of_the_engine_thread(served: Served):
    stream = events(served.http.port, COMPLETIONS, ENDLESS)
    next(stream)
    reply = complete(served, prompt="die")
    assert (reply.status, reply.error["code"]) == (503, "engine_dead")
    assert "the device is gone" in list(stream)[-1]["error"]["message"]
    assert ask(served.http.port, "/health").status == ask(served.http.port, "/ready").status == 503


def test_metrics_and_status(served: Served, engine: FakeEngine):
    assert complete(served).status == 200
    assert complete(served, n=0).status == complete(served, wat=0).status == chat(served, wat=0).status == 400
    engine.step_seconds = 0.02  # it runs for 40 s, so that it is there while it is looked at
    stream = events(served.http.port, COMPLETIONS, ENDLESS)
    next(stream)
    status = ask(served.http.port, "/v1/internal/status").json
    assert (status["running"], status["calls"], status["model"], status["draining"]) == (1, 1, "fake", False)
    assert "sequences" not in status
    picture = ask(served.http.port, "/v1/internal/status?sequences=true").json
    [sequence] = picture["sequences"]
    assert (sequence["prompt_tokens"], sequence["slots"], sequence["phase"]) == (4, 1, "decode")
    assert picture["pools"]["slots"]["cells"] == [0, -1, -1, -1]
    assert picture["latencies"]["inter_token_latency_seconds"]["sum"] > 0
    for query in ("sequences=1", "wat=true"):
        assert ask(served.http.port, f"/v1/internal/status?{query}").error["param"] == "sequences"
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    eventually(lambda: served.desk.running == 0)
    text = ask(served.http.port, "/metrics").raw.decode()
    for line in (
        'jhybrid_requests_total{outcome="ok"} 1.0',
        'jhybrid_requests_total{outcome="refused"} 3.0',
        'jhybrid_requests_total{outcome="cancelled"} 1.0',
        "jhybrid_time_to_first_token_seconds_count 2.0",
        'jhybrid_pages{state="free"} 100.0',
    ):
        assert line in text.splitlines(), line


def test_keep_alive_serves_several_requests_on_one_connection(served: Served):
    with hang(served.http.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 2}) as connection:
        assert b"200 OK" in connection.recv(10000)
        raw = json.dumps({"prompt": "abc", "max_tokens": 2, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        seen = b""
        while b"[DONE]" not in seen:
            seen += connection.recv(10000)


def closes_after(connection: socket.socket, piece: bytes) -> float:
    """Seconds of dribbling after which the server hangs up; `piece` is sent again and again."""
    started = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - started < 10:
        try:
            if piece:
                connection.sendall(piece)
            if connection.recv(1000) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started


def test_heads_that_do_not_come_are_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    address = ("127.0.0.1", served.http.port)
    for begin, piece in ((b"", b""), (b"GET /health HTTP/1.1\r\nx: ", b"x")):
        with socket.create_connection(address, 10) as connection:
            connection.sendall(begin)
            assert ask(served.http.port, "/health").status == 200, "others do not notice"
            assert 0.5 < closes_after(connection, piece) < 5
    with hang(served.http.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 2}) as connection:
        assert b"200 OK" in connection.recv(10000)
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        assert 0.5 < closes_after(connection, b"x") < 8
    with hang(served.http.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 600}) as connection:
        time.sleep(1.2)  # an answer may take longer than a head
        assert b"200 OK" in connection.recv(10000)


def test_a_taken_port_is_refused(served: Served):
    with pytest.raises(ConfigError, match=f"port: 127.0.0.1:{served.http.port} cannot be bound"):
        HttpServer(served.desk, "127.0.0.1", served.http.port)
    with pytest.raises(ConfigError, match="port: 99999 is not in"):
        HttpServer(served.desk, port=99999)
