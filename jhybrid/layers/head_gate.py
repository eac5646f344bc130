"""HeadGate: what an attention head gives, multiplied by the sigmoid of one number of its own (LFM3, Ling 3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.linear import INIT_STD, linear
from jhybrid.layers.parameter import parameter
from jhybrid.mesh import Layout


class HeadGate(nn.Module):
    """Parameter: `weight` [Hq, M]; it is small, decides what is let through, and is never quantised."""

    hidden_size: int
    num_heads: int
    dtype: jnp.dtype
    layout: Layout

    @nn.compact
    def __call__(self, o: Array, x: Array) -> Array:
        """o [T, Hq, D] of the heads, x [T, M] that they were computed from -> [T, Hq, D]."""
        shape, init = (self.num_heads, self.hidden_size), nn.initializers.normal(INIT_STD)
        weight = parameter(self, "weight", init, shape, self.dtype, self.layout)
        gate = jax.nn.sigmoid(linear(x, weight, jnp.dtype(jnp.float32)))  # [T, Hq]
        return (o * gate[:, :, None]).astype(o.dtype)
