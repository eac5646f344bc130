"""ToolFormats: how models write calls of tools into their text. Each knows its markers, reads calls and has a grammar.

What the formats are is said by the chat templates of the models' cards; vLLM and SGLang read the same ones.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jhybrid.schema_limits import moved

Schema = dict[str, Any]
Literal = Callable[[str], str]
"""A text as the grammar writes it: quoted, or a control token."""

AS_TEMPLATES_DO = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""Space in JSON where chat templates put it, so where the models have learnt it."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
FREE_TEXT = "/(?s:.*)/"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema = field(default_factory=dict)
    """JSON schema of its arguments, an object."""
    description: str | None = None

    @property
    def properties(self) -> dict[str, Schema]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> list[str]:
        found = self.parameters.get("required")
        return [name for name in found if name in self.properties] if isinstance(found, list) else []


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; `arguments` is a JSON object. `id` None: one is to be made up."""

    name: str
    arguments: str
    id: str | None = None


class Malformed(Exception):
    """A section of text that is no call after all."""


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls: between `start` and `end`, one or several."""

    name: str
    start: str
    end: str
    is_open: Callable[[str], bool]
    """Whether a text cut at an end marker is inside a string, so that the marker is part of it."""
    read: Callable[[str, Sequence[Tool]], list[ToolCall]]
    """The calls between the markers. Raises Malformed."""
    rules: Callable[[Sequence[Tool], bool, Literal], str]
    """Rules of a Lark grammar for one call, or several if asked for, from `start` on."""
    names: re.Pattern[str] = NAME
    """What names of tools must be."""
    marks: tuple[str, ...] = ()
    """Further markers inside."""


def call_of(name: Any, arguments: Any, tools: Sequence[Tool], call_id: str | None = None) -> ToolCall:
    """A call of a tool that there is, with an object of arguments. Raises Malformed."""
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict) or all(tool.name != name for tool in tools):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    return ToolCall(name, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), call_id)


# JSON: hermes, nemotron_json, jamba


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def in_json_string(text: str) -> bool:
    """Whether the end of a JSON text lies inside a string."""
    return len(re.findall(r'"', re.sub(r"\\.", "", text, flags=re.DOTALL))) % 2 == 1


def _read_json(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    found = _json(text)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise Malformed
    return [call_of(call.get("name"), call.get("arguments", call.get("parameters")), tools) for call in calls]


def _json_call(tool: Tool) -> Schema:
    """The schema of one call."""
    arguments = {"type": "object"} | moved(tool.parameters, "#/properties/arguments")
    return {
        "x-guidance": AS_TEMPLATES_DO,
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _json_tools(tools: Sequence[Tool]) -> str:
    rules = [f"tool{i}: %json {json.dumps(_json_call(tool))}" for i, tool in enumerate(tools)]
    return "\n".join([f"tool: {_either('tool', tools)}", *rules])


def _hermes_rules(tools: Sequence[Tool], several: bool, literal: Literal) -> str:
    more = ' ("\\n" call)*' if several else ""
    call = f'call: {literal("<tool_call>")} "\\n" tool "\\n" {literal("</tool_call>")}'
    return f"start: call{more}\n{call}\n{_json_tools(tools)}\n"


def _list_rules(start: str, end: str) -> Callable[[Sequence[Tool], bool, Literal], str]:
    def rules(tools: Sequence[Tool], several: bool, literal: Literal) -> str:
        more = ' (", " tool)*' if several else ""
        return f'start: {literal(start)} "[" tool{more} "]" {literal(end)}\n{_json_tools(tools)}\n'

    return rules


def _either(name: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{name}{i}" for i in range(len(tools)))


# XML of parameters: qwen3_coder

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _in_parameter(text: str) -> bool:
    return text.count("<parameter=") > text.count("</parameter>")


def _read_xml(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    calls, at = [], 0
    while at < len(text):
        found = FUNCTION.match(text, at)
        if found is None:
            raise Malformed
        calls.append(_xml_call(found[1].strip(), found[2], tools))
        at = found.end()
    if not calls:
        raise Malformed
    return calls


def _xml_call(name: str, body: str, tools: Sequence[Tool]) -> ToolCall:
    schemas = next((tool.properties for tool in tools if tool.name == name), {})
    arguments, at = {}, 0
    while body[at:].strip():
        found = PARAMETER.match(body, at)
        if found is None:
            raise Malformed
        arguments[found[1].strip()] = _typed(found[2], schemas.get(found[1].strip(), {}))
        at = found.end()
    return call_of(name, arguments, tools)


def _is_text(schema: Any) -> bool:
    """Whether a parameter is written as it is and not as JSON."""
    return not isinstance(schema, dict) or schema.get("type", "string") == "string"


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter: texts are as they stand, others JSON if they can be."""
    if _is_text(schema) and not (isinstance(schema, dict) and {"anyOf", "oneOf", "$ref"} & set(schema)):
        return text
    try:
        return _json(text)
    except Malformed:
        return text


