"""Quantised weights: the schemes that are read, what 8 bits and their scales stand for, and rounding to them.

Whatever the scheme, a weight [..., O, I] is held as its 8-bit values and float32 scales [..., O, C], one for each of C
equal runs of columns of a row: scales of a tensor, of rows, of groups of columns and of blocks all come out as this,
and cut along rows like the values. Activations are never rounded.
"""

import fnmatch
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jhybrid.errors import ConfigError
from jhybrid.layers.parameter import scale_of
from jhybrid.models.hf_config import TEXT_SECTIONS, HfConfig, load_json
from jhybrid.weights.places import Place, leaves, nest

Kind = Literal["int8", "fp8"]

VALUES: dict[Kind, np.dtype] = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
MOST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}  # the largest values
STORED: dict[Kind, str] = {"int8": "I8", "fp8": "F8_E4M3"}  # as a file's header spells them
PACKED = "_packed"  # ends the name of a tensor of int8, four to an int32 (compressed-tensors)
LEAST_RUN = 16  # columns of a scale; narrower ones would make the scales as large as the weight
ROUNDED_AT_ONCE = 1 << 24  # numbers that are float32 at a time while a tensor is rounded or expanded
UNUSED = (
    # scales of activations, which are not rounded here, and shapes that the tensors have themselves
    r".*\.(input|output|activation|q)_scale",
    r".*\.weight_shape",
)
CACHE_SCALES = (r".*\.(k|v|kv|[kv]_proj\.output)_scale",)
"""Of keys and values, also beside plain weights: `cache_scales.py` reads them where the cache has 8 bits."""
REMEDY = (
    "use the checkpoint that it was made from (most often the same name without the suffix) with quantization int8 or "
    "fp8, or write one with transformers: AutoModelForCausalLM.from_pretrained(dir).dequantize().save_pretrained(dir2)"
)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint stores its quantised tensors."""

    kind: Kind
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: those of a tensor do, or those of a row."""
    excluded: tuple[str, ...] = ()
    """Patterns of the modules that are not quantised."""

    def scale_names(self, tensor: str) -> tuple[str, ...]:
        """Spellings of the tensor that holds another's scales."""
        return f"{tensor}_scale_inv", f"{tensor}_scale"

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What the scales of a tensor [..., O, I] may be shaped like, but for axes of length 1."""
        *lead, rows, columns = shape
        if self.block is None:
            return [(), (*lead, 1, 1), (*lead, rows, 1)]
        return [(*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))]

    def by_row(self, scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The scales of a tensor [..., O, I] as [..., O, C] float32."""
        *lead, rows, columns = shape
        scales = scales.astype(np.float32)
        if self.block is None:
            each = scales.reshape(*lead, -1, 1) if scales.size > 1 else scales.reshape(*[1] * len(shape))
            return np.ascontiguousarray(np.broadcast_to(each, (*lead, rows, 1)))
        scales = scales.reshape(self.scale_shapes(shape)[0])
        run = self.run(columns)
        scales = np.repeat(scales, self.block[0], axis=-2)[..., :rows, :]
        return np.repeat(scales, self.block[1] // run, axis=-1)[..., : columns // run]

    def run(self, columns: int) -> int:
        """Columns of a row that share a scale; all runs are equal, so a last block that is cut off divides them."""
        return columns if self.block is None else math.gcd(columns, self.block[1])

    def excludes(self, tensor: str) -> bool:
        """Whether the config says that a tensor is not quantised."""
        module = tensor.rpartition(".")[0]
        return any(_matches(pattern, module) for pattern in self.excluded)


@dataclass(frozen=True)
class Numbers:
    """A tensor as a file has it: plain, or with its scales [..., O, C]."""

    values: np.ndarray
    scale: np.ndarray | None = None

    def whole(self, dtype: np.dtype) -> np.ndarray:
        """What the tensor stands for."""
        if self.scale is None:
            return self.values
        expanded = np.empty(self.values.shape, dtype)
        run = self.values.shape[-1] // self.scale.shape[-1]
        for out, values, scale in _by_rows(expanded, self.values, self.scale):
            np.copyto(out, values.astype(np.float32) * np.repeat(scale, run, axis=1), casting="unsafe")
        return expanded

    def rounded(self, dtype: np.dtype) -> list[np.ndarray]:
        """The values and scales of 8 bits, of plain numbers with a scale per row that its largest number fills."""
        if self.scale is not None:
            return [self.values, self.scale]
        most = next(MOST[kind] for kind, values in VALUES.items() if values == dtype)
        values = np.empty(self.values.shape, dtype)
        scale = np.empty((*values.shape[:-1], 1), np.float32)
        for out, scales, plain in _by_rows(values, scale, self.values):
            plain = plain.astype(np.float32)
            scales[...] = np.abs(plain).max(axis=1, keepdims=True) / most
            plain /= np.where(scales == 0, 1, scales)
            with np.errstate(invalid="ignore"):  # what is not finite shows in its row's scale
                np.copyto(out, np.rint(plain) if dtype == np.int8 else plain, casting="unsafe")
        return [values, scale]


def read_quantisation(directory: str | Path) -> Scheme | None:
    """How a Hugging Face directory says that its weights are stored; None: as plain floats.

    Raises ConfigError with the scheme's name and what to do for every scheme that is not read.
    """
    directory = Path(directory)
    hf = HfConfig(load_json(directory / "config.json"))
    sections = [hf, *(hf.section(key) for key in TEXT_SECTIONS if hf.has(key))]
    keys = ("quantization_config", "compression_config")
    found = [section.section(key) for section in sections for key in keys if section.has(key)]
    if not found and (directory / "hf_quant_config.json").exists():  # ModelOpt's older way
        beside = HfConfig(load_json(directory / "hf_quant_config.json")).section("quantization")
        return _read_modelopt(beside) if beside.has("quant_algo") else None
    if not found:
        return None
    scheme = found[0]
    method = scheme.text("quant_method", default="unnamed")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt}
    if method not in readers:
        raise _unread(method, scheme)
    return readers[method](scheme)


