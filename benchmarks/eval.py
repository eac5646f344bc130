"""Scoring throughput, in items per second: one item is one continuation of one context, as tasks with choices ask it.

    python benchmarks/eval.py --output benchmarks/results/eval.json
    python benchmarks/eval.py --peer OTHER_PYTHON=benchmarks/peer_harness.py --output FILE

Questions of 40 tokens with 4 choices of 1 to 8, alone and behind 5 examples of 60 tokens that all of them share; and
rolling windows. Tokens are random. With a peer, both score the same items with the same random weights, in turn in one
run, and must agree: the peer makes the checkpoint, and its figures are those of lm-evaluation-harness's `hf` model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.evaluate.scorer import Scorer
from jhybrid.evaluate.windows import Window, continuation_window, rolling_windows
from jhybrid.machine import machine

GRANITE = Path(__file__).parent / "models" / "granite_h_156m"
LENGTH = 511
EXACT = 1e-3
"""Nats per token by which two engines may differ."""
Pair = tuple[list[int], list[int]]
CONSOLE = Console(stderr=True)


def items(vocab: int, questions: int, shots: int) -> list[Pair]:
    """Context and continuation of each choice."""
    rng = np.random.default_rng(0)
    examples = rng.integers(0, vocab, 60 * shots).tolist()
    found = []
    for _ in range(questions):
        question = rng.integers(0, vocab, 40).tolist()
        choices = [rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(4)]
        found += [(examples + question, choice) for choice in choices]
    return found


def timed(engine: Engine, windows: list[Window]) -> dict[str, Any]:
    """Seconds, rates, what was shared, and the likelihoods."""
    scorer = Scorer(engine)
    started = time.perf_counter()
    found = scorer.score(windows)
    seconds = time.perf_counter() - started
    return {
        "items": len(windows),
        "seconds": seconds,
        "items_per_second": len(windows) / seconds,
        "tokens_per_second": scorer.tally.asked / seconds,
        "computed_tokens_per_second": scorer.tally.computed / seconds,
        **scorer.tally.report(),
        "totals": [likelihood.total for likelihood in found],
    }


def measure(model: str, load_format: str, questions: int) -> dict[str, Any]:
    """Each workload on a warm engine with nothing cached."""
    config = EngineConfig(
        model=model,
        load_format=load_format,
        dtype="float32",
        max_model_len=LENGTH + 1,
        enable_prefix_caching=True,
    )
    with Engine(config) as engine:
        vocab = engine.model.vocab_size
        work = {
            name: [continuation_window(*item, LENGTH) for item in items(vocab, questions, shots)]
            for name, shots in (("0 shots", 0), ("5 shots", 5))
        }
        tokens = np.random.default_rng(1).integers(0, vocab, 3 * LENGTH).tolist()
        work["rolling windows of 511 tokens"] = list(rolling_windows(tokens, 0, LENGTH))
        Scorer(engine).score([continuation_window(*item, LENGTH) for item in items(vocab, 1, 1)])
        found = {}
        for name, windows in work.items():
            engine.flush_cache()
            found[name] = timed(engine, windows)
        assert engine.compilations_after_ready == 0
    return found


def beside(peer: str, questions: int, rounds: int) -> dict[str, Any]:
    """Items per second of both, in turn, and their ratios. Raises if they do not agree on the likelihoods."""
    python, script = peer.split("=")
    found: dict[str, Any] = {"rounds": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, asked = str(Path(folder) / "checkpoint"), str(Path(folder) / "items.json")
        subprocess.run([python, script, "--make", str(GRANITE), checkpoint], check=True)
        vocab = json.loads((GRANITE / "config.json").read_text())["vocab_size"]
        work = {"0 shots": items(vocab, questions, 0), "5 shots": items(vocab, questions, 5)}
        Path(asked).write_text(json.dumps(work))
        mine = [sys.executable, __file__, "--one", checkpoint, "--questions", str(questions)]
        run(mine)  # compiles
        for _ in range(rounds):
            ours, theirs = run(mine), run([python, script, checkpoint, asked, str(LENGTH)])
            found["peer"] = theirs["engine"]
            figures: dict[str, Any] = {}
            for name, asked_items in work.items():
                mine_, theirs_ = ours[name], theirs[name]
                apart = np.abs(np.subtract(mine_.pop("totals"), theirs_.pop("totals")))
                worst = float((apart / [len(continuation) for _, continuation in asked_items]).max())
                assert worst < EXACT, (name, worst)
                ratio = mine_["items_per_second"] / theirs_["items_per_second"]
                figures[name] = {"ratio": ratio, "nats per token apart": worst, "jhybrid": mine_, "peer": theirs_}
            found["rounds"].append(figures)
    return found


def run(command: list[str]) -> dict[str, Any]:
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def show(found: dict[str, Any]) -> None:
    table = Table("items per second", "jhybrid", found["peer"], "ratio")
    for figures in found["rounds"]:
        for name, row in figures.items():
            rates = [f"{row[who]['items_per_second']:.3g}" for who in ("jhybrid", "peer")]
            table.add_row(name, *rates, f"{row['ratio']:.1f}")
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--peer", metavar="PYTHON=SCRIPT", help="also measure the harness's own model")
    parser.add_argument("--rounds", type=int, default=2, help="with a peer")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("--one", help="measure one checkpoint and print JSON")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, "auto", asked.questions)))
        return
    command = f"python benchmarks/eval.py --questions {asked.questions}"
    if asked.peer:
        command += f" --rounds {asked.rounds} --peer OTHER_PYTHON={asked.peer.split('=')[1]}"
    found: dict[str, Any] = {"command": command, "machine": machine()}
    if asked.peer:
        found |= beside(asked.peer, asked.questions, asked.rounds)
        show(found)
    else:
        for name, model, form in (("demo", "demo", "auto"), ("granite_h_156m, random", str(GRANITE), "dummy")):
            found[name] = measure(model, form, asked.questions)
            for figures in found[name].values():
                del figures["totals"]
            CONSOLE.print(name, found[name])
    if asked.output is not None:
        asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
