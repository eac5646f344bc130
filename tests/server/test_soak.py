"""The soak of `make soak`, a minute of it and on a small model: its verdict is what matters, so that is tested too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--dtype float32 --max-model-len 256 --max-num-seqs 4 --max-num-batched-tokens 32 --page-size 8 --chunk-size 8 "
    "--enable-prefix-caching --max-queue 64"
)


@pytest.mark.timeout(300)
def test_200_unruly_clients_leave_nothing():
    model = ROOT / "tests" / "golden" / "nemotron_h_dense"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "soak.py"),
        "--seconds",
        "60",
        "--streams",
        "200",
        "--json",
        "--",
    ]
    run = subprocess.run([*command, "--model", str(model), *SMALL.split()], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout, run.stderr
    figures = json.loads(run.stdout)
    assert figures["faults"] == [] and run.returncode == 0
    assert figures["calls"] > 1000
    endings = figures["endings"]
    assert endings["http huge"].keys() == endings["grpc long"].keys() == {"refused"}
    assert endings["http stream"]["answered"] and endings["grpc stream"]["answered"]
