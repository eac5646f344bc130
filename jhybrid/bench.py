"""Bench: the engine's own throughput and latency, offline. Called by `jhybrid bench` and `benchmarks/`."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.machine import machine
from jhybrid.request import Request, SamplingParams


def measure(
    config: EngineConfig,
    *,
    batch_sizes: Sequence[int],
    prefill_tokens: int,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Medians over `repeats`: prefill tokens/s of one prompt, decode tokens/s and host time per step by batch size."""
    started = time.perf_counter()
    with Engine(config) as engine:
        ready = time.perf_counter() - started
        rng = np.random.default_rng(0)
        prefill = [_prefill(engine, rng, prefill_tokens) for _ in range(repeats + 1)][1:]
        decode = [
            _summary(size, [_decode(engine, rng, size, prompt_tokens, output_tokens) for _ in range(repeats + 1)][1:])
            for size in batch_sizes
        ]
        return {
            "machine": machine(),
            "config": asdict(config),
            "num_parameters": engine.model.num_parameters,
            "ready_seconds": ready,
            "bucket_seconds": {str(b): s for b, s in engine.runner.bucket_seconds.items()},
            "prefill": {
                "tokens": prefill_tokens,
                "tokens_per_second": statistics.median(prefill),
                "spread": [min(prefill), max(prefill)],
            },
            "decode": decode,
            "compilations_after_ready": engine.compilations_after_ready,
        }


def _prompts(engine: Engine, rng: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return rng.integers(0, engine.model.vocab_size, (count, length)).tolist()


def _prefill(engine: Engine, rng: np.random.Generator, length: int) -> float:
    """Tokens per second from submission to the first token."""
    [prompt] = _prompts(engine, rng, 1, length)
    started = time.perf_counter()
    engine.generate([Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, temperature=0.0))])
    return length / (time.perf_counter() - started)


def _decode(engine: Engine, rng: np.random.Generator, size: int, prompt: int, output: int) -> tuple[float, float]:
    """(tokens per second, host milliseconds per step) while all `size` sequences decode."""
    sampling = SamplingParams(max_tokens=output + 1, temperature=0.0, ignore_eos=True)
    for tokens in _prompts(engine, rng, size, prompt):
        engine.submit(Request(prompt_token_ids=tokens, sampling=sampling))
    decoding: set[str] = set()
    while len(decoding) < size:  # until everybody has its first token
        decoding |= {delta.request_id for delta in engine.step()}
    seconds, steps, tokens = dict(engine.stats.seconds), engine.stats.steps, 0
    started = time.perf_counter()
    while engine.has_work:
        tokens += len(engine.step())
    elapsed = time.perf_counter() - started
    spent = {name: total - seconds[name] for name, total in engine.stats.seconds.items()}
    host = (spent["step"] - spent["wait"] - spent["launch"]) / max(1, engine.stats.steps - steps)
    return tokens / elapsed, host * 1e3


def _summary(size: int, runs: list[tuple[float, float]]) -> dict[str, Any]:
    rates, hosts = zip(*runs, strict=True)
    return {
        "batch_size": size,
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "step_ms": 1e3 * size / statistics.median(rates),
        "host_ms_per_step": statistics.median(hosts),
    }


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """The same as a table."""
    where = figures["machine"]
    console.print(
        f"{figures['config']['model']}: {figures['num_parameters']:,} parameters on {where['cpu'] or where['device']}, "
        f"jax {where['jax']}; ready in {figures['ready_seconds']:.1f} s"
    )
    table = Table("what", "tokens/s", "spread", "step ms", "host ms per step")
    prefill = figures["prefill"]
    low, high = prefill["spread"]
    table.add_row(
        f"prefill {prefill['tokens']}", f"{prefill['tokens_per_second']:.0f}", f"{low:.0f} - {high:.0f}", "", ""
    )
    for row in figures["decode"]:
        low, high = row["spread"]
        table.add_row(
            f"decode, batch {row['batch_size']}",
            f"{row['tokens_per_second']:.1f}",
            f"{low:.1f} - {high:.1f}",
            f"{row['step_ms']:.2f}",
            f"{row['host_ms_per_step']:.3f}",
        )
    console.print(table)
