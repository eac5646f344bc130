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
    if (window is None) != (spans.kind == "dense"):
        raise NotImplementedError(f"window is {'None' if window is None else 'given'} with {spans.kind!r} spans")
    taps = weight.astype(jnp.float32).T  # [K, D]
    if window is None:
        y = _dense(x, taps, spans)
    else:
        # [S, K, D], the inputs before each sequence's first token
        kept = jnp.where(spans.first_pos[:, None, None] > 0, window[base + spans.read_slot], 0)
        y = (_decode if spans.kind == "decode" else _ragged)(x, kept, taps, spans)
        window = _write_windows(x, kept, window, spans, base)
    y = y if bias is None else y + bias.astype(jnp.float32)
    y = jax.nn.silu(y) if activation == "silu" else y
    return y.astype(x.dtype), window


def _dense(x: Array, taps: Array, spans: Spans) -> Array:
    """[T, D] of S whole sequences of T // S tokens."""
    K, length = taps.shape[0], x.shape[0] // spans.num_seqs
    padded = jnp.pad(x.reshape(spans.num_seqs, length, -1), [(0, 0), (K - 1, 0), (0, 0)]).astype(jnp.float32)
    return sum(padded[:, k : k + length] * taps[k] for k in range(K)).reshape(x.shape)  # pyright: ignore


def _decode(x: Array, kept: Array, taps: Array, spans: Spans) -> Array:
    """[T, D] of one token per sequence."""
    before = jnp.sum(kept[:, 1:].astype(jnp.float32) * taps[:-1], axis=1)
    return before + x.astype(jnp.float32) * taps[-1]


def _ragged(x: Array, kept: Array, taps: Array, spans: Spans) -> Array:
    """[T, D] of packed sequences: taps within this step, plus those that reach back into `kept`."""
    (T, _), K = x.shape, taps.shape[0]
    offset = jnp.arange(T, dtype=jnp.int32) - spans.query_start[spans.token_seq]
    padded = jnp.pad(x, [(K - 1, 0), (0, 0)]).astype(jnp.float32)
    y = x.astype(jnp.float32) * taps[-1]
    for back in range(1, K):
        earlier = padded[K - 1 - back : K - 1 - back + T]
        y = y + jnp.where((offset >= back)[:, None], earlier, 0.0) * taps[K - 1 - back]
    # Token o < K-1 of a sequence meets kept[o + 1 + k] with tap k.
    reach = jnp.pad(kept[:, 1:], [(0, 0), (0, K - 2), (0, 0)]).astype(jnp.float32)
    before = sum(reach[:, k : k + K - 1] * taps[k] for k in range(K - 1))  # [S, K-1, D]
    before = before[spans.token_seq, jnp.minimum(offset, K - 2)]  # pyright: ignore
    return y + jnp.where((offset < K - 1)[:, None], before, 0.0)


def _write_windows(x: Array, kept: Array, window: Array, spans: Spans, base: int | Array) -> Array:
    """The window array with each sequence's last K inputs, at its end and at its snapshots, written in place."""
    _, K, D = window.shape
    x = jnp.pad(x, [(K, 0), (0, 0)])
    kept = jnp.pad(kept, [(0, 0), (0, K), (0, 0)])  # [S, 2K, D]
    rows = jnp.arange(K, dtype=jnp.int32)[:, None]

    def write(window: Array, seq: Array, end: Array, slot: Array) -> Array:
        length = jnp.minimum(end - spans.query_start[seq], K)
        recent = lax.dynamic_slice(x, (end, 0), (K, D))  # tokens end - K .. end - 1
        older = lax.dynamic_slice(kept, (seq, length, 0), (1, K, D))[0]
        inputs = jnp.where(rows >= K - length, recent.astype(window.dtype), older)
        return lax.dynamic_update_slice(window, inputs[None], (base + slot, 0, 0))

    def sequence(seq: Array, window: Array) -> Array:
        return write(window, seq, spans.query_start[seq + 1], spans.write_slot[seq])

    def chunk(c: Array, window: Array) -> Array:
        return write(window, spans.chunk_seq[c], spans.chunk_start[c] + spans.chunk_len[c], spans.chunk_snapshot[c])

    used = jnp.sum(spans.query_start[:-1] < spans.num_tokens)  # sequences up to the last that has tokens
    window = lax.fori_loop(0, used, sequence, window)
    return lax.fori_loop(0, jnp.where(spans.num_snapshots > 0, spans.num_chunks, 0), chunk, window)
