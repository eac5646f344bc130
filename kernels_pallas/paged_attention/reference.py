"""paged_attention as it is defined: token by token, float32, over the whole context at once."""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.spans import Spans
from kernels_pallas.words import from_words, to_words


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
    """See the package."""
    group = q.shape[1] // k.shape[1]
    position, valid, tokens = spans.positions(), spans.token_valid(), q.shape[0]

    def row(t: Array, page: Array) -> Array:
        return base + spans.page_table[spans.token_seq[t], page]

    if pages is not None:
        page_size = pages.shape[1]

        def append(t: Array, pages: Array) -> Array:
            parts = [k[t]] if v is None else [k[t], v[t]]
            new = jnp.stack(parts, axis=1).reshape(-1)  # [2 Hkv Dh]: K, V of head 0, then of 1
            place = row(t, position[t] // page_size), position[t] % page_size
            return pages.at[place].set(to_words(new, pages.dtype))

        pages = lax.fori_loop(0, spans.num_tokens, append, pages)

    def attend(t: Array) -> Array:
        if pages is None:
            at = jnp.arange(tokens // spans.num_seqs)
            start = spans.query_start[spans.token_seq[t]]
            keys, values = (a[start + at].astype(jnp.float32) for a in (k, k if v is None else v))
        else:
            at = jnp.arange(spans.page_table.shape[1] * pages.shape[1])
            held = from_words(pages[row(t, at // pages.shape[1]), at % pages.shape[1]])
            held = held.reshape(len(at), -1, k.shape[2])  # [context, Hkv or 2 Hkv, Dh]
            keys, values = (held, held) if v is None else (held[:, 0::2], held[:, 1::2])  # [context, Hkv, Dh]
        seen = (at <= position[t]) & valid[t]
        if sliding_window is not None:
            seen &= at > position[t] - sliding_window
        keys = jnp.repeat(jnp.where(seen[:, None, None], keys, 0.0), group, axis=1)  # [context, Hq, Dh]
        values = jnp.repeat(jnp.where(seen[:, None, None], values, 0.0), group, axis=1)
        scores = jnp.einsum("hd,chd->hc", q[t].astype(jnp.float32), keys, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
        weights = weights / weights.sum(axis=1, keepdims=True)
        return jnp.where(valid[t], jnp.einsum("hc,chd->hd", weights, values, precision="highest"), 0.0)

    return lax.map(attend, jnp.arange(tokens)).astype(q.dtype), pages
