"""LatentAttention: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads follow from one latent vector per token, which alone is kept in the cache. Its
projections are not applied to the cache but moved to the other side of the products (section 2.1.2): each head's
query is taken into the latent space, where all heads share one key, which is also the value, and what a head reads
there is projected after. Positions are those of the shared key alone, where there are any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.head_gate import HeadGate
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.parameter import parameter
from jhybrid.layers.rope import Rope
from jhybrid.mesh import Layout, over_shards, shards
from jhybrid.weights.names import TensorName
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.products import by_head
from kernels_pallas.spans import Spans

LATENT_EPS = 1e-6  # of the latent's norm; no config has it


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Sizes of the mixer; all its layers in a model share one."""

    hidden_size: int  # M
    num_heads: int  # Hq
    latent_size: int  # L
    own_key_dim: int  # of a head's key that follows from the latent
    shared_key_dim: int  # of the key that all heads share
    value_dim: int
    rope: Rope | None = None  # of the shared key, and of what each query has for it; None: no positions at all
    head_gated: bool = False  # the output of each head is multiplied by the sigmoid of one number

    @property
    def key_dim(self) -> int:
        """Width of a head's query."""
        return self.own_key_dim + self.shared_key_dim

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each part of `in_proj`, in order."""
        return {"q": self.num_heads * self.key_dim, "latent": self.latent_size + self.shared_key_dim}

    @property
    def shards(self) -> int:
        """Among how many the heads are shared out. All hold the latents, and compute the queries of all heads."""
        return shards("heads", self.num_heads)

    def parts(self, page_size: int, kv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per page: the latent and the shared key of each token, one row for all heads."""
        return (Part("kv", "page", (page_size, self.latent_size + self.shared_key_dim), kv_dtype),)


class LatentAttention(nn.Module):
    """Parameters: `in_proj` (rows queries | latent | shared key), `latent_norm` [L], `kv_proj` (rows of each head:
    its key, its value) [Hq (own key + value), L], `o_proj` [M, Hq value], and `gate_proj` [Hq, M] where asked. Cache
    part: `kv`.
    """

    spec: LatentAttentionSpec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        spec, sizes = self.spec, self.spec.sizes
        projected = Linear(sum(sizes.values()), spec.hidden_size, self.dtype, name="in_proj")(x)
        q, latent, shared = jnp.split(projected, [sizes["q"], sizes["q"] + spec.latent_size], axis=1)
        latent = RMSNorm(spec.latent_size, LATENT_EPS, self.dtype, name="latent_norm")(latent)
        to_key, to_value = self._head_projections()
        q, q_shared = jnp.split(q.reshape(-1, spec.num_heads, spec.key_dim), [spec.own_key_dim], axis=2)
        shared = shared[:, None]  # [T, 1, shared]
        if spec.rope is not None:
            positions = spans.positions()
            q_shared, shared = spec.rope(q_shared, positions), spec.rope(shared, positions)
        kept = jnp.concatenate([latent[:, None], shared], axis=2)  # [T, 1, L + shared]
        q = by_head("thk,hkl->thl", q, to_key)
        q = jnp.concatenate([q, q_shared.astype(jnp.float32)], axis=2)  # [T, Hq, L + shared]
        pages, base = cache.open(self.layer_id, "kv")
        attend = partial(paged_attention, scale=spec.key_dim**-0.5, base=base)
        axes = (1, None, None, None, None), (1, None)
        read, pages = over_shards(attend, spec.shards, *axes)(q, kept, None, pages, spans)
        cache = cache.put(self.layer_id, "kv", pages)
        read = read[..., : spec.latent_size].astype(self.dtype)
        o = by_head("thl,hvl->thv", read, to_value).astype(self.dtype)  # [T, Hq, value]
        if spec.head_gated:
            over = Layout(spec.shards)
            o = HeadGate(spec.hidden_size, spec.num_heads, self.dtype, over, name="gate_proj")(o, x)
        width = spec.num_heads * spec.value_dim
        across = Layout(spec.shards, axis=1)
        out = Linear(spec.hidden_size, width, self.dtype, init_std=self.out_std, layout=across, name="o_proj")
        return out(o.reshape(-1, width)), cache

    def _head_projections(self) -> tuple[Array, Array]:
        """From the latent to each head's key [Hq, own key, L], and to its value [Hq, value, L]."""
        spec = self.spec
        shape = (spec.num_heads * (spec.own_key_dim + spec.value_dim), spec.latent_size)
        weight = parameter(self, "kv_proj", nn.initializers.normal(INIT_STD), shape, self.dtype, Layout(spec.shards))
        by_head = weight.reshape(spec.num_heads, -1, spec.latent_size)
        return by_head[:, : spec.own_key_dim], by_head[:, spec.own_key_dim :]


def latent_attention_names(
    hub: str, path: tuple[str, ...], spec: LatentAttentionSpec, renamed: Mapping[str, str] | None = None
) -> list[TensorName]:
    """Tensors of one mixer; `hub` is its prefix in checkpoints, `renamed` what a family calls its `o_proj` or
    `gate_proj`.
    """
    queries, width = spec.sizes["q"], sum(spec.sizes.values())
    names = [
        TensorName((f"{hub}.q_proj.weight",), (*path, "in_proj", "weight"), rows=(0, queries)),
        TensorName((f"{hub}.kv_a_proj_with_mqa.weight",), (*path, "in_proj", "weight"), rows=(queries, width)),
        TensorName((f"{hub}.kv_a_layernorm.weight",), (*path, "latent_norm", "weight")),
        TensorName((f"{hub}.kv_b_proj.weight",), (*path, "kv_proj")),
    ]
    for module in ("o_proj", "gate_proj") if spec.head_gated else ("o_proj",):
        spelled = (renamed or {}).get(module, module)
        names.append(TensorName((f"{hub}.{spelled}.weight",), (*path, module, "weight")))
    return names
