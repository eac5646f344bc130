"""Attention: grouped-query causal attention with one fused q/k/v projection, with or without rotary positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.head_gate import HeadGate
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.rope import Rope
from jhybrid.mesh import WHOLE, Layout, Piece, over_shards, shards, split
from jhybrid.weights.names import FileRows, TensorName
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.spans import Spans

KV_SCALE = "kv_scale"
"""Of keys and of values [2] float32: a parameter that there is only where a checkpoint brings it for 8-bit pages."""


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
    qk_norm_offset: float = 0.0  # of the weights of those norms
    qk_norm_whole: bool = False  # one norm over all heads of q, and one over those of k
    gated: bool = False  # the output of each head is multiplied by the sigmoid of a projection of its own
    head_gated: bool = False  # or by that of one number
    sliding_window: int | None = None
    out_size: int | None = None  # width of the output where it is not the hidden size

    @property
    def heads(self) -> dict[str, int]:
        """Heads of each part of `qkv_proj`, in order."""
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        return heads | {"gate": self.num_heads} if self.gated else heads

    @property
    def shards(self) -> int:
        """Among how many the heads are shared out."""
        return shards("heads", self.num_heads, self.num_kv_heads)

    @property
    def copies(self) -> int:
        """How often each head of K and V is held: once, unless there are more shards than these."""
        return max(1, self.shards // self.num_kv_heads)

    @property
    def layout(self) -> Layout:
        """Of `qkv_proj`."""
        copies = {"k": self.copies, "v": self.copies}
        pieces = (Piece(heads, self.head_dim, copies.get(part, 1)) for part, heads in self.heads.items())
        return Layout(self.shards, pieces=tuple(pieces))

    def parts(self, page_size: int, kv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per page: of each token K and V of head 0, then of 1, and so on."""
        width = 2 * self.num_kv_heads * self.copies * self.head_dim
        return (Part("kv", "page", (page_size, width), kv_dtype, shards=self.shards),)


class Attention(nn.Module):
    """Parameters: `qkv_proj` [(Hq + 2 Hkv) Dh, M], with Hq Dh more rows for the gate where asked, `o_proj` [M, Hq Dh],
    `q_norm` and `k_norm` [Dh], or [Hq Dh] and [Hkv Dh], and `gate_proj` [Hq, M], where asked. Cache part: `kv`.
    """

    spec: AttentionSpec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(
        self,
        x: Array,
        cache: AnyCache,
        spans: Spans,
        *,
        added: tuple[Array, ...] | None = None,
        layer_id: int | None = None,
    ) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]. A mixer that layers share is told by each its `layer_id`, and what is `added` to q, k
        and v [T, heads * Dh].
        """
        spec, layer_id = self.spec, self.layer_id if layer_id is None else layer_id
        layout = spec.layout
        proj = Linear(layout.held, spec.hidden_size, self.dtype, spec.qkv_bias, layout=layout, name="qkv_proj")
        parts = split(proj(x), [piece.held for piece in layout.pieces], spec.shards)
        if added is not None:
            parts = [part + more for part, more in zip(parts, added, strict=True)]
        q, k, v, *gate = (part.reshape(len(x), -1, spec.head_dim) for part in parts)  # [T, heads, Dh]
        q, k = self._normalise(q, "q_norm"), self._normalise(k, "k_norm", spec.copies)
        if spec.rope is not None:
            positions = spans.positions()
            q, k = spec.rope(q, positions), spec.rope(k, positions)
        scale = self.get_variable("params", KV_SCALE) if self.has_variable("params", KV_SCALE) else None
        if scale is not None:  # pages hold keys and values divided by it
            q, k, v = ((x * by).astype(x.dtype) for x, by in ((q, scale[0]), (k, 1 / scale[0]), (v, 1 / scale[1])))
        pages, base = cache.open(layer_id, "kv")
        attend = partial(paged_attention, scale=spec.scale, sliding_window=spec.sliding_window, base=base)
        o, pages = over_shards(attend, spec.shards, (1, 1, 1, 2, None), (1, 2))(q, k, v, pages, spans)
        cache = cache.put(layer_id, "kv", pages)
        if scale is not None:
            o = (o * scale[1]).astype(o.dtype)
        if spec.gated:
            o = o * jax.nn.sigmoid(gate[0])
        if spec.head_gated:
            over = Layout(spec.shards)
            o = HeadGate(spec.hidden_size, spec.num_heads, self.dtype, over, name="gate_proj")(o, x)
        width = spec.num_heads * spec.head_dim
        out = Linear(
            spec.out_size or spec.hidden_size,
            width,
            self.dtype,
            spec.out_bias,
            init_std=self.out_std,
            layout=Layout(spec.shards, axis=1),
            name="o_proj",
        )
        return out(o.reshape(-1, width)), cache  # [T, Hq * Dh] -> [T, M]

    def _normalise(self, heads: Array, name: str, copies: int = 1) -> Array:
        """q or k [T, heads, Dh], normalised where asked."""
        spec = self.spec
        if spec.qk_norm_eps is None:
            return heads
        layout = WHOLE
        if spec.qk_norm_whole:
            piece = Piece(heads.shape[1] // copies, spec.head_dim, copies)
            heads, layout = heads.reshape(len(heads), -1), Layout(spec.shards, pieces=(piece,))
        norm = RMSNorm(heads.shape[-1], spec.qk_norm_eps, self.dtype, spec.qk_norm_offset, layout, name=name)
        return norm(heads).reshape(len(heads), -1, spec.head_dim)


def attention_names(
    hubs: tuple[str, ...], path: tuple[str, ...], spec: AttentionSpec, renamed: Mapping[str, str] | None = None
) -> list[TensorName]:
    """Tensors of one mixer; `hubs` are the spellings of its prefix in checkpoints, `renamed` what a family calls
    its `o_proj`, `q_norm`, `k_norm` or `gate_proj`.
    """

    def spell(module: str, kind: str) -> tuple[str, ...]:
        return tuple(f"{hub}.{(renamed or {}).get(module, module)}.{kind}" for hub in hubs)

    rows, row = {}, 0
    for part, count in spec.heads.items():
        rows[part] = (row, row + count * spec.head_dim)
        row = rows[part][1]
    names = []
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        at = (*path, "qkv_proj", kind)
        if spec.gated:  # one tensor in the file, with each head's query before its gate
            for part, start in (("q", 0), ("gate", spec.head_dim)):
                share = FileRows(start, start + spec.head_dim, 2 * spec.head_dim, spec.num_heads)
                names.append(TensorName(spell("q_proj", kind), at, rows=rows[part], file_rows=share))
        whole = ("k", "v") if spec.gated else ("q", "k", "v")
        names += [TensorName(spell(f"{part}_proj", kind), at, rows=rows[part]) for part in whole]
    for kind in ("weight", "bias") if spec.out_bias else ("weight",):
        names.append(TensorName(spell("o_proj", kind), (*path, "o_proj", kind)))
    if spec.qk_norm_eps is not None:
        names += [TensorName(spell(n, "weight"), (*path, n, "weight")) for n in ("q_norm", "k_norm")]
    if spec.head_gated:
        names.append(TensorName(spell("gate_proj", "weight"), (*path, "gate_proj", "weight")))
    return names
