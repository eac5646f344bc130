"""scaled_matmul in plain JAX: on CPU tile after tile of the weight, elsewhere one product.

XLA's CPU code writes the whole weight out in float32 before it multiplies, ten times as slow for one row; a tile that
is written out stays in the core's cache. Twelve products of 4096 x 1024 on two AVX-512 cores (JAX 0.10.2), milliseconds
of processor time:

| rows of x | float32 weight | int8, in tiles | e4m3, in tiles |
|---|---|---|---|
| 1 | 10 | 9 | 19 |
| 2 | 13 | 13 | 22 |
| 16 | 23 | 26 | 35 |
| 64 | 69 | 86 | 90 |
| 256 | 309 | 305 | 310 |
"""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import products

TILE_BYTES = 1 << 20  # of the float32 part of a weight that a core works on


def scaled_matmul(x: Array, weight: Array, scale: Array) -> Array:
    """See the package."""
    return lax.platform_dependent(x, weight, scale, cpu=_by_tiles, default=_at_once)


def whole(weight: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """weight [..., I] times its scales [..., C], rounded to `dtype` once."""
    scales = jnp.repeat(scale, weight.shape[-1] // scale.shape[-1], axis=-1)
    return (weight.astype(jnp.float32) * scales).astype(dtype)


def _at_once(x: Array, weight: Array, scale: Array) -> Array:
    if scale.shape[1] > 1:
        return products.x_first(x, whole(weight, scale, x.dtype), x.dtype)
    return (products.x_first(x, weight.astype(x.dtype), jnp.dtype(jnp.float32)) * scale[:, 0]).astype(x.dtype)


def _by_tiles(x: Array, weight: Array, scale: Array) -> Array:
    (out, width), wide = weight.shape, x.astype(jnp.float32)
    rows = min(out, max(1, TILE_BYTES // (4 * width)))

    def tile(i: Array, y: Array) -> Array:
        at = jnp.minimum(i * rows, out - rows)
        # Tied to the loop's index, lest XLA write the whole weight out ahead of the loop.
        all_rows, at = lax.optimization_barrier((weight, at))
        part = lax.dynamic_slice_in_dim(all_rows, at, rows)
        part = whole(part, lax.dynamic_slice_in_dim(scale, at, rows), jnp.dtype(jnp.float32))
        return lax.dynamic_update_slice_in_dim(y, products.on_cpu(wide, part, wide.dtype), at, 1)

    return lax.fori_loop(0, -(-out // rows), tile, jnp.zeros((x.shape[0], out))).astype(x.dtype)
