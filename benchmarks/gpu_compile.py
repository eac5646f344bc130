"""What can be known of GPUs without one: kernels and whole steps compiled for Hopper, their resources and their floors.

    JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py [--only kernels|steps] [--ops ...] [--models ...] [--gpus ...]
        [--devices ...] [--output FILE]

Needs the extra `gpu-compile`. Kernels are compiled in processes of their own, since the assembler tells of registers,
spills and shared memory in files alone. An earlier output is kept where this run has nothing newer: kernels by version
of JAX and op, steps by model, GPU and number of devices.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import gpu as timings
import jax

from jhybrid.config import EngineConfig
from jhybrid.errors import OutOfMemoryError
from jhybrid.fit import Fit, Site
from kernels_pallas.gpus import GPUS
from kernels_pallas.program_text import kernel_names, whole_copies
from kernels_pallas.target import Target

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """An op at work: sequences of `lens` tokens after `cached` each, and sizes other than the benchmark's."""

    op: str
    lens: tuple[int, ...]
    cached: int = 4095
    sizes: tuple[tuple[str, int], ...] = ()

    def row(self) -> dict[str, Any]:
        what = {"op": self.op, "sequences": len(self.lens), "tokens": sum(self.lens), "cached": self.cached}
        return what | dict(self.sizes)


DECODE, PROMPT = (1,) * 128, (2048,)
CASES = [
    *[Case(op, DECODE) for op in timings.OPS],
    *[Case(op, PROMPT) for op in ("ssd", "gated_delta", "selective_scan", "paged_attention")],
    *[Case("gated_delta", lens, sizes=(("by_channel", True),)) for lens in (DECODE, PROMPT)],
    *[Case("ssd", lens, sizes=(("state", 256),)) for lens in (DECODE, PROMPT)],
    *[Case("paged_attention", lens, sizes=(("dim", dim),)) for dim in (64, 256) for lens in (DECODE, PROMPT)],
    Case("paged_attention", (1,), 32767),
    *[Case("experts", (1,) * tokens, 0) for tokens in (1, 64, 128)],
]
LARGE = ("nemotron_h_8b", "nemotron_3_nano_30b_a3b", "kimi_linear_48b_a3b", "qwen3_next_80b_a3b")
MODELS = {
    "demo": EngineConfig(max_model_len=256, max_num_seqs=64),
    **{name: EngineConfig(max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048) for name in LARGE},
}


def compile_kernel(case: Case) -> dict[str, Any]:
    """One layer of an op with its kernel, compiled for an H200: memory, and the floors."""
    h200, found = GPUS["h200"], []
    pages = -(-(case.cached + max(case.lens)) // 16) if case.op == "paged_attention" else 1
    cached = [case.cached] * len(case.lens)
    step = replace(timings.spans(list(case.lens), cached, pages), target=Target(capability=h200.capability))
    run = timings.Run(False, h200)

    def arrays() -> Any:
        if case.op == "experts":
            found.append(timings.experts_sizes(run, len(case.lens)))
        else:
            found.append(timings.SIZES[case.op](run, step, **dict(case.sizes)))
        return found[0].inputs, found[0].cache

    inputs, cache = jax.eval_shape(arrays)
    sizes, function = found[0], getattr(import_module(f"kernels_pallas.{case.op}"), case.op)

    def once(cache: Any, inputs: Any, step: Any) -> Any:
        if case.op == "experts":
            return cache, function(*inputs, *cache, **sizes.options, target=step.target, implementation="gpu")
        return function(*inputs, cache, step, **sizes.options, implementation="gpu")[::-1]

    compiled = jax.jit(once, donate_argnums=0).lower(*h200.place((cache, inputs, step))).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    floors = h200.floors(sizes.moved, sizes.flops, sizes.exponentials)
    return {
        "floors_us": {name: round(seconds * 1e6, 2) for name, seconds in floors.items() if seconds},
        "scratch": memory.temp_size_in_bytes,
        "cache_in_place": memory.alias_size_in_bytes >= sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache)),
        "cache_copies": sum(whole_copies(text, a.shape) for a in jax.tree.leaves(cache)),
        "kernels": [name for _, name in kernel_names(text)],
    }


FACTS = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}
REGISTERS, SHARED, MOST_THREADS = 65536, 233472, 2048  # of a multiprocessor
THREADS = 128  # of a thread block, which has one warpgroup
CORES = GPUS["h200"].cores
START_US = 2.0  # of a kernel after another
# How many times its even share of the bandwidth a multiprocessor can take.
PORT = 64 * GPUS["h200"].clock * CORES / GPUS["h200"].bandwidth
# Of an op's kernels, the first that it has does the work.
WORKING = ("scan", "attend", "step_rows", "step", "up_projection")


