"""Attention: grouped-query causal attention with one fused q/k/v projection, with or without rotary positions."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.rope import Rope
from jhybrid.weights.names import TensorName
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and switches of an attention mixer; all full-attention layers of a model share one."""

    hidden_size: int  # M
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # Dh
    scale: float
    rope: Rope | None = None  # None: no positions at all (NoPE)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None  # RMSNorm of each q and k head
    sliding_window: int | None = None

    def parts(self, page_size: int, kv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per page: K of head h at 2h, V at 2h + 1."""
        return (Part("kv", "page", (page_size, 2 * self.num_kv_heads, self.head_dim), kv_dtype),)


class Attention(nn.Module):
    """Parameters: `qkv_proj` [(Hq + 2 Hkv) Dh, M], `o_proj` [M, Hq Dh], `q_norm` and `k_norm` [Dh] where asked.
    Cache part: `kv`.
    """

    spec: AttentionSpec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        spec = self.spec
        queries, width = spec.num_heads, spec.num_heads + 2 * spec.num_kv_heads
        qkv = Linear(width * spec.head_dim, spec.hidden_size, self.dtype, spec.qkv_bias, name="qkv_proj")(x)
        qkv = qkv.reshape(-1, width, spec.head_dim)  # [T, Hq + 2 Hkv, Dh]
        q, k, v = jnp.split(qkv, [queries, queries + spec.num_kv_heads], axis=1)
        if spec.qk_norm_eps is not None:
            q = RMSNorm(spec.head_dim, spec.qk_norm_eps, self.dtype, name="q_norm")(q)
            k = RMSNorm(spec.head_dim, spec.qk_norm_eps, self.dtype, name="k_norm")(k)
        if spec.rope is not None:
            positions = spans.positions()
            q, k = spec.rope(q, positions), spec.rope(k, positions)
        pages, base = cache.open(self.layer_id, "kv")
        o, pages = paged_attention(
            q, k, v, pages, spans, scale=spec.scale, sliding_window=spec.sliding_window, base=base
        )
        cache = cache.put(self.layer_id, "kv", pages)
        out = Linear(
            spec.hidden_size,
            queries * spec.head_dim,
            self.dtype,
            spec.out_bias,
            init_std=self.out_std,
            name="o_proj",
        )
        return out(o.reshape(-1, queries * spec.head_dim)), cache  # [T, Hq * Dh] -> [T, M]


def attention_names(hubs: tuple[str, ...], path: tuple[str, ...], spec: AttentionSpec) -> list[TensorName]:
    """Tensors of one mixer; `hubs` are the spellings of its prefix in checkpoints."""

    def spell(name: str) -> tuple[str, ...]:
        return tuple(f"{hub}.{name}" for hub in hubs)

    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
    names = []
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        row = 0
        for name, count in heads.items():
            rows = (row, row + count * spec.head_dim)
            names.append(TensorName(spell(f"{name}.{kind}"), (*path, "qkv_proj", kind), rows=rows))
            row = rows[1]
    for kind in ("weight", "bias") if spec.out_bias else ("weight",):
        names.append(TensorName(spell(f"o_proj.{kind}"), (*path, "o_proj", kind)))
    if spec.qk_norm_eps is not None:
        names += [TensorName(spell(f"{n}.weight"), (*path, n, "weight")) for n in ("q_norm", "k_norm")]
    return names
