"""Conversion of a checkpoint: a Hugging Face directory to a native one, and back. Behind `jhybrid convert`.

What is quantised stays so: in a native checkpoint as the values and scales that the engine holds, in a Hugging Face
directory in compressed-tensors' form, with a scale per row or per group of columns.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jhybrid.cache.arrays import tree_bytes
from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError
from jhybrid.layers.parameter import scale_of
from jhybrid.models import abstract_params, family_for
from jhybrid.models.hf_config import TEXT_SECTIONS, load_json
from jhybrid.tokenizer import ADDITIONAL_TEMPLATES
from jhybrid.weights.export import export_huggingface
from jhybrid.weights.load import find_model, load_params, read_model
from jhybrid.weights.names import TensorName
from jhybrid.weights.orbax import PARAMS_DIR, is_orbax, save_orbax
from jhybrid.weights.places import Place, leaves, nest
from jhybrid.weights.quantised import compressed_tensors

OWN = ("config.json", "metadata.json", "hf_quant_config.json")  # written anew, or out of date after
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


def convert(source: str, destination: Path, *, dtype: str = "auto", quantization: str = "auto") -> dict[str, Any]:
    """Write the model in `source` to `destination` in the other form; tokenizer and other files are copied.

    `dtype` auto is the checkpoint's own, float32 where its config.json has none of ours. The whole model passes through
    the host's memory. Returns what was written. Raises ConfigError if the destination has a model or is no directory,
    WeightsError if the source cannot be read.
    """
    directory, native = find_model(source), is_orbax(find_model(source))
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("destination", f"{destination} is no directory and cannot be made one: {error}") from error
    if any(f.name == PARAMS_DIR or f.name.endswith(WEIGHTS) for f in destination.iterdir()):
        raise ConfigError("destination", f"{destination} has weights already; give an empty or new directory")
    raw = load_json(directory / "config.json")
    config = EngineConfig(model=source, dtype=_dtype(raw) if dtype == "auto" else dtype, quantization=quantization)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model, module, _, used = read_model(config)
        params = load_params(config, model, module, abstract_params(module))
    names = family_for(model).weight_names(model)
    params, names, scheme = _in_one_form(params, names) if native else (params, names, _scheme(params, names))
    raw = _without_scheme(raw) | ({} if scheme is None else {"quantization_config": scheme})
    if native:
        export_huggingface(destination, raw, params, names)
    else:
        save_orbax(destination, raw, params, {"converted_from": directory.name})
    for file in directory.iterdir():
        if file.is_file() and file.name not in OWN and not file.name.endswith(WEIGHTS):
            shutil.copy(file, destination / file.name)
    if (directory / ADDITIONAL_TEMPLATES).is_dir():
        shutil.copytree(directory / ADDITIONAL_TEMPLATES, destination / ADDITIONAL_TEMPLATES, dirs_exist_ok=True)
    return {
        "form": "huggingface" if native else "orbax",
        "dtype": used,
        "quantization": scheme and scheme["format"],
        "num_parameters": sum(leaf.size for path, leaf in leaves(params) if not _is_scale(path, params)),
        "bytes": tree_bytes(params),
    }


def _dtype(raw: Mapping[str, Any]) -> str:
    """The dtype that a config.json gives, at its top or for its text model."""
    sections = (raw, *(raw[key] for key in TEXT_SECTIONS if isinstance(raw.get(key), dict)))
    given = next((s[key] for s in sections for key in ("dtype", "torch_dtype") if s.get(key)), "float32")
    return given if given in ("float32", "bfloat16") else "float32"


def _without_scheme(raw: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if key not in ("quantization_config", "compression_config")}
    for key in TEXT_SECTIONS:
        if isinstance(kept.get(key), dict):
            kept[key] = _without_scheme(kept[key])
    return kept


def _is_scale(path: Place, params: Mapping[str, Any]) -> bool:
    parent: Any = params
    for key in path[:-1]:
        parent = parent[key]
    return any(scale_of(name) == path[-1] for name in parent)


def _scheme(params: Mapping[str, Any], names: Sequence[TensorName]) -> dict[str, Any] | None:
    """The `quantization_config` that says how `params` are held; None: plain."""
    flat = dict(leaves(params))
    runs = _runs(flat)
    if not runs:
        return None
    plain = {name.names[0] for name in names if name.path not in runs and len(flat[name.path].shape) > 1}
    excluded = {tensor.removesuffix(".weight") for tensor in plain}
    by_row = all(run == flat[path].shape[-1] for path, run in runs.items())
    values = np.dtype(flat[next(iter(runs))].dtype)
    return compressed_tensors(values, None if by_row else math.gcd(*runs.values()), excluded)


def _runs(flat: Mapping[Place, Any]) -> dict[Place, int]:
    """Of each parameter in 8 bits: the columns that share a scale."""
    scales = {path: (*path[:-1], scale_of(path[-1])) for path in flat}
    return {path: flat[path].shape[-1] // flat[at].shape[-1] for path, at in scales.items() if at in flat}


def _in_one_form(
    params: Mapping[str, Any], names: Sequence[TensorName]
) -> tuple[dict[str, Any], list[TensorName], dict[str, Any] | None]:
    """The same parameters with as many columns to a scale everywhere, as a scheme must have it, and names of scales."""
    flat = dict(leaves(params))
    runs, scheme = _runs(flat), _scheme(params, names)
    if scheme is None:
        return dict(params), list(names), None
    run = scheme["config_groups"]["group_0"]["weights"].get("group_size")
    for path, own in runs.items():
        at = (*path[:-1], scale_of(path[-1]))
        flat[at] = np.repeat(np.asarray(flat[at]), 1 if run is None else own // run, axis=-1)
    scales = [
        replace(n, names=(scale_of(n.names[0]),), path=(*n.path[:-1], scale_of(n.path[-1])), file_shape=None)
        for n in names
        if n.path in runs
    ]
    return nest(flat), [*names, *scales], scheme
