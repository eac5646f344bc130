"""Cache scales: the scales of 8-bit keys and values that a checkpoint brings, as vLLM, ModelOpt and llm-compressor name
them. A layer of attention with a scale keeps its keys divided by it, so that they fill the range of their pages.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jhybrid.errors import WeightsError
from jhybrid.layers.attention import KV_SCALE
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import Place, leaves, nest
from jhybrid.weights.safetensors import read_tensors

log = logging.getLogger("jhybrid")

KEY = ".k_proj.weight"  # ends the name of the tensor that tells where a mixer's others are
SPELLINGS = ("{m}.{x}_scale", "{m}.attn.{x}_scale", "{m}.{x}_proj.{x}_scale", "{m}.{x}_proj.output_scale")
OF_BOTH = "{m}.kv_scale"  # the oldest form: one scale for keys and values


def with_cache_scales(directory: Path, params: Mapping[str, Any], names: Iterable[TensorName]) -> dict[str, Any]:
    """The parameters, with the scales of keys and of values [2] of every mixer that the checkpoint has both for.

    Raises WeightsError for one that is no positive number.
    """
    flat = dict(leaves(params))
    wanted: dict[Place, list[tuple[str, str]]] = {}
    for name in names:
        for mixer in (spelling.removesuffix(KEY) for spelling in name.names if spelling.endswith(KEY)):
            pairs = [(form.format(m=mixer, x="k"), form.format(m=mixer, x="v")) for form in SPELLINGS]
            both = OF_BOTH.format(m=mixer)
            wanted.setdefault((*name.path[:-2], KV_SCALE), []).extend([*pairs, (both, both)])
    found = read_tensors(directory, {tensor for pairs in wanted.values() for pair in pairs for tensor in pair})
    for path, pairs in wanted.items():
        pair = next((pair for pair in pairs if found.keys() >= set(pair)), None)
        if pair is None:
            continue
        scales = np.array([_number(directory, tensor, found[tensor]) for tensor in pair], np.float32)
        flat[path] = jax.device_put(scales, _everywhere(flat))
    count = sum(path[-1] == KV_SCALE for path in flat)
    if count:
        log.info("the checkpoint has scales of 8-bit keys and values for %d layers of attention", count)
    return nest(flat)


def _number(directory: Path, tensor: str, values: np.ndarray) -> float:
    if values.size != 1:
        raise WeightsError(
            f"{directory}: {tensor} has the shape {list(values.shape)}; scales of keys and values are read one for all "
            "heads: use a checkpoint with those, or kv_cache_dtype bfloat16"
        )
    number = float(values.reshape(()))
    if not 0 < number < float("inf"):
        raise WeightsError(f"{directory}: {tensor} is {number}, and no scale; use kv_cache_dtype bfloat16")
    return number


def _everywhere(flat: Mapping[Place, Any]) -> Any:
    """Where a parameter goes that all devices hold."""
    sharding = next(iter(flat.values())).sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
