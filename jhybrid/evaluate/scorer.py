"""Scorer: log-likelihoods of windows, in an order in which what they share is computed once.

Runs over texts and the harness's model call it. It asks the engine for the log-probabilities of the scored tokens
alone, so no array over the vocabulary leaves the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from jhybrid.engine import Engine
from jhybrid.errors import ConfigError, StepError
from jhybrid.evaluate.windows import Window
from jhybrid.request import MAX_SNAPSHOTS, Output, Request, SamplingParams

BLOCK = 16
"""Windows that are handed to the engine at once, for each sequence that it runs at a time."""


@dataclass(frozen=True)
class Likelihood:
    """Log-probabilities (nats) of a window's scored tokens, and whether each is the likeliest at its place."""

    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def total(self) -> float:
        return sum(self.logprobs)


@dataclass(frozen=True)
class Tally:
    """What scoring has cost, in tokens; tallies add up."""

    asked: int = 0
    computed: int = 0
    cached: int = 0
    repeated: int = 0
    """Of windows that were equal to others."""
    positions: int = 0
    """That the device computed."""
    used: int = 0
    """Positions that were somebody's token."""

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def report(self) -> dict[str, float]:
        """Tokens asked for, computed, and taken from the prefix cache or from an equal window; padding of the steps.

        `padding` is the share of the positions computed by the device that were no token of anybody.
        """
        return {
            "tokens_asked": self.asked,
            "tokens_computed": self.computed,
            "tokens_cached": self.cached,
            "tokens_repeated": self.repeated,
            "reuse": (self.cached + self.repeated) / max(1, self.asked),
            "padding": 1 - self.used / max(1, self.positions),
        }


class Scorer:
    """Scores windows on an engine of its own: nothing else may step it meanwhile."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._asked = self._cached = self._repeated = 0
        self._before = self._counts()

    def _counts(self) -> tuple[int, int, int]:
        stats = self.engine.stats
        return stats.prompt_tokens, stats.batch_tokens, stats.scheduled_tokens

    def score(self, windows: Sequence[Window], done: Callable[[int], object] = lambda _count: None) -> list[Likelihood]:
        """Likelihoods in the order of the windows; `done` is told how many more are known. Raises StepError."""
        places: dict[tuple[int, ...], list[int]] = {}
        for i, window in enumerate(windows):
            places.setdefault((*window.tokens, window.start), []).append(i)
        order = sorted((at[0] for at in places.values()), key=lambda i: windows[i].tokens)
        found: list[Likelihood | None] = [None] * len(windows)
        marks = branch_points([windows[i] for i in order])
        size = BLOCK * self.engine.config.max_num_seqs
        for at in range(0, len(order), size):
            block = order[at : at + size]
            requests = [_request(windows[i], marks[at + k]) for k, i in enumerate(block)]
            for i, output in zip(block, self.engine.generate(requests), strict=True):
                window = windows[i]
                likelihood = _read(window, output)
                same = places[(*window.tokens, window.start)]
                for place in same:
                    found[place] = likelihood
                self._asked += len(window.tokens) * len(same)
                self._repeated += len(window.tokens) * (len(same) - 1)
                self._cached += output.cached_tokens
                done(len(same))
        assert None not in found, found.count(None)
        return [likelihood for likelihood in found if likelihood is not None]

    @property
    def tally(self) -> Tally:
        """What this scorer's work has cost."""
        computed, positions, used = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        return Tally(self._asked, computed, self._cached, self._repeated, positions, used)


def branch_points(windows: Sequence[Window]) -> list[list[int]]:
    """For windows in the order of their tokens: where each should leave its state for later ones, in tokens.

    That is where a later window leaves what it shares with this one, if no earlier window has computed up to there.
    A window cannot start from beyond the token before its first scored one.
    """
    shared = [min(common_prefix(a.tokens, b.tokens), b.start - 1) for a, b in pairwise(windows)]
    points: list[list[int]] = [[] for _ in windows]
    coming: list[int] = []  # rising: how much of this window the next ones share, each distinct value once
    for i in range(len(shared) - 1, -1, -1):
        coming = [*(depth for depth in coming if depth < shared[i]), shared[i]]
        known = shared[i - 1] if i else 0
        points[i] = [depth for depth in coming if depth > known][:MAX_SNAPSHOTS]
    return points


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    least = min(len(a), len(b))
    low, high = 0, least
    while low < high:  # slices compare at the speed of C, tokens one by one do not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def window_length(max_model_len: int, asked: int | None) -> int:
    """Most tokens that one pass reads: what was asked, or what the engine allows. Raises ConfigError.

    The last token of a window is read by nobody, but the engine counts it, so this is one less than max_model_len.
    """
    most = max_model_len - 1
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise ConfigError(
            "max_length",
            f"{asked} is not in 1 to {most}; a pass and the token that follows must fit in "
            f"max_model_len={max_model_len}, which can be raised to the model's own limit",
        )
    return asked


def _request(window: Window, marks: list[int]) -> Request:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=window.start)
    return Request(prompt_token_ids=window.tokens, sampling=sampling, snapshot_at=marks)


def _read(window: Window, output: Output) -> Likelihood:
    if output.prompt_logprobs is None:
        raise StepError(output.error or "no log-probabilities came back")
    logprobs, is_greedy = [], True
    for token, entry in zip(window.tokens[window.start :], output.prompt_logprobs[window.start :], strict=True):
        assert entry is not None, window.start
        logprobs.append(dict(entry)[token])
        is_greedy &= entry[0][0] == token
    return Likelihood(tuple(logprobs), is_greedy)
