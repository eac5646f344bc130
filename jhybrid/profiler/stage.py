"""Stage: chains and shadows on an engine, and the way back to how the engine was.

A chain is a parked sequence that was really prefilled to a depth. Shadows are sequences that go on from there: they
share its full pages, have a private copy of the partial last one and all pages that they will need, and its state.
Everything is held through the engine's ledger and run by the engine's own steps.
"""

import logging
from typing import Self

from jhybrid.engine import Engine
from jhybrid.errors import ConfigError, JhybridError, StepError
from jhybrid.profiler.timing import StepTimer, Timing
from jhybrid.request import Delta
from jhybrid.sequence import Sequence

log = logging.getLogger("jhybrid")


class ReferencesError(JhybridError):
    """The ledger counts other references after profiling than before. This is a bug of ours."""


class Stage:
    """Used as a context manager: on leaving it, whatever happened, the engine holds what it held before."""

    def __init__(self, engine: Engine, text: list[int], *, chains: int, state: str, is_real: bool):
        """`text` are the tokens that chains read, chain i from its i-th share on; `state` is copy, inplace or none."""
        if engine.has_work:
            raise ConfigError("engine", "has work to do; profile one that is idle")
        self.engine = engine
        self.timer = StepTimer(engine)
        self._text, self._in_place, self._is_real = text, state == "inplace", is_real
        self._num_chains = chains
        self._chains: list[Sequence] = []
        self._spent: set[int] = set()  # chains whose state a shadow has gone on with
        self._running: dict[str, Sequence] = {}  # shadows
        self._ended: set[str] = set()
        self._numbers = 0

    def __enter__(self) -> Self:
        self.engine.flush_cache()  # what it gives back later would hide what is left over
        self.baseline = self.engine.ledger.references()
        self._preemptions = self.engine.scheduler.num_preemptions
        if not self._is_real:  # zeros, not what others left
            self.engine.runner.reset()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._abort([*self._running, *(chain.request_id for chain in self._chains)])
        self.engine.flush_cache()
        after = self.engine.ledger.references()
        left = {pool: after[pool] - count for pool, count in self.baseline.items() if after[pool] > count}
        if left or self.engine.has_work:
            message = f"references left over: {left}; work left: {self.engine.has_work}"
            if error is None:
                raise ReferencesError(message)
            log.error(message)

    # chains

    def chain_to(self, depth: int) -> None:
        """Have every chain stand at `depth`, computed by the engine's steps (or, when synthetic, only reserved)."""
        at = self._chains[0].dispatched if self._chains else 0
        if at > depth or self._spent:
            self._drop_chains()
        if not self._chains:
            for i in range(self._num_chains):
                self._chains.append(self._park(i, depth))
        elif at < depth:
            for chain in self._chains:
                self.engine.extend(chain, depth, computed=self._is_real)
        while any(chain.remaining for chain in self._chains):
            self.step()
        self.step()  # takes in the last one
        self.timer.pause()

    def _park(self, i: int, depth: int) -> Sequence:
        name = f"profile/chain-{self._number()}"
        return self.engine.park(name, self._words(i), depth, computed=self._is_real)

    def _words(self, i: int) -> list[int]:
        """What chain i reads, from position 0 to the longest sequence."""
        start = i * len(self._text) // self._num_chains
        return (self._text[start:] + self._text[:start])[: self.engine.model.max_model_len]

    def _drop_chains(self) -> None:
        self._abort([chain.request_id for chain in self._chains])
        self._chains, self._spent = [], set()

    @property
    def chain_depth(self) -> int:
        return self._chains[0].dispatched

    # shadows

    def shadow(self, i: int, cached: int, new: int, room: int, own: int) -> str:
        """Fork a shadow off chain i (modulo their number) with `new` tokens after the first `cached`.

        `own` chooses its first new token and its seed. It samples until it has `room` tokens. Returns its name.
        """
        at = i % self._num_chains
        chain, words = self._chains[at], self._words(at)
        tokens = words[: cached + new]
        tokens[cached] = words[(cached + own * 7) % len(words)]
        if cached and self._in_place:
            assert at not in self._spent, f"chain {at} has lent its state already"
            self._spent.add(at)
        name = f"profile/shadow-{self._number()}"
        self._running[name] = self.engine.fork(
            chain, name, tokens, room, shares=cached, in_place=self._in_place, seed=own
        )
        return name

    @property
    def spent(self) -> bool:
        """Whether the chains must be prefilled anew before they can lend their state again."""
        return bool(self._spent)

    def step(self) -> Timing | None:
        """One step of the engine, and what it measured. Raises StepError with the cause if a sequence failed."""
        timing, deltas = self.timer.step()
        self._take(deltas)
        if self.engine.scheduler.num_preemptions != self._preemptions:
            raise StepError("a sequence of the profile was preempted: something else takes pages of this engine")
        return timing

    def has_ended(self, name: str) -> bool:
        return name in self._ended

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None and self._running.pop(delta.request_id, None) is not None:
                self._ended.add(delta.request_id)
        for delta in deltas:
            if delta.error is not None:
                raise StepError(f"{delta.request_id}: {delta.error}")

    def end_shadows(self) -> None:
        """Give back all that shadows hold."""
        self._abort(list(self._running))
        self._running, self._ended = {}, set()

    def _abort(self, names: list[str]) -> None:
        """End sequences, and take in the step under way, so that the device is idle."""
        for name in names:
            self.engine.abort(name)
        self.engine.step()
        self.timer.pause()

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