def _read_fp8(scheme: HfConfig) -> Scheme:
    """transformers' own: block scales (DeepSeek-V3, section 3.3.2), or one scale for a tensor."""
    if scheme.text("fmt", default="e4m3") != "e4m3":
        raise _unread("fp8 not of e4m3", scheme)
    excluded = _patterns(scheme, "modules_to_not_convert", "ignored_layers")
    if not scheme.has("weight_block_size"):
        return Scheme("fp8", excluded=excluded)
    return Scheme("fp8", _block(scheme, "weight_block_size"), excluded)


def _read_modelopt(scheme: HfConfig) -> Scheme:
    algorithms = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": (128, 128)}
    algorithm = scheme.text("quant_algo", default="unnamed")
    if algorithm not in algorithms:
        raise _unread("modelopt", scheme)
    return Scheme("fp8", algorithms[algorithm], _patterns(scheme, "exclude_modules", "ignore"))


def _read_compressed_tensors(scheme: HfConfig) -> Scheme | None:
    within = scheme.section("config_groups")
    groups = [within.section(name) for name in within.raw]
    weights = [group.section("weights") for group in groups if group.has("weights")]
    if not weights and scheme.has("kv_cache_scheme"):  # of the cache alone
        return None
    if not weights or any(w.raw != weights[0].raw for w in weights):
        raise _unread("compressed-tensors with groups of several kinds, or none", scheme)
    [of, *_] = weights
    bits, number = of.integer("num_bits"), of.text("type")
    kind: Kind | None = {"float": "fp8", "int": "int8"}.get(number) if bits == 8 else None  # pyright: ignore[reportAssignmentType]
    described = f"compressed-tensors of {bits}-bit {number}"
    formats = ("float-quantized", "int-quantized", "naive-quantized", *(["pack-quantized"] if kind == "int8" else []))
    if kind is None or scheme.text("format", default="unnamed") not in formats:
        raise _unread(described, scheme)
    if not of.flag("symmetric", default=True):
        raise _unread(f"{described} with zero points", scheme)
    if scheme.has("sparsity_config") and scheme.section("sparsity_config").text("format", default="dense") != "dense":
        raise _unread(f"{described}, sparse", scheme)
    strategy, excluded = of.text("strategy", default="tensor"), _patterns(scheme, "ignore")
    if strategy in ("tensor", "channel"):
        return Scheme(kind, None, excluded)
    if strategy == "group" and of.raw.get("actorder") is None:
        return Scheme(kind, (1, of.integer("group_size")), excluded)
    if strategy == "block":
        return Scheme(kind, _block(of, "block_structure"), excluded)
    raise _unread(f"{described} with scales by {strategy}", scheme)


