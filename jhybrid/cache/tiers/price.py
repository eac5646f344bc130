"""Price: whether a prefix comes up sooner than it is computed. By what both have taken of late, not by assumption."""

import threading
import time

STALE = 60.0  # seconds for which a measurement is ground for not loading; then it is tried again
TRIFLE = 0.05  # seconds that a load may take in any case: less than what measurements and steps differ by
TOKENS, BYTES = 8192, 1 << 28  # of late: after so much more, what was measured before weighs half


class Rate:
    """Amounts per second, over about the last `horizon` of them. Any thread may add to it."""

    def __init__(self, horizon: int):
        self._horizon = horizon
        self._lock = threading.Lock()
        self._amount = self._seconds = self._last = 0.0

    def saw(self, amount: float, seconds: float) -> None:
        """So much took so long."""
        with self._lock:
            now = time.monotonic()
            keep = 0.0 if now - self._last > STALE else 0.5 ** (amount / self._horizon)
            self._amount, self._seconds, self._last = keep * self._amount + amount, keep * self._seconds + seconds, now

    def seconds_for(self, amount: float, *, within: float = float("inf")) -> float | None:
        """What an amount will take; None if that was not measured, or not within so many seconds."""
        with self._lock:
            if not self._amount or time.monotonic() - self._last > within:
                return None
            return amount * self._seconds / self._amount


class Price:
    """What computing takes, against what loading would. `timeout`: seconds after which a load is given up anyway."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._computing = Rate(TOKENS)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step over so many tokens of prompts took so long."""
        self._computing.saw(tokens, seconds)

    def is_worth_it(self, loads: Rate, size: int, tokens: int) -> bool:
        """Whether to load so many bytes rather than to compute so many tokens. What is not known yet is tried."""
        loading = loads.seconds_for(size, within=STALE)
        computing = self._computing.seconds_for(tokens)
        if loading is None or loading <= min(TRIFLE, self._timeout):
            return True
        return loading <= self._timeout and (computing is None or loading <= computing)
