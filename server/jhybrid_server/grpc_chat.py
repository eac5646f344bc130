"""GrpcChat: a chat of the gRPC service as the conversation that HTTP has too, and refusals in the service's words."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from google.protobuf import json_format
from pydantic_core import from_json

from jhybrid.errors import RequestError
from jhybrid_server.openai_schema import Conversation, Message
from jhybrid_server.openai_tools import CallBody, CalledFunction, FunctionBody, NamedFunction, NamedTool, ToolBody
from jhybrid_server.v1 import inference_pb2 as pb

MODES: dict[int, Literal["none", "auto", "required"]] = {
    pb.ToolChoice.MODE_UNSPECIFIED: "auto",
    pb.ToolChoice.MODE_AUTO: "auto",
    pb.ToolChoice.MODE_NONE: "none",
    pb.ToolChoice.MODE_REQUIRED: "required",
}
RENAMES = {"prompt": "messages", "prompt_token_ids": "messages"}
SPELLINGS = {".function": "", ".reasoning_content": ".reasoning"}
"""Parts of field names in OpenAI's words, and in those of the service."""


def conversation_of(message: pb.ChatRequest) -> Conversation:
    """What was said and may be called. RequestError for JSON that is none."""
    return Conversation(
        messages=[_said(said) for said in message.messages],
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else None,
        chat_template_kwargs=_variables(message),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(message.tools)],
        tool_choice=_choice(message.tool_choice) if message.HasField("tool_choice") else None,
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else None,
    )


@contextlib.contextmanager
def renamed_fields() -> Iterator[dict[str, str]]:
    """Refusals inside name fields as the service does. Names that the block finds out go in what it is given."""
    names = dict(RENAMES)
    try:
        yield names
    except RequestError as error:
        field = names.get(error.field, error.field)
        for openai, ours in SPELLINGS.items():
            field = field.replace(openai, ours)
        if field == error.field:
            raise
        raise RequestError(field, str(error).removeprefix(f"{error.field}: ")) from error


def _said(said: pb.ChatMessage) -> Message:
    calls = [
        CallBody(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in said.tool_calls
    ]
    return Message(
        role=said.role,
        content=said.content,
        name=said.name if said.HasField("name") else None,
        tool_calls=calls or None,
        tool_call_id=said.tool_call_id or None,
        reasoning_content=said.reasoning or None,
    )


def _tool(tool: pb.Tool, field: str) -> ToolBody:
    function = FunctionBody(
        name=tool.name,
        description=tool.description if tool.HasField("description") else None,
        parameters=_schema(tool.parameters, f"{field}.parameters") if tool.HasField("parameters") else None,
    )
    return ToolBody(type="function", function=function)


def _schema(text: str, field: str) -> dict[str, Any]:
    try:
        found = from_json(text)
    except ValueError as error:
        raise RequestError(field, f"is no JSON ({error}); send the schema as a JSON text") from error
    if not isinstance(found, dict):
        raise RequestError(field, f"must be a JSON schema, an object, got {text[:100]!r}")
    return found


def _choice(choice: pb.ToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.WhichOneof("choice") == "name":
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    if choice.mode not in MODES:
        raise RequestError("tool_choice.mode", f"{choice.mode} is none of {', '.join(pb.ToolChoice.Mode.keys())}")
    return MODES[choice.mode]


def _variables(message: pb.ChatRequest) -> dict[str, Any]:
    try:
        return _whole(json_format.MessageToDict(message.chat_template_kwargs))
    except (ValueError, json_format.Error) as error:
        raise RequestError("chat_template_kwargs", f"holds what JSON has not ({error}); remove it") from error


def _whole(value: Any) -> Any:
    """With integers again, which a Struct holds as floats: templates write 512, not 512.0."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
