"""causal_conv in plain JAX: all tokens at once, then one window written per sequence, in place."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.spans import Spans


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    window: Array | None,
    spans: Spans,
    *,
    activation: Literal["silu"] | None = "silu",
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.causal_conv.causal_conv`."""
    if activation not in ("silu", None):
        raise NotImplementedError(f"activation {activation!r}: causal_conv knows 'silu' and None")
    if weight.shape[1] < 2:
        raise NotImplementedError(f"weight {weight.shape}: a convolution of fewer than 2 taps keeps no window")
    if (window is None) != (spans.kind == "dense"):
        raise NotImplementedError(f"window is {'None' if window is None else 'given'} with {spans.kind!r} spans")
    taps = weight.astype(jnp.float32).T  # [K, D]

    def finish(y: Array) -> Array:
        y = y if bias is None else y + bias.astype(jnp.float32)
        return (jax.nn.silu(y) if activation == "silu" else y).astype(x.dtype)

    if window is None:
        dense = x.reshape(spans.num_seqs, -1, x.shape[1])  # [S, L, D]
        return finish(_shifted_sum(dense, taps)).reshape(x.shape), None
    # [S, K, D], the inputs before each sequence's first token: read before anything is written.
    kept = jnp.where(spans.first_pos[:, None, None] > 0, window[base + spans.read_slot], 0)
    if spans.kind == "decode":
        before = jnp.sum(kept[:, 1:].astype(jnp.float32) * taps[:-1], axis=1)
        y, starts = finish(before + x.astype(jnp.float32) * taps[-1]), None
    else:
        y, starts = finish(_shifted_sum(x, taps)), finish(_starts(x, kept, taps, spans))
    return _write(y, starts, x, kept, window, spans, base)


def _shifted_sum(x: Array, taps: Array) -> Array:
    """Convolution of x [..., T, D] along T with zeros before its start, in float32."""
    K, T = taps.shape[0], x.shape[-2]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(K - 1, 0), (0, 0)]).astype(jnp.float32)
    return sum(padded[..., k : k + T, :] * taps[k] for k in range(K))  # pyright: ignore[reportReturnType]


def _starts(x: Array, kept: Array, taps: Array, spans: Spans) -> Array:
    """[S, K-1, D]: convolution at the first K-1 tokens of each sequence, those that reach back into `kept`."""
    K = taps.shape[0]
    first = spans.query_start[:-1, None] + jnp.arange(K - 1, dtype=jnp.int32)
    tokens = x[jnp.minimum(first, x.shape[0] - 1)]  # past a sequence's end: not used
    inputs = jnp.concatenate([kept[:, 1:].astype(jnp.float32), tokens.astype(jnp.float32)], axis=1)
    return sum(inputs[:, k : k + K - 1] * taps[k] for k in range(K))  # pyright: ignore[reportReturnType]


def _write(
    y: Array, starts: Array | None, x: Array, kept: Array, window: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """y with each sequence's first tokens replaced by `starts`, and the window array with the last K inputs of
    each sequence, at its end and at its snapshots. One loop that updates both in place."""
    (T, D), (_, K, _), S = y.shape, window.shape, spans.num_seqs
    seqs = jnp.concatenate([jnp.arange(S, dtype=jnp.int32), spans.chunk_seq])
    ends = jnp.concatenate([spans.query_start[1:], spans.chunk_start + spans.chunk_len])
    slots = jnp.concatenate([spans.write_slot, spans.chunk_snapshot])
    used = jnp.sum(spans.query_start[:-1] < spans.num_tokens)  # sequences up to the last that has tokens
    count = jnp.where(spans.num_snapshots > 0, S + spans.num_chunks, used)
    recent, span = jnp.arange(K, dtype=jnp.int32), min(K - 1, T)

    def entry(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, window = carry
        seq, end = seqs[i], ends[i]
        start = spans.query_start[seq]
        token = end - K + recent  # [K]
        older = kept[seq, jnp.minimum(recent + end - start, K - 1)]
        inputs = jnp.where((token >= start)[:, None], x[jnp.maximum(token, 0)].astype(window.dtype), older)
        window = lax.dynamic_update_slice(window, inputs[None], (base + slots[i], 0, 0))
        if starts is None:
            return y, window
        at = jnp.minimum(start, T - span)
        offset = at + jnp.arange(span, dtype=jnp.int32) - start
        rows = lax.dynamic_slice(y, (at, 0), (span, D))
        own = (offset >= 0) & (offset < end - start)
        rows = jnp.where(own[:, None], starts[seq, jnp.maximum(offset, 0)], rows)
        return lax.dynamic_update_slice(y, rows, (at, 0)), window

    return lax.fori_loop(0, count, entry, (y, window))
