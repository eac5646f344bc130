"""Counts of one tier, and the breaker that takes it out when it keeps failing."""

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

log = logging.getLogger("jhybrid")

MissCause = Literal["absent", "gone", "corrupt", "failed", "timeout", "slow", "stale", "no_room", "out"]
"""Why a tier did not serve a prefix: it is not there; it was when looked up and then not; it is not what was written;
reading failed; it took too long; it would take longer than computing it; the device had given up what was to go before
it; the device had no row for the state; the tier is taken out."""

LIMIT = 3  # failures in a row that take a tier out
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 3600.0  # seconds until it is tried again


@dataclass
class TierCounts:
    """What a tier did since the engine was ready. Every thread adds to it through `add`, under one lock."""

    hits: int = 0  # admissions that started from it
    hit_tokens: int = 0  # of their prompts, that it provided for
    misses: Counter[str] = field(default_factory=Counter)  # by MissCause
    deferrals: int = 0  # times that an admission was put off, to wait for it
    writes: int = 0  # entries: pages and states in the host, whole prefixes on the disk
    written_bytes: int = 0
    write_seconds: float = 0.0
    read_bytes: int = 0
    read_seconds: float = 0.0
    dropped: int = 0  # prefixes that were to be written and were not: gone before their turn, or no room in the queue
    failures: int = 0
    evicted: int = 0  # entries given up for others

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def miss(self, cause: MissCause) -> None:
        with self._lock:
            self.misses[cause] += 1

    def status(self) -> dict:
        """As the engine's status shows it; rates in bytes per second of the time spent in transfers."""
        with self._lock:
            fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "misses": dict(self.misses),
            "write_bandwidth": self.written_bytes / self.write_seconds if self.write_seconds else 0.0,
            "read_bandwidth": self.read_bytes / self.read_seconds if self.read_seconds else 0.0,
        }


class Breaker:
    """Out after LIMIT failures in a row; in again, on trial, after a pause that doubles while trials fail."""

    def __init__(self, name: str):
        self.name = name
        self.reason: str | None = None  # why it is out
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._lock = threading.Lock()

    @property
    def is_in(self) -> bool:
        """Whether to use what it guards."""
        return self.reason is None or time.monotonic() >= self._until

    def succeeded(self) -> None:
        if not self._failures:
            return
        with self._lock:
            if self.reason is not None:
                log.warning("%s is back in use", self.name)
            self._failures, self._pause, self.reason = 0, FIRST_PAUSE, None

    def failed(self, error: BaseException) -> None:
        """Count a failure, whatever it was. One of what was begun before it was taken out tells nothing new."""
        with self._lock:
            self._failures += 1
            log.warning("%s failed: %r", self.name, error)
            if self._failures >= LIMIT and self.is_in:
                self._take_out(error)

    def trip(self, error: BaseException) -> None:
        """Take it out at once."""
        with self._lock:
            self._failures = max(self._failures + 1, LIMIT)
            self._take_out(error)

    def _take_out(self, error: BaseException) -> None:
        self.reason = str(error) or repr(error)
        self._until = time.monotonic() + self._pause
        log.error("%s is taken out for %.0f s: %r", self.name, self._pause, error)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
