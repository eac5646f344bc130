"""What can be known of GPUs without one: kernels and whole steps compiled for Hopper, their resources and their floors.

    JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py [--only kernels|steps] [--output FILE]

Needs the extra `gpu-compile`. Kernels are compiled in processes of their own, since the assembler tells of registers,
spills and shared memory on the error output alone. An earlier output is kept where this run has nothing newer.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import gpu as timings
import jax

from jhybrid.config import EngineConfig
from jhybrid.fit import Fit, Site
from kernels_pallas.gpus import GPUS
from kernels_pallas.target import Target

HERE = Path(__file__).parent
CASES = [
    *[(op, [1] * 128, 4095) for op in timings.OPS],
    ("ssd", [2048], 4095),
    ("selective_scan", [2048], 4095),
    ("paged_attention", [2048], 4095),
    ("paged_attention", [1], 32767),
]
MODELS = {
    "demo": EngineConfig(max_model_len=256),
    "nemotron_h_8b": EngineConfig(max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048),
    "nemotron_3_nano_30b_a3b": EngineConfig(max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048),
}


def compile_kernel(op: str, lens: list[int], cached: int) -> dict[str, Any]:
    """One layer of an op with its kernel, compiled for an H200: memory, and the floor of bandwidth and tensor cores."""
    h200, found = GPUS["h200"], []
    pages = -(-(cached + max(lens)) // 16) if op == "paged_attention" else 1
    step = replace(timings.spans(lens, [cached] * len(lens), pages), target=Target(capability=h200.capability))
    run = timings.Run(600.0, False, h200)

    def arrays() -> Any:
        found.append(timings.SIZES[op](run, step))
        return found[0].inputs, found[0].cache

    inputs, cache = jax.eval_shape(arrays)
    sizes, function = found[0], getattr(import_module(f"kernels_pallas.{op}"), op)

    def once(cache: Any, inputs: Any, step: Any) -> Any:
        return function(*inputs, cache, step, **sizes.options, implementation="gpu")[::-1]

    compiled = jax.jit(once, donate_argnums=0).lower(*h200.place((cache, inputs, step))).compile()
    memory = compiled.memory_analysis()
    return {
        "floor_us": round(h200.floor_seconds(sizes.moved, sizes.flops) * 1e6, 2),
        "scratch": memory.temp_size_in_bytes,
        "cache_in_place": memory.alias_size_in_bytes >= cache.size * cache.dtype.itemsize,
    }


def resources(told: str) -> list[dict[str, Any]]:
    """What the assembler said of each kernel."""
    kernels = []
    for part in told.split("Compiling entry function '")[1:]:
        numbers = {
            name: re.search(pattern, part)
            for name, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("spill_stores", r"(\d+) bytes spill stores"),
                ("spill_loads", r"(\d+) bytes spill loads"),
            )
        }
        name = part.split("'")[0].removesuffix("_mosaic_gpu_kernel")
        kernels.append({"name": name} | {key: int(m[1]) for key, m in numbers.items() if m})
    return kernels


def kernels() -> list[dict[str, Any]]:
    rows = []
    for op, lens, cached in CASES:
        case = json.dumps([op, lens, cached])
        environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
        command = [sys.executable, __file__, "--kernel", case]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        row = {"op": op, "sequences": len(lens), "tokens": sum(lens), "cached": cached}
        if done.returncode:
            row["failed"] = done.stderr[-500:]
        else:
            row |= json.loads(done.stdout.strip().splitlines()[-1])
            row["kernels"] = resources(done.stdout + done.stderr)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def steps() -> list[dict[str, Any]]:
    rows = []
    for model, config in MODELS.items():
        for gpu in GPUS.values():
            if model != "demo":
                config = replace(config, model=str(HERE / "models" / model), load_format="dummy")
            report = Fit(config, Site.gpu(gpu)).report()
            print(json.dumps({"model": model} | report), flush=True)
            rows.append({"model": model} | report)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kernels", "steps"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--kernel", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kernel:
        print(json.dumps(compile_kernel(*json.loads(arguments.kernel))))
        return
    found: dict[str, Any] = {}
    if arguments.output is not None and arguments.output.exists():
        found = json.loads(arguments.output.read_text())
    found |= {"command": "JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py", "jax": jax.__version__}
    for name, section in (("kernels", kernels), ("steps", steps)):
        if arguments.only in (None, name):
            found[name] = section()
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
