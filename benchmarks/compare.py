"""The engine beside its peers in one run, in turn, so that a noisy machine is noisy for all: ratios are what counts.

    python benchmarks/compare.py --peer OTHER_PYTHON=benchmarks/peer_transformers.py [--rounds 3] [--output FILE]

Each peer is a script with an environment of its own; see `peer_transformers.py` for what it prints.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from engine import MODELS, bench_command
from rich.console import Console
from rich.table import Table


def rates(figures: dict) -> dict[str, float]:
    """What is compared -> tokens per second."""
    prefill = figures["prefill"]
    found = {f"prefill {prefill['tokens']}": prefill["tokens_per_second"]}
    return found | {f"decode, batch {row['batch_size']}": row["tokens_per_second"] for row in figures["decode"]}


def run(command: list[str]) -> dict:
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", required=True, metavar="PYTHON=SCRIPT")
    parser.add_argument("--model", default="granite_h_156m", choices=[name for name in MODELS if name != "demo"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    directory = MODELS[asked.model][1]
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        ours = bench_command(MODELS[asked.model], cache)
        machine = run([*ours, "--repeats", "1"])["machine"]  # also compiles, so that the measured starts are warm
        for _ in range(asked.rounds):
            runs.setdefault("jhybrid", []).append(rates(run(ours)))
            for peer in asked.peer:
                python, script = peer.split("=")
                figures = run([python, script, directory])
                runs.setdefault(figures["engine"], []).append(rates(figures))
    medians = {name: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for name, rs in runs.items()}
    table = Table("tokens/s", *medians, *(f"jhybrid / {name}" for name in medians if name != "jhybrid"))
    for key in medians["jhybrid"]:
        ratios = [
            statistics.median(a[key] / b[key] for a, b in zip(runs["jhybrid"], runs[name], strict=True))
            for name in medians
            if name != "jhybrid"
        ]
        table.add_row(key, *(f"{m[key]:.1f}" for m in medians.values()), *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
    if asked.output is not None:
        text = {"command": "python benchmarks/compare.py", "model": asked.model, "machine": machine, "runs": runs}
        asked.output.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
