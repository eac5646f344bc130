"""Profiles of the engine on this machine: real against synthetic caches, and how well the latency model predicts.

    python benchmarks/profile_steps.py [--model demo] [--folder DIRECTORY] [--output benchmarks/results/NAME.json]

Without `--model` it measures the demo model and random weights in the shape of `models/granite_h_156m`. One engine
profiles both seeds in several passes, in the order real, synthetic, synthetic, real, ..., so that a machine that gets
slower or faster meanwhile favours neither, and that the repeats of a point lie minutes apart; rows of one seed are put
together. Then a trace of requests is served, and the sum of its steps' times is held against the sum that the latency
model of the real profiles predicts for them. A run with `--folder` that was stopped goes on from there.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.machine import machine
from jhybrid.profiler.compare import compare, print_comparison
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.latency import LatencyModel
from jhybrid.profiler.plot import has_matplotlib, plot_profile
from jhybrid.profiler.run import Profile, fit, run_profile
from jhybrid.profiler.table import print_profile
from jhybrid.profiler.timing import StepTimer, Timing

HERE = Path(__file__).parent
MODELS = {"demo": ("demo", "auto"), "granite_h_156m": (str(HERE / "models" / "granite_h_156m"), "dummy")}
LIMITS = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 256, "dtype": "float32"}
GRID = {
    "batches": (1, 4, 6, 8, 12, 16),
    "depths": (64, 640),
    "new_tokens": (16, 64, 160, 256),
    "cached_tokens": (0, 512),
    "mixed_batches": (3, 12),
    "mixed_new_tokens": (48, 180),
}
CONSOLE = Console(stderr=True)


def trace(rng: np.random.Generator, vocab: int, count: int) -> list[tuple[int, Request]]:
    """(step of arrival, request): prompts of 16 to 600 tokens, answers of 8 to 48, one every five steps or so."""
    arrivals = np.cumsum(rng.poisson(5, count))
    requests = []
    for at in arrivals.tolist():
        prompt = rng.integers(0, vocab, int(np.exp(rng.uniform(np.log(16), np.log(600))))).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(8, 49)), temperature=1.0, seed=at, ignore_eos=True)
        requests.append((at, Request(prompt_token_ids=prompt, sampling=sampling)))
    return requests


def replay(engine: Engine, requests: list[tuple[int, Request]]) -> tuple[float, list[Timing]]:
    """Serve a trace. Wall seconds of all of it, and its steps."""
    waiting, timer, steps, number = requests[::-1], StepTimer(engine), [], 0
    started = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and (waiting[-1][0] <= number or not engine.has_work):
            engine.submit(waiting.pop()[1])
        timing, _ = timer.step()
        if timing is not None:
            steps.append(timing)
        number += 1
    return time.perf_counter() - started, steps


def judge(model: LatencyModel, seconds: float, steps: list[Timing]) -> dict[str, Any]:
    """How far the model is off on a trace: in total, and step by step."""
    predicted = np.array([model.predict(step.decodes, step.prefills) for step in steps])
    measured = np.array([step.seconds for step in steps])
    return {
        "steps": len(steps),
        "wall_seconds": seconds,
        "predicted_seconds": float(predicted.sum()),
        "error_of_total": float(predicted.sum() / seconds - 1),
        "mean_error_of_a_step": float(np.abs(predicted / measured - 1).mean()),
        "mixed_steps": sum(bool(step.prefills and step.decodes) for step in steps),
    }


def replayed(engine: Engine, requests: list[tuple[int, Request]], path: Path) -> tuple[float, list[Timing]]:
    """What `replay` found, now or in a run before."""
    if not path.exists():
        replay(engine, requests[: max(1, len(requests) // 8)])
        wall, steps = replay(engine, requests)
        path.write_text(json.dumps([wall, [asdict(step) for step in steps]]))
    wall, steps = json.loads(path.read_text())
    return wall, [Timing(**step) for step in steps]


def together(passes: list[Profile]) -> Profile:
    """Profiles of one grid as one."""
    rows = []
    for same in zip(*(one.rows for one in passes), strict=True):
        samples = [sample for row in same for sample in row["samples"]]
        spread = [min(samples), max(samples)]
        rows.append(
            same[0]
            | {"samples": samples, "repeats": len(samples), "spread": spread, "seconds": float(np.median(samples))}
        )
    return replace(passes[0], rows=rows)


def brief(profile: Profile) -> list[dict[str, Any]]:
    """What is committed of the rows."""
    names = ("point", "seconds", "spread", "repeats", "state_mode", "kv", "chain_depth", "buckets", "floor_seconds")
    return [{name: row[name] for name in names} for row in profile.measured]


def measure(name: str, requests: int, passes: int, grid: dict[str, int], folder: Path) -> dict[str, Any]:
    model, load_format = MODELS.get(name, (name, "auto"))
    config = EngineConfig(model=model, load_format=load_format, **LIMITS)  # pyright: ignore[reportArgumentType]
    found: dict[str, list[Profile]] = {"real": [], "synthetic": []}
    with Engine(config, max_parked=1) as engine:
        for i in range(2 * passes):
            seed = "real" if i % 4 in (0, 3) else "synthetic"
            config = ProfileConfig(**GRID, **grid, seed=seed)  # pyright: ignore[reportArgumentType]
            found[seed].append(run_profile(engine, config, folder / name / f"{i}-{seed}"))
        asked = trace(np.random.default_rng(1), engine.model.vocab_size, requests)
        replays = [replayed(engine, asked, folder / name / f"trace-{i}.json") for i in range(2)]
    profiles = {seed: together(several) for seed, several in found.items()}
    latency = fit(profiles["real"])
    assert latency is not None
    runs = [judge(latency, *one) for one in replays]
    print_profile(profiles["real"], CONSOLE)
    CONSOLE.print(latency.errors)
    comparison = compare(profiles["real"], profiles["synthetic"])
    print_comparison(comparison, CONSOLE)
    for run in runs:
        CONSOLE.print(run)
    if has_matplotlib():
        plot_profile(profiles["real"], folder / name / "steps.png")
    return {
        "real": brief(profiles["real"]),
        "synthetic": brief(profiles["synthetic"]),
        "synthetic_over_real": comparison.describe()[-1],
        "latency_model": {"bases": latency.bases, "slopes": latency.slopes, "errors": latency.errors},
        "replayed_trace": runs,
        "config": profiles["real"].head["engine"] | {"model": name},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory of a model, or a name of this folder; default: all of them")
    parser.add_argument("--requests", type=int, default=30, help="of the trace")
    parser.add_argument("--passes", type=int, default=5, help="of each seed")
    parser.add_argument("--repeats", type=int, default=2, help="of a point in each pass")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of a repeat")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("--folder", type=Path, help="where the passes stay; default: nowhere")
    arguments = parser.parse_args()
    names = [arguments.model] if arguments.model else list(MODELS)
    grid = {"repeats": arguments.repeats, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as nowhere:
        folder = arguments.folder or Path(nowhere)
        results = {name: measure(name, arguments.requests, arguments.passes, grid, folder) for name in names}
    if arguments.output is not None:
        given = {"command": "python benchmarks/profile_steps.py", "machine": machine(), "results": results}
        arguments.output.write_text(json.dumps(given, indent=1) + "\n")


if __name__ == "__main__":
    main()
