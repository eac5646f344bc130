"""The exporter: a parameter tree written as a Hugging Face directory, for other software to load.

The inverse of `load_safetensors`: the same names, read the other way.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jhybrid.errors import WeightsError
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import (
    Coverage,
    dotted,
    leaves,
    place_shape,
    same_but_for_ones,
    slices,
    stored_shape,
    taken,
    whole,
)
from jhybrid.weights.safetensors import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 4 * 10**9


def export_huggingface(
    directory: str | Path,
    hf_config: Mapping[str, Any],
    params: Mapping[str, Any],
    names: Sequence[TensorName],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `config.json` and `model.safetensors` (several shards and an index above `shard_bytes`).

    `hf_config` is written as it is. `params` is a nested dict of arrays, whose dtypes are kept; each tensor gets
    the first spelling of its name. Where alternative names fill the same place, the one listed first is written.
    Tokenizer files are the caller's to put beside them.

    Raises WeightsError if the directory already has safetensors in it: a loader would mix the two.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if present := sorted(f.name for f in directory.iterdir() if ".safetensors" in f.name):
        raise WeightsError(f"{directory}: already has {', '.join(present[:5])}; export into an empty directory")
    flat = dict(leaves(params))
    (directory / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
    shards = _plan(flat, _written(flat, names), shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        # transformers refuses a file without a format
        save_file(_tensors(flat, shard), directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_bytes(flat, name) for shard in shards for name in shard)},
            "weight_map": {name.names[0]: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _written(flat: Mapping[tuple[str, ...], Any], names: Iterable[TensorName]) -> list[TensorName]:
    """The names that an export writes: for each parameter the first ones that fill it, exactly once."""
    by_path: dict[tuple[str, ...], list[TensorName]] = {path: [] for path in flat}
    for name in names:
        assert name.path in by_path, f"{name} names a parameter that the model does not have"
        by_path[name.path].append(name)
    written = []
    for path, candidates in by_path.items():
        coverage = Coverage(flat[path].shape, candidates)
        for name in candidates:
            if not coverage.of(name).all():
                coverage.claim(name)
                written.append(name)
        assert not coverage.gaps, f"no name exports all of {dotted(path)}"
        assert not coverage.overlaps, f"names export {dotted(path)} more than once"
    return written


def _plan(flat: Mapping[tuple[str, ...], Any], names: Iterable[TensorName], shard_bytes: int) -> list[list[TensorName]]:
    """Split the names, in order, into shards of at most `shard_bytes` (a larger tensor has one to itself)."""
    shards: list[list[TensorName]] = [[]]
    filled = 0
    for _, places in groupby(names, key=lambda name: name.names[0]):
        places = list(places)
        size = sum(_bytes(flat, name) for name in places)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += places
        filled += size
    return shards


def _bytes(flat: Mapping[tuple[str, ...], Any], name: TensorName) -> int:
    param = flat[name.path]
    return int(np.prod(place_shape(name, param.shape))) * np.dtype(param.dtype).itemsize


def _tensors(flat: Mapping[tuple[str, ...], Any], shard: Iterable[TensorName]) -> dict[str, np.ndarray]:
    """The tensors of one shard on the host, each in the shape that the file has, contiguous."""
    tensors = {}
    for path, group in groupby(shard, key=lambda name: name.path):
        param = np.asarray(flat[path])  # fetched once, not once per expert
        for tensor, places in groupby(group, key=lambda name: name.names[0]):
            assert tensor not in tensors, f"the names of {tensor} are not one after the other"
            tensors[tensor] = _assembled(param, list(places))
    return tensors


def _assembled(param: np.ndarray, places: list[TensorName]) -> np.ndarray:
    """The tensor of a file from the places that it fills."""
    assert whole(places), f"{places} do not make up a tensor"
    tensor = np.empty(stored_shape(places[0], param.shape), param.dtype)
    for name in places:
        view = taken(name, tensor)
        view[...] = param[slices(name)].reshape(view.shape)
    shape = places[0].file_shape or tensor.shape
    assert same_but_for_ones(tensor.shape, shape), f"{places[0]}: its tensor has shape {tensor.shape}"
    return tensor.reshape(shape)
