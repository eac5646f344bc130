"""Mamba1: the selective state space mixer with a decay per channel and state (Gu and Dao 2023, "Mamba")."""

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.mamba2 import step_size
from jhybrid.layers.norm import RMSNorm, gated, normalised
from jhybrid.layers.parameter import inverse_softplus_of_log_uniform, parameter, uniform
from jhybrid.weights.names import TensorName
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.selective_scan import selective_scan
from kernels_pallas.spans import Spans

NORMED = ("dt", "b", "c")


@dataclass(frozen=True)
class Mamba1Spec:
    """Sizes and switches of a Mamba1 mixer; all layers of a model share one."""

    hidden_size: int  # M
    inner_size: int  # D
    state_size: int  # N
    dt_rank: int
    conv_kernel: int  # K
    conv_bias: bool
    proj_bias: bool
    norm: Literal["weighted", "unit"] | None = (
        None  # RMSNorm of dt (before its projection), B and C; "unit": no weights
    )
    norm_eps: float = 1e-6
    dt_init: tuple[float, float] = (0.001, 0.1)  # fresh channels step between these, log-uniformly

    def parts(self, state_dtype: str, conv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per slot."""
        return (
            Part("conv", "slot", (self.conv_kernel, self.inner_size), conv_dtype),
            Part("ssm", "slot", (self.state_size, self.inner_size), state_dtype),
        )


class Mamba1(nn.Module):
    """Parameters: `in_proj` (rows x | z), `conv_weight` [D, K], `conv_bias`, `x_proj` (rows dt | B | C), `dt_proj`
    [D, dt_rank], `dt_bias` [D], `A_log` [D, N], `D` [D], the last three float32, `dt_norm`, `b_norm` and `c_norm`
    where weighted, `out_proj`. Cache parts: `conv` and `ssm`.
    """

    spec: Mamba1Spec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        spec = self.spec
        x = Linear(2 * spec.inner_size, spec.hidden_size, self.dtype, spec.proj_bias, name="in_proj")(x)
        x, gate = jnp.split(x, 2, axis=1)
        x, cache = self._convolve(x, cache, spans)
        y, cache = self._scan(x, cache, spans)
        out = Linear(
            spec.hidden_size, spec.inner_size, self.dtype, spec.proj_bias, init_std=self.out_std, name="out_proj"
        )
        return out(gated(y, gate).astype(self.dtype)), cache

    def _convolve(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        shape = (spec.inner_size, spec.conv_kernel)
        weight = parameter(self, "conv_weight", uniform(spec.conv_kernel**-0.5), shape, self.dtype)
        bias = parameter(self, "conv_bias", nn.initializers.zeros, shape[:1], self.dtype) if spec.conv_bias else None
        window, base = cache.open(self.layer_id, "conv")
        x, window = causal_conv(x, weight, bias, window, spans, activation="silu", base=base)
        return x, cache.put(self.layer_id, "conv", window)

    def _scan(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec, inner = self.spec, (self.spec.inner_size,)
        width = spec.dt_rank + 2 * spec.state_size
        projected = Linear(width, spec.inner_size, self.dtype, name="x_proj", exact=True)(x)
        parts = jnp.split(projected, [spec.dt_rank, spec.dt_rank + spec.state_size], axis=1)
        dt, B, C = (self._normalise(a, name) for a, name in zip(parts, NORMED, strict=True))
        dt = Linear(spec.inner_size, spec.dt_rank, self.dtype, name="dt_proj", exact=True)(dt)
        dt_bias = parameter(self, "dt_bias", inverse_softplus_of_log_uniform(*spec.dt_init), inner, jnp.float32)
        dt = step_size(dt, dt_bias, (0.0, float("inf")), spans)
        A = -jnp.exp(parameter(self, "A_log", _log_of_count, (*inner, spec.state_size), jnp.float32))
        D = parameter(self, "D", nn.initializers.ones, inner, jnp.float32)
        state, base = cache.open(self.layer_id, "ssm")
        y, state = selective_scan(x, dt, A, B, C, D, state, spans, base=base)
        return y, cache.put(self.layer_id, "ssm", state)

    def _normalise(self, x: Array, name: str) -> Array:
        if self.spec.norm == "weighted":
            return RMSNorm(x.shape[1], self.spec.norm_eps, self.dtype, name=f"{name}_norm")(x)
        if self.spec.norm == "unit":
            return normalised(x.astype(jnp.float32), self.spec.norm_eps).astype(x.dtype)
        return x


def mamba1_names(hubs: tuple[str, ...], path: tuple[str, ...], spec: Mamba1Spec) -> list[TensorName]:
    """Tensors of one mixer; `hubs` are the spellings of its prefix in checkpoints."""
    places: dict[str, tuple[str, ...]] = {"A_log": ("A_log",), "D": ("D",)}
    places |= {"conv1d.weight": ("conv_weight",), "dt_proj.bias": ("dt_bias",)}
    places |= {f"{proj}.weight": (proj, "weight") for proj in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    if spec.conv_bias:
        places["conv1d.bias"] = ("conv_bias",)
    if spec.proj_bias:
        places |= {f"{proj}.bias": (proj, "bias") for proj in ("in_proj", "out_proj")}
    if spec.norm == "weighted":
        places |= {f"{name}_layernorm.weight": (f"{name}_norm", "weight") for name in NORMED}
    in_file = {"conv1d.weight": (spec.inner_size, 1, spec.conv_kernel)}
    return [
        TensorName(tuple(f"{hub}.{name}" for hub in hubs), (*path, *at), file_shape=in_file.get(name))
        for name, at in places.items()
    ]


def _log_of_count(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """log of 1, 2, ... N for every channel (S4D-Real), as the paper's code has it."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[1] + 1, dtype=dtype)), shape)
