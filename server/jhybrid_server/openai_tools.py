"""Tools in OpenAI's words: what may be called, what must be, and earlier calls in a conversation."""

import keyword
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from jhybrid.errors import RequestError
from jhybrid_server.tool_formats import PYTHON_NAME, Tool, ToolCall, ToolFormat

MAX_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
STRICT = ConfigDict(extra="forbid", strict=True)


class FunctionBody(BaseModel):
    model_config = STRICT

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Calls that are required always follow the schema; others as well as the model can."""


class ToolBody(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(BaseModel):
    model_config = STRICT

    name: str


class NamedTool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BaseModel):
    model_config = STRICT

    name: str
    arguments: str


class CallBody(BaseModel):
    """A call of before, as the server told it."""

    model_config = STRICT

    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self, field: str) -> dict[str, Any]:
        """Templates write arguments themselves, from an object. RequestError if they are none."""
        try:
            arguments = from_json(self.function.arguments or "{}")  # refuses half characters, unlike json
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(f"{field}.function.arguments", "is no JSON object; send what the server told")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def tools_of(bodies: Sequence[ToolBody], tool_format: ToolFormat) -> list[Tool]:
    """The tools of a request. RequestError for what the model's format cannot write."""
    if len(bodies) > MAX_TOOLS:
        raise RequestError("tools", f"{len(bodies)} given, at most {MAX_TOOLS} allowed")
    tools: list[Tool] = []
    for at, body in enumerate(bodies):
        name, field = body.function.name, f"tools[{at}].function"
        if not tool_format.names.fullmatch(name):
            raise RequestError(f"{field}.name", f"{name[:100]!r} must match {tool_format.names.pattern}")
        if any(tool.name == name for tool in tools):
            raise RequestError(f"{field}.name", f"{name!r} is given twice; calls could not be told apart")
        parameters = NO_PARAMETERS if body.function.parameters is None else body.function.parameters
        tools.append(Tool(name, parameters, body.function.description))
        if tool_format.names is PYTHON_NAME:
            for key in tools[-1].properties:
                if not key.isidentifier() or keyword.iskeyword(key):
                    raise RequestError(
                        f"{field}.parameters",
                        f"{key[:100]!r}: this model writes calls in Python; use names that it has",
                    )
    return tools


def call_body(call: ToolCall) -> dict[str, Any]:
    """A call as the server tells it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
