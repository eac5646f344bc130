"""Mamba1: the selective state space mixer with a decay per channel and state (Gu and Dao 2023, "Mamba")."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.mamba2 import CHANNELS, step_size
from jhybrid.layers.norm import RMSNorm, gated, normalised
from jhybrid.layers.parameter import inverse_softplus_of_log_uniform, parameter, uniform
from jhybrid.mesh import Layout, Piece, over_shards, shards, split
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

    @property
    def shards(self) -> int:
        """Among how many the channels are shared out."""
        return shards("channels", self.inner_size)

    def parts(self, state_dtype: str, conv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per slot."""
        return (
            Part("conv", "slot", (self.conv_kernel, self.inner_size), conv_dtype, shards=self.shards),
            Part("ssm", "slot", (self.state_size, self.inner_size), state_dtype, shards=self.shards),
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
        spec, inner = self.spec, self.spec.inner_size
        layout = Layout(spec.shards, pieces=(Piece(inner), Piece(inner)))
        in_proj = Linear(2 * inner, spec.hidden_size, self.dtype, spec.proj_bias, layout=layout, name="in_proj")
        x, gate = split(in_proj(x), (inner, inner), spec.shards)
        x, cache = self._convolve(x, cache, spans)
        y, cache = self._scan(x, cache, spans)
        out = Linear(
            spec.hidden_size,
            inner,
            self.dtype,
            spec.proj_bias,
            init_std=self.out_std,
            layout=Layout(spec.shards, axis=1),
            name="out_proj",
        )
        return out(gated(y, gate).astype(self.dtype)), cache

    def _convolve(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        shape, layout = (spec.inner_size, spec.conv_kernel), Layout(spec.shards)
        weight = parameter(self, "conv_weight", uniform(spec.conv_kernel**-0.5), shape, self.dtype, layout)
        bias = None
        if spec.conv_bias:
            bias = parameter(self, "conv_bias", nn.initializers.zeros, shape[:1], self.dtype, layout)
        window, base = cache.open(self.layer_id, "conv")
        convolve = over_shards(partial(causal_conv, activation="silu", base=base), spec.shards, *CHANNELS)
        x, window = convolve(x, weight, bias, window, spans)
        return x, cache.put(self.layer_id, "conv", window)

    def _scan(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec, inner = self.spec, (self.spec.inner_size,)
        width = spec.dt_rank + 2 * spec.state_size
        layout = Layout(spec.shards)
        across = Layout(spec.shards, axis=1)
        projected = Linear(width, spec.inner_size, self.dtype, name="x_proj", exact=True, layout=across)(x)
        parts = jnp.split(projected, [spec.dt_rank, spec.dt_rank + spec.state_size], axis=1)
        dt, B, C = (self._normalise(a, name) for a, name in zip(parts, NORMED, strict=True))
        dt = Linear(spec.inner_size, spec.dt_rank, self.dtype, name="dt_proj", exact=True, layout=layout)(dt)
        dt_bias = parameter(self, "dt_bias", inverse_softplus_of_log_uniform(*spec.dt_init), inner, jnp.float32, layout)
        dt = step_size(dt, dt_bias, (0.0, float("inf")), spans)
        A = -jnp.exp(parameter(self, "A_log", _log_of_count, (*inner, spec.state_size), jnp.float32, layout))
        D = parameter(self, "D", nn.initializers.ones, inner, jnp.float32, layout)
        state, base = cache.open(self.layer_id, "ssm")
        axes = (1, 1, 0, None, None, 0, 2, None), (1, 2)
        y, state = over_shards(partial(selective_scan, base=base), spec.shards, *axes)(x, dt, A, B, C, D, state, spans)
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
