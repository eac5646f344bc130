"""Linear: a product with a weight stored [out, in], the one door to dense products."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.parameter import Scaled, parameter, weight
from jhybrid.mesh import WHOLE, Layout, on_all, over_shards, summed_over_shards
from kernels_pallas.products import times_weight
from kernels_pallas.scaled_matmul import scaled_matmul

INIT_STD = 0.02  # standard deviation of fresh weights; projections back into the residual use less (`out_std`)


def out_std(num_branches: int) -> float:
    """Standard deviation of projections into the residual when `num_branches` of them add up (GPT-2, section 2.3)."""
    return INIT_STD / num_branches**0.5


def linear(x: Array, weight: Array | Scaled, dtype: jnp.dtype | None = None, layout: Layout = WHOLE) -> Array:
    """x [..., I] times weight [O, I] -> [..., O], in x's dtype or in `dtype`."""
    if isinstance(weight, Scaled):
        assert dtype is None and x.ndim == 2, (dtype, x.shape)
        return _scaled(x, weight, layout)
    return times_weight(x, weight, dtype or x.dtype)


def _scaled(x: Array, weight: Scaled, layout: Layout) -> Array:
    if layout.axis == 0:
        return over_shards(scaled_matmul, layout.shards, (None, 0, 0), 1)(x, *weight)
    columns = 1 if weight.scale.shape[1] % layout.shards == 0 else None  # a scale for whole rows goes to all
    if columns is None and weight.scale.shape[1] > 1:
        return scaled_matmul(on_all(x), *map(on_all, weight))
    return summed_over_shards(scaled_matmul, layout.shards, (1, 1, columns))(x, *weight)


class Linear(nn.Module):
    """y = x W^T (+ b). Parameters: `weight` [out, in], `bias` [out] where asked.

    An `exact` one is never quantised: what it gives is exponentiated or decides something, and it is small.
    `layout` shares out what it gives (axis 0) or what it reads (axis 1); in the latter case all get the sum.
    """

    out_features: int
    in_features: int
    dtype: jnp.dtype
    bias: bool = False
    init_std: float = INIT_STD
    exact: bool = False
    layout: Layout = WHOLE

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., in] -> [..., out]."""
        shape, declare = (self.out_features, self.in_features), parameter if self.exact else weight
        init = nn.initializers.normal(self.init_std)
        y = linear(x, declare(self, "weight", init, shape, self.dtype, self.layout), layout=self.layout)
        if self.layout.axis == 1:
            y = on_all(y)
        if self.bias:
            layout = self.layout if self.layout.axis == 0 else WHOLE
            y = y + parameter(self, "bias", nn.initializers.zeros, (self.out_features,), self.dtype, layout)
        return y
