"""Reasoning and calls of tools read from texts: every format, cut at every place, and what only looks like a call."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhybrid.grammar import Grammars, literal
from jhybrid.structured_outputs import Reasoning, StructuredOutputs
from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server.answer_parser import AnswerParser, Parts
from jhybrid_server.tool_formats import TOOL_FORMATS, Tool, format_of

TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("stop"),
]
THINK = Reasoning("<think>", "</think>", is_open=True)
MAYBE = Reasoning("<think>", "</think>", is_open=False)
PARIS = ("get_weather", {"city": "Paris", "days": 2})
STOP = ("stop", {})

CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "nemotron_json": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
    '{"name": "stop", "arguments": {}}]</TOOLCALL>',
    "jamba": '<tool_calls>[\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"},\n'
    '{"name": "stop", "arguments": {}}\n]</tool_calls>',
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris', days=2), stop()]<|tool_call_end|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
}


def read(
    pieces: list[str], name: str = "hermes", reasoning: Reasoning | None = None, tools: list[Tool] | None = None
) -> tuple[str, str, list[tuple[str, dict]]]:
    parser = AnswerParser(reasoning, TOOLS if tools is None else tools, TOOL_FORMATS[name])
    total = Parts()
    for parts in [*map(parser.push, pieces), parser.finish()]:
        total.reasoning += parts.reasoning
        total.content += parts.content
        total.calls += parts.calls
    return total.reasoning, total.content, [(call.name, json.loads(call.arguments)) for call in total.calls]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_each_format(name: str):
    assert read([CALLS[name]], name) == ("", "", [PARIS, STOP])
    assert read(["Let me see.\n" + CALLS[name] + "\n"], name) == ("", "Let me see.", [PARIS, STOP])
    assert read(["Hm.\n</think>\n\nLet me see.\n" + CALLS[name]], name, THINK) == ("Hm.", "Let me see.", [PARIS, STOP])
    assert read([CALLS[name]], name, tools=[]) == ("", CALLS[name], [])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_template_tells_the_format(name: str):
    assert format_of("{{ tools }} ... " + CALLS[name]) is TOOL_FORMATS[name]
    assert format_of("{{ messages }}") is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("special", [False, True])
def test_the_grammar_of_each_format_allows_its_calls(name: str, special: bool):
    """As the templates write them, also where the markers are control tokens."""
    form = TOOL_FORMATS[name]
    marks = (form.start, form.end, *form.marks) if special else ()
    tokenizer = ByteTokenizer(special_tokens=("<bos>", "<eos>", *marks))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset({257}))
    rules = form.rules(TOOLS, True, lambda text: literal(tokenizer, text))
    matcher = grammars.of(StructuredOutputs(grammar=rules)).matcher()
    text = CALLS[name].replace("'Paris'", '"Paris"').replace("[\n{", "[{").replace("},\n{", "}, {").replace("\n]", "]")
    if name == "hermes":
        stop = '{"name": "stop", "arguments": {}}'
        text = text.replace(f"<tool_call>{stop}", f"<tool_call>\n{stop}\n")
    if name == "jamba":
        text = text.replace('"{\\"city\\": \\"Paris\\", \\"days\\": 2}"', '{"city": "Paris", "days": 2}')
    for at, token in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        assert matcher.consume_token(token), (text[: at + 1], matcher.get_error())
    assert matcher.is_accepting()


ODD = [
    "plain text\n",
    "  ",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>\n{nothing}\n</tool_call> and more ",
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "stop", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "stop", "argu',
    "<tool_call>\n<function=stop>\n<parameter=a>\n1\n</function>\n</tool_call>",
    "<tool_call>\n<function=stop>text</function>\n</tool_call>",
    "<TOOLCALL>[]</TOOLCALL>",
    '<TOOLCALL>{"a": 1}</TOOLCALL>x',
    "<tool_calls>[3]</tool_calls>",
    "<|tool_call_start|>[stop(1)]<|tool_call_end|>",
    "<|tool_call_start|>[stop(**{})]<|tool_call_end|>",
    "<|tool_call_start|>[(lambda: 1)()]<|tool_call_end|>",
    "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>",
    "<|tool_call_start|>" + "(" * 500 + "<|tool_call_end|>",
    "<|tool_calls_section_begin|>functions.stop:0<|tool_calls_section_end|>",
    "<tool_call>" + "[" * 5000 + "</tool_call>",
]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("text", ODD, ids=lambda text: text[:30])
def test_what_is_no_call_is_content(name: str, text: str):
    assert read([text], name) == ("", text, [])
    _, content, calls = read([text + " then " + CALLS[name]], name)
    if "</" in text or "end|>" in text:
        assert calls[-2:] == [PARIS, STOP] or content.endswith(CALLS[name])


def test_a_whole_call_without_its_end_counts():
    assert read(['<tool_call>{"name": "stop", "arguments": {}}']) == ("", "", [STOP])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
            "</tool_call>",
        ),
        ("lfm2", "<|tool_call_start|>[get_weather(city='\"<|tool_call_end|>')]<|tool_call_end|>", '"<|tool_call_end|>'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n</tool_call>\n\n</parameter>\n</function>\n</tool_call>",
            "</tool_call>\n",
        ),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800"}}</tool_call>', "\ufffd"),
    ],
)
def test_markers_inside_of_strings_are_part_of_them(name: str, text: str, value: str):
    assert read([text], name) == ("", "", [("get_weather", {"city": value})])


def test_values_of_xml_parameters_follow_their_schemas():
    tool = Tool(
        "f",
        {
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "number"},
                "flag": {"type": "boolean"},
                "list": {"type": "array"},
                "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            }
        },
    )
    values = {"text": "12", "number": "1.5", "flag": "true", "list": '["a"]', "any": "7", "other": "7"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    typed = {"text": "12", "number": 1.5, "flag": True, "list": ["a"], "any": 7, "other": "7"}
    assert read([text], "qwen3_coder", tools=[tool]) == ("", "", [("f", typed)])


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        ("a\nb</think>\n\nc", THINK, ("a\nb", "c")),
        ("a\nb", THINK, ("a\nb", "")),
        ("", THINK, ("", "")),
        ("</think>c</think>", THINK, ("", "c</think>")),
        ("\n<think>\na\n</think>\n\nc ", MAYBE, ("a", "c ")),
        (" c <think>", MAYBE, ("", " c <think>")),
        ("<thin", MAYBE, ("", "<thin")),
        ("<think>a</thi", MAYBE, ("a</thi", "")),
        ("<think>a", None, ("", "<think>a")),
    ],
)
def test_reasoning(text: str, reasoning: Reasoning | None, expected: tuple[str, str]):
    assert read([text], reasoning=reasoning)[:2] == expected


def test_reasoning_text_is_the_answers_own_up_to_the_end_of_it():
    parser = AnswerParser(MAYBE, [], None)
    for char in "\n<think>\n a b \n</think>\n\nc":
        parser.push(char)
    assert parser.reasoning_text == "\n<think>\n a b \n</think>"


texts = st.lists(
    st.sampled_from([*CALLS.values(), *ODD[:14], "<think>", "</think>", "\n", " ", "a", "é😀", '"', "{", "<", "</"]),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(texts, st.sampled_from([*TOOL_FORMATS]), st.sampled_from([None, THINK, MAYBE]), st.data())
def test_no_cut_changes_what_is_read(text: str, name: str, reasoning: Reasoning | None, data: st.DataObject):
    whole = read([text], name, reasoning)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, name, reasoning) == whole
    assert read(list(text), name, reasoning) == whole
