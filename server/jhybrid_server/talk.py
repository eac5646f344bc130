"""Talk: what one chat may say besides content. It binds the request before, and reads the answers after."""

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from jhybrid.errors import RequestError
from jhybrid.request import Delta, SamplingParams
from jhybrid.schema_limits import check_schema
from jhybrid.structured_outputs import Reasoning
from jhybrid.tokenizer import Tokenizer
from jhybrid_server.answer_parser import AnswerParser
from jhybrid_server.dialect import Dialect
from jhybrid_server.tool_formats import Tool, ToolCall


@dataclass(frozen=True)
class Choice:
    """Whether tools are to be called: by whichever name, or this one."""

    kind: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    several: bool = True


@dataclass(frozen=True)
class Talk:
    """One chat in the model's dialect, its prompt rendered."""

    dialect: Dialect
    tokenizer: Tokenizer
    reasoning: Reasoning | None
    tools: Sequence[Tool] = ()
    choice: Choice = Choice()

    def bind(self, sampling: SamplingParams) -> SamplingParams:
        """With what the answer must look like: calls that are required, and whatever it is after the reasoning."""
        wanted = sampling.structured_outputs
        if self.choice.kind == "required":
            if wanted is not None:
                raise RequestError("tool_choice", "requires a call beside a form of the answer; leave one of them out")
            wanted = self.dialect.calls(self.tokenizer, self._callable(), self.choice.several)
        if wanted is not None:
            wanted = replace(wanted, reasoning=self.reasoning)
        shown = self.dialect.needs_control_tokens(self.tokenizer, self.tools)
        return replace(
            sampling,
            structured_outputs=wanted,
            skip_special_tokens=sampling.skip_special_tokens and not shown,
        )

    def _callable(self) -> list[Tool]:
        found = {i: tool for i, tool in enumerate(self.tools) if self.choice.name in (None, tool.name)}
        if not found:
            raise RequestError("tool_choice.function.name", f"{self.choice.name!r} is none of the tools")
        for i, tool in found.items():
            check_schema(f"tools[{i}].function.parameters", {"type": "object"} | tool.parameters)
        return list(found.values())


@dataclass(slots=True)
class ChatDelta(Delta):
    """A delta of a chat: `text` is content alone. `finish_reason` is `tool_calls` where an answer with calls has ended
    by itself."""

    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls that have become whole, each with its id."""


class Reading:
    """One answer of a talk while it comes in."""

    def __init__(self, talk: Talk):
        self._talk = talk
        self._parser = AnswerParser(talk.reasoning, talk.tools, talk.dialect.tools, several=talk.choice.several)
        self._token_ids: list[int] = []
        self.num_calls = 0
        """Calls that have come out."""

    def take(self, delta: Delta) -> ChatDelta:
        """What a delta brings; with its end, all that is left."""
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts.add(self._parser.finish())
        if self._talk.reasoning is not None:
            self._token_ids += delta.token_ids
        self.num_calls += len(parts.calls)
        said: dict[str, Any] = {each.name: getattr(delta, each.name) for each in fields(Delta)}
        if delta.finish_reason == "stop" and self.num_calls:
            said["finish_reason"] = "tool_calls"
        calls = [replace(call, id=call.id or f"call_{uuid.uuid4().hex[:24]}") for call in parts.calls]
        said["text"] = parts.content
        return ChatDelta(**said, reasoning=parts.reasoning, tool_calls=calls)

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the reasoning has, markers included."""
        left, count = len(self._parser.reasoning_text.encode()), 0
        while left > 0 and count < len(self._token_ids):
            left -= len(self._talk.tokenizer.token_bytes(self._token_ids[count]))
            count += 1
        return count


class Readings:
    """All answers of a talk."""

    def __init__(self, talk: Talk):
        self._talk = talk
        self._readings: dict[int, Reading] = defaultdict(lambda: Reading(talk))

    def __getitem__(self, index: int) -> Reading:
        """That of one answer."""
        return self._readings[index]

    @property
    def reasoning_tokens(self) -> int | None:
        """Of what has come so far; None where no reasoning was to be expected."""
        if self._talk.reasoning is None:
            return None
        return sum(reading.reasoning_tokens for reading in self._readings.values())
