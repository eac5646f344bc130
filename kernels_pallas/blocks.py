"""Tuned block sizes, from `tpu_configs/blocks/<chip>/<op>.json`."""

import functools
import json
from pathlib import Path

from kernels_pallas.chips import Chip

FOLDER = Path(__file__).parent.parent / "tpu_configs" / "blocks"


@functools.cache
def block_sizes(chip: Chip, op: str) -> dict[str, int]:
    """The sizes of an op's blocks on a chip. NotImplementedError where none were chosen."""
    file = FOLDER / chip.name / f"{op}.json"
    if not file.exists():
        raise NotImplementedError(f"no block sizes of {op} for {chip}: {file} is missing")
    return json.loads(file.read_text())


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
