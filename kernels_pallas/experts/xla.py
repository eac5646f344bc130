"""experts on tokens sorted by expert: two grouped products, each of which reads only the experts that have tokens."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from kernels_pallas.activations import activate
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.target import Target


def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    up: Array,
    down: Array,
    up_scale: Array | None,
    down_scale: Array | None,
    activation: str,
    target: Target,
    *,
    multiply: Callable[..., Array] = grouped_matmul,
) -> Array:
    """See the package; `multiply` is `grouped_matmul`, or gives anything for rows of no group."""
    count, (T, k) = up.shape[0], chosen.shape
    mine = (chosen >= 0) & (chosen < count)
    flat = jnp.where(mine, chosen, count).reshape(-1)  # what is none sorts behind every group, and belongs to none
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype)).reshape(T, k)
    sizes = jnp.bincount(flat, length=count + 1)[:-1].astype(jnp.int32)
    h = multiply(x[order // k], up, sizes, up_scale)
    h = activate(jnp.split(h, 2, axis=-1) if up.shape[1] == 2 * down.shape[2] else [h], activation)
    # The first choices of all tokens, then the second: [T, k, D] would lie in tiles of eight rows, k of them used.
    y = multiply(h, down, sizes, down_scale)[place.T.reshape(-1)].reshape(k, T, -1)
    weighed = (jnp.where(mine[:, j, None], y[j].astype(jnp.float32) * weights[:, j, None], 0.0) for j in range(k))
    return sum(weighed, jnp.zeros((T, x.shape[1])))
