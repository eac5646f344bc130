"""paged_attention in plain JAX for devices with thousands of lanes: many chunks at once, block by block of context."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.paged_attention.append import append
from kernels_pallas.paged_attention.xla import FEW_TOKENS, Rule, attend_tile, whole_blocks
from kernels_pallas.spans import Spans
from kernels_pallas.zeros import zeros_after

CHUNKS_AT_ONCE = 16
GATHERED_TOKENS = 1 << 15  # of the cache, of all chunks together: what is held beside it
MOST_BLOCK_TOKENS = 512


def paged_attention(
    q: Array,
    k: Array,
    v: Array | None,
    pages: Array | None,
    spans: Spans,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """See the package; dense spans are left to others."""
    if pages is None:
        raise NotImplementedError("dense spans")
    rule = Rule(scale, sliding_window, soft_cap)
    pages = append(k, v, pages, spans, base)
    queries = q.astype(jnp.float32)
    o = zeros_after(queries, q.shape)
    if spans.kind == "decode":
        tiles, at_once = [1], spans.num_seqs
    else:
        most = min(spans.chunk_size, q.shape[0])
        tiles, at_once = sorted({min(FEW_TOKENS, most), most}), min(CHUNKS_AT_ONCE, spans.chunk_len.shape[0])
    for longer_than, tile in zip([0, *tiles], tiles, strict=False):
        sizes = {"kv_heads": k.shape[1], "tile": tile, "longer_than": longer_than, "at_once": at_once}
        o = _attend_chunks(queries, pages, spans, base, rule, o, **sizes)
    return o.astype(q.dtype), pages


def _attend_chunks(
    q: Array,
    pages: Array,
    spans: Spans,
    base: int | Array,
    rule: Rule,
    o: Array,
    *,
    kv_heads: int,
    tile: int,
    longer_than: int,
    at_once: int,
) -> Array:
    """`o` [T, Hq, Dh] with the rows of every chunk of `longer_than < tokens <= tile`, `at_once` in each turn."""
    T, C = q.shape[0], spans.chunk_len.shape[0]
    wanted = (jnp.arange(C) < spans.num_chunks) & (spans.chunk_len > longer_than) & (spans.chunk_len <= tile)
    order = jnp.argsort(~wanted)  # wanted ones first, in order
    count = wanted.sum()
    block = max(1, min(MOST_BLOCK_TOKENS, GATHERED_TOKENS // at_once))
    table = whole_blocks(spans.page_table, pages.shape[1], block)
    attend = jax.vmap(partial(attend_tile, rule=rule, kv_heads=kv_heads, block_tokens=block), (0, None, 0, 0, 0))

    def some(i: Array, o: Array) -> Array:
        index = i * at_once + jnp.arange(at_once)
        chunk = order[jnp.minimum(index, C - 1)]
        length = jnp.where(index < count, spans.chunk_len[chunk], 0)
        start, seq = spans.chunk_start[chunk], spans.chunk_seq[chunk]
        first = spans.first_pos[seq] + start - spans.query_start[seq]
        tokens = start[:, None] + jnp.arange(tile)
        got = attend(q.at[tokens].get(mode="clip"), pages, table[seq] + base, first, length)
        mine = jnp.arange(tile) < length[:, None]
        return o.at[jnp.where(mine, tokens, T)].set(got, mode="drop")

    # A loop costs the host a round trip to the device.
    return some(jnp.int32(0), o) if at_once == C else lax.fori_loop(0, -(-count // at_once), some, o)
