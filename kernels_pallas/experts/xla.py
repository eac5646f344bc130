"""experts on tokens sorted by expert: two grouped products, each of which reads only the experts that have tokens."""

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
) -> Array:
    """See the package."""
    count, (T, k) = up.shape[0], chosen.shape
    # an expert past the last one sorts behind every group, and belongs to none
    flat = jnp.where((chosen >= 0) & (chosen < count), chosen, count).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    sizes = jnp.bincount(flat, length=count + 1)[:-1].astype(jnp.int32)
    h = grouped_matmul(x[order // k], up, sizes, up_scale)
    h = activate(jnp.split(h, 2, axis=-1) if up.shape[1] == 2 * down.shape[2] else [h], activation)
    y = grouped_matmul(h, down, sizes, down_scale)[place].reshape(T, k, -1)
    return jnp.einsum("tkd,tk->td", y.astype(jnp.float32), weights)
