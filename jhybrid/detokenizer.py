"""Detokenizer: the text of one answer as its tokens arrive, and the search for stop strings in it.

The sequence holds one per answer. Streamed or not, text comes through here, so both are the same text.
"""

import codecs
from collections.abc import Iterable, Sequence

from jhybrid.tokenizer import Tokenizer

_Utf8Decoder: type[codecs.BufferedIncrementalDecoder] = codecs.getincrementaldecoder("utf-8")  # pyright: ignore[reportAssignmentType]


class Detokenizer:
    """Turns tokens into text that is final once given out.

    Bytes of an unfinished UTF-8 character are held back until it is whole, and so is text that a stop string may
    begin with. Work per token does not grow with the length of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt: Iterable[int] = (),
    ):
        """`tokenizer` None: the text is empty. A stop string counts only if all its text comes after `min_tokens`.

        `prompt` are the tokens that the answer goes on from: text of theirs keeps the answer from opening the text,
        where some tokenizers drop a space.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._utf8 = _Utf8Decoder("replace")
        self._first = tokenizer is None or all(skip_special_tokens and tokenizer.is_special(token) for token in prompt)
        self.opens = self._first
        """Whether the answer opens the text."""
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the answer."""
        self.token_count = 0
        """Tokens taken in; after a stop it ends at the token that completed the stop string."""

    def push(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """Take tokens in; give out the text that is now final, and the stop string if one has ended the answer.

        Tokens after the one that completed a stop string are not taken in: see `token_count`.
        """
        assert self.stopped is None, f"tokens pushed after stop string {self.stopped!r}"
        pieces: list[str] = []
        for token in token_ids:
            self.token_count += 1
            text = self._text_of(token)
            pieces.append(self._search(text) if self._stop else text)
            if self.stopped is not None:
                break
        return "".join(pieces), self.stopped

    def finish(self) -> str:
        """The text still held back; an unfinished character becomes one U+FFFD. Empty after a stop string."""
        if self.stopped is not None:
            return ""
        text, self._held = self._held + self._utf8.decode(b"", final=True), ""
        return text

    def _text_of(self, token: int) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None or (self._skip_special_tokens and tokenizer.is_special(token)):
            return ""
        piece = tokenizer.token_bytes(token, self._first)
        self._first = False
        if piece.isascii() and not self._utf8.buffer:  # nothing to wait for, and less work
            return piece.decode()
        return self._utf8.decode(piece)

    def _search(self, new: str) -> str:
        """Add `new` to the held text and return what no stop string can claim any more."""
        if self.token_count <= self._min_tokens:
            return new
        text = self._held + new
        end, start, stop = min(self._matches(text), default=(0, 0, None))
        if stop is not None:
            self.stopped, self._held = stop, ""
            return text[:end] if self._include_stop else text[:start]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """(end, start, stop string) of each stop string in `text`. The one that ends first wins, the longest among
        those: that is what a reader of one character at a time would find, so token borders do not matter."""
        found = ((text.find(stop), stop) for stop in self._stop)
        return [(start + len(stop), start, stop) for start, stop in found if start >= 0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself not included."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
