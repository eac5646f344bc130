"""AnswerParser: the text of an answer, cut into reasoning, content and calls of tools as it comes.

Streamed or not, texts go through here, and what comes out does not depend on how they were cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jhybrid.structured_outputs import Reasoning
from jhybrid_server.tool_formats import Malformed, Tool, ToolCall, ToolFormat

MAX_PASSED = 64
"""End markers that one call may have inside strings. Looking for the end of each costs a pass over the call."""


@dataclass
class Parts:
    """What a piece of text brought."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, more: "Parts") -> None:
        self.reasoning += more.reasoning
        self.content += more.content
        self.calls += more.calls

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """For one answer. Calls come out once they are whole; what only looks like one is content."""

    def __init__(
        self, reasoning: Reasoning | None, tools: Sequence[Tool], tool_format: ToolFormat | None, several: bool = True
    ):
        """`reasoning` None: there is none. Calls are read if there are tools; unless `several`, the first one alone."""
        self._several, self._num_calls = several, 0
        self._reasoning, self._tools = reasoning, tools
        self._format = tool_format if tools else None
        self._text = ""  # not given out yet
        self._phase = "content" if reasoning is None else "reasoning" if reasoning.is_open else "opening"
        self._begun = False  # something of the section has been given out
        self._searched = 0  # of a call under way: where its end may begin
        self._passed = 0  # end markers in it that were inside strings
        self._space = ""  # after content, before what may be a call
        self._after_call = False
        self.reasoning_text = ""
        """The answer's text up to the end of its reasoning, markers included."""

    def push(self, text: str) -> Parts:
        """Take text in; give out what is known of it."""
        self._text += text
        parts = Parts()
        while self._step(parts):
            pass
        return parts

    def finish(self) -> Parts:
        """What is left when the answer ends. A call without an end marker counts if it is whole otherwise."""
        parts, text = Parts(), self._text
        self._text = ""
        if self._phase == "reasoning":
            self._reason(text, parts)
        elif self._phase == "call":
            assert self._format is not None
            self._take_call(text, self._format.start + text, parts)
        else:
            self._say(text, parts)
        if not self._after_call:
            parts.content += self._space
        return parts

    def _step(self, parts: Parts) -> bool:
        """One transition; False if more text is needed."""
        return {"opening": self._open, "reasoning": self._think, "content": self._speak, "call": self._call}[
            self._phase
        ](parts)

    def _open(self, parts: Parts) -> bool:
        """Whether the answer begins with reasoning."""
        del parts
        assert self._reasoning is not None
        start, text = self._reasoning.start, self._text.lstrip()
        if text.startswith(start):
            self.reasoning_text = self._text[: len(self._text) - len(text) + len(start)]
            self._text = text[len(start) :]
            self._phase = "reasoning"
            return True
        if start.startswith(text):
            return False
        self._phase, self._begun = "content", True
        return True

    def _think(self, parts: Parts) -> bool:
        assert self._reasoning is not None
        before, end, after = self._text.partition(self._reasoning.end)
        if end:
            self._reason(before.rstrip(), parts)
            self.reasoning_text += before[len(before.rstrip()) :] + end
            self._text, self._phase, self._begun = after, "content", False
            return True
        keep = _kept(self._text, self._reasoning.end)
        self._reason(self._text[: len(self._text) - keep], parts)
        self._text = self._text[len(self._text) - keep :]
        return False

    def _reason(self, text: str, parts: Parts) -> None:
        """Reasoning without the line breaks around it."""
        self.reasoning_text += text
        if not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        parts.reasoning += text

    def _speak(self, parts: Parts) -> bool:
        if self._reasoning is not None and not self._begun:  # line breaks after the reasoning
            self._text = self._text.lstrip()
            self._begun = bool(self._text)
        if self._format is None:
            parts.content, self._text = parts.content + self._text, ""
            return False
        before, start, after = self._text.partition(self._format.start)
        if start:
            self._say(before, parts)
            self._text, self._phase, self._searched, self._passed = after, "call", 0, 0
            return True
        keep = _overlap(self._text, self._format.start)
        self._say(self._text[: len(self._text) - keep], parts)
        self._text = self._text[len(self._text) - keep :]
        return False

    def _say(self, text: str, parts: Parts) -> None:
        """Content; space at its end waits until it is known whether a call follows."""
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if solid:
            self._after_call = False
        parts.content += solid

    def _call(self, parts: Parts) -> bool:
        assert self._format is not None
        form = self._format
        at = self._text.find(form.end, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._text) - len(form.end) + 1)
            return False
        if self._passed < MAX_PASSED and form.is_open(self._text[:at]):
            self._passed += 1
            self._searched = at + 1
            return True
        inner, self._text = self._text[:at], self._text[at + len(form.end) :]
        self._phase = "content"
        self._take_call(inner, form.start + inner + form.end, parts)
        return True

    def _take_call(self, inner: str, whole: str, parts: Parts) -> None:
        assert self._format is not None
        try:
            calls = self._format.read(inner, self._tools)
        except Malformed:
            self._say(whole, parts)
            return
        if not self._several:
            calls = calls[: 1 - self._num_calls]
        self._num_calls += len(calls)
        parts.calls += calls
        self._space, self._after_call = "", True


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _kept(text: str, marker: str) -> int:
    """What of a text may belong to a marker or be space before it."""
    overlap = _overlap(text, marker)
    solid = text[: len(text) - overlap].rstrip()
    return len(text) - len(solid)
