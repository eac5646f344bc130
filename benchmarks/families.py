"""A model of about 150M parameters of each kind of mixer beside its peers in one run: prefill and decode.

    python benchmarks/families.py --peer OTHER_PYTHON=benchmarks/peer_transformers.py [--kinds mamba1 ...] [--rounds 2]

Random weights, float32. `compare.py` does the runs; ratios are what counts.
"""

import argparse
import json
from pathlib import Path

from compare import measure, medians, ratio
from rich.console import Console
from rich.table import Table

MODELS = Path(__file__).parent / "models"
KINDS = {
    "attention": "attention_150m",
    "mamba2": "granite_h_156m",
    "mamba1": "mamba1_156m",
    "gated_delta": "gated_delta_144m",
    "kda": "kda_150m",
    "short_conv": "short_conv_151m",
}
FLAGS = ["--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", "1024", "--max-num-batched-tokens", "512"]
SHARED = ("--batch-sizes", "1", "16", "--output-tokens", "16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", required=True, metavar="PYTHON=SCRIPT")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compiled", help="folder of compiled executables to keep; default: a new one for each kind")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON; kinds that it has are replaced")
    asked = parser.parse_args()
    kept = json.loads(asked.output.read_text())["kinds"] if asked.output and asked.output.exists() else {}
    for kind in asked.kinds:
        model = ["--model", str(MODELS / KINDS[kind])]
        for machine, runs in measure(model, asked.peer, asked.rounds, FLAGS, SHARED, asked.compiled):
            kept[kind] = {"model": KINDS[kind], "machine": machine, "runs": runs}
            if asked.output is not None:
                text = {"command": "python benchmarks/families.py", "kinds": kept}
                asked.output.write_text(json.dumps(text, indent=1) + "\n")
        runs = kept[kind]["runs"]
        found = medians(runs)
        peers = [name for name in found if name != "jhybrid"]
        table = Table(f"{kind}, tokens/s", *found, *(f"jhybrid / {name}" for name in peers))
        for key in found["jhybrid"]:
            ratios = [ratio(runs, name, key) for name in peers]
            table.add_row(key, *(f"{m[key]:.1f}" for m in found.values()), *(f"{r:.2f}" for r in ratios))
        Console().print(table)


if __name__ == "__main__":
    main()
