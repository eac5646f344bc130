"""A small made-up model and its checkpoint, with every way that a tensor can find its place. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from jhybrid.weights.names import FileRows, TensorName

PARAMS = {
    "embedding": (7, 4),
    "qkv.weight": (10, 4),
    "conv": (6, 3),
    "experts.up": (2, 5, 4),
    "experts.gate_up": (2, 6, 4),
    "norm": (4,),
    "scale": (),
    "mixer": (13, 3),
}
NAMES = [
    TensorName(("backbone.embed.weight", "model.embed.weight"), ("embedding",)),
    TensorName(("q.weight",), ("qkv", "weight"), rows=(0, 6)),
    TensorName(("k.weight",), ("qkv", "weight"), rows=(6, 8)),
    TensorName(("v.weight",), ("qkv", "weight"), rows=(8, 10)),
    TensorName(("conv1d.weight",), ("conv",), file_shape=(6, 1, 3)),
    *[TensorName((f"experts.{e}.up.weight",), ("experts", "up"), index=e) for e in range(2)],
    *[TensorName((f"experts.{e}.gate.weight",), ("experts", "gate_up"), index=e, rows=(0, 3)) for e in range(2)],
    *[TensorName((f"experts.{e}.lift.weight",), ("experts", "gate_up"), index=e, rows=(3, 6)) for e in range(2)],
    TensorName(("norm.weight",), ("norm",)),
    TensorName(("scale",), ("scale",), file_shape=(1,)),
    TensorName(("mix.weight",), ("mixer",), rows=(0, 4), file_rows=FileRows(0, 2, 5, groups=2)),
    TensorName(("mix.weight",), ("mixer",), rows=(4, 10), file_rows=FileRows(2, 5, 5, groups=2)),
    TensorName(("lone.weight",), ("mixer",), rows=(10, 13)),
]
SHARD_OF = {"q.weight": 0, "k.weight": 1, "v.weight": 2, "experts.0.up.weight": 0, "experts.1.up.weight": 2}


def abstract(dtype: str = "float32") -> dict:
    """The parameter tree as shapes."""
    tree: dict = {}
    for path, shape in PARAMS.items():
        *parents, leaf = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = jax.ShapeDtypeStruct(shape, dtype)
    return tree


def tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    """The checkpoint: every element of every tensor is another number."""
    shapes = {
        "backbone.embed.weight": (7, 4),
        "q.weight": (6, 4),
        "k.weight": (2, 4),
        "v.weight": (2, 4),
        "conv1d.weight": (6, 1, 3),
        "norm.weight": (4,),
        "scale": (1,),
        "mix.weight": (10, 3),
        "lone.weight": (3, 3),
    }
    for e in range(2):
        shapes |= {
            f"experts.{e}.up.weight": (5, 4),
            f"experts.{e}.gate.weight": (3, 4),
            f"experts.{e}.lift.weight": (3, 4),
        }
    start, made = 0, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        made[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape).astype(dtype)
        start += size
    return made


def expected() -> dict[str, np.ndarray]:
    """Parameters by dotted path, put together by hand."""
    t = tensors()
    return {
        "embedding": t["backbone.embed.weight"],
        "qkv.weight": np.concatenate([t["q.weight"], t["k.weight"], t["v.weight"]]),
        "conv": t["conv1d.weight"][:, 0],
        "experts.up": np.stack([t["experts.0.up.weight"], t["experts.1.up.weight"]]),
        "experts.gate_up": np.stack(
            [np.concatenate([t[f"experts.{e}.gate.weight"], t[f"experts.{e}.lift.weight"]]) for e in range(2)]
        ),
        "norm": t["norm.weight"],
        "scale": t["scale"][0],
        "mixer": np.concatenate([t["mix.weight"][[0, 1, 5, 6, 2, 3, 4, 7, 8, 9]], t["lone.weight"]]),
    }


def write(directory: Path, made: Mapping[str, np.ndarray]) -> None:
    """One model.safetensors."""
    save_file(dict(made), directory / "model.safetensors")


def shard_name(i: int) -> str:
    return f"model-{i + 1:05d}-of-00003.safetensors"


def write_shards(directory: Path, made: Mapping[str, np.ndarray]) -> None:
    """Three shards and their index; fused rows and experts of one parameter lie in different shards."""
    shard_of = {name: SHARD_OF.get(name, i % 3) for i, name in enumerate(made)}
    for i in range(3):
        save_file({n: a for n, a in made.items() if shard_of[n] == i}, directory / shard_name(i))
    index = {"metadata": {}, "weight_map": {name: shard_name(i) for name, i in shard_of.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
