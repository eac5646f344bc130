"""Chats over gRPC: the same texts, reasoning, calls, usage and ends as over HTTP, and refusals by name."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from jhybrid import SamplingParams
from jhybrid.errors import RequestError
from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server import dialect
from jhybrid_server.client import AsyncClient
from jhybrid_server.dialect import Parsers
from jhybrid_server.statuses import error_of
from jhybrid_server.talk import Choice
from jhybrid_server.tool_formats import Tool, ToolCall
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.v1.inference_pb2_grpc import InferenceServiceStub
from tests.server.fake_engine import FakeEngine
from tests.server.http_client import ask, events
from tests.server.serving import Served, serving
from tests.server.test_answer_parser import CALLS
from tests.server.test_tool_calls import MESSAGES, PATH, SHOWN, TOOLS, WEATHER

OUR_TOOLS = [Tool("get_weather", WEATHER, "..."), Tool("stop")]
CHOICES: list[tuple[dict[str, Any], Choice | None]] = [
    ({}, None),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, Choice(several=False)),
    ({"tool_choice": "none"}, Choice("none")),
]

Told = tuple[dict[int, tuple[str, str, list[tuple[str, str]], str | None]], dict[str, int | None]]
"""By answer: content, reasoning, calls and finish reason; and usage."""


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(263, chat_template=SHOWN + "{# <tool_call> #}")
    return engine


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


def http_whole(served: Served, body: dict) -> Told:
    reply = ask(served.http.port, PATH, body)
    assert reply.status == 200, reply.raw
    choices = {choice["index"]: choice for choice in reply.json["choices"]}
    return {index: (*_said([choice["message"]]), choice["finish_reason"]) for index, choice in choices.items()}, _usage(
        reply.json["usage"]
    )


def http_stream(served: Served, body: dict) -> Told:
    *chunks, last, _ = events(served.http.port, PATH, body | {"stream_options": {"include_usage": True}})
    deltas, ends = defaultdict(list), {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        deltas[choice["index"]].append(choice["delta"])
        ends[choice["index"]] = choice["finish_reason"]
    return {index: (*_said(said), ends[index]) for index, said in deltas.items()}, _usage(last["usage"])


def grpc_stream(served: Served, sampling: SamplingParams, **options: Any) -> Told:
    stream = served.client.chat(MESSAGES, sampling, **options)
    said: dict[int, tuple[str, str, list[ToolCall]]] = defaultdict(lambda: ("", "", []))
    for delta in stream:
        content, reasoning, calls = said[delta.index]
        said[delta.index] = (content + delta.text, reasoning + delta.reasoning, calls + delta.tool_calls)
    answer = stream.answer()
    assert [(m["content"], m["reasoning"], m["tool_calls"]) for m in answer.messages] == [said[i] for i in sorted(said)]
    usage = answer.usage
    counts = {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "reasoning": usage.reasoning_tokens}
    return {
        c.index: (*said[c.index][:2], [(f.name, f.arguments) for f in said[c.index][2]], c.finish_reason)
        for c in answer.output.completions
    }, counts


def _said(parts: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    texts = ["".join(part.get(key) or "" for part in parts) for key in ("content", "reasoning_content")]
    return texts[0], texts[1], [(call["name"], call["arguments"]) for call in calls]


def _usage(usage: dict[str, Any]) -> dict[str, int | None]:
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
    return {"prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"], "reasoning": reasoning}


@pytest.mark.parametrize(("choice", "ours"), CHOICES, ids=str)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_three_ways_tell_the_same(
    served: Served, engine: FakeEngine, choice: dict, ours: Choice | None, thinking: bool | None
):
    engine.script = b"I wonder.\n</think>\n\nYes.\n" + CALLS["hermes"].encode() + b' {"a": <tool_call> no'
    variables = {} if thinking is None else {"thinking": thinking}
    body = {"messages": MESSAGES, "tools": TOOLS, "n": 2, **choice, "chat_template_kwargs": variables}
    sampling = SamplingParams(n=2, max_tokens=None)
    seen = [http_whole(served, body), http_stream(served, body)]
    seen.append(grpc_stream(served, sampling, tools=OUR_TOOLS, tool_choice=ours, chat_template_kwargs=variables))
    assert seen == [seen[0]] * 3
    content, reasoning, calls, end = seen[0][0][1]
    assert reasoning == ("I wonder." if thinking else "") and content.startswith("Yes." if thinking else "I wonder.")
    assert len(calls) == {"{}": 2, "none": 0}.get(choice.get("tool_choice", "{}"), 1)
    assert end == ("tool_calls" if calls else "stop")
    told = len("I wonder.\n</think>") * 2 if thinking else None if thinking is False else 0
    assert seen[0][1]["reasoning"] == told
    first, *others = [request.prompt_token_ids for request in engine.submitted]
    assert others == [first] * 2


def test_a_conversation_goes_on_as_over_http(served: Served, engine: FakeEngine):
    engine.tokenizer = ByteTokenizer(263, chat_template=SHOWN.replace("|", "{{ m.reasoning_content }}|{{ budget }}"))
    served.desk._parsers = Parsers("hermes", "think")
    engine.script = b"<think>So.</think>" + CALLS["hermes"].encode()
    options: dict[str, Any] = {"tools": OUR_TOOLS, "chat_template_kwargs": {"budget": 512, "share": 0.5}}
    stream = served.client.chat(MESSAGES, SamplingParams(max_tokens=None), **options)
    *_, last = stream
    assert last.finish_reason == "tool_calls"
    [message] = stream.answer().messages
    assert message["reasoning"] == "So." and len({call.id for call in message["tool_calls"]}) == 2
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0].id, "content": "rain"}
    engine.script = b"It rains."
    again = served.client.chat([*MESSAGES, message, tool], SamplingParams(max_tokens=None), **options)
    assert "".join(delta.text for delta in again) == "It rains."
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message["tool_calls"]
    ]
    assistant = {"role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": calls}
    body = {"tools": TOOLS, "chat_template_kwargs": options["chat_template_kwargs"]}
    assert ask(served.http.port, PATH, body | {"messages": [*MESSAGES, assistant, tool]}).status == 200
    ours, theirs = [bytes((r.prompt_token_ids or [])[1:]).decode() for r in engine.submitted[1:]]
    shown = "[get_weather][stop]user:hi|512assistant:(get_weather Paris)(stop )So.|512tool:rain|512"
    assert ours == theirs == shown


def test_an_asyncio_client_gets_the_same(served: Served, engine: FakeEngine):
    engine.script = b"Let me see.\n" + CALLS["hermes"].encode()

    async def talk() -> tuple[list[tuple[str, str]], Any]:
        async with AsyncClient(served.target) as client:
            stream = client.chat(MESSAGES, SamplingParams(max_tokens=None), tools=OUR_TOOLS)
            calls = [(call.name, call.arguments) async for delta in stream for call in delta.tool_calls]
            return calls, stream.answer().messages

    calls, [message] = asyncio.run(talk())
    wanted = grpc_stream(served, SamplingParams(max_tokens=None), tools=OUR_TOOLS)[0][0]
    assert (message["content"], calls) == (wanted[0], wanted[2]) and len(calls) == 2


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice.name", {"tool_choice": {"name": "other"}}),
    ("tool_choice.mode", {"tool_choice": {"mode": 77}}),
    ("tool_choice", {"tools": [], "tool_choice": {"mode": "MODE_REQUIRED"}}),
    (
        "tool_choice",
        {
            "tool_choice": {"mode": "MODE_REQUIRED"},
            "options": {"sampling": {"structured_outputs": {"json_object": True}}},
        },
    ),
    ("tools[0].name", {"tools": [{"name": "a b"}]}),
    ("tools[1].name", {"tools": [{"name": "a"}, {"name": "a"}]}),
    ("tools[0].parameters", {"tools": [{"name": "a", "parameters": "{"}]}),
    ("tools[0].parameters", {"tools": [{"name": "a", "parameters": "[1]"}]}),
    ("tools[0].parameters", {"tools": [{"name": "a", "parameters": "[" * 10_000}]}),
    ("tools", {"tools": [{"name": f"f{i}"} for i in range(129)]}),
    ("messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": [{"name": "a", "arguments": "{}"}]}]}),
    (
        "messages[0].tool_calls[0].arguments",
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "[]"}]}]},
    ),
    (
        "messages[0].tool_calls[0].arguments",
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": '{"city": "\\ud800"}'}]}]},
    ),
    ("messages[0].tool_call_id", {"messages": [{"role": "user", "tool_call_id": "x"}]}),
    ("messages[0].reasoning", {"messages": [{"role": "user", "reasoning": "x"}]}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": "x"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"x": float("nan")}}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 3000}]}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field(served: Served, field: str, fields: dict):
    given: dict[str, Any] = {"messages": MESSAGES, "tools": [{"name": "stop"}], **fields}
    with grpc.insecure_channel(served.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(InferenceServiceStub(channel).Chat(pb.ChatRequest(**given)))
    error = error_of(caught.value)
    assert isinstance(error, RequestError) and error.field == field, error


def test_what_the_wire_cannot_carry_is_refused_by_name(served: Served):
    for field, messages, options in (
        ("messages", [{"role": "user", "tool_calls": [{"name": "x"}]}], {}),
        ("messages", [{"role": "user", "reasoning_content": "x"}], {}),
        ("tools", MESSAGES, {"tools": [Tool("a", {"type": object})]}),
        ("tool_choice", MESSAGES, {"tool_choice": Choice("sometimes")}),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(RequestError) as caught:
            served.client.chat(messages, SamplingParams(), **options)
        assert caught.value.field == field


def test_a_model_without_calls_says_so(served: Served, engine: FakeEngine):
    engine.tokenizer = ByteTokenizer(263, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match=r"tools: .*--tool-call-parser"):
        list(served.client.chat(MESSAGES, SamplingParams(), tools=OUR_TOOLS))
    served.desk._parsers = Parsers("none", "none")
    engine.tokenizer = ByteTokenizer(263, chat_template=SHOWN + "{# <tool_call> #}")
    with pytest.raises(RequestError, match=r"tools: .*--tool-call-parser"):
        list(served.client.chat(MESSAGES, SamplingParams(), tools=OUR_TOOLS))


# on a real engine, whose answers a seed decides


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_required_calls_are_the_same_for_a_seed(hybrid: Served, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(hybrid.desk, "_parsers", Parsers(name, "none"))
    for body, ours in (
        ({"tool_choice": "required", "parallel_tool_calls": False}, Choice("required", several=False)),
        ({"tool_choice": {"type": "function", "function": {"name": "stop"}}}, Choice("required", "stop")),
    ):
        shared = {"seed": 3, "max_tokens": 220}
        body = {"messages": MESSAGES, "tools": TOOLS, **body, **shared}
        seen = [http_whole(hybrid, body), http_stream(hybrid, body)]
        seen.append(grpc_stream(hybrid, SamplingParams(**shared), tools=OUR_TOOLS, tool_choice=ours))
        assert seen == [seen[0]] * 3
        [(_, _, calls, end)] = seen[0][0].values()
        assert end == "tool_calls" and len(calls) == 1 and isinstance(json.loads(calls[0][1]), dict)


def test_reasoning_is_the_same_for_a_seed(hybrid: Served, monkeypatch: pytest.MonkeyPatch):
    async def prompt(*_: Any, **__: Any) -> str:
        return "<bos>hi<think>\n"

    monkeypatch.setattr(hybrid.desk, "_parsers", Parsers("hermes", "think"))
    monkeypatch.setattr(hybrid.desk, "chat_prompt", prompt)
    monkeypatch.setattr(dialect, "THINK", ("<think>", "b"))  # an end that the model comes to
    both = False
    for seed in range(30):
        shared = {"seed": seed, "max_tokens": 120, "temperature": 1.2}
        body = {"messages": MESSAGES, **shared}
        seen = [http_whole(hybrid, body), http_stream(hybrid, body), grpc_stream(hybrid, SamplingParams(**shared))]
        assert seen == [seen[0]] * 3
        [(content, reasoning, _, _)] = seen[0][0].values()
        assert seen[0][1]["reasoning"]
        both = bool(content and reasoning)
        if both and seed > 1:
            break
    assert both
