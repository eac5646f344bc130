"""Dialect: how the served model writes reasoning and calls of tools, as its template shows or the operator says."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from jhybrid.errors import ConfigError, RequestError
from jhybrid.grammar import literal
from jhybrid.structured_outputs import Reasoning, StructuredOutputs
from jhybrid.tokenizer import Tokenizer
from jhybrid_server.tool_formats import TOOL_FORMATS, Tool, ToolFormat, format_of

THINK = ("<think>", "</think>")
"""The markers of reasoning of every family served here that has them."""


@dataclass(frozen=True)
class Dialect:
    """What texts of one model may hold besides content."""

    tools: ToolFormat | None = None
    reasons: bool = False

    def reasoning(self, prompt: str) -> Reasoning | None:
        """The section that an answer to a rendered prompt may begin with; None if the prompt has closed it."""
        start, end = THINK
        tail = prompt.rstrip()
        if not self.reasons or tail.endswith(end):
            return None
        return Reasoning(start, end, is_open=tail.endswith(start))

    def tool_format(self) -> ToolFormat:
        """RequestError if the model has none."""
        if self.tools is None:
            raise RequestError(
                "tools", "this model's chat template has no calls of tools; leave them out, or set --tool-call-parser"
            )
        return self.tools

    def needs_control_tokens(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> bool:
        """Whether markers are control tokens, which texts leave out unless told otherwise."""
        marks = list(THINK) if self.reasons else []
        if tools and self.tools is not None:
            marks += [self.tools.start, self.tools.end, *self.tools.marks]
        return any(literal(tokenizer, mark).startswith("<[") for mark in marks)

    def calls(self, tokenizer: Tokenizer, tools: Sequence[Tool], several: bool) -> StructuredOutputs:
        """Calls of these tools and nothing else."""
        rules = self.tool_format().rules(tools, several, lambda text: literal(tokenizer, text))
        return StructuredOutputs(grammar=rules)


@dataclass(frozen=True)
class Parsers:
    """What the operator says: `auto` is what the chat templates show, `none` switches off."""

    tool_call: str = "auto"
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("tool_call_parser", self.tool_call, ("auto", "none", *TOOL_FORMATS)),
            ("reasoning_parser", self.reasoning, ("auto", "none", "think")),
        ):
            if value not in known:
                raise ConfigError(field, f"{value!r} is not one of {', '.join(known)}")

    @functools.lru_cache(maxsize=4)  # noqa: B019 - there is one for a server
    def dialect(self, tokenizer: Tokenizer | None) -> Dialect:
        templates = "" if tokenizer is None else "\n".join(tokenizer.chat_templates.values())
        shown = all(mark in templates for mark in THINK)
        return Dialect(
            format_of(templates) if self.tool_call == "auto" else TOOL_FORMATS.get(self.tool_call),
            shown if self.reasoning == "auto" else self.reasoning == "think",
        )
