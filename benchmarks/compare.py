"""The engine beside its peers in one run, in turn, so that a noisy machine is noisy for all: ratios are what counts.

    python benchmarks/compare.py --peer OTHER_PYTHON=benchmarks/peer_transformers.py [--rounds 3] [--output FILE]

Each peer is a script with an environment of its own; see `peer_transformers.py` for what it prints.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine import FLAGS, MODELS, bench_command
from rich.console import Console
from rich.table import Table


def rates(figures: dict) -> dict[str, float]:
    """What is compared -> tokens per second."""
    prefill = figures["prefill"]
    found = {f"prefill {prefill['tokens']}": prefill["tokens_per_second"]}
    return found | {f"decode, batch {row['batch_size']}": row["tokens_per_second"] for row in figures["decode"]}


def run(command: list[str]) -> dict:
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(
    model: list[str],
    peers: list[str],
    rounds: int,
    flags: list[str] = FLAGS,
    shared: tuple[str, ...] = (),
    compiled: str | None = None,
) -> Iterator[tuple[dict, dict[str, list[dict[str, float]]]]]:
    """After each round: the machine, and of each engine what it did in each so far. `shared` options are given to all.

    `compiled` is a folder of executables that outlives the run.
    """
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as new:
        ours = bench_command(model, compiled or new, [*flags, *shared])
        machine = run([*ours, "--repeats", "1"])["machine"]  # also compiles, so that the measured starts are warm
        for _ in range(rounds):
            runs.setdefault("jhybrid", []).append(rates(run(ours)))
            for peer in peers:
                python, script = peer.split("=")
                figures = run([python, script, model[1], *shared])
                runs.setdefault(figures["engine"], []).append(rates(figures))
            yield machine, runs


def ratio(runs: dict[str, list[dict[str, float]]], peer: str, key: str) -> float:
    """Ours to a peer's: the median over the rounds."""
    return statistics.median(a[key] / b[key] for a, b in zip(runs["jhybrid"], runs[peer], strict=True))


def medians(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {name: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for name, rs in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", required=True, metavar="PYTHON=SCRIPT")
    parser.add_argument("--model", default="granite_h_156m", choices=[name for name in MODELS if name != "demo"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    *_, (machine, runs) = measure(MODELS[asked.model], asked.peer, asked.rounds)
    found = medians(runs)
    peers = [name for name in found if name != "jhybrid"]
    table = Table("tokens/s", *found, *(f"jhybrid / {name}" for name in peers))
    for key in found["jhybrid"]:
        ratios = [ratio(runs, name, key) for name in peers]
        table.add_row(key, *(f"{m[key]:.1f}" for m in found.values()), *(f"{r:.2f}" for r in ratios))
    Console().print(table)
    if asked.output is not None:
        text = {"command": "python benchmarks/compare.py", "model": asked.model, "machine": machine, "runs": runs}
        asked.output.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
