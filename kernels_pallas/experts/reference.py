"""experts as they are defined: token by token and choice by choice, float32."""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.activations import activate
from kernels_pallas.scaled_matmul.xla import whole
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
    count, gated = up.shape[0], up.shape[1] == 2 * down.shape[2]
    up = up.astype(jnp.float32) if up_scale is None else whole(up, up_scale, jnp.dtype(jnp.float32))
    down = down.astype(jnp.float32) if down_scale is None else whole(down, down_scale, jnp.dtype(jnp.float32))

    def one(token: Array, expert: Array, weight: Array) -> Array:
        h = jnp.dot(up[expert], token, precision="highest")
        h = activate(jnp.split(h, 2) if gated else [h], activation)
        y = weight * jnp.dot(down[expert], h, precision="highest")
        return jnp.where((expert >= 0) & (expert < count), y, 0.0)

    def row(t: Array) -> Array:
        token = x[t].astype(jnp.float32)
        return sum((one(token, chosen[t, j], weights[t, j]) for j in range(chosen.shape[1])), jnp.zeros(x.shape[1]))

    return lax.map(row, jnp.arange(x.shape[0]))