def _xml_rules(tools: Sequence[Tool], several: bool, literal: Literal) -> str:
    rules = [
        f"start: call{' (NEWLINE call)*' if several else ''}",
        'NEWLINE: "\\n"',
        f'call: {literal("<tool_call>")} "\\n" tool "</function>\\n" {literal("</tool_call>")}',
        f"tool: {_either('tool', tools)}",
    ]
    for i, tool in enumerate(tools):
        parts = [_quoted(f"<function={tool.name}>\n")]
        for j, name in enumerate(sorted(tool.properties, key=lambda name: name not in tool.required)):
            rule = f"tool{i}p{j}"
            parts.append(rule if name in tool.required else f"{rule}?")
            rules += _xml_parameter(rule, name, tool)
        rules.append(f"tool{i}: {' '.join(parts)}")
    return "\n".join(rules) + "\n"


def _xml_parameter(rule: str, name: str, tool: Tool) -> list[str]:
    schema, close = tool.properties[name], _quoted("\n</parameter>\n")
    head = f"{rule}: {_quoted(f'<parameter={name}>{chr(10)}')} {rule}v"
    choices = schema.get("enum") if isinstance(schema, dict) and _is_text(schema) else None
    if choices and all(isinstance(choice, str) for choice in choices):
        return [f"{head} {close}", f"{rule}v: {' | '.join(map(_quoted, choices))}"]
    if _is_text(schema) and not _refers(schema):
        return [head, f"{rule}v[suffix={close}]: {FREE_TEXT}"]
    return [f"{head} {close}", f"{rule}v: %json {json.dumps(_alone(schema, tool))}"]


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and bool({"anyOf", "oneOf", "allOf", "$ref"} & set(schema))


def _alone(schema: Any, tool: Tool, style: dict[str, Any] = AS_TEMPLATES_DO) -> Any:
    """The schema of one parameter as a document of its own, with all of them where it refers to others."""
    if not isinstance(schema, dict):
        return schema
    found = moved(schema, "#/$defs/parameters")
    shared = {} if found == schema else {"$defs": {"parameters": moved(tool.parameters, "#/$defs/parameters")}}
    return {"x-guidance": style} | found | shared


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Python: lfm2

PYTHON_ESCAPES = AS_TEMPLATES_DO | {"json_allowed_escapes": 'nrtbf\\"'}
"""Those that mean the same in JSON and in Python."""
PYTHON_WORDS = {"true": True, "false": False, "null": None}


def _in_python_string(text: str) -> bool:
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        if quote and char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        at += 1
    return bool(quote)


