"""What the mask of a grammar costs a step: the same decode step compiled without that argument, with it and nobody
bound by a grammar, and with everybody bound by one that allows all.

    python benchmarks/mask.py [--model demo] [--seqs 32] [--rounds 300] [--output benchmarks/results/mask.json]

The three take turns on one batch. Times are of whole steps, from the call to the tokens on the host.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.batch import Batch, Layout
from jhybrid.machine import machine
from jhybrid.programs import step
from jhybrid.structured_outputs import StructuredOutputs

Step = Callable[..., tuple[Any, Any, Any]]


def decode_batch(engine: Engine, seqs: int, wanted: StructuredOutputs | None) -> Batch:
    """A step in which so many sequences decode."""
    run, batches = engine.runner.run, []

    def recorded(batch: Batch) -> Any:
        batches.append(batch)
        return run(batch)

    sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=1, structured_outputs=wanted)
    engine.runner.run = recorded
    engine.generate([Request(prompt=f"My lord, {i}", sampling=sampling) for i in range(seqs)])
    engine.runner.run = run
    return next(b for b in batches if len(b.items) == seqs and all(item.num_tokens == 1 for item in b.items))


def without_mask(engine: Engine, batch: Batch) -> Step:
    """The batch's step compiled as if there were no grammars: its mask is a constant."""
    programs = engine.runner._programs
    shape, layout = programs.mask_shape(batch.bucket), Layout(batch.bucket, programs.geometry())
    masked = partial(step, programs.module, layout)

    def plain(params: Any, cache: Any, sampler: Any, ints: Any, floats: Any) -> Any:
        return masked(params, cache, sampler, ints, floats, jnp.zeros(shape, jnp.uint32))

    runner = engine.runner
    held = (runner.params, runner.cache, runner.sampler, batch.ints, batch.floats)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), held)
    return jax.jit(plain, donate_argnums=(1, 2)).lower(*shapes).compile()


def measure(engine: Engine, seqs: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each way, by round."""
    runner, free = engine.runner, decode_batch(engine, seqs, None)
    bound = decode_batch(engine, seqs, StructuredOutputs(regex="(?s:.*)"))
    assert free.mask is None and bound.mask is not None and free.bucket == bound.bucket
    with_mask = runner._programs.steps[free.bucket]
    nobody = runner._no_masks[runner._programs.mask_shape(free.bucket)]
    ways: dict[str, tuple[Step, tuple[Any, ...]]] = {
        "without": (without_mask(engine, free), (free.ints, free.floats)),
        "nobody bound": (with_mask, (free.ints, free.floats, nobody)),
        "all bound": (with_mask, (bound.ints, bound.floats, bound.mask)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-10, rounds):  # the first ones are not counted
        for name in random.sample(list(ways), len(ways)):
            run, vectors = ways[name]
            started = time.perf_counter()
            runner.cache, runner.sampler, out = run(runner.params, runner.cache, runner.sampler, *vectors)
            np.asarray(out.tokens)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    asked = parser.parse_args()
    config = EngineConfig(model=asked.model, max_num_seqs=asked.seqs, max_model_len=256)
    with Engine(config) as engine:
        seconds = measure(engine, asked.seqs, asked.rounds)
        vocab = engine.model.vocab_size
    rows = {}
    for name, times in seconds.items():
        ratio = statistics.median(t / own for t, own in zip(times, seconds["without"], strict=True))
        rows[name] = {"milliseconds": statistics.median(times) * 1e3, "of_without": ratio}
        print(f"{name:14}{rows[name]['milliseconds']:8.3f} ms {ratio:8.3f}")
    if asked.output is not None:
        command = f"python benchmarks/mask.py --model {asked.model} --seqs {asked.seqs} --rounds {asked.rounds}"
        facts = {"command": command, "machine": machine(), "vocab_size": vocab}
        asked.output.write_text(json.dumps(facts | {"steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
