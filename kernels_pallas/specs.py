"""Spec: one named case that every implementation of an op must get right.

Each op's `specs.py` lists its own as `SPECS: list[Spec]`; the contract test runs them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spec:
    """A case: its name, how to build the op's arguments from a seed, and how close the answer must be.

    `build(seed)` gives `(args, kwargs)` for the op's function without `implementation`. If the op has a
    cache, `args` ends in `..., cache array (or None), spans` and `kwargs` may hold `base`.
    """

    name: str
    build: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    atol: float
    rows: int | None = None
    """Rows of one layer in the cache array, scratch (the last) included; None: the array is one layer."""
