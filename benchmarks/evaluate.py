"""Scoring throughput: a few-shot trace with and without prefix sharing, and rolling windows.

    python benchmarks/evaluate.py --output benchmarks/results/evaluate.json

The trace: questions with 4 choices each behind the same examples. Tokens are random, and all that were asked for
count, computed or not.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.evaluate.scorer import Scorer
from jhybrid.evaluate.windows import Window, continuation_window, rolling_windows
from jhybrid.machine import machine

GRANITE = str(Path(__file__).parent / "models" / "granite_h_156m")
LENGTH = 511
CONSOLE = Console(stderr=True)


def few_shot(rng: np.random.Generator, vocab: int, questions: int) -> list[Window]:
    """Questions of 40 tokens with 4 choices of 1 to 8 behind 300 tokens of examples."""
    examples = rng.integers(0, vocab, 300).tolist()
    windows = []
    for _ in range(questions):
        question = rng.integers(0, vocab, 40).tolist()
        for _ in range(4):
            choice = rng.integers(0, vocab, rng.integers(1, 9)).tolist()
            windows.append(continuation_window(examples + question, choice, LENGTH))
    return windows


def measure(model: str, load_format: str, questions: int) -> dict[str, Any]:
    """Tokens asked for per second on one model, each engine warm."""
    figures: dict[str, Any] = {}
    for sharing in (False, True):
        config = EngineConfig(
            model=model,
            load_format=load_format,
            max_model_len=LENGTH + 1,
            max_num_seqs=8,
            enable_prefix_caching=sharing,
        )
        with Engine(config) as engine:
            vocab, rng = engine.model.vocab_size, np.random.default_rng(0)
            Scorer(engine).score(few_shot(rng, vocab, 1))
            engine.flush_cache()
            figures["few_shot, shared" if sharing else "few_shot, alone"] = timed(
                engine, few_shot(rng, vocab, questions)
            )
            if not sharing:
                tokens = rng.integers(0, vocab, 6 * LENGTH).tolist()
                figures["rolling"] = timed(engine, list(rolling_windows(tokens, 0, LENGTH)))
            assert engine.compilations_after_ready == 0
    alone, shared = figures["few_shot, alone"], figures["few_shot, shared"]
    figures["speed-up by sharing"] = alone["seconds"] / shared["seconds"]
    return figures


def timed(engine: Engine, windows: list[Window]) -> dict[str, Any]:
    """Seconds, rates and the scorer's report."""
    scorer = Scorer(engine)
    started = time.perf_counter()
    scorer.score(windows)
    seconds = time.perf_counter() - started
    report = scorer.report()
    return {
        "windows": len(windows),
        "seconds": seconds,
        "windows_per_second": len(windows) / seconds,
        "tokens_per_second": report["tokens_asked"] / seconds,
        "computed_tokens_per_second": report["tokens_computed"] / seconds,
        **report,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4, help="on the larger model; 8 times as many on the demo")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    figures = {"command": "python benchmarks/evaluate.py", "machine": machine()}
    for name, model, form, questions in (
        ("demo", "demo", "auto", 8 * arguments.questions),
        ("granite_h_156m, random weights", GRANITE, "dummy", arguments.questions),
    ):
        figures[name] = measure(model, form, questions)
        CONSOLE.print(name, figures[name])
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
