"""causal_conv in plain JAX: all tokens at once, then one window written per sequence, in place."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.rows import copy_row, load_row, start_slots
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans

Finish = Callable[[Array], Array]  # adds the bias, applies the activation, gives the output's dtype


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
    # [K, D] by a product with the identity: XLA keeps it in memory, where a transposition would become strided
    # reads in every loop that uses the taps.
    taps = jnp.dot(jnp.eye(weight.shape[1]), weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)

    def finish(y: Array) -> Array:
        y = y if bias is None else y + bias.astype(jnp.float32)
        return (jax.nn.silu(y) if activation == "silu" else y).astype(x.dtype)

    if window is None:
        dense = jnp.pad(x.reshape(spans.num_seqs, -1, x.shape[1]), [(0, 0), (weight.shape[1] - 1, 0), (0, 0)])
        return finish(_shifted_sum(dense, taps)).reshape(x.shape), None  # [S, L, D] -> [T, D]
    window, slots = start_slots(window, spans, base)
    update = _decode if spans.kind == "decode" else _ragged
    return update(x, taps, finish, window, slots, spans, base)


def _shifted_sum(padded: Array, taps: Array) -> Array:
    """[..., T, D] float32: convolution along the second to last axis of padded [..., K-1 + T, D]."""
    K = taps.shape[0]
    T = padded.shape[-2] - (K - 1)
    return sum(padded[..., k : k + T, :].astype(jnp.float32) * taps[k] for k in range(K))  # pyright: ignore


def _decode(
    x: Array, taps: Array, finish: Finish, window: Array, slots: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """One token per sequence: each window is read once and written once."""
    has_snapshot = chunk_has_snapshot(spans)

    def token(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, window = carry
        before = lax.dynamic_index_in_dim(window, base + slots[t], keepdims=False)
        before = jnp.where(spans.first_pos[t] > 0, before, 0)
        current = lax.dynamic_slice_in_dim(x, t, 1)
        inputs = jnp.concatenate([before[1:].astype(jnp.float32), current.astype(jnp.float32)])  # [K, D]
        y = lax.dynamic_update_slice_in_dim(y, jnp.sum(inputs * taps, axis=0, keepdims=True), t, 0)
        window, wanted = _put(window, inputs, base + spans.write_slot[t]), has_snapshot[t]
        return y, copy_row(window, base + spans.write_slot[t], base + spans.chunk_snapshot[t], wanted)

    y, window = lax.fori_loop(0, spans.num_tokens, token, (jnp.zeros(x.shape, jnp.float32), window))
    return finish(y), window


def _ragged(
    x: Array, taps: Array, finish: Finish, window: Array, slots: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """All tokens as if they were one sequence, then chunk after chunk the K-1 first outputs of each anew."""
    (T, D), K = x.shape, taps.shape[0]
    # Slices past either end, where dynamic_slice would shift them, meet padding instead.
    padded = jnp.pad(x, [(K - 1, K), (0, 0)])
    y = finish(_shifted_sum(padded, taps))  # [T + K, D]
    has_snapshot = chunk_has_snapshot(spans)
    newest = jnp.arange(K, dtype=jnp.int32)[:, None]

    def chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, window = carry
        start, length, seq = spans.chunk_start[c], spans.chunk_len[c], spans.chunk_seq[c]
        is_first = start == spans.query_start[seq]
        slot = jnp.where(is_first, slots[seq], spans.write_slot[seq])
        before = load_row(window, base + slot, ~is_first | (spans.first_pos[seq] > 0))
        tokens = lax.dynamic_slice(padded, (start + K - 1, 0), (K - 1, D))
        reach = jnp.concatenate([before[1:].astype(jnp.float32), tokens.astype(jnp.float32)])  # [2K-2, D]
        starts = finish(sum(reach[k : k + K - 1] * taps[k] for k in range(K)))  # pyright: ignore[reportArgumentType]
        # In order of start, so the next chunk overwrites what this one leaves past its length.
        y = lax.dynamic_update_slice(y, starts, (start, 0))
        latest = lax.dynamic_slice(padded, (start + length - 1, 0), (K, D))
        older = lax.dynamic_slice(jnp.pad(before, [(0, K), (0, 0)]), (jnp.minimum(length, K), 0), (K, D))
        inputs = jnp.where(newest >= K - length, latest.astype(window.dtype), older)
        window, row = _put(window, inputs, base + spans.write_slot[seq]), base + spans.write_slot[seq]
        return y, copy_row(window, row, base + spans.chunk_snapshot[c], has_snapshot[c])

    y, window = lax.fori_loop(0, spans.num_chunks, chunk, (y, window))
    return y[:T], window


def _put(window: Array, inputs: Array, row: Array) -> Array:
    return lax.dynamic_update_index_in_dim(window, inputs.astype(window.dtype), row, 0)
