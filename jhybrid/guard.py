"""Guard: computes a sample of cache hits again, cold, and says which cached prefixes gave something else.

The engine tells it of hits and asks it for checks when there is nothing else to do. A check is two requests of the
hit's prefix and one token more, one that starts from the cached prefix and one that uses nothing of the cache.
"""

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

from jhybrid.cache.node import Node, Salt
from jhybrid.request import MAX_LOGPROBS, Delta, Request, SamplingParams, TokenLogprobs

QUEUE = 16  # hits that wait for their check; more are let go
COMPARED = 5  # likeliest tokens


@dataclass
class Check:
    """A cached prefix under suspicion. `prompt` is the prefix and one token more."""

    node: Node
    salt: Salt
    prompt: list[int]
    answers: dict[bool, Delta] = field(default_factory=dict)  # by whether it was computed cold


@dataclass(frozen=True)
class Verdict:
    """What a check came to: `worst` is the largest difference of log-probabilities; None if it proved nothing.

    `forget` is set if the hit was wrong: the first node after the last ancestor that could be hit by itself.
    """

    check: Check
    worst: float | None
    forget: Node | None = None


class Guard:
    """Chooses `rate` of all hits; log-probabilities may differ by `tolerance`."""

    def __init__(self, rate: float, tolerance: float, page_size: int, *, needs_state: bool, seed: int = 0):
        self.rate, self.tolerance = rate, tolerance
        self._needs_state = needs_state
        self._page_size = page_size
        self._random = random.Random(seed)
        self._waiting: deque[Check] = deque()
        self._running: dict[str, tuple[Check, bool]] = {}  # by name of the request; whether it is the cold one
        self._numbers = itertools.count()

    def saw(self, node: Node, salt: Salt, token_ids: list[int]) -> None:
        """A sequence with these tokens has started from this node."""
        if self.rate and self._random.random() < self.rate and len(self._waiting) < QUEUE:
            self._waiting.append(self._check(node, salt, token_ids))

    def suspect(self, node: Node, salt: Salt, token_ids: list[int]) -> None:
        """A sequence that started from this node has failed with logits that are not finite: check it in any case."""
        if all(check.node is not node for check in self._waiting):
            self._waiting.appendleft(self._check(node, salt, token_ids))

    def _check(self, node: Node, salt: Salt, token_ids: list[int]) -> Check:
        return Check(node, salt, token_ids[: node.depth * self._page_size + 1])

    @property
    def is_checking(self) -> bool:
        """Whether the requests of a check are under way."""
        return bool(self._running)

    def begin(self) -> list[tuple[str, Request, bool]]:
        """The requests of the next check: name, request, whether to compute it cold. Empty if there is none.

        Prefixes that have been forgotten meanwhile are skipped.
        """
        while self._waiting:
            check = self._waiting.popleft()
            if check.node.alive and (check.node.snapshot is not None or not self._needs_state):
                break
        else:
            return []
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True)
        request = Request(prompt_token_ids=check.prompt, sampling=sampling, cache_salt=check.salt)
        names = {f"\0check-{next(self._numbers)}": is_cold for is_cold in (False, True)}
        self._running |= {name: (check, is_cold) for name, is_cold in names.items()}
        return [(name, request, is_cold) for name, is_cold in names.items()]

    def owns(self, request_id: str) -> bool:
        """Whether a request is one of a check under way."""
        return request_id in self._running

    def take(self, delta: Delta) -> Verdict | None:
        """The answer to one of a check's requests; a verdict when it was the second."""
        check, is_cold = self._running.pop(delta.request_id)
        check.answers[is_cold] = delta
        return self._judge(check) if len(check.answers) == 2 else None

    def _judge(self, check: Check) -> Verdict:
        """Compare the two answers of a check. After a wrong one, the nearest ancestor with a state is checked next."""
        hit, cold = check.answers[False], check.answers[True]
        depth = check.node.depth * self._page_size
        if hit.cached_tokens != depth or not cold.logprobs:
            return Verdict(check, None)  # evicted before its turn, or ended early
        # Where the hit alone has failed, what it started from is not even finite.
        worst = _distance(hit.logprobs[0], cold.logprobs[0]) if hit.logprobs else math.inf
        if worst <= self.tolerance:
            return Verdict(check, worst)
        node = check.node
        while node.parent is not None and node.parent.depth and node.parent.snapshot is None:
            node = node.parent
        if node.parent is not None and node.parent.depth:
            self._waiting.appendleft(self._check(node.parent, check.salt, check.prompt))
        return Verdict(check, worst, forget=node)


def _distance(hit: TokenLogprobs, cold: TokenLogprobs) -> float:
    """Largest difference among the hit's likeliest tokens; infinite if the cold run does not rank one of them."""
    expected = dict(cold)
    return max(abs(value - expected.get(token, float("inf"))) for token, value in hit[:COMPARED])
