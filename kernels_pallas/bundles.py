"""Bundles: the instructions that the TPU compiler schedules together, read from its dump of a kernel.

A bundle takes about a cycle. The dump has each once, with the depth of the loop it is in, and beside it how much of
each unit it uses.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS: tuple[str, ...] = (
    "matrix",
    "cross_lane",
    "vector",
    "pop",
    "transcendental",
    "load",
    "fill",
    "store",
    "spill",
    "scalar",
)
CAPACITY_OF = {"fill": "load", "spill": "store"}  # these use the slots of others
LINE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*(>*)(.*)")
EXIT_TEST = re.compile(r"scmp\.ge\.s32\.totalorder %s\S+, (\d+) /\* loop exit test")


@dataclass(frozen=True)
class Region:
    """Bundles in a row, of one loop, all run or none."""

    depth: int  # of loops
    begins_loop: bool
    conditional: bool  # jumped over when a condition fails
    trips: int | None  # of a loop that begins here, where the compiler knows the number
    bundles: int
    used: dict[str, int]  # slots of each unit


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of a kernel."""

    regions: list[Region]
    capacity: dict[str, int]  # slots of a bundle

    def cycles(self, steps: float, trips: Sequence[float], shares: Sequence[float]) -> tuple[float, dict[str, float]]:
        """Bundles run, and slots used, in `steps` steps of the grid.

        The outermost loop is the grid's. `trips` are those of inner loops that the compiler leaves open, in order.
        `shares` say how often what is conditional is run: the first of the longest such region, the last of the rest.
        """
        total, used, open_trips = 0.0, dict.fromkeys(UNITS, 0.0), iter(trips)
        by_length = sorted((region for region in self.regions if region.conditional), key=lambda r: -r.bundles)
        share_of = {id(region): shares[min(n, len(shares) - 1)] for n, region in enumerate(by_length)}
        counts: list[float] = []  # turns of the loops begun last, by depth; a region of less depth need not end them
        for region in self.regions:
            if region.begins_loop:
                del counts[region.depth - 1 :]
            while len(counts) < region.depth:
                counts.append(region.trips or next(open_trips, 1) if counts else steps)
            times = share_of.get(id(region), 1.0) * math.prod(counts[: region.depth])
            total += region.bundles * times
            for unit, slots in region.used.items():
                used[unit] += slots * times
        return total, used


def read_kernel(folder: Path, name: str) -> Kernel:
    """The kernel that was given `name`. FileNotFoundError if the compiler dumped none."""
    [utilization] = _dumps(folder, f"*-{name}.[0-9]*-*per-bundle-utilization.txt")
    [listing] = [f for f in _dumps(folder, f"*-{name}.[0-9]*-*final_bundles.txt") if "analysis" not in f.name]
    head, body = utilization.read_text().split("== UTILIZATION:\n")
    capacity = dict(zip(UNITS, map(int, head.strip().splitlines()[-1].split()), strict=True))
    used = [[int(n) for n in line.split()] for line in body.splitlines() if line.strip()]
    return Kernel(_regions(listing.read_text().splitlines(), used), capacity)


def _dumps(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"the compiler left no {pattern} in {folder}")
    return found[-1:] if "utilization" in pattern else found[-2:]


def _regions(lines: list[str], used: list[list[int]]) -> list[Region]:
    """The listing cut where a loop begins or ends, and where a jump may leave what follows out."""
    cuts: dict[int, tuple[str, bool]] = {0: ("", False)}  # bundle -> (mark, whether a jump precedes it)
    depths, tests = [0] * len(used), {}
    index = 0
    for line in lines:
        match = LINE.match(line)
        if match:
            index = int(match[1], 16)
            depths[index] = len(match[3])
            if match[2]:
                cuts[index] = (match[2], cuts.get(index, ("", False))[1])
        if "sbr.rel" in line:
            cuts.setdefault(index + 1, ("", True))
        if test := EXIT_TEST.search(line):
            tests[index] = int(test[1])
    begins = sorted(at for at in cuts if at < len(used))
    regions, loop_ends = [], [*begins[1:], len(used)]
    for at, stop in zip(begins, loop_ends, strict=True):
        mark, after_jump = cuts[at]
        depth = max(depths[at:stop])
        tests_inside = [n for where, n in tests.items() if where >= at and depths[where] == depth]
        starts_loop = mark == "LB"
        slots = {unit: sum(row[k] for row in used[at:stop]) for k, unit in enumerate(UNITS)}
        trips = tests_inside[0] if starts_loop and tests_inside and depth > 1 else None
        regions.append(Region(depth, starts_loop, after_jump and mark not in ("PF", "LB"), trips, stop - at, slots))
    return regions