def resources(dumped: Path) -> list[dict[str, Any]]:
    """What the assembler and the launches say of each kernel that was dumped, in the order of their compilation.

    `blocks` are all thread blocks, `blocks_per_sm` those that registers and shared memory leave room for.
    """
    kernels = []
    for file in sorted(dumped.glob("*.ptxas"), key=lambda f: f.stat().st_mtime_ns):
        told, passes = file.read_text(), file.with_suffix(".mlir-passes.log").read_text()
        found = {name: int(m[1]) for name, pattern in FACTS.items() if (m := re.search(pattern, told))}
        launch = re.search(r"gpu\.launch .*? blocks\(.*?\) in \((.*?)\) .* dynamic_shared_memory_size %c(\d+)", passes)
        assert launch is not None, file
        found["shared"] = int(launch[2])
        blocks = math.prod(int(n) for n in re.findall(r"= %c(\d+)", launch[1]))
        allocated = -(-found["registers"] // 8) * 8 * THREADS
        fit = REGISTERS // allocated, SHARED // (found["shared"] + 1024), MOST_THREADS // THREADS
        found["blocks_per_sm"] = min(fit)
        found["blocks"] = blocks
        kernels.append(found)
    return kernels


def share_at_most(floors_us: dict[str, float], kernels: list[dict[str, Any]]) -> float:
    """The greatest floor's share of a time that no kernel can be below: starting each kernel, and what the busiest
    multiprocessor has to do, which takes ceil(blocks / 132) thread blocks. Their products and exponentials it does
    alone; of the bandwidth it can draw at most 64 bytes a clock, which is `PORT` times its even share.

    How long one step of a chain waits for another is not in it: that decides scans of few sequences, and only a card
    can tell. Of several kernels all work is taken to be done by the one of `WORKING`.
    """
    [blocks, *_] = [kernel["blocks"] for name in WORKING for kernel in kernels if kernel["name"] == name]
    busiest = math.ceil(blocks / CORES) * CORES / blocks  # times the even share of the work
    slowed = {name: us * busiest / (PORT if name == "bandwidth" else 1.0) for name, us in floors_us.items()}
    floor = max(floors_us.values())
    return round(floor / (max(floor, *slowed.values()) + START_US * len(kernels)), 2)


def kernels(ops: list[str]) -> list[dict[str, Any]]:
    rows = []
    for number, case in enumerate(CASES):
        if case.op not in ops:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
            command = [sys.executable, __file__, "--kernel", str(number)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            row = case.row()
            if done.returncode:
                row["failed"] = done.stderr[-500:]
            else:
                row |= json.loads(done.stdout.strip().splitlines()[-1])
                told = resources(Path(folder))
                row["kernels"] = [{"name": n} | of for n, of in zip(row["kernels"], told, strict=True)]
                row["share_at_most"] = share_at_most(row["floors_us"], row["kernels"])
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def steps(model: str, gpu: str, devices: int) -> dict[str, Any]:
    """The largest steps of a model, spread over so many devices, compiled; what each device needs."""
    config = replace(MODELS[model], tensor_parallel_size=devices)
    if model != "demo":
        config = replace(config, model=str(HERE / "models" / model), load_format="dummy")
    row = {"model": model, "devices": devices, "jax": jax.__version__}
    try:
        row |= Fit(config, Site.gpu(GPUS[gpu], devices)).report()
    except OutOfMemoryError as error:
        row |= {"site": gpu, "refused": str(error)}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kernels", "steps"))
    ops = sorted({case.op for case in CASES})
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--kernel", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kernel is not None:
        print(json.dumps(compile_kernel(CASES[arguments.kernel])))
        return
    found: dict[str, Any] = {"kernels": {}, "steps": []}
    if arguments.output is not None and arguments.output.exists():
        found = json.loads(arguments.output.read_text())

    def keep() -> None:
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")

    found["command"] = "JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py"
    if arguments.only != "steps":
        others = [row for row in found["kernels"].get(jax.__version__, []) if row["op"] not in arguments.ops]
        found["kernels"][jax.__version__] = others + kernels(arguments.ops)
        keep()
    if arguments.only == "kernels":
        return
    for of in product(arguments.models, arguments.gpus, arguments.devices):
        others = [row for row in found["steps"] if (row["model"], row["site"], row["devices"]) != of]
        found["steps"] = [*others, steps(*of)]
        keep()


if __name__ == "__main__":
    main()
