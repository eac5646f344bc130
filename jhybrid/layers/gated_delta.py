"""GatedDelta: the mixer of the gated delta rule, with a decay per head (Gated DeltaNet) or per channel (Kimi Delta).

Sources: Yang et al. 2024, "Gated Delta Networks", section 3.4; Kimi Team 2025, "Kimi Linear", section 4.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.mamba2 import CHANNELS
from jhybrid.layers.norm import GatedRMSNorm
from jhybrid.layers.parameter import inverse_softplus_of_log_uniform, log_of_uniform, parameter, uniform
from jhybrid.mesh import Layout, Piece, on_all, over_shards, shards, split
from jhybrid.weights.names import FileRows, TensorName
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.gated_delta import gated_delta
from kernels_pallas.spans import Spans

KEY_EPS = 1e-6  # within the root of the length of keys and queries; no config has it


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Sizes and switches of the mixer; all layers of a model share one."""

    hidden_size: int  # M
    num_k_heads: int  # Hk
    num_v_heads: int  # H, a multiple of Hk
    k_dim: int  # dk
    v_dim: int  # dv
    conv_kernel: int  # K
    norm_eps: float
    channel_decay: bool = False  # a decay of each channel of a head's keys instead of one per head
    bottleneck: int | None = None  # through which decays and the gate are computed; None: directly
    least_log_decay: float | None = None  # decays approach its exponential, by a sigmoid; None: 0, by a softplus
    gate_activation: str = "silu"
    beta_scale: float = 1.0  # 2 lets the state's eigenvalues be negative

    @property
    def inner_size(self) -> int:
        """H * dv."""
        return self.num_v_heads * self.v_dim

    @property
    def decay_size(self) -> int:
        """Decays of a token: H, or H * dk."""
        return self.num_v_heads * (self.k_dim if self.channel_decay else 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each part of `in_proj`, in order; the first three pass the convolution."""
        keys = self.num_k_heads * self.k_dim
        return {"q": keys, "k": keys, "v": self.inner_size, "gate": self.bottleneck or self.inner_size}

    @property
    def control_sizes(self) -> dict[str, int]:
        """Rows of each part of `control_proj`, in order: what says how much is written, and how much forgotten."""
        return {"beta": self.num_v_heads, "decay": self.bottleneck or self.decay_size}

    @property
    def conv_size(self) -> int:
        """Channels that pass the convolution."""
        return sum(self.sizes[part] for part in ("q", "k", "v"))

    @property
    def shards(self) -> int:
        """Among how many the heads are shared out, and the bottleneck."""
        if self.bottleneck is not None and shards("channels", self.bottleneck) != shards("heads", self.num_v_heads):
            return 1
        return shards("heads", self.num_v_heads, self.num_k_heads)

    @property
    def pieces(self) -> dict[str, Piece]:
        """The rows of `in_proj`. Where there are more shards than key heads, these are held several times."""
        keys = Piece(self.num_k_heads, self.k_dim, max(1, self.shards // self.num_k_heads))
        values = Piece(self.num_v_heads, self.v_dim)
        return {"q": keys, "k": keys, "v": values, "gate": Piece(self.bottleneck) if self.bottleneck else values}

    @property
    def conv_layout(self) -> Layout:
        """Of the channels that pass the convolution."""
        return Layout(self.shards, pieces=tuple(self.pieces[part] for part in ("q", "k", "v")))

    def parts(self, state_dtype: str, conv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per slot."""
        state, over = (self.num_v_heads, self.k_dim, self.v_dim), self.shards
        return (
            Part("conv", "slot", (self.conv_kernel, self.conv_layout.held), conv_dtype, shards=over),
            Part("delta", "slot", state, state_dtype, vector=self.v_dim, shards=over, shared_axis=0),
        )


class GatedDelta(nn.Module):
    """Parameters: `in_proj` (rows q | k | v | gate), `control_proj` (rows beta | decay), `conv_weight` [D, K], `A_log`
    [H] and `dt_bias` [H] or, with decays per channel, [H dk], both float32, `norm` [dv], `out_proj`; with a bottleneck
    also `decay_proj` and `gate_proj`, out of it. Cache parts: `conv` and `delta`.
    """

    spec: GatedDeltaSpec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        spec = self.spec
        by_head, layout = Layout(spec.shards), Layout(spec.shards, pieces=tuple(spec.pieces.values()))
        projected = Linear(layout.held, spec.hidden_size, self.dtype, layout=layout, name="in_proj")(x)
        qkv, gate = split(projected, (spec.conv_layout.held, spec.pieces["gate"].held), spec.shards)
        sizes = spec.control_sizes.values()
        layout = Layout(spec.shards, pieces=tuple(map(Piece, sizes)))
        control = Linear(sum(sizes), spec.hidden_size, self.dtype, layout=layout, name="control_proj", exact=True)(x)
        beta, decay = split(control, tuple(sizes), spec.shards)
        if spec.bottleneck is not None:
            wide = (spec.inner_size, spec.bottleneck, self.dtype), (spec.decay_size, spec.bottleneck, self.dtype)
            gate = Linear(*wide[0], layout=by_head, name="gate_proj")(on_all(gate))
            decay = Linear(*wide[1], layout=by_head, name="decay_proj", exact=True)(on_all(decay))
        beta = jax.nn.sigmoid(beta.astype(jnp.float32)) * spec.beta_scale
        qkv, cache = self._convolve(qkv, cache, spans)
        o, cache = self._update(qkv, self._log_decay(decay), beta, cache, spans)  # [T, H, dv]
        norm = GatedRMSNorm(
            spec.v_dim,
            1,
            spec.norm_eps,
            self.dtype,
            norm_before_gate=True,
            activation=spec.gate_activation,
            name="norm",
        )
        o = norm(o, gate.reshape(o.shape)).reshape(-1, spec.inner_size)  # [T, H * dv]
        sizes, across = (spec.hidden_size, spec.inner_size), Layout(spec.shards, axis=1)
        out = Linear(*sizes, self.dtype, init_std=self.out_std, layout=across, name="out_proj")
        return out(o), cache

    def _convolve(self, qkv: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        spec = self.spec
        layout = spec.conv_layout
        shape = (layout.held, spec.conv_kernel)
        weight = parameter(self, "conv_weight", uniform(spec.conv_kernel**-0.5), shape, self.dtype, layout)
        window, base = cache.open(self.layer_id, "conv")
        convolve = over_shards(partial(causal_conv, activation="silu", base=base), spec.shards, *CHANNELS)
        qkv, window = convolve(qkv, weight, None, window, spans)
        return qkv, cache.put(self.layer_id, "conv", window)

    def _log_decay(self, decay: Array) -> Array:
        """[T, H] or [T, H, dk] float32: -exp(A_log) softplus(decay + dt_bias), or, with a bound,
        least_log_decay * sigmoid(exp(A_log) (decay + dt_bias)).
        """
        spec, layout = self.spec, Layout(self.spec.shards)
        heads = spec.num_v_heads
        A = jnp.exp(parameter(self, "A_log", log_of_uniform(1.0, 16.0), (heads,), jnp.float32, layout))
        init = inverse_softplus_of_log_uniform(0.001, 0.1)
        decay = decay.astype(jnp.float32) + parameter(self, "dt_bias", init, decay.shape[1:], jnp.float32, layout)
        if spec.channel_decay:
            A, decay = A[:, None], decay.reshape(-1, heads, spec.k_dim)
        if spec.least_log_decay is not None:
            return spec.least_log_decay * jax.nn.sigmoid(A * decay)
        return -A * jax.nn.softplus(decay)

    def _update(
        self, qkv: Array, log_decay: Array, beta: Array, cache: AnyCache, spans: Spans
    ) -> tuple[Array, AnyCache]:
        spec = self.spec
        widths = [piece.held for piece in spec.conv_layout.pieces]
        q, k, v = split(qkv, widths, spec.shards)
        q, k = (_unit_length(a.reshape(len(a), -1, spec.k_dim).astype(jnp.float32)) for a in (q, k))
        v = v.reshape(-1, spec.num_v_heads, spec.v_dim)
        state, base = cache.open(self.layer_id, "delta")
        update = over_shards(partial(gated_delta, base=base), spec.shards, (1, 1, 1, 1, 1, 1, None), (1, 1))
        q, k = (a.astype(self.dtype) for a in (q * spec.k_dim**-0.5, k))
        o, state = update(q, k, v, log_decay, beta, state, spans)
        return o, cache.put(self.layer_id, "delta", state)


def _unit_length(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + KEY_EPS)


def gated_delta_names(
    hubs: tuple[str, ...],
    path: tuple[str, ...],
    spec: GatedDeltaSpec,
    *,
    projections: Mapping[str, tuple[str, ...]],
    convolutions: Mapping[str, tuple[str, ...]],
    renamed: Mapping[str, str],
    interleaved: bool = False,
) -> list[TensorName]:
    """Tensors of one mixer; `hubs` are the spellings of its prefix in checkpoints.

    `projections` and `convolutions` say of each tensor of a checkpoint which parts (as in `GatedDeltaSpec.sizes` or
    `.control_sizes`) it holds, one after the other; `interleaved` ones hold them key head by key head. `renamed` says
    what the checkpoint calls `norm`, `out_proj`, `gate_proj` and `decay_proj`.
    """

    def spell(tensor: str) -> tuple[str, ...]:
        return tuple(f"{hub}.{tensor}" for hub in hubs)

    groups = spec.num_k_heads if interleaved else 1
    names = []
    for tensor, parts in projections.items():
        module, sizes = next(
            (m, sizes)
            for m, sizes in (("in_proj", spec.sizes), ("control_proj", spec.control_sizes))
            if set(parts) <= sizes.keys()
        )
        for rows, file_rows in _shared_rows(sizes, parts, groups):
            at = (*path, module, "weight")
            names.append(TensorName(spell(f"{tensor}.weight"), at, rows=rows, file_rows=file_rows))
    for tensor, parts in convolutions.items():
        shape = (sum(spec.sizes[part] for part in parts), 1, spec.conv_kernel)
        for rows, file_rows in _shared_rows(spec.sizes, parts, 1):
            at = (*path, "conv_weight")
            names.append(TensorName(spell(f"{tensor}.weight"), at, rows=rows, file_rows=file_rows, file_shape=shape))
    A_log = None if spec.bottleneck is None else (1, 1, spec.num_v_heads, 1)
    names.append(TensorName(spell("A_log"), (*path, "A_log"), file_shape=A_log))
    names.append(TensorName(spell("dt_bias"), (*path, "dt_bias")))
    modules = ("norm", "out_proj") if spec.bottleneck is None else ("norm", "out_proj", "gate_proj", "decay_proj")
    names += [TensorName(spell(f"{renamed.get(m, m)}.weight"), (*path, m, "weight")) for m in modules]
    return names


def _shared_rows(
    sizes: Mapping[str, int], parts: tuple[str, ...], groups: int
) -> Iterator[tuple[tuple[int, int], FileRows]]:
    """Of each part that a tensor holds: its rows in a projection of `sizes`, and those in the tensor."""
    order = list(sizes)
    total, done = sum(sizes[part] for part in parts) // groups, 0
    for part in parts:
        start = sum(sizes[earlier] for earlier in order[: order.index(part)])
        size = sizes[part] // groups
        yield (start, start + sizes[part]), FileRows(done, done + size, total, groups)
        done += size
