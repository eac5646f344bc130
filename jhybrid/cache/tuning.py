"""Tuner: finds the alpha of flop-aware eviction by replaying recent requests under several (Marconi, section 4.2)."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from jhybrid.cache.eviction import Policy
from jhybrid.cache.ledger import Ledger
from jhybrid.cache.node import Salt
from jhybrid.cache.replay import Visit, replay

ALPHAS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
MEMORY = 256  # requests that are remembered
MAX_TOKENS = 8192  # of a remembered one; longer ones are left out, so that a turn stays short


class Tuner:
    """Works in turns of one replayed request, so that it fits in where the host has nothing else to do.

    `empty_ledger(alpha)` makes books like the engine's own, with nothing in them.
    """

    def __init__(self, policy: Policy, empty_ledger: Callable[[float], Ledger]):
        self.policy = policy
        self._empty_ledger = empty_ledger
        self._visits: deque[Visit] = deque(maxlen=MEMORY)
        self._new = 0  # visits since the last tuning
        self._wait = MEMORY // 4  # until the next; doubles twice or so, as Marconi's bootstrap window does
        self._work: Iterator[None] | None = None
        self.tunings = 0

    def saw(self, salt: Salt, token_ids: list[int], prompt_len: int) -> None:
        """Remember a request that has ended."""
        if len(token_ids) <= MAX_TOKENS:
            self._visits.append(Visit(salt, token_ids[:prompt_len], token_ids[prompt_len:]))
            self._new += 1

    def turn(self, has_evicted: bool) -> bool:
        """Replay one request, if there is reason to. False if there was nothing to do."""
        if self._work is None:
            if not has_evicted or self._new < self._wait:
                return False
            self._new, self._wait = 0, min(2 * self._wait, 2 * MEMORY)
            self._work = self._tune(list(self._visits))
        if next(self._work, self) is self:
            self._work = None
        return True

    def _tune(self, visits: list[Visit]) -> Iterator[None]:
        saved = dict.fromkeys(ALPHAS, 0.0)
        size = self.policy.cost.page_size
        for alpha, turn in itertools.groupby(itertools.product(ALPHAS, visits), key=lambda pair: pair[0]):
            ledger = self._empty_ledger(alpha)
            for _, visit in turn:
                saved[alpha] += self.policy.cost.flops(0, replay(ledger, visit) // size)
                yield
        best = max(saved.values())
        # Of equals the smallest: recency is what a change of habits shows in first.
        self.policy.set_alpha(min(alpha for alpha, flops in saved.items() if flops == best))
        self.tunings += 1
