"""Spec: one named case that every implementation of an op must get right.

Each op's `specs.py` lists its own as `SPECS: list[Spec]`; the contract test runs them all. Here are also the spans that
the cases of ops with recurrent state have in common.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels_pallas.spans import Spans, make_spans

ROWS = 9  # of a layer's state: slots 0..7 and scratch
SCRATCH = ROWS - 1
LAYERS = 3


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
    tpu: bool = False
    """Whether the TPU kernel takes these shapes; it is run on such cases alone, since its simulator is slow."""
    chip: str = "v5e"
    """That it is made for."""
    slow: bool = False
    """Left to the long run of the tests."""


def ragged(lens: list[int], first_pos: list[int], chunk_size: int = 8, **options: Any) -> Spans:
    """Sequence i reads and writes slot i, unless `read` or `write` say otherwise. Short ones are padded to one
    size, so that they share an executable."""
    slots, total = list(range(len(lens))), sum(lens)
    return make_spans(
        lens,
        first_pos,
        options.pop("read", slots),
        options.pop("write", slots),
        num_tokens=48 if total < 48 else total + 2,
        num_seqs=max(len(lens), 6),
        scratch_slot=SCRATCH,
        chunk_size=chunk_size,
        **options,
    )


def decode(first_pos: list[int], num_seqs: int, **options: Any) -> Spans:
    """One token of each sequence; slots as in `ragged`."""
    slots = list(range(len(first_pos)))
    return make_spans(
        [1] * len(first_pos),
        first_pos,
        options.pop("read", slots),
        options.pop("write", slots),
        num_tokens=num_seqs,
        num_seqs=num_seqs,
        scratch_slot=SCRATCH,
        kind="decode",
        **options,
    )