def _read_python(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    try:
        listed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error
    calls = listed.elts if isinstance(listed, ast.List) else [listed]
    if not calls:
        raise Malformed
    return [_python_call(call, tools) for call in calls]


def _python_call(call: ast.expr, tools: Sequence[Tool]) -> ToolCall:
    if isinstance(call, ast.Dict):
        found = _python_value(call)
        return call_of(found.get("name"), found.get("arguments"), tools)
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise Malformed
    arguments = {str(each.arg): _python_value(each.value) for each in call.keywords}
    return call_of(ast.unparse(call.func), arguments, tools)


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in PYTHON_WORDS:
            return PYTHON_WORDS[word]
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_python_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {str(key.value): _python_value(value) for key, value in zip(keys, values, strict=True)}  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    raise Malformed


def _python_rules(tools: Sequence[Tool], several: bool, literal: Literal) -> str:
    more = ' (", " tool)*' if several else ""
    start, end = literal("<|tool_call_start|>"), literal("<|tool_call_end|>")
    rules = [f'start: {start} "[" tool{more} "]" {end}', f"tool: {_either('tool', tools)}"]
    for i, tool in enumerate(tools):
        names = sorted(tool.properties, key=lambda name: name not in tool.required)
        for j, name in enumerate(names):
            schema = json.dumps(_alone(tool.properties[name], tool, PYTHON_ESCAPES))
            rules += [f"tool{i}p{j}: {_quoted(name + '=')} tool{i}v{j}", f"tool{i}v{j}: %json {schema}"]
        rules.append(f'tool{i}: {_quoted(tool.name + "(")} {_keywords(i, names, len(tool.required))} ")"')
    return "\n".join(rules) + "\n"


def _keywords(i: int, names: Sequence[str], required: int) -> str:
    """Arguments with commas between: those that are required, then any of the others in their order."""
    parts = [f"tool{i}p{j}" for j in range(len(names))]
    optional = [f'(", " {part})?' for part in parts]
    if required:
        return ' ", " '.join(parts[:required]) + " " + " ".join(optional[required:])
    firsts = [" ".join([part, *optional[j + 1 :]]) for j, part in enumerate(parts)]
    return f"({' | '.join(firsts)})?" if firsts else ""


# sections of calls: kimi_k2

KIMI_BEGIN, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_CALL = re.compile(
    rf"\s*{re.escape(KIMI_BEGIN)}\s*((?:functions\.)?([^\s<]+?)(?::\d+)?)\s*{re.escape(KIMI_ARGUMENTS)}\s*(.*?)\s*{re.escape(KIMI_END)}\s*",
    re.DOTALL,
)


def _in_kimi_string(text: str) -> bool:
    return in_json_string(text.rpartition(KIMI_ARGUMENTS)[2]) if KIMI_ARGUMENTS in text else False


def _read_kimi(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    calls, at = [], 0
    while at < len(text):
        found = KIMI_CALL.match(text, at)
        if found is None:
            raise Malformed
        calls.append(call_of(found[2], found[3], tools, found[1]))
        at = found.end()
    if not calls:
        raise Malformed
    return calls


def _kimi_rules(tools: Sequence[Tool], several: bool, literal: Literal) -> str:
    start, end = literal("<|tool_calls_section_begin|>"), literal("<|tool_calls_section_end|>")
    begin, arguments, over = literal(KIMI_BEGIN), literal(KIMI_ARGUMENTS), literal(KIMI_END)
    rules = [f"start: {start} call{'+' if several else ''} {end}", f"call: {begin} tool {over}"]
    rules.append(f"tool: {_either('tool', tools)}")
    for i, tool in enumerate(tools):
        schema = json.dumps({"x-guidance": AS_TEMPLATES_DO, "type": "object"} | tool.parameters)
        rules.append(f"tool{i}: {_quoted(f'functions.{tool.name}:')} /[0-9]{{1,2}}/ {arguments} tool{i}v")
        rules.append(f"tool{i}v: %json {schema}")
    return "\n".join(rules) + "\n"


_ALL = (
    ToolFormat(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _in_kimi_string,
        _read_kimi,
        _kimi_rules,
        marks=(KIMI_BEGIN, KIMI_ARGUMENTS, KIMI_END),
    ),
    ToolFormat(
        "lfm2", "<|tool_call_start|>", "<|tool_call_end|>", _in_python_string, _read_python, _python_rules, PYTHON_NAME
    ),
    ToolFormat(
        "nemotron_json",
        "<TOOLCALL>",
        "</TOOLCALL>",
        in_json_string,
        _read_json,
        _list_rules("<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolFormat(
        "jamba",
        "<tool_calls>",
        "</tool_calls>",
        in_json_string,
        _read_json,
        _list_rules("<tool_calls>", "</tool_calls>"),
    ),
    ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", _in_parameter, _read_xml, _xml_rules),
    ToolFormat("hermes", "<tool_call>", "</tool_call>", in_json_string, _read_json, _hermes_rules),
)
TOOL_FORMATS = {each.name: each for each in _ALL}
"""By name: those of Kimi Linear, LFM2, Nemotron-H, Jamba, Qwen3.5 and Nemotron 3, and of Qwen3-Next, Granite 4 and
Falcon-H1."""

_SIGNS = {"qwen3_coder": "<function="}


def format_of(chat_template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None if it knows no tools, or another one."""
    return next((each for each in _ALL if _SIGNS.get(each.name, each.start) in chat_template), None)
