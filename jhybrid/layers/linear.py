"""Linear: a product with a weight stored [out, in], the one door to dense products."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.parameter import Scaled, parameter, weight
from kernels_pallas.products import times_weight
from kernels_pallas.scaled_matmul import scaled_matmul

INIT_STD = 0.02  # standard deviation of fresh weights; projections back into the residual use less (`out_std`)


def out_std(num_branches: int) -> float:
    """Standard deviation of projections into the residual when `num_branches` of them add up (GPT-2, section 2.3)."""
    return INIT_STD / num_branches**0.5


def linear(x: Array, weight: Array | Scaled, dtype: jnp.dtype | None = None) -> Array:
    """x [..., I] times weight [O, I] -> [..., O], in x's dtype or in `dtype`."""
    if isinstance(weight, Scaled):
        assert dtype is None and x.ndim == 2, (dtype, x.shape)
        return scaled_matmul(x, *weight)
    return times_weight(x, weight, dtype or x.dtype)


class Linear(nn.Module):
    """y = x W^T (+ b). Parameters: `weight` [out, in], `bias` [out] where asked.

    An `exact` one is never quantised: what it gives is exponentiated or decides something, and it is small.
    """

    out_features: int
    in_features: int
    dtype: jnp.dtype
    bias: bool = False
    init_std: float = INIT_STD
    exact: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., in] -> [..., out]."""
        shape, declare = (self.out_features, self.in_features), parameter if self.exact else weight
        y = linear(x, declare(self, "weight", nn.initializers.normal(self.init_std), shape, self.dtype))
        if self.bias:
            y = y + parameter(self, "bias", nn.initializers.zeros, (self.out_features,), self.dtype)
        return y
