"""The GPU benchmark's way of going on: it is tried on CPU, so that it does not die on the card."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.gpus import GPUS
from kernels_pallas.ssd import IMPLEMENTATIONS
from kernels_pallas.ssd.specs import SPECS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(gpu: Any) -> Any:
    return gpu.Run(1000.0, True, GPUS["h200"])


def test_what_fails_or_does_not_fit_is_written_down_and_the_rest_goes_on(gpu, run, tmp_path, monkeypatch) -> None:
    pieces = [
        ("good", 0.0, lambda: {"us": 2.0}),
        ("bad", 0.0, lambda: 1 / 0),
        ("long", 2000.0, lambda: {"us": 3.0}),
    ]
    monkeypatch.setattr(gpu, "sections", lambda run: [("one", pieces), ("two", pieces[:1])])
    run.small = False
    file = tmp_path / "gpu.json"
    found = gpu.run_all(run, file)
    good, bad, long = found["sections"]["one"]
    assert good["us"] == 2.0
    assert bad["failed"].startswith("ZeroDivisionError")
    assert long["skipped"].startswith("needs 2000 s")
    assert found["sections"]["two"][0]["us"] == 2.0
    assert json.loads(file.read_text()) == found
    assert gpu.table_of(run).row_count == 4


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

    monkeypatch.setattr(gpu, "OPS", ("ssd",))
    monkeypatch.setitem(IMPLEMENTATIONS, "gpu", broken)
    monkeypatch.delitem(IMPLEMENTATIONS, "parallel")
    name, needs, work = next(gpu.checks(run))
    assert run.attempt(name, needs, work)["failed"] == "TypeError: another JAX"


@pytest.mark.slow
def test_every_section_runs_at_small_sizes(gpu, run) -> None:
    found = gpu.run_all(run)
    failed = {
        (title, piece["name"]): piece["failed"]
        for title, pieces in found["sections"].items()
        for piece in pieces
        if "failed" in piece
    }
    allowed = ("gpu", "PyTorch", "parallel, prompt")  # these need the card, or have no such form
    assert [at for at in failed if not any(word in " ".join(at) for word in allowed)] == []
    [served] = found["sections"]["156 million parameters, served"]
    assert [row["batch_size"] for row in served["decode"]] == [1, 2]
