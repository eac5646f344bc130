"""RMSNorm, plain and gated. Weights and arithmetic are float32 whatever the model's dtype is."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.parameter import parameter
from jhybrid.mesh import WHOLE, Layout
from kernels_pallas.activations import ACTIVATIONS


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + w) over the last axis (Zhang and Sennrich 2019). Parameter: `weight` [size] float32."""

    size: int
    eps: float
    dtype: jnp.dtype  # of the result
    offset: float = 0.0  # 1 where checkpoints hold weights less 1
    layout: Layout = WHOLE

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., size] -> [..., size]."""
        init = nn.initializers.constant(1.0 - self.offset)
        weight = parameter(self, "weight", init, (self.size,), jnp.float32, self.layout) + self.offset
        return (normalised(x.astype(jnp.float32), self.eps) * weight).astype(self.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm over each of `groups` equal parts of the last axis, with y multiplied by act(gate) before or after.

    Mamba2 (Dao and Gu 2024, section 7.1) gates first. Parameter: `weight` [size] float32.
    """

    size: int
    groups: int
    eps: float
    dtype: jnp.dtype
    norm_before_gate: bool = False
    activation: str = "silu"

    @nn.compact
    def __call__(self, y: Array, gate: Array) -> Array:
        """y, gate [..., size] -> [..., size]."""
        weight = parameter(self, "weight", nn.initializers.ones, (self.size,), jnp.float32)
        y = y.astype(jnp.float32)
        if not self.norm_before_gate:
            y = gated(y, gate, self.activation)
        parts = y.reshape(*y.shape[:-1], self.groups, self.size // self.groups)
        y = normalised(parts, self.eps).reshape(y.shape) * weight
        if self.norm_before_gate:
            y = gated(y, gate, self.activation)
        return y.astype(self.dtype)


def gated(y: Array, gate: Array, activation: str = "silu") -> Array:
    """y times the activated gate, in float32."""
    return y.astype(jnp.float32) * ACTIVATIONS[activation](gate.astype(jnp.float32))


def normalised(x: Array, eps: float) -> Array:
    """x / rms(x) over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
