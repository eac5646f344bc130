"""Cases every implementation of scaled_matmul must get right."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.specs import Spec


def eight_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, columns: int) -> tuple[Any, Any]:
    """A weight that uses the whole range of its dtype, and scales that bring it to about 1 and differ by row."""
    most = 127 if dtype == "int8" else 448
    weight = jnp.asarray(np.clip(rng.standard_normal(shape) * most / 3, -most, most), dtype)
    scale = rng.uniform(0.5, 2.0, (*shape[:-1], columns)) * 3 / most
    return weight, jnp.asarray(scale, jnp.float32)


def _scaled(name: str, tokens: int, out: int, width: int, *, columns: int = 1, dtype: str = "int8", **of: Any) -> Spec:
    def build(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal((tokens, width)), of.get("x", "float32"))
        return (x, *eight_bits(rng, (out, width), dtype, columns)), {}

    return Spec(name, build, of.get("atol", 2e-4))


SPECS = [
    _scaled("int8", 5, 24, 16),
    _scaled("int8_one_row", 1, 7, 11),
    _scaled("int8_by_runs", 4, 24, 48, columns=3),
    _scaled("e4m3", 5, 24, 16, dtype="float8_e4m3fn"),
    _scaled("e4m3_by_runs", 3, 13, 48, columns=6, dtype="float8_e4m3fn"),
    _scaled("odd_tiles", 3, 700, 512, columns=2, atol=1e-3),
    _scaled("bfloat16", 6, 24, 32, x="bfloat16", atol=0.25),
    _scaled("bfloat16_by_runs", 6, 24, 32, columns=2, dtype="float8_e4m3fn", x="bfloat16", atol=0.25),
]
