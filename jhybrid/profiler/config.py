"""ProfileConfig: which points are measured and how."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError

Kind = Literal["decode", "prefill", "mixed"]
StateMode = Literal["auto", "copy", "inplace"]
Seed = Literal["real", "synthetic"]

KINDS: tuple[Kind, ...] = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class ProfileConfig:
    """A grid of points and how each is measured. Axes left empty are derived from the engine's limits."""

    kinds: tuple[Kind, ...] = KINDS
    """Which grids: decode (batch x depth), prefill (new x cached tokens), mixed (a prompt beside a decoding batch)."""
    batches: tuple[int, ...] = ()
    """Sequences that decode together. Empty: 1, 2, 3, 4, 6, 8, 12, ... up to max_num_seqs, and that."""
    depths: tuple[int, ...] = ()
    """Tokens of context that each of them has. Empty: powers of four from 64, and what max_model_len leaves."""
    new_tokens: tuple[int, ...] = ()
    """Prompt tokens to compute. Empty: powers of four from 16 up to max_num_batched_tokens, and that."""
    cached_tokens: tuple[int, ...] = ()
    """Tokens before them that are computed already. Empty: 0 and the depths."""
    mixed_batches: tuple[int, ...] = ()
    """Decoding sequences of the mixed points. Empty: a quarter of max_num_seqs, and one less than it."""
    mixed_new_tokens: tuple[int, ...] = ()
    """Prompt tokens of the mixed points. Empty: a quarter of the largest of new_tokens, and what fits one step."""
    repeats: int = 5
    """Measurements of each point; their median and range are reported."""
    steps: int = 4
    """Decode steps of one measurement, which is their mean."""
    warmup: int = 2
    """Decode steps before the first measurement; the first of them reads the chain's state."""
    burn_in: float = 1.0
    """Seconds for which the first point is run before anything is measured, as processors start slowly."""
    state_mode: StateMode = "auto"
    """How a shadow gets the chain's recurrent state: copy (a slot of its own), inplace (the chain's), auto."""
    seed: Seed = "real"
    """real: chains are prefilled. synthetic: pages and state are zeros, only to compare with."""
    chains: int = 1
    """Sequences that are really prefilled to each depth. Shadows share their pages in turn."""
    text: Path | None = None
    """Text that the chains read, in UTF-8. None: random tokens, which mixtures of experts may route unlike text."""
    bandwidth: float | None = None
    """Memory bandwidth in GB/s for the floor. None: measured."""

    def __post_init__(self) -> None:
        for name in ("kinds", "batches", "depths", "new_tokens", "cached_tokens", "mixed_batches", "mixed_new_tokens"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for kind in self.kinds:
            _one_of("kinds", kind, KINDS)
        _one_of("state_mode", self.state_mode, ("auto", "copy", "inplace"))
        _one_of("seed", self.seed, ("real", "synthetic"))
        for name in ("batches", "depths", "new_tokens", "mixed_batches", "mixed_new_tokens"):
            for value in getattr(self, name):
                _at_least(name, value, 1)
        for value in self.cached_tokens:
            _at_least("cached_tokens", value, 0)
        for name in ("repeats", "steps", "warmup", "chains"):
            _at_least(name, getattr(self, name), 1)
        if not self.burn_in >= 0:
            raise ConfigError("burn_in", f"must be a number of seconds, got {self.burn_in!r}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigError("bandwidth", f"must be a positive number of GB/s, got {self.bandwidth!r}")

    def axes(self, engine: EngineConfig, max_model_len: int) -> "Axes":
        """The values of every axis, sorted and without repetition.

        Raises ConfigError where depths are to be derived and the decode steps leave no context.
        """
        most, budget = engine.max_num_seqs, engine.max_num_batched_tokens
        room = max_model_len - 2 - self.decode_steps
        if room < 1 and not self.depths and {"decode", "mixed"}.intersection(self.kinds):
            sum_of = f"warmup={self.warmup} + repeats={self.repeats} * steps={self.steps} + 1"
            raise ConfigError(
                "repeats",
                f"a decode point takes {self.decode_steps} steps ({sum_of}), beside which "
                f"max_model_len={max_model_len} leaves no context; "
                f"use fewer repeats or steps, or a max_model_len above {self.decode_steps + 2}",
            )
        depths = self.depths or [*_powers(64, 4, room), *([room] if room > 0 else [])]
        new = self.new_tokens or [*_powers(16, 4, budget), min(budget, max_model_len - 1)]
        fits = max_model_len - 1 - max(new)
        cached = self.cached_tokens or [0, *(depth for depth in depths if depth <= fits)]
        few = self.mixed_batches or (max(1, most // 4), max(1, most - 1))
        beside = self.mixed_new_tokens or (max(1, max(new) // 4), max(1, min(budget - max(few), max(new))))
        return Axes(
            # those between powers of two tell what a sequence costs from what its bucket costs
            batches=_sorted(self.batches or [*_powers(1, 2, most), *_powers(3, 2, most), most]),
            depths=_sorted(depths),
            new_tokens=_sorted(new),
            cached_tokens=_sorted(cached),
            mixed_batches=_sorted(few),
            mixed_new_tokens=_sorted(beside),
        )

    @property
    def decode_steps(self) -> int:
        """Steps that a decode point's sequences take at most: the one under way at the end included."""
        return self.warmup + self.repeats * self.steps + 1


@dataclass(frozen=True)
class Axes:
    """The values of a grid."""

    batches: tuple[int, ...]
    depths: tuple[int, ...]
    new_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    mixed_batches: tuple[int, ...]
    mixed_new_tokens: tuple[int, ...]


def _powers(first: int, factor: int, limit: int) -> list[int]:
    """first, first * factor, ... below `limit`."""
    values = []
    while first < limit:
        values.append(first)
        first *= factor
    return values


def _sorted(values: Any) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(name, f"{value!r} is not one of {', '.join(known)}")


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, f"must be an integer of at least {least}, got {value!r}")
