"""Mamba2: the selective state space mixer with scalar decay per head (Dao and Gu 2024, "Transformers are SSMs")."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.norm import GatedRMSNorm, gated
from jhybrid.layers.parameter import inverse_softplus_of_log_uniform, log_of_uniform, parameter, uniform
from jhybrid.mesh import Layout, Piece, over_shards, shards, split
from jhybrid.weights.names import TensorName
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.spans import Spans
from kernels_pallas.ssd import ssd

CHANNELS = (1, 0, 0, 2, None), (1, 2)
"""Axes of the arguments and results of `causal_conv` that consist of channels."""


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
        """Channels that pass the convolution, as checkpoints have them: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def shards(self) -> int:
        """Among how many the heads are shared out."""
        return shards("heads", self.num_heads, self.num_groups)

    @property
    def pieces(self) -> dict[str, Piece]:
        """The rows of `in_proj`. Where there are more shards than groups, B and C are held once for each shard."""
        heads = Piece(self.num_heads, self.head_dim)
        groups = Piece(self.num_groups, self.state_size, max(1, self.shards // self.num_groups))
        return {"z": heads, "x": heads, "B": groups, "C": groups, "dt": Piece(self.num_heads)}

    @property
    def conv_layout(self) -> Layout:
        """Of the channels that pass the convolution."""
        return Layout(self.shards, pieces=tuple(self.pieces[part] for part in ("x", "B", "C")))

    def parts(self, state_dtype: str, conv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per slot."""
        window = (self.conv_kernel, self.conv_layout.held)
        state = (self.state_size, self.inner_size)
        return (
            Part("conv", "slot", window, conv_dtype, shards=self.shards),
            Part("ssm", "slot", state, state_dtype, vector=self.head_dim, shards=self.shards),
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
        layout = Layout(spec.shards, pieces=tuple(spec.pieces.values()))
        in_proj = Linear(layout.held, spec.hidden_size, self.dtype, spec.proj_bias, layout=layout, name="in_proj")
        projected = in_proj(x)
        if spec.projected_multipliers is not None:
            sizes = [piece.rows for piece in layout.pieces]
            by_row = layout.arranged(np.repeat(spec.projected_multipliers, sizes))
            projected = projected * by_row.astype(self.dtype)
        widths = (spec.inner_size, spec.conv_layout.held, spec.num_heads)
        gate, xBC, dt = split(projected, widths, spec.shards)
        xBC, cache = self._convolve(xBC, cache, spans)
        init = inverse_softplus_of_log_uniform(*spec.dt_init)
        dt_bias = parameter(self, "dt_bias", init, dt.shape[1:], jnp.float32, Layout(spec.shards))
        y, cache = self._scan(xBC, step_size(dt, dt_bias, spec.dt_limit, spans), cache, spans)
        if spec.norm_groups is None:
            y = gated(y, gate).astype(self.dtype)
        else:
            sizes = (spec.inner_size, spec.norm_groups, spec.norm_eps, self.dtype)
            y = GatedRMSNorm(*sizes, spec.norm_before_gate, name="norm")(y, gate)
        out = Linear(
            spec.hidden_size,
            spec.inner_size,
            self.dtype,
            spec.proj_bias,
            init_std=self.out_std,
            layout=Layout(spec.shards, axis=1),
            name="out_proj",
        )
        return out(y), cache

    def _convolve(self, xBC: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        bound = spec.conv_kernel**-0.5  # depthwise: the fan-in is the kernel alone
        layout = spec.conv_layout
        weight = parameter(self, "conv_weight", uniform(bound), (layout.held, spec.conv_kernel), self.dtype, layout)
        bias = None
        if spec.conv_bias:
            bias = parameter(self, "conv_bias", nn.initializers.zeros, (layout.held,), self.dtype, layout)
        window, base = cache.open(self.layer_id, "conv")
        convolve = over_shards(partial(causal_conv, activation="silu", base=base), spec.shards, *CHANNELS)
        xBC, window = convolve(xBC, weight, bias, window, spans)
        return xBC, cache.put(self.layer_id, "conv", window)

    def _scan(self, xBC: Array, dt: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        heads, layout = (spec.num_heads,), Layout(spec.shards)
        A = -jnp.exp(parameter(self, "A_log", log_of_uniform(1.0, 16.0), heads, jnp.float32, layout))
        D = parameter(self, "D", nn.initializers.ones, heads, jnp.float32, layout)
        x, B, C = split(xBC, [piece.held for piece in spec.conv_layout.pieces], spec.shards)
        x = x.reshape(len(x), spec.num_heads, spec.head_dim)  # [T, H, P]
        B, C = (a.reshape(len(x), -1, spec.state_size) for a in (B, C))  # [T, G, N]
        state, base = cache.open(self.layer_id, "ssm")
        scan = over_shards(partial(ssd, base=base), spec.shards, (1, 1, 0, 1, 1, 0, 2, None), (1, 2))
        y, state = scan(x, dt, A, B, C, D, state, spans)
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
