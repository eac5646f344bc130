"""Stats: an engine's counters, its status as a dictionary, and the periodic log line."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jhybrid.batch import Bucket
from jhybrid.cache.pages import RowPool
from jhybrid.histogram import Histogram
from jhybrid.scheduler import Plan

if TYPE_CHECKING:
    from jhybrid.engine import Engine

log = logging.getLogger("jhybrid")

LOG_SECONDS = 10.0
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Stats:
    """Counts since the engine was ready."""

    def __init__(self) -> None:
        self.requests = 0
        self.steps = 0
        self.steps_ended = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.scheduled_tokens = 0
        self.batch_tokens = 0
        """Tokens of the steps, and the positions that the device computed for them, padding included."""
        self.failed_steps = 0
        self.failed_sequences = 0
        self.nan_events = 0
        """Sequences that failed because logits were not finite."""
        self.step_seconds: dict[Bucket, Histogram] = {}
        """From the start of a step, or the end of the one before if that is later, until its results are there."""
        self._ended_at = 0.0
        self.seconds = {"step": 0.0, "launch": 0.0, "wait": 0.0}
        """Wall time inside `Engine.step`, of it in handing steps to the device, and in waiting for their results."""
        self._logged_at = time.monotonic()
        self._logged_tokens = 0

    def launched(self, plan: Plan, batch_tokens: int) -> None:
        """Count a step that has started, in a batch of so many positions."""
        self.steps += 1
        self.scheduled_tokens += sum(item.num_tokens for item in plan.items)
        self.batch_tokens += batch_tokens
        self.prompt_tokens += sum(
            min(item.num_tokens, item.sequence.prompt_len - item.first_pos)
            for item in plan.items
            if item.first_pos < item.sequence.prompt_len
        )

    def landed(self, bucket: Bucket, started: float) -> float:
        """Count a step that was started at a time of `perf_counter` and whose results are there now; its seconds."""
        now = time.perf_counter()
        seconds = now - max(started, self._ended_at)
        self.step_seconds.setdefault(bucket, Histogram(STEP_SECONDS)).observe(seconds)
        self._ended_at = now
        return seconds

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time spent inside to `seconds[what]`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - started

    def status(self, engine: "Engine") -> dict:
        """What `Engine.status` returns. State fields appear for models with recurrent layers only."""
        ledger, memory = engine.ledger, engine.runner.memory
        kinds = memory.by_kind()
        status: dict = {
            "running": len(engine.scheduler.running),
            "waiting": engine.scheduler.num_waiting,
            "pages": _pool(ledger.pages, cached=ledger.idle_pages),
        }
        if ledger.slots.size:
            status["slots"] = _pool(ledger.slots)
            status["snapshots"] = _pool(ledger.snapshots, cached=ledger.tree.num_snapshots if ledger.tree else 0)
        else:
            kinds = {kind: size for kind, size in kinds.items() if kind not in ("state", "snapshots")}
        if ledger.tree is not None:
            status["prefix_cache"] = ledger.prefix_status()
        if ledger.tiers is not None:
            status["tiers"] = ledger.tiers.status()
        if not memory.copies:
            del kinds["copies"]
        return status | {
            "memory_bytes": kinds,
            "memory_total_bytes": memory.total,
            "compilations_after_ready": engine.compilations_after_ready,
            "requests": self.requests,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "preemptions": engine.scheduler.num_preemptions,
            "failed_steps": self.failed_steps,
            "failed_sequences": self.failed_sequences,
            "nan_events": self.nan_events,
            "scheduled_tokens": self.scheduled_tokens,
            "padding_tokens": self.batch_tokens - self.scheduled_tokens,
            "seconds": dict(self.seconds),
            "step_seconds": {str(bucket): seen.counted()._asdict() for bucket, seen in self.step_seconds.items()},
        }

    def describe(self, engine: "Engine") -> str:
        """One line: what the engine holds and how much of it is in use."""
        ledger, memory = engine.ledger, engine.runner.memory
        tokens = ledger.pages.size * ledger.page_size
        idle = ledger.idle_pages
        parts = [
            f"{len(engine.scheduler.running)} running, {engine.scheduler.num_waiting} waiting",
            f"pages {ledger.pages.used - idle}/{ledger.pages.size} ({tokens} tokens, {memory.kv / 1e6:.1f} MB)",
        ]
        if ledger.slots.size:
            parts.append(f"slots {ledger.slots.used}/{ledger.slots.size} ({memory.state / 1e6:.1f} MB)")
        if ledger.tree is not None:
            counts = ledger.counts
            share = counts.hit_tokens / max(1, counts.query_tokens)
            parts.append(f"{idle} pages and {ledger.tree.num_snapshots} snapshots cached, {share:.0%} of tokens hit")
        parts.append(f"weights {memory.weights / 1e6:.1f} MB, scratch {memory.scratch / 1e6:.1f} MB")
        return ", ".join(parts)

    def log_now_and_then(self, engine: "Engine") -> None:
        """The periodic log line, every LOG_SECONDS while there is work."""
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS:
            return
        rate = (self.output_tokens - self._logged_tokens) / (now - self._logged_at)
        log.info("%s, %.1f tokens/s", self.describe(engine), rate)
        self._logged_at, self._logged_tokens = now, self.output_tokens


def _pool(pool: RowPool, cached: int = 0) -> dict[str, int]:
    """Rows by state. What holds cached prefixes that nobody uses can be had at once, and counts as free."""
    free = pool.free + cached
    return {"total": pool.size, "free": free, "used": pool.size - free, "cached": cached}
