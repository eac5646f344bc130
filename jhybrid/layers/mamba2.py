"""Mamba2: the selective state space mixer with scalar decay per head (Dao and Gu 2024, "Transformers are SSMs")."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.norm import GatedRMSNorm, gated
from jhybrid.layers.parameter import inverse_softplus_of_log_uniform, log_of_uniform, parameter, uniform
from jhybrid.weights.names import TensorName
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.spans import Spans
from kernels_pallas.ssd import ssd


@dataclass(frozen=True)
class Mamba2Spec:
    """Sizes and switches of a Mamba2 mixer; all layers of a model share one."""

    hidden_size: int  # M
    num_heads: int  # H
    head_dim: int  # P
    state_size: int  # N
    num_groups: int  # G
    conv_kernel: int  # K
    norm_groups: int | None  # None: gated, but not normalised
    norm_eps: float
    conv_bias: bool
    proj_bias: bool
    dt_limit: tuple[float, float]
    dt_init: tuple[float, float] = (0.001, 0.1)  # fresh heads step between these, log-uniformly
    norm_before_gate: bool = False
    projected_multipliers: tuple[float, ...] | None = None  # of z, x, B, C, dt, the parts of `in_proj`'s output

    @property
    def inner_size(self) -> int:
        """H * P."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def parts(self, state_dtype: str, conv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per slot."""
        return (
            Part("conv", "slot", (self.conv_kernel, self.conv_size), conv_dtype),
            Part("ssm", "slot", (self.state_size, self.inner_size), state_dtype, vector=self.head_dim),
        )


class Mamba2(nn.Module):
    """Parameters: `in_proj` (rows z | x | B | C | dt), `conv_weight` [D, K], `conv_bias`, `A_log`, `D`, `dt_bias` [H]
    float32, `norm` unless there is none, `out_proj`. Cache parts: `conv` and `ssm`.
    """

    spec: Mamba2Spec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        spec = self.spec
        width = spec.inner_size + spec.conv_size + spec.num_heads
        projected = Linear(width, spec.hidden_size, self.dtype, spec.proj_bias, name="in_proj")(x)
        if spec.projected_multipliers is not None:
            groups = spec.num_groups * spec.state_size
            sizes = (spec.inner_size, spec.inner_size, groups, groups, spec.num_heads)
            projected = projected * np.repeat(spec.projected_multipliers, sizes).astype(self.dtype)
        gate, xBC, dt = jnp.split(projected, [spec.inner_size, spec.inner_size + spec.conv_size], axis=1)
        xBC, cache = self._convolve(xBC, cache, spans)
        dt_bias = parameter(self, "dt_bias", inverse_softplus_of_log_uniform(*spec.dt_init), dt.shape[1:], jnp.float32)
        y, cache = self._scan(xBC, step_size(dt, dt_bias, spec.dt_limit, spans), cache, spans)
        if spec.norm_groups is None:
            y = gated(y, gate).astype(self.dtype)
        else:
            sizes = (spec.inner_size, spec.norm_groups, spec.norm_eps, self.dtype)
            y = GatedRMSNorm(*sizes, spec.norm_before_gate, name="norm")(y, gate)
        out = Linear(
            spec.hidden_size, spec.inner_size, self.dtype, spec.proj_bias, init_std=self.out_std, name="out_proj"
        )
        return out(y), cache

    def _convolve(self, xBC: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        bound = spec.conv_kernel**-0.5  # depthwise: the fan-in is the kernel alone
        shape = (spec.conv_size, spec.conv_kernel)
        weight = parameter(self, "conv_weight", uniform(bound), shape, self.dtype)
        bias = parameter(self, "conv_bias", nn.initializers.zeros, shape[:1], self.dtype) if spec.conv_bias else None
        window, base = cache.open(self.layer_id, "conv")
        xBC, window = causal_conv(xBC, weight, bias, window, spans, activation="silu", base=base)
        return xBC, cache.put(self.layer_id, "conv", window)

    def _scan(self, xBC: Array, dt: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        heads, groups = (spec.num_heads,), spec.num_groups * spec.state_size
        A = -jnp.exp(parameter(self, "A_log", log_of_uniform(1.0, 16.0), heads, jnp.float32))
        D = parameter(self, "D", nn.initializers.ones, heads, jnp.float32)
        x, B, C = jnp.split(xBC, [spec.inner_size, spec.inner_size + groups], axis=1)
        x = x.reshape(-1, spec.num_heads, spec.head_dim)  # [T, H, P]
        B = B.reshape(-1, spec.num_groups, spec.state_size)  # [T, G, N]
        C = C.reshape(-1, spec.num_groups, spec.state_size)  # [T, G, N]
        state, base = cache.open(self.layer_id, "ssm")
        y, state = ssd(x, dt, A, B, C, D, state, spans, base=base)
        return y.reshape(-1, spec.inner_size), cache.put(self.layer_id, "ssm", state)  # [T, H * P]


def step_size(dt: Array, dt_bias: Array, limit: tuple[float, float], spans: Spans) -> Array:
    """dt [T, H] -> float32: softplus of dt + bias, clamped, and 0 for padding so that it leaves the state alone."""
    dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
    if limit != (0.0, float("inf")):
        dt = jnp.clip(dt, *limit)
    if spans.kind == "dense":
        return dt
    return jnp.where(spans.token_valid()[:, None], dt, 0.0)


def mamba2_names(hubs: tuple[str, ...], path: tuple[str, ...], spec: Mamba2Spec) -> list[TensorName]:
    """Tensors of one mixer; `hubs` are the spellings of its prefix in checkpoints."""
    places = {
        "A_log": ("A_log",),
        "D": ("D",),
        "dt_bias": ("dt_bias",),
        "conv1d.weight": ("conv_weight",),
        "in_proj.weight": ("in_proj", "weight"),
        "out_proj.weight": ("out_proj", "weight"),
    }
    if spec.norm_groups is not None:
        places["norm.weight"] = ("norm", "weight")
    if spec.conv_bias:
        places["conv1d.bias"] = ("conv_bias",)
    if spec.proj_bias:
        places |= {"in_proj.bias": ("in_proj", "bias"), "out_proj.bias": ("out_proj", "bias")}
    in_file = {"conv1d.weight": (spec.conv_size, 1, spec.conv_kernel)}
    return [
        TensorName(tuple(f"{hub}.{name}" for hub in hubs), (*path, *at), file_shape=in_file.get(name))
        for name, at in places.items()
    ]
