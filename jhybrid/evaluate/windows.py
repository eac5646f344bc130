"""Window: tokens that the model reads in one pass, of which those from an index on are scored.

What a window is follows lm-evaluation-harness: a model of length L reads L tokens and predicts L, so a window has
at most L + 1. `rolling_windows` is its `get_rolling_token_windows` with one token of context, made disjoint;
`continuation_window` is the left truncation of its `hf` model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jhybrid.errors import RequestError


@dataclass(frozen=True)
class Window:
    """Tokens of one pass; `start`, at least 1, is the index of the first one that is scored."""

    tokens: list[int]
    start: int

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.start


def rolling_windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Window]:
    """Windows that score each of `tokens` exactly once, the first given `prefix`, in passes of `length` tokens.

    Windows do not overlap, but for the last one, which reaches back so that it too has `length` tokens to read.
    """
    for at in range(0, len(tokens), length):
        end = min(at + length, len(tokens))
        if at == 0:
            yield Window([prefix, *tokens[:end]], 1)
        else:
            begin = end - length - 1
            yield Window(list(tokens[begin:end]), at - begin)


def continuation_window(context: Sequence[int], continuation: Sequence[int], length: int) -> Window:
    """The window that scores `continuation` after as much of the end of `context` as a pass of `length` tokens reads.

    Raises RequestError if either is empty, or if the continuation alone is longer than a pass.
    """
    if not context:
        raise RequestError("context", "is empty; lead with the prefix token, BOS or EOS")
    if not continuation:
        raise RequestError("continuation", "has no tokens of its own after the context; there is nothing to score")
    if len(continuation) > length:
        raise RequestError(
            "continuation", f"{len(continuation)} tokens exceed the {length} of one pass; score it in rolling windows"
        )
    tokens = [*context, *continuation][-(length + 1) :]
    return Window(tokens, len(tokens) - len(continuation))
