"""Windows: the harness's own windows, and its left truncation."""

import json
from pathlib import Path

import pytest

from jhybrid.errors import RequestError
from jhybrid.evaluate.windows import continuation_window, rolling_windows

CASES = json.loads((Path(__file__).parent / "rolling_windows.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['tokens']}-by-{case['length']}")
def test_rolling_windows_are_the_harness_s(case: dict):
    tokens = list(range(100, 100 + case["tokens"]))
    windows = list(rolling_windows(tokens, 0, case["length"]))
    # The harness gives what is read before the scored tokens, and the scored tokens; the last of those is not read.
    assert [[w.tokens[: w.start], w.tokens[w.start :]] for w in windows] == case["windows"]
    assert [token for w in windows for token in w.tokens[w.start :]] == tokens
    assert all(len(w.tokens) <= case["length"] + 1 for w in windows)


@pytest.mark.parametrize("context", range(1, 9))
@pytest.mark.parametrize("continuation", range(1, 5))
def test_a_context_is_cut_on_the_left(context: int, continuation: int):
    before, after = list(range(context)), list(range(50, 50 + continuation))
    window = continuation_window(before, after, 4)
    assert window.tokens[window.start :] == after
    kept = window.tokens[: window.start]
    assert kept == before[len(before) - len(kept) :]
    assert len(window.tokens) == min(context + continuation, 5)  # the last token is not read


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(RequestError, match=r"continuation: 5 tokens exceed the 4 of one pass"):
        continuation_window([1], [2] * 5, 4)
    with pytest.raises(RequestError, match=r"context: is empty"):
        continuation_window([], [2], 4)
    with pytest.raises(RequestError, match=r"continuation: has no tokens"):
        continuation_window([1], [], 4)
