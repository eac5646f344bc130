"""Calls of tools and reasoning over HTTP and the `openai` package: written by a script, and bound on a real engine."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server import dialect
from jhybrid_server.dialect import Parsers
from jhybrid_server.tool_formats import TOOL_FORMATS
from tests.server.fake_engine import FakeEngine
from tests.server.http_client import ask, events
from tests.server.serving import Served, serving
from tests.server.test_answer_parser import CALLS

SHOWN = (
    "{{ bos_token }}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}|{% endfor %}"
    "{% if thinking is not defined %}{% elif thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Łódź"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "...", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(263, chat_template=SHOWN + "{# <tool_call> #}")
    return engine


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def calls_of(message: Any) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def chat(served: Served, **body: Any) -> Any:
    reply = ask(served.http.port, PATH, {"messages": MESSAGES, "tools": TOOLS, **body})
    assert reply.status == 200, reply.raw
    return reply.json["choices"][0]


def test_calls_whole_and_streamed(client: openai.OpenAI, engine: FakeEngine):
    engine.script = b"Let me see.\n" + CALLS["hermes"].encode()
    options: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
    assert calls_of(whole.message) == [("get_weather", {"city": "Paris", "days": 2}), ("stop", {})]
    assert len({call.id for call in whole.message.tool_calls or ()}) == 2
    assert bytes(engine.submitted[0].prompt_token_ids[1:]).decode().startswith("[get_weather][stop]user:hi|")  # pyright: ignore[reportOptionalSubscript]
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Let me see."
    assert calls_of(final.message) == calls_of(whole.message)


def test_calls_over_the_async_client(served: Served, engine: FakeEngine):
    engine.script = b"Let me see.\n" + CALLS["hermes"].encode()
    options: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS}

    async def work() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            whole = client.chat.completions.create(**options)
            async with client.chat.completions.stream(**options) as stream:
                return [(await whole).choices[0], (await stream.get_final_completion()).choices[0]]

    for choice in asyncio.run(work()):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert calls_of(choice.message) == [("get_weather", {"city": "Paris", "days": 2}), ("stop", {})]


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI, engine: FakeEngine):
    engine.script = CALLS["hermes"].encode()
    options: dict[str, Any] = {"model": "fake", "tools": TOOLS}
    message = client.chat.completions.create(**options, messages=MESSAGES).choices[0].message
    assert message.content is None and message.tool_calls
    engine.script = b"It rains."
    answer: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    again = [*MESSAGES, message.model_dump(exclude_none=True, exclude={"annotations", "refusal"}), answer]
    assert client.chat.completions.create(**options, messages=again).choices[0].message.content == "It rains."
    prompt = bytes((engine.submitted[1].prompt_token_ids or [])[1:]).decode()
    assert prompt == "[get_weather][stop]user:hi|assistant:(get_weather Paris)(stop )|tool:rain|"


def test_tool_choice_none_tells_of_no_tools(served: Served, engine: FakeEngine):
    engine.script = CALLS["hermes"].encode()
    choice = chat(served, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": CALLS["hermes"]} and choice["finish_reason"] == "stop"
    assert b"get_weather" not in bytes((engine.submitted[0].prompt_token_ids or [])[1:])


def test_one_call_where_several_are_not_wanted(served: Served, engine: FakeEngine):
    engine.script = CALLS["hermes"].encode()
    assert len(chat(served, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_malformed_calls_are_content(served: Served, engine: FakeEngine):
    engine.script = b'<tool_call>\n{"name": "stop", "arg</tool_call> then'
    choice = chat(served)
    assert choice["message"]["content"] == engine.script.decode() and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    engine.script = b'<tool_call>{"name": "stop", "arguments": {}}'
    assert chat(served, max_tokens=20)["message"]["content"] == engine.script.decode()[:20]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_apart(served: Served, engine: FakeEngine, stream: bool):
    engine.script = b"I wonder.\n</think>\n\nYes. " + CALLS["hermes"].encode()
    body = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"thinking": True}}
    if stream:
        body["stream_options"] = {"include_usage": True}
        *chunks, last, _ = events(served.http.port, PATH, body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        said = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content")}
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0, 1]
        usage, end = last["usage"], chunks[-1]["choices"][0]["finish_reason"]
    else:
        reply = ask(served.http.port, PATH, body).json
        said, usage = reply["choices"][0]["message"], reply["usage"]
        calls, end = said["tool_calls"], reply["choices"][0]["finish_reason"]
    assert (said["reasoning_content"], said["content"], end) == ("I wonder.", "Yes.", "tool_calls")
    assert [call["function"]["name"] for call in calls] == ["get_weather", "stop"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("I wonder.\n</think>")}
    engine.script = b"No <think>ing."
    closed = ask(served.http.port, PATH, {"messages": MESSAGES, "chat_template_kwargs": {"thinking": False}}).json
    assert closed["choices"][0]["message"] == {"role": "assistant", "content": "No <think>ing."}
    assert "completion_tokens_details" not in closed["usage"]


def test_a_model_without_calls_says_so(served: Served, engine: FakeEngine):
    engine.tokenizer = ByteTokenizer(263, chat_template="{{ messages[0].content }}")
    reply = ask(served.http.port, PATH, {"messages": MESSAGES, "tools": TOOLS})
    assert reply.status == 400 and reply.error["param"] == "tools" and "--tool-call-parser" in reply.error["message"]


BAD = [
    ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[1].function.name", {"tools": [TOOLS[1], TOOLS[1]]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}),
]


@pytest.mark.parametrize(("param", "body"), BAD, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field(served: Served, param: str, body: dict):
    reply = ask(served.http.port, PATH, {"messages": MESSAGES, "tools": TOOLS, **body})
    assert (reply.status, reply.error["param"]) == (400, param)


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


UNUSABLE = [
    (
        "tools[1].function.parameters",
        {"properties": {"child": {"$ref": "#"}}, "required": ["child"]},
        "requires itself",
    ),
    ("tools[1].function.parameters", {"properties": {f"k{i}": {} for i in range(4000)}}, "has 4000 keys, at most"),
    ("tools", {"properties": {"a": {"not": {}}}}, "Unimplemented"),
]


@pytest.mark.parametrize(("param", "parameters", "message"), UNUSABLE, ids=lambda value: str(value)[:40])
def test_parameters_that_no_call_can_follow_are_refused(hybrid: Served, param: str, parameters: Any, message: str):
    body = {"messages": MESSAGES, "tools": [TOOLS[1], tool(parameters)], "tool_choice": "required"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid.desk, "_parsers", Parsers("hermes", "none"))
        named = {"type": "function", "function": {"name": "f"}}
        several, alone = ask(hybrid.http.port, PATH, body), ask(hybrid.http.port, PATH, body | {"tool_choice": named})
    assert (several.status, several.error["param"]) == (400, param)
    assert (alone.status, alone.error["param"]) == (400, "tools[1].function.parameters")
    assert message in several.error["message"] and message in alone.error["message"]


# on a real engine, which says anything unless bound


@pytest.fixture
def speaking(hybrid: Served, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Served:
    monkeypatch.setattr(hybrid.desk, "_parsers", Parsers(request.param, "none"))
    return hybrid


@pytest.mark.parametrize("speaking", TOOL_FORMATS, indirect=True)
def test_required_calls_follow_their_schemas(speaking: Served):
    for seed in range(3):
        body = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "max_tokens": 220}
        choice = chat(speaking, **body)
        assert choice["finish_reason"] == "tool_calls", choice
        [call] = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None and call["function"]["name"] in ("get_weather", "stop")
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert arguments.pop("city") in ("Paris", "Łódź")
            assert 0 <= arguments.pop("days", 0) <= 9 and not arguments


@pytest.mark.parametrize("speaking", TOOL_FORMATS, indirect=True)
def test_parameters_may_refer_to_each_other(speaking: Served):
    size = {"enum": ["s", {"$ref": "#"}]}
    parameters = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/size"},
            "b": {"$ref": "#/properties/a"},
            "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 0},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"size": size},
    }
    choice = chat(speaking, tools=[tool(parameters)], tool_choice="required", parallel_tool_calls=False, max_tokens=240)
    assert choice["finish_reason"] == "tool_calls", choice
    arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments["a"] in size["enum"] and arguments["b"] in size["enum"]


@pytest.mark.parametrize("speaking", TOOL_FORMATS, indirect=True)
def test_a_named_tool_is_the_one_called(speaking: Served):
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = chat(speaking, tool_choice=named, seed=4, max_tokens=220)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


def test_what_is_bound_comes_after_the_reasoning(hybrid: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hybrid.desk, "_parsers", Parsers("hermes", "think"))
    monkeypatch.setattr(hybrid.desk, "chat_prompt", lambda *_, **__: _soon("<bos>hi<think>\n"))
    monkeypatch.setattr(dialect, "THINK", ("<think>", "b"))  # an end that the model comes to
    contents = set()
    for seed in range(12):
        choice = chat(hybrid, seed=seed, max_tokens=200, structured_outputs={"regex": "[a-c]{5}"}, tools=None)
        if choice["finish_reason"] == "stop":
            contents.add(choice["message"]["content"])
            assert "b" not in choice["message"].get("reasoning_content", "")
    assert contents and all(len(content) == 5 and set(content) <= set("abc") for content in contents)


async def _soon(text: str) -> str:
    return text
