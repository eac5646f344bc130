"""Structured outputs over HTTP, gRPC and the `openai` package, on a small hybrid that would say anything."""

import json
import re
import threading
from typing import Any

import openai
import pydantic
import pytest

from jhybrid import Request, RequestError, SamplingParams, StructuredOutputs
from jhybrid.structured_outputs import MAX_GRAMMAR_CHARS
from tests.server.http_client import ask, events
from tests.server.serving import Served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "hi"}]


def complete(hybrid: Served, **body: Any) -> Any:
    return ask(hybrid.http.port, "/v1/completions", {"prompt": "To be", "max_tokens": 200, "seed": 1} | body)


def chat(hybrid: Served, **body: Any) -> Any:
    return ask(hybrid.http.port, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 200, "seed": 1} | body)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_schema_over_every_way(hybrid: Served, seed: int, temperature: float):
    options = {"seed": seed, "temperature": temperature}
    [choice] = complete(hybrid, response_format=FORMAT, **options).json["choices"]
    person = json.loads(choice["text"])
    assert list(person) == ["name", "age"] and len(person["name"]) <= 5 and 0 <= person["age"] <= 99
    assert choice["finish_reason"] == "stop"
    assert complete(hybrid, structured_outputs={"json": SCHEMA}, **options).json["choices"][0]["text"] == choice["text"]
    body = {"prompt": "To be", "max_tokens": 200, "response_format": FORMAT, **options}
    chunks = [event for event in events(hybrid.http.port, "/v1/completions", body) if event != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
    sampling = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA), **options)
    answer = hybrid.client.generate(Request(prompt="To be", sampling=sampling))
    assert answer.output.text == choice["text"] and answer.output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[A-Z][a-z]{2,5}, é+!"}, "[A-Z][a-z]{2,5}, é+!"),
        ({"choice": ["yes", "né", "😀😀"]}, "yes|né|😀😀"),
        ({"grammar": 'start: "<" /[a-f]+/ ">"'}, "<[a-f]+>"),
        ({"grammar": 'root ::= "a" root "b" | "."'}, r"a*\.b*"),
    ],
    ids=str,
)
def test_the_other_kinds(hybrid: Served, wanted: dict, pattern: str):
    for seed in range(5):
        [choice] = chat(hybrid, structured_outputs=wanted, seed=seed).json["choices"]
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["message"]["content"])
        sampling = SamplingParams(max_tokens=200, seed=seed, structured_outputs=StructuredOutputs(**wanted))
        [said] = hybrid.client.generate(Request(prompt="To be", sampling=sampling)).output.completions
        assert said.finish_reason == "length" or re.fullmatch(pattern, said.text)


def test_beside_others_and_in_several_answers(hybrid: Served):
    """Bound and free ones at the same time say what they say alone."""
    bodies: list[dict] = [
        {"response_format": FORMAT, "n": 2},
        {},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[a-z]{60}"}, "logprobs": 2},
        {"seed": 5, "logprobs": 2},
    ]
    alone = [complete(hybrid, **body).json["choices"] for body in bodies]
    together: list[Any] = [None] * len(bodies)

    def go(i: int) -> None:
        together[i] = complete(hybrid, **bodies[i]).json["choices"]

    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, its in zip(together, alone, strict=True):
        assert [c["text"] for c in ours] == [c["text"] for c in its]
    assert any(value < -3 for value in together[3][0]["logprobs"]["token_logprobs"]), "they are the model's own"


NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"items": DEEP}
DEEP_FORMAT = FORMAT | {"json_schema": {"name": "x", "schema": DEEP}}
BAD: list[tuple[str, dict]] = [
    ("response_format.json_schema.schema", {"response_format": NO_SCHEMA}),
    ("response_format.json_schema.schema", {"response_format": FORMAT | {"json_schema": {"name": "x"}}}),
    ("structured_outputs.json", {"structured_outputs": {"json": {"type": "x"}}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: x"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("guided_json", {"guided_json": SCHEMA}),
    (
        "response_format.json_schema.schema",
        {"response_format": FORMAT | {"json_schema": {"name": "x", "schema": DEEP}}},
    ),
    ("structured_outputs.json", {"structured_outputs": {"json": DEEP}}),
    ("structured_outputs.json", {"structured_outputs": {"json": '{"items": ' * 5000 + "{}" + "}" * 5000}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: %json " + '{"items": ' * 5000}}),
]


@pytest.mark.parametrize(("param", "body"), BAD, ids=lambda value: str(value)[:40])
def test_refusals_name_the_clients_field(hybrid: Served, param: str, body: dict):
    for reply in (complete(hybrid, **body), chat(hybrid, **body)):
        assert (reply.status, reply.error["param"]) == (400, param)
        assert (reply.error["message"].startswith(f"{param}: ") and "; " in reply.error["message"]) or len(body) == 1


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "🐏" * 5000 + "("}, "unclosed group"),
        ({"json": DEEP}, "nested more than 100 levels"),
        ({"json": '{"items": ' * 5000}, "nested too deeply"),
        ({"grammar": "start: " + "(" * 5000}, "too deeply nested"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_over_grpc(hybrid: Served, wanted: dict[str, Any], message: str):
    sampling = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    with pytest.raises(RequestError, match=message) as refused:
        hybrid.client.generate(Request(prompt="a", sampling=sampling))
    assert refused.value.field == f"structured_outputs.{next(iter(wanted))}"


def test_the_openai_package(hybrid: Served):
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        age: int = pydantic.Field(ge=0, le=99)

    options: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 200, "seed": 2}
    with openai.OpenAI(base_url=f"{hybrid.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(**options, response_format=Person)
        assert isinstance(parsed.choices[0].message.parsed, Person)
        with client.chat.completions.stream(**options, response_format=Person) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
        extra = {"structured_outputs": {"choice": ["yes", "no"]}}
        chosen = client.chat.completions.create(**options, extra_body=extra)
        assert chosen.choices[0].message.content in ("yes", "no")
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**options, response_format=NO_SCHEMA)
        assert bad.value.param == "response_format.json_schema.schema"
