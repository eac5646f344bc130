"""paged_attention in plain JAX: what CPU runs, and any device without a kernel of its own."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.paged_attention.append import append
from kernels_pallas.spans import Spans
from kernels_pallas.words import from_words

BLOCK_TOKENS = 128  # of the cache read at a time on CPU
FEW_TOKENS = 8  # of a chunk that gets a small query tile
MASKED = -1e30  # finite: a block that is wholly masked for a row must not make NaN of its running maximum


@dataclass(frozen=True)
class Rule:
    """Which positions a token attends to, and how scores are shaped."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None

    def scores(self, raw: Array) -> Array:
        scaled = raw * self.scale
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def sees(self, query: Array, key: Array) -> Array:
        """Bool, broadcast: whether the token at position `query` attends to position `key`."""
        seen = key <= query
        return seen if self.sliding_window is None else seen & (key > query - self.sliding_window)


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
    """See the package. Work and reads follow the true context lengths; the cache is updated in place if donated."""
    rule = Rule(scale, sliding_window, soft_cap)
    if pages is None:
        return _whole_sequences(q, k, k if v is None else v, spans.num_seqs, rule), None
    pages = append(k, v, pages, spans, base)
    queries = q.astype(jnp.float32)
    o = jnp.zeros_like(queries)
    if spans.kind == "decode":
        tiles = [1]
    else:
        # Mixed and verifying steps have many chunks of one or a few tokens; full tiles take 2.4 times as long for 5.
        most = min(spans.chunk_size, q.shape[0])
        tiles = sorted({min(FEW_TOKENS, most), most})
    for longer_than, tile in zip([0, *tiles], tiles, strict=False):
        sizes = {"kv_heads": k.shape[1], "tile": tile, "longer_than": longer_than}
        o = _attend_chunks(queries, pages, spans, base, rule, o, **sizes)
    return o.astype(q.dtype), pages


def _whole_sequences(q: Array, k: Array, v: Array, num_seqs: int, rule: Rule) -> Array:
    """Causal attention over `num_seqs` sequences of equal length with no cache; differentiable."""
    tokens, heads, dim = q.shape
    kv_heads, length = k.shape[1], tokens // num_seqs
    queries = q.astype(jnp.float32).reshape(num_seqs, length, kv_heads, heads // kv_heads, dim)
    keys = k.astype(jnp.float32).reshape(num_seqs, length, kv_heads, dim)
    values = v.astype(jnp.float32).reshape(num_seqs, length, kv_heads, dim)
    at = jnp.arange(length)
    scores = rule.scores(jnp.einsum("sqhgd,skhd->shgqk", queries, keys))
    weights = jax.nn.softmax(jnp.where(rule.sees(at[:, None], at), scores, MASKED), axis=-1)
    return jnp.einsum("shgqk,skhd->sqhgd", weights, values).reshape(q.shape).astype(q.dtype)


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
) -> Array:
    """`o` [T, Hq, Dh] with the rows of every chunk of `longer_than < tokens <= tile` filled in."""
    tokens = q.shape[0]
    chunks = spans.chunk_len.shape[0]
    index = jnp.arange(chunks, dtype=jnp.int32)
    wanted = (index < spans.num_chunks) & (spans.chunk_len > longer_than) & (spans.chunk_len <= tile)
    # following[c]: the first wanted chunk at or after c
    following = lax.cummin(jnp.where(wanted, index, chunks), reverse=True)
    following = jnp.append(following, jnp.int32(chunks))
    room = ((0, tile - 1), (0, 0), (0, 0))  # a tile may reach past the last token
    q, o = jnp.pad(q, room), jnp.pad(o, room)
    table = whole_blocks(spans.page_table, pages.shape[1], BLOCK_TOKENS)

    def attend(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        chunk, o = carry
        start, seq = spans.chunk_start[chunk], spans.chunk_seq[chunk]
        first = spans.first_pos[seq] + start - spans.query_start[seq]
        rows = lax.dynamic_slice_in_dim(q, start, tile)
        got = attend_tile(rows, pages, table[seq] + base, first, spans.chunk_len[chunk], rule, kv_heads)
        old = lax.dynamic_slice_in_dim(o, start, tile)
        mine = jnp.arange(tile) < spans.chunk_len[chunk]
        new = jnp.where(mine[:, None, None], got, old)
        return following[chunk + 1], lax.dynamic_update_slice_in_dim(o, new, start, 0)

    _, o = lax.while_loop(lambda carry: carry[0] < chunks, attend, (following[0], o))
    return o[:tokens]


def whole_blocks(table: Array, page_size: int, block_tokens: int) -> Array:
    """[S, W'] page table, W' a multiple of the pages of a block; the added entries are past every context."""
    per_block = min(max(1, block_tokens // page_size), table.shape[1])
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_block)))


def attend_tile(
    q: Array,
    pages: Array,
    rows: Array,
    first: Array,
    count: Array,
    rule: Rule,
    kv_heads: int,
    block_tokens: int = BLOCK_TOKENS,
) -> Array:
    """Attention of one chunk: q [tile, Hq, Dh] float32 at positions `first...`, of which `count` are real.

    `rows` [W'] are the rows of the sequence's pages. Online softmax over blocks of pages, from the first that
    any of the tokens sees to the last.
    """
    tile, heads, dim = q.shape
    page_size, held_per_head = pages.shape[1], pages.shape[2] // dim // kv_heads  # key and value, or one for both
    per_block = min(max(1, block_tokens // page_size), rows.shape[0])
    block = per_block * page_size
    group = heads // kv_heads
    # [Hkv, tile * group, Dh]: query heads that share a key head are rows of one product
    queries = q.reshape(tile, kv_heads, group, dim).swapaxes(0, 1)
    queries = queries.reshape(kv_heads, tile * group, dim)
    position = jnp.repeat(first + jnp.arange(tile, dtype=jnp.int32), group)[:, None]
    last = first + count - 1

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, sums = state
        # Tied to the loop's index, lest XLA convert the whole cache to float32 ahead of the loop.
        cache, i = lax.optimization_barrier((pages, i))
        held = cache.at[lax.dynamic_slice_in_dim(rows, i * per_block, per_block)].get(mode="promise_in_bounds")
        # [1 or 2, Hkv, block, Dh]: copied once head by head, on CPU quicker than products over strided heads
        held = from_words(held).reshape(block, kv_heads, held_per_head, dim).transpose(2, 1, 0, 3)
        keys, values = held[0], held[-1]
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        # Rows that no token of the chunk sees may be NaN, and 0 * NaN is NaN.
        read = at <= last
        if rule.sliding_window is not None:
            read &= at > first - rule.sliding_window
        values = jnp.where(read[:, None], values, 0.0)
        scores = rule.scores(jnp.einsum("hqd,hkd->hqk", queries, keys))
        scores = jnp.where(rule.sees(position, at) & read, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights, fade = jnp.exp(scores - new_peak), jnp.exp(peak - new_peak)
        total = total * fade + weights.sum(axis=-1, keepdims=True)
        return new_peak, total, sums * fade + jnp.einsum("hqk,hkd->hqd", weights, values)

    begin = jnp.int32(0)
    if rule.sliding_window is not None:
        begin = jnp.maximum(first - rule.sliding_window + 1, 0) // block
    column = (kv_heads, tile * group, 1)
    start = (jnp.full(column, MASKED), jnp.zeros(column), jnp.zeros((kv_heads, tile * group, dim)))
    _, total, sums = lax.fori_loop(begin, last // block + 1, step, start)
    return (sums / total).reshape(kv_heads, tile, group, dim).swapaxes(0, 1).reshape(q.shape)
