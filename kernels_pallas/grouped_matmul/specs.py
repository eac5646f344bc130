"""Cases every implementation of grouped_matmul must get right."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.scaled_matmul.specs import eight_bits
from kernels_pallas.specs import Spec


def _grouped(
    name: str, sizes: list[int], *, out: int, width: int, tail: int = 0, dtype: str = "float32", atol: float = 1e-4
) -> Spec:
    """Groups of `sizes` rows and `tail` rows after them, which hold NaN."""

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((sum(sizes) + tail, width)).astype(np.float32)
        x[sum(sizes) :] = np.nan
        weight = rng.standard_normal((len(sizes), out, width)).astype(np.float32)
        return (jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(sizes, jnp.int32)), {}

    return Spec(name, build, atol)


def _scaled(name: str, sizes: list[int], out: int, width: int, *, columns: int, dtype: str) -> Spec:
    """Weights of 8 bits."""

    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (x, _, group_sizes), _ = _grouped("", sizes, out=out, width=width, tail=2).build(seed)
        weight, scale = eight_bits(np.random.default_rng(seed), (len(sizes), out, width), dtype, columns)
        return (x, weight, group_sizes, scale), {}

    return Spec(name, build, 1e-3)


SPECS = [
    _grouped("even", [4, 4, 4, 4], out=8, width=16),
    _grouped("empty_groups", [0, 3, 0, 0, 5, 0], out=8, width=16),
    _grouped("all_in_one_group", [0, 0, 19, 0], out=8, width=16),
    _grouped("all_in_the_last_group", [0, 0, 0, 7], out=8, width=16, tail=2),
    _grouped("no_rows_of_any_group", [0, 0, 0], out=8, width=16, tail=6),
    _grouped("one_group", [5], out=8, width=16),
    _grouped("odd_sizes_and_tail", [1, 7, 0, 2, 3], out=13, width=11, tail=3),
    _grouped("weight_in_tiles", [3, 0, 9], out=300, width=512, tail=1),
    _grouped("inputs_in_tiles", [3, 0, 2], out=640, width=2500, tail=1, atol=5e-4),
    _grouped("many_groups_few_rows", [1 if g % 5 == 0 else 0 for g in range(32)], out=24, width=16, tail=1),
    _grouped("tiles_of_most_rows", [130, 64, 1], out=8, width=16),
    _grouped("bfloat16", [2, 0, 9, 1], out=40, width=32, tail=4, dtype="bfloat16", atol=0.1),
    _scaled("int8", [2, 0, 9, 1], 40, 32, columns=1, dtype="int8"),
    _scaled("int8_by_runs_in_tiles", [3, 0, 9], 300, 512, columns=4, dtype="int8"),
    _scaled("e4m3", [0, 3, 0, 0, 5, 0], 8, 16, columns=1, dtype="float8_e4m3fn"),
    _scaled("e4m3_by_runs", [1, 7, 0, 2, 3], 13, 48, columns=3, dtype="float8_e4m3fn"),
]
