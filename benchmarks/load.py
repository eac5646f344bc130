"""Load time and peak host memory of a checkpoint made here, about 2 GB in bfloat16: both forms, as it is and rounded.

    python benchmarks/load.py [--gigabytes 2] [--shard-gigabytes 0.5] [--output benchmarks/results/load.json]

Each load runs in a process of its own, whose memory before the load is subtracted. On CPU the device's share is host
memory too, so the peak is at least that; what counts is what lies above it, in shards. The files are in the page cache.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from jhybrid.machine import machine
from jhybrid.models import abstract_params, family_of
from jhybrid.weights.convert import convert
from jhybrid.weights.export import export_huggingface
from jhybrid.weights.places import leaves, nest

SHAPE = Path(__file__).parent / "models" / "granite_h_156m" / "config.json"
WIDER = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "mamba_n_heads": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LOAD = """
import json, sys, threading, time
import jax, psutil
from jhybrid.cache.arrays import tree_bytes
from jhybrid.config import EngineConfig
from jhybrid.models import abstract_params, quantisable_params
from jhybrid.weights.load import load_params, read_model

config = EngineConfig(model=sys.argv[1], dtype="bfloat16", quantization=sys.argv[2])
model, module, _, _ = read_model(config)
shapes = abstract_params(module)
quantisable_params(module)
jax.numpy.zeros(()).block_until_ready()
me, peak, done = psutil.Process(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, me.memory_info().rss)
        time.sleep(0.002)

before = me.memory_info().rss
watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
params = load_params(config, model, module, shapes)
jax.block_until_ready(params)
seconds = time.perf_counter() - started
done = True
watcher.join()
print(json.dumps({"seconds": seconds, "peak_bytes": peak - before, "held_bytes": tree_bytes(params)}))
"""


def make(directory: Path, size: int, shard: int) -> None:
    """A Granite-4-H-like model with random weights of `size` bytes, in shards of `shard`."""
    raw = json.loads(SHAPE.read_text())
    raw |= WIDER | {"dtype": "bfloat16", "num_hidden_layers": 0, "layer_types": []}
    numbers = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    while True:
        raw["layer_types"] = [*raw["layer_types"], "attention" if len(raw["layer_types"]) % 8 == 5 else "mamba"]
        raw["num_hidden_layers"] = len(raw["layer_types"])
        family = family_of(raw)
        config = family.config.from_hf(raw)
        shapes = abstract_params(family.module(config, jax.numpy.dtype("bfloat16")))
        if sum(leaf.size for _, leaf in leaves(shapes)) * 2 >= size:
            break
    params = nest({path: np.resize(numbers, leaf.shape).astype(leaf.dtype) for path, leaf in leaves(shapes)})
    export_huggingface(directory, raw, params, family.weight_names(config), shard_bytes=shard)


def load(directory: Path, quantization: str) -> dict:
    command = [sys.executable, "-c", LOAD, str(directory), quantization]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-gigabytes", type=float, default=0.5)
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        huggingface, native = Path(folder) / "huggingface", Path(folder) / "native"
        make(huggingface, int(asked.gigabytes * 1e9), int(asked.shard_gigabytes * 1e9))
        shard = max(file.stat().st_size for file in huggingface.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in huggingface.glob("*.safetensors"))
        convert(str(huggingface), native)
        for directory in (huggingface, native):
            for quantization in ("auto", "int8"):
                found = load(directory, quantization)
                above = (found["peak_bytes"] - found["held_bytes"]) / shard
                rows.append({"form": directory.name, "quantization": quantization, **found, "above_in_shards": above})
    table = Table("form", "quantization", "seconds", "peak MB", "held MB", "peak above what is held, in shards")
    for row in rows:
        sizes = [f"{row[key] / 1e6:.0f}" for key in ("peak_bytes", "held_bytes")]
        table.add_row(
            row["form"], row["quantization"], f"{row['seconds']:.2f}", *sizes, f"{row['above_in_shards']:.2f}"
        )
    Console().print(table)
    print(f"checkpoint of {size / 1e6:.0f} MB, largest shard {shard / 1e6:.0f} MB")
    if asked.output is not None:
        text = {"command": "python benchmarks/load.py", "machine": machine(), "shard_bytes": shard, "bytes": size}
        asked.output.write_text(json.dumps(text | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
