"""Host and disk tiers: what saving costs, and how soon a long prompt answers from each tier.

    python benchmarks/tiers.py [--model DIR] [--only writes turns] [--prompt 256] [--tokens 4000] [--rounds 6]
        [--output FILE.json]

`writes` runs the same load with no tiers, with a host tier, and with a host and a disk tier, in turns in one process on
one engine; nothing is ever hit, so that all of it is what writing costs: in seconds until the answers are there, and in
seconds of all cores until everything is written. `turns` is the time to the first token of one prompt: cold, and with
its prefix on the device, in host memory, and on disk; and what of it goes by until the prefix has arrived beside the
steps of others (load), and in copying it into the caches, which is in their way (insert). Random weights do.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.cache.tiers.tiers import Tiers
from jhybrid.machine import machine

MODEL = Path(__file__).parent / "models" / "granite_h_156m"


def request(tokens: list[int], count: int) -> Request:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return Request(prompt_token_ids=tokens, sampling=sampling)


def writes(engine: Engine, rounds: int, requests: int, length: int, count: int) -> dict:
    """Seconds of the same load, in turns, without and with tiers. Every prompt is new."""
    rng, ledger = np.random.default_rng(0), engine.ledger
    tiers = ledger.tiers
    assert tiers is not None
    disk = tiers.disk
    ways = {"none": (None, None), "host": (tiers, None), "host and disk": (tiers, disk)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        names = list(ways) if round_ % 2 else list(ways)[::-1]
        for name in names:
            ledger.tiers, tiers._saver._disk = ways[name]
            load = [request(rng.integers(0, engine.model.vocab_size, length).tolist(), count) for _ in range(requests)]
            started, used = time.perf_counter(), time.process_time()
            engine.generate(load)
            took = time.perf_counter() - started
            engine.drain_tiers()
            if round_:  # the first round warms up
                seconds[name].append(took)
                cpu[name].append(time.process_time() - used)
            ledger.tiers, tiers._saver._disk = tiers, disk
            engine.drain_tiers()
            engine.flush_cache()
    cost = {name: _cost(seconds, name) for name in ways if name != "none"}
    cpu_cost = {name: _cost(cpu, name) for name in ways if name != "none"}
    status = tiers.status()
    return {
        "load": f"{requests} requests of {length} prompt tokens and {count} answer tokens",
        "seconds": seconds,
        "cpu_seconds": cpu,
        "median_cost": cost,
        "median_cpu_cost": cpu_cost,
        "written_bytes": {name: counts["written_bytes"] for name, counts in status.items()},
        "dropped": {name: counts["dropped"] for name, counts in status.items()},
    }


def _cost(values: dict[str, list[float]], name: str) -> float:
    """Median of the ratios to the run without tiers of the same round, less 1."""
    return statistics.median(b / a - 1 for a, b in zip(values["none"], values[name], strict=True))


def turns(engine: Engine, tokens: int, rounds: int) -> dict:
    """Seconds to the first token of one prompt, by where its prefix is."""
    tiers = engine.ledger.tiers
    assert tiers is not None
    seconds: dict[str, list[float]] = {"device": [], "host": [], "disk": [], "cold": []}
    loads: dict[str, list[float]] = {"host": [], "disk": []}
    inserts: list[float] = []
    cached: dict[str, int] = {}
    copy_in = engine.runner.copy_in

    def timed(*loaded: Any) -> None:
        started = time.perf_counter()
        copy_in(*loaded)
        jax.block_until_ready(engine.runner.cache.arrays)
        inserts.append(time.perf_counter() - started)

    engine.runner.copy_in = timed
    for round_ in range(rounds):
        prompt = np.random.default_rng(round_).integers(0, engine.model.vocab_size, tokens).tolist()
        for where in ("cold", "device", "host", "disk"):
            engine.drain_tiers()
            if where in ("host", "disk"):
                engine.flush_cache(device_only=True)
            if where == "disk":
                tiers.host.clear()
            started, read = time.perf_counter(), _read_seconds(tiers)
            [output] = engine.generate([request(prompt, 1)])
            seconds[where].append(time.perf_counter() - started)
            cached[where] = output.cached_tokens
            if where in loads:
                loads[where].append(_read_seconds(tiers) - read)
        engine.flush_cache()
    engine.runner.copy_in = copy_in
    return {"tokens": tokens, "cached_tokens": cached, "seconds": seconds, "load": loads, "insert": inserts}


def _read_seconds(tiers: Tiers) -> float:
    return sum(tier.counts.read_seconds for tier in (tiers.host, tiers.disk) if tier is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--only", nargs="*", default=["writes", "turns"])
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens of `writes`")
    parser.add_argument("--tokens", type=int, default=4000, help="prompt tokens of `turns`")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    config = EngineConfig(
        model=options.model,
        load_format="dummy",
        dtype="float32",
        max_num_seqs=8,
        max_model_len=-(-(options.tokens + 16) // 16) * 16,
        enable_prefix_caching=True,
        snapshot_slots=24,
        host_cache_bytes=2 << 30,
        disk_cache_url=f"file://{folder.name}/",
        cache_load_timeout=30.0,
    )
    figures: dict = {"command": f"python benchmarks/tiers.py --rounds {options.rounds}", "machine": machine()}
    console = Console()
    with folder, Engine(config) as engine:
        if "writes" in options.only:
            figures["writes"] = found = writes(engine, options.rounds, requests=6, length=options.prompt, count=16)
            table = Table("tiers", "median seconds", "cost", "cost in seconds of cores", title=found["load"])
            for name, values in found["seconds"].items():
                costs = [found[kind].get(name) for kind in ("median_cost", "median_cpu_cost")]
                cells = ["" if cost is None else f"{cost:+.1%}" for cost in costs]
                table.add_row(name, f"{statistics.median(values):.2f}", *cells)
            console.print(table)
        if "turns" in options.only:
            figures["turns"] = found = turns(engine, options.tokens, max(1, options.rounds // 3))
            table = Table(
                "prefix", "cached tokens", "seconds to the first token", "load", title=f"{options.tokens} tokens"
            )
            for where, values in found["seconds"].items():
                load = found["load"].get(where)
                loading = "" if load is None else f"{statistics.median(load):.4f}"
                table.add_row(where, str(found["cached_tokens"][where]), f"{statistics.median(values):.3f}", loading)
            console.print(table, f"insert: {statistics.median(found['insert']):.4f} s", sep="\n")
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
