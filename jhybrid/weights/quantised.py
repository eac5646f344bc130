"""Quantised checkpoints: the scheme that is read, the refusal of all others, and the numbers that a tensor stands for.

The loader expands what is read to the parameter's dtype; nothing is computed in fewer bits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jhybrid.errors import ConfigError
from jhybrid.models.hf_config import HfConfig

EIGHT_BIT = "F8_E4M3"  # as a file's header spells it
REMEDY = (
    "use the checkpoint that it was made from (most often the same name without the suffix), or write one with "
    "transformers: AutoModelForCausalLM.from_pretrained(dir).dequantize().save_pretrained(dir2)"
)


@dataclass(frozen=True)
class BlockScales:
    """8-bit floats with one scale for each block of the last two axes (DeepSeek-V3, section 3.3.2)."""

    rows: int
    columns: int

    def scale_name(self, tensor: str) -> str:
        """The tensor that holds another's scales."""
        return f"{tensor}_scale_inv"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[..., O, I] -> [..., blocks of O, blocks of I]."""
        return (*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns))

    def expand(self, tensor: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """tensor [..., O, I] times its scales, float32."""
        expanded = tensor.astype(np.float32)
        for block in range(scales.shape[-2]):
            rows = expanded[..., block * self.rows : (block + 1) * self.rows, :]
            by_column = np.repeat(scales[..., block, :].astype(np.float32), self.columns, axis=-1)
            rows *= by_column[..., None, : tensor.shape[-1]]
        return expanded


def read_quantisation(raw: Mapping[str, Any]) -> BlockScales | None:
    """How a config.json says that its weights are stored; None: as plain floats.

    Raises ConfigError with the scheme's name and what to do for every scheme that is not read.
    """
    hf = HfConfig(raw)
    sections = [hf, *(hf.section(key) for key in ("text_config", "llm_config") if hf.has(key))]
    keys = ("quantization_config", "compression_config")
    found = [section.section(key) for section in sections for key in keys if section.has(key)]
    if not found:
        return None
    scheme = found[0]
    method = scheme.text("quant_method", default="unnamed")
    if method != "fp8":
        raise _unread(method, scheme)
    if not scheme.has("weight_block_size") or scheme.text("fmt", default="e4m3") != "e4m3":
        raise _unread("fp8 without weight_block_size, or not of e4m3", scheme)
    block = scheme.items("weight_block_size")
    if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ConfigError("quantization_config.weight_block_size", f"must be [rows, columns], got {block!r}")
    return BlockScales(*block)


def _unread(method: str, scheme: HfConfig) -> ConfigError:
    known = ("format", "bits", "quant_algo", "load_in_8bit", "load_in_4bit")
    details = ", ".join(f"{key}={scheme.raw[key]}" for key in known if scheme.has(key))
    name = f"{method} ({details})" if details else method
    return ConfigError(
        "quantization_config.quant_method",
        f"weights quantised by {name} are not read, only fp8 with weight_block_size is; {REMEDY}",
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
