"""What an answer must look like, in OpenAI's words (`response_format`) and in vLLM's (`structured_outputs`)."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jhybrid.errors import RequestError
from jhybrid.structured_outputs import StructuredOutputs

STRICT = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class JsonSchema(BaseModel):
    model_config = STRICT

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None
    """Schemas are always enforced."""


class ResponseFormat(BaseModel):
    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsBody(BaseModel):
    model_config = STRICT

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


RENAMES = {
    "structured_outputs": "response_format",
    "structured_outputs.json": "response_format.json_schema.schema",
    "structured_outputs.json_object": "response_format",
}
"""What the engine's fields are called where `response_format` was given."""

MOVED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "json_schema": "response_format",
}
"""Other spellings of the field, and the one that is known here."""


def structured_outputs(
    response_format: ResponseFormat | None, given: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """The one that is asked for. RequestError if both are."""
    wanted = None if given is None else StructuredOutputs(**given.model_dump(by_alias=True, exclude_none=True))
    if response_format is None or response_format.type == "text":
        return wanted
    if wanted is not None:
        raise RequestError("structured_outputs", "is there beside response_format; give one of them")
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True)
    if response_format.json_schema is None:
        raise RequestError("response_format.json_schema", "is missing; give {'name': ..., 'schema': ...}")
    return StructuredOutputs(json=response_format.json_schema.schema_)
