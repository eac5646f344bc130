"""What is made of the compiler's dump of a kernel: cycles, and the table in the docs."""

import json
from pathlib import Path

from kernels_pallas.bundles import UNITS, Kernel, Region
from kernels_pallas.schedule import table

ROOT = Path(__file__).parents[2]


def _region(bundles: int, depth: int = 1, *, loop: bool = False, conditional: bool = False, trips: int | None = None):
    return Region(depth, loop, conditional, trips, bundles, dict.fromkeys(UNITS, bundles))


def test_turns_of_loops_and_shares_of_what_is_conditional() -> None:
    regions = [
        _region(7, 0),
        _region(10, loop=True),
        _region(100, conditional=True),
        _region(5, 2, loop=True),
        _region(40, conditional=True),
        _region(3, 2, loop=True, trips=6),
        _region(4, 0),  # where a jump goes
        _region(2, 2),
    ]
    kernel = Kernel(regions, dict.fromkeys(UNITS, 1))
    least, used = kernel.cycles(8, [2.5], (0.0,))
    assert least == 11 + 8 * (10 + 2.5 * 5 + 6 * (3 + 2)) == used["matrix"]
    assert kernel.cycles(8, [2.5], (0.25, 0.5))[0] == least + 8 * (100 / 4 + 40 / 2)
    assert kernel.cycles(8, [2.5], (1.0,))[0] == least + 8 * 140


def test_the_docs_have_the_table_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "tpu_schedule.json").read_text())
    assert table(results["rows"]) in (ROOT / "docs" / "tpu-kernels.md").read_text(), (
        "put what `python -m kernels_pallas.schedule --table benchmarks/results/tpu_schedule.json` prints into the docs"
    )


def test_a_line_of_the_table() -> None:
    row = {"case": "attention", "shape": "one", "chip": "v5e", "bundles": 30, "hbm_floor_cycles": 10}
    row |= {"ratio": 3.0, "busy": dict.fromkeys(UNITS, 0.1) | {"cross_lane": 0.625}}
    other = row | {"case": "attention_jax", "bundles": 60}
    text = table([row, other, row | {"chip": "v6e", "bundles": 9, "ratio": 1.0}])
    assert text.splitlines()[0] == "| | v5e | v6e |"
    last = "| `attention`: one | 3.00, cross-lane unit 62%; 0.50 of JAX's bundles | 1.00, bandwidth |"
    assert text.splitlines()[2:] == [last]
