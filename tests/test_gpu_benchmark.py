"""The GPU benchmark's way of going on: it is tried on CPU, so that it does not die on the card."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.gpus import GPUS
from kernels_pallas.ssd import IMPLEMENTATIONS
from kernels_pallas.ssd.specs import SPECS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
MISBEHAVE = f"""
import os, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import apart

def given(option):
    return sys.argv[sys.argv.index(option) + 1]

PIECES = {{
    "one": [
        apart.Piece("good", 0.0, lambda: {{"us": 2.0}}),
        apart.Piece("bad", 0.0, lambda: 1 / 0),
        apart.Piece("spoils the device", 0.0, lambda: [] + ()),
        apart.Piece("killed", 0.0, lambda: os.kill(os.getpid(), 9)),
        apart.Piece("long", 2000.0, lambda: {{"us": 3.0}}),
        apart.Piece("hangs", 0.0, lambda: time.sleep(1000)),
        apart.Piece("good again", 0.0, lambda: {{"us": float(os.getpid())}}),
    ],
    "two": [apart.Piece("good", 0.0, lambda: {{"us": 4.0}})],
    "late": [apart.Piece("slow", 0.0, lambda: time.sleep(1000)), apart.Piece("last", 7.0, dict)],
}}
if given("--section") == "broken":
    raise ImportError("no such thing")
spoilt = iter([False, True])  # what is asked after "bad" and after "spoils the device"
with open(given("--report"), "a") as report:
    apart.work(PIECES[given("--section")], int(given("--first")), report, float(given("--deadline")),
               lambda: not next(spoilt), machine={{"device": "none"}})
"""


@pytest.fixture
def gpu(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, "gpu", raising=False)
    import gpu

    return gpu


@pytest.fixture
def run(gpu: Any) -> Any:
    return gpu.Run(True, GPUS["h200"])


def test_what_fails_dies_hangs_or_does_not_fit_is_written_down_and_the_rest_goes_on(gpu, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu.apart, "LEAST_PATIENCE", 2.0)
    script, file = tmp_path / "script.py", tmp_path / "gpu.json"
    script.write_text(MISBEHAVE)
    worker = [sys.executable, str(script)]
    found = gpu.run_all(worker, ["one", "broken", "two"], time.time() + 100, file)
    good, bad, spoils, killed, long, hangs, again = found["sections"]["one"]
    assert good["us"] == 2.0
    assert bad["failed"].startswith("ZeroDivisionError")
    assert spoils["failed"].startswith("TypeError")
    assert (killed["name"], killed["failed"]) == ("killed", "its process ended with SIGKILL: ")
    assert long["skipped"].startswith("needs 2000 s")
    assert re.match(r"hung for \d+ s", hangs["failed"])
    assert again["name"] == "good again"
    [broken] = found["sections"]["broken"]
    assert broken["failed"].endswith("ImportError: no such thing")
    assert found["sections"]["two"][0]["us"] == 4.0
    assert json.loads(file.read_text()) == found
    assert gpu.table_of(found).row_count == 9
    monkeypatch.setattr(gpu.apart, "LEAST_PATIENCE", 100.0)
    late = gpu.run_all(worker, ["late", "two"], time.time() + 5)["sections"]
    assert [piece["name"] for piece in late["late"]] == ["slow", "last"]
    assert late["late"][0]["failed"] == "the time was over"
    assert late["late"][1]["skipped"] == "needs 7 s, 0 s are left"
    assert "skipped" in late["two"][0]


def test_checks_see_a_wrong_state(gpu, run, monkeypatch) -> None:
    spec = next(spec for spec in SPECS if spec.name == "decode-padded")
    assert gpu.check(run, "ssd", spec, "parallel")["worst"] < 1e-3
    right = IMPLEMENTATIONS["parallel"]

    def wrong(*arguments: Any, **options: Any) -> Any:
        y, state = right(*arguments, **options)
        return y, state.at[1].add(1.0)

    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", wrong)
    with pytest.raises(AssertionError, match="differs from the reference"):
        gpu.check(run, "ssd", spec, "wrong")


def test_a_form_that_cannot_even_be_traced_fails_its_own_checks_alone(gpu, run, monkeypatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise TypeError("another JAX")

    monkeypatch.setitem(IMPLEMENTATIONS, "gpu", broken)
    piece = next(gpu.checks(run, "ssd", "gpu"))
    assert piece.perform(1000.0)["failed"] == "TypeError: another JAX"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_section_runs_at_small_sizes(gpu) -> None:
    found = gpu.run_all([sys.executable, str(SCRIPT), "--small"], list(gpu.sections(True)), time.time() + 1700)
    pieces = [(title, piece) for title, pieces in found["sections"].items() for piece in pieces]
    failed = {f"{title}: {piece['name']}": piece["failed"] for title, piece in pieces if "failed" in piece}
    no_gpu = "NotImplementedError: the kernels are for Hopper, an NVIDIA GPU"
    assert [
        at for at, why in failed.items() if "PyTorch" not in at and not ("gpu" in at and why.startswith(no_gpu))
    ] == []
    [served] = found["sections"]["156 million parameters, served"]
    assert [row["batch_size"] for row in served["decode"]] == [1, 2]
