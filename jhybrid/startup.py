"""Startup: how far an engine's start is. The thread that starts it writes, servers read meanwhile."""

import time
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Startup:
    """One start. Phases come in the order of the literal."""

    phase: Literal["starting", "loading weights", "compiling", "allocating", "ready"] = "starting"
    buckets: int = 0
    """Compiled so far, or loaded from the cache of executables."""
    buckets_total: int = 0
    """0 until it is known."""
    started: float = field(default_factory=time.monotonic)

    def compiled(self, buckets: int, total: int) -> None:
        """So many buckets of so many are there."""
        self.phase, self.buckets, self.buckets_total = "compiling", buckets, total

    @property
    def seconds(self) -> float:
        """Since the start began."""
        return time.monotonic() - self.started

    def describe(self) -> dict[str, object]:
        """As plain data."""
        counts = {"buckets": self.buckets, "buckets_total": self.buckets_total}
        return {"phase": self.phase, **counts, "seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        buckets = f", {self.buckets} of {self.buckets_total} buckets" if self.buckets_total else ""
        return f"{self.phase}{buckets}, {self.seconds:.0f} s so far"
