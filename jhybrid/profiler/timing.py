"""StepTimer: how long each step of an engine took, and what was in it."""

import time
from dataclasses import dataclass

from jhybrid.engine import Engine, Flight
from jhybrid.request import Delta


@dataclass(frozen=True)
class Timing:
    """One step. `seconds` are from the landing of the step before, or its own launch, to its landing."""

    bucket: str
    decodes: tuple[int, ...]  # tokens of context, that of the step included, of each sequence that had one token
    prefills: tuple[tuple[int, int], ...]  # (new, cached) of each that had more, or none before
    seconds: float


class StepTimer:
    """Steps an engine. Steps overlap on the host, so a step's time is the interval between landings."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._landed_at = 0.0
        self._before: Flight | None = engine.landed

    def step(self) -> tuple[Timing | None, list[Delta]]:
        """A step of the engine. None if none landed in it."""
        deltas = self._engine.step()
        now, flight = time.perf_counter(), self._engine.landed
        if flight is None or flight is self._before:
            return None, deltas
        since = max(self._landed_at, flight.started)
        self._landed_at, self._before = now, flight
        return _timing(flight, now - since), deltas

    def pause(self) -> None:
        """What happens until the next step is not measured."""
        self._before, self._landed_at = self._engine.landed, time.perf_counter()


def _timing(flight: Flight, seconds: float) -> Timing:
    decodes, prefills = [], []
    for item in flight.plan.items:
        if item.num_tokens == 1 and item.first_pos:
            decodes.append(item.first_pos + 1)
        else:
            prefills.append((item.num_tokens, item.first_pos))
    return Timing(str(flight.bucket), tuple(decodes), tuple(prefills), seconds)
