"""Occupancy: who holds which slots, pages and snapshots at one moment, for people to look at.

`of` runs on the engine's thread and only copies what running sequences hold; `describe` may run anywhere.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jhybrid.cache.ledger import Ledger
from jhybrid.scheduler import Scheduler
from jhybrid.sequence import Sequence

MAX_CELLS = 1024
"""Of one pool; beyond, a cell stands for several rows."""
FREE, CACHED, SHARED = -1, -2, -3
"""Cells that no one sequence holds: free, held for prefixes that may be asked for again, or held by several."""


@dataclass(frozen=True)
class Holder:
    """A running sequence, without its text."""

    name: str
    index: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    computed_tokens: int
    preemptions: int
    priority: int
    rows: dict[str, list[int]]
    """Pool -> rows that it holds."""

    @classmethod
    def of(cls, sequence: Sequence) -> "Holder":
        holding = sequence.holding
        assert holding is not None, f"{sequence.request_id} runs and holds nothing"
        nodes = [holding.source, *holding.tails]
        kept = [node.snapshot for node in nodes if node is not None and node.snapshot is not None]
        return cls(
            sequence.request_id,
            sequence.index,
            sequence.prompt_len,
            sequence.num_outputs,
            sequence.cached_tokens,
            sequence.dispatched,
            sequence.preemptions,
            sequence.request.priority,
            {
                "slots": [] if holding.slot is None else [holding.slot],
                "pages": holding.pages.copy(),
                "snapshots": [*holding.snapshots.values(), *kept],
            },
        )

    def describe(self) -> dict[str, Any]:
        phase = "prefill" if self.computed_tokens < self.prompt_tokens else "decode"
        held = {pool: len(rows) for pool, rows in self.rows.items()}
        names = ("name", "index", "prompt_tokens", "output_tokens", "cached_tokens", "computed_tokens", "preemptions")
        return {name: getattr(self, name) for name in names} | {"priority": self.priority, "phase": phase} | held


@dataclass(frozen=True)
class Occupancy:
    """All pools at one moment."""

    holders: list[Holder]
    taken: dict[str, bytes]
    """Pool -> for each row, whether anybody holds it."""

    @classmethod
    def of(cls, scheduler: Scheduler, ledger: Ledger) -> "Occupancy":
        """Costs time that grows with what runs, not with what waits."""
        pools = {"slots": ledger.slots, "pages": ledger.pages, "snapshots": ledger.snapshots}
        holders = [Holder.of(sequence) for sequence in scheduler.running]
        return cls(holders, {name: pool.taken_rows() for name, pool in pools.items() if pool.size})

    def describe(self) -> dict[str, Any]:
        """As plain data: `sequences`, and for each pool cells that index them or are FREE, CACHED or SHARED."""
        pools = {name: self._pool(name, np.frombuffer(taken, bool)) for name, taken in self.taken.items()}
        return {"sequences": [holder.describe() for holder in self.holders], "pools": pools}

    def _pool(self, name: str, taken: np.ndarray) -> dict[str, Any]:
        cells = np.where(taken, CACHED, FREE).astype(np.int64)
        for number, holder in enumerate(self.holders):
            rows = holder.rows[name]
            cells[rows] = np.where(cells[rows] == CACHED, number, SHARED)
        per_cell = -(-len(cells) // MAX_CELLS)
        padded = np.pad(cells, (0, -len(cells) % per_cell), constant_values=FREE).reshape(-1, per_cell)
        merged = padded.max(axis=1)  # a holder if there is one, else whether anything is held
        merged = np.where(merged < 0, padded.min(axis=1), merged)
        return {"rows_per_cell": per_cell, "rows": len(cells), "cells": merged.tolist()}