def rounded_params(params: Mapping[str, Any], quantisable: Collection[Place], kind: Kind) -> dict[str, Any]:
    """A tree of plain arrays with those of `quantisable` in 8 bits."""
    flat = {}
    for path, array in leaves(params):
        flat[path] = array
        if path in quantisable:
            values, scale = Numbers(np.asarray(array)).rounded(VALUES[kind])
            flat |= {path: jnp.asarray(values), (*path[:-1], scale_of(path[-1])): jnp.asarray(scale)}
    return nest(flat)


def held_shapes(shapes: Mapping[str, Any], held: Mapping[Place, Kind], scheme: Scheme | None) -> dict[str, Any]:
    """A tree of shapes with those of `held` in 8 bits, with a scale per row, or as `scheme` has them."""
    flat = {}
    for path, leaf in leaves(shapes):
        flat[path] = leaf
        if path in held:
            *rows, columns = leaf.shape
            run = columns if scheme is None else scheme.run(columns)
            if run >= LEAST_RUN:
                flat[path] = jax.ShapeDtypeStruct(leaf.shape, VALUES[held[path]])
                flat[(*path[:-1], scale_of(path[-1]))] = jax.ShapeDtypeStruct((*rows, columns // run), np.float32)
    return nest(flat)


def compressed_tensors(values: np.dtype, run: int | None, excluded: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of an export whose tensors are `values` with a scale per row (`run` None) or run."""
    kind: Kind = next(kind for kind, dtype in VALUES.items() if dtype == values)
    number = {"int8": "int", "fp8": "float"}[kind]
    weights = {"num_bits": 8, "type": number, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if run is None else {"strategy": "group", "group_size": run}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{number}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": sorted(excluded),
    }


def unpacked(packed: np.ndarray) -> np.ndarray:
    """int8 [O, 4 I] of int32 [O, I], which holds four, each with 128 added, the first in the lowest bits."""
    return (np.ascontiguousarray(packed).view(np.uint8) ^ np.uint8(128)).view(np.int8)


def _by_rows(*tensors: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Views of some rows of each tensor [..., O, any], as matrices."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    rows = max(1, ROUNDED_AT_ONCE // max(matrix.shape[1] for matrix in flat))
    for at in range(0, flat[0].shape[0], rows):
        yield tuple(matrix[at : at + rows] for matrix in flat)


def _block(scheme: HfConfig, key: str) -> tuple[int, int]:
    block = scheme.items(key)
    if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ConfigError(scheme.named(key), f"must be [rows, columns], got {block!r}")
    return block[0], block[1]


def _patterns(scheme: HfConfig, *keys: str) -> tuple[str, ...]:
    return tuple(str(pattern) for key in keys if scheme.has(key) for pattern in scheme.items(key))


def _matches(pattern: str, module: str) -> bool:
    """compressed-tensors writes `re:`, ModelOpt stars, transformers parts of names."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def _unread(method: str, scheme: HfConfig) -> ConfigError:
    known = ("format", "bits", "quant_algo", "load_in_8bit", "load_in_4bit")
    details = ", ".join(f"{key}={scheme.raw[key]}" for key in known if scheme.has(key))
    name = f"{method} ({details})" if details else method
    return ConfigError(
        "quantization_config.quant_method",
        f"weights quantised by {name} are not read, only 8-bit ones (fp8, compressed-tensors and ModelOpt, symmetric) "
        f"are; {REMEDY}",
    )


def read_eight_bits(path: Path, tensor: str) -> np.ndarray:
    """An `F8_E4M3` tensor of a file whose header has been found sound; the library gives numpy none of that dtype."""
    start, header = _header(path, path.stat().st_mtime_ns)
    begin, end = header[tensor]["data_offsets"]
    with path.open("rb") as file:
        file.seek(start + begin)
        data = file.read(end - begin)
    return np.frombuffer(data, ml_dtypes.float8_e4m3fn).reshape(header[tensor]["shape"])


@lru_cache(maxsize=1)
def _header(path: Path, changed: int) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begin, and its header, as of when it was `changed` last."""
    del changed
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))
