"""The engine's figures on this machine: prefill and decode throughput, host time per step, start-up cold and warm.

    python benchmarks/engine.py [--model demo] [--output benchmarks/results/NAME.json]

Without `--model` it measures the demo model and random weights in the shape of `models/granite_h_156m`. Each model is
started twice in processes of its own with an empty folder for compiled executables: the first start is the cold one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from jhybrid.bench import print_figures

HERE = Path(__file__).parent
MODELS = {"demo": ["--model", "demo"], "granite_h_156m": ["--model", str(HERE / "models" / "granite_h_156m")]}
FLAGS = ["--dtype", "float32", "--max-num-seqs", "32", "--max-model-len", "1024", "--max-num-batched-tokens", "512"]


def bench_command(model: list[str], cache: str, flags: list[str] = FLAGS) -> list[str]:
    """`jhybrid bench` on a model; random weights where it has none."""
    dummy = [] if model[1] == "demo" else ["--load-format", "dummy"]
    cached = ["--compilation-cache-dir", cache]
    return [sys.executable, "-m", "jhybrid.cli", "bench", *model, *dummy, *flags, *cached, "--json"]


def run(model: list[str], cache: str) -> dict:
    done = subprocess.run(bench_command(model, cache), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory of a model, or demo; default: all of this folder's")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    models = MODELS if arguments.model is None else {arguments.model: ["--model", arguments.model]}
    results = {}
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as cache:
            cold = run(model, cache)["ready_seconds"]
            figures = run(model, cache)
        figures["ready_seconds_cold"] = cold
        figures["config"]["compilation_cache_dir"] = "(a new folder)"
        figures["config"]["model"] = name
        results[name] = figures
        print_figures(figures, Console())
        print(f"ready cold in {cold:.1f} s, warm in {figures['ready_seconds']:.1f} s")
    if arguments.output is not None:
        text = {"command": "python benchmarks/engine.py", "results": results}
        arguments.output.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
