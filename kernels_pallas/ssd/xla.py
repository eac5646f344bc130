"""ssd in plain JAX: loops over chunks and single tokens for cached sequences, a batched scan for dense ones."""

import math

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.rows import copy_row, repeat_if, start_slots
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans
from kernels_pallas.ssd.chunk import chunk_update, read_state, token_decay, token_update
from kernels_pallas.ssd.dense import ssd_dense

# State rows [N, H*P] are updated in blocks of at most so many of N: read, written, and read again from cache
# for the output. 32 is the fastest of 8, 16, 32, 64 and the whole row on a CPU with 2 MB of cache per core.
STATE_BLOCK = 32

Carry = tuple[Array, Array, Array]  # y [T + Q, H*P], h [N, H*P] float32, state
Tokens = tuple[Array, Array, Array, Array]  # xdt [T, H*P], log_decay [T, H], B [T, G, N], C [T, G, N], float32


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    state: Array | None,
    spans: Spans,
    *,
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.ssd.ssd`."""
    if (state is None) != (spans.kind == "dense"):
        raise NotImplementedError(f"state is {'None' if state is None else 'given'} with {spans.kind!r} spans")
    T, H, P = x.shape
    xf, dt, B, C = (a.astype(jnp.float32) for a in (x, dt, B, C))
    tokens = ((xf * dt[:, :, None]).reshape(T, H * P), dt * A.astype(jnp.float32), B, C)
    if state is None:
        y = ssd_dense(*tokens, spans)
    else:
        lengths = spans.query_start[1:] - spans.query_start[:-1]
        is_single = lengths == 1
        state, slots = start_slots(state, spans, base, in_place=is_single)
        y = jnp.zeros((T, H * P))
        if spans.kind == "ragged":
            y, state = _chunks(tokens, state, slots, is_single, spans, base)
        y, state = _single_tokens(tokens, y, state, is_single, spans, base)
    y = y.reshape(T, H, P) + D.astype(jnp.float32)[:, None] * xf
    return y.astype(x.dtype), state


def _chunks(
    tokens: Tokens, state: Array, slots: Array, is_single: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of several tokens, chunk after chunk; the state is carried until the sequence's last one."""
    (T, width), Q = tokens[0].shape, spans.chunk_size
    # Slices of Q tokens may run past the end, where dynamic_slice would shift them: pad instead.
    xdt, log_decay, B, C = (jnp.pad(a, [(0, Q)] + [(0, 0)] * (a.ndim - 1)) for a in tokens)
    # Transposed once for all: the products with B [N, Q] are several times slower with B [Q, N] on CPU.
    B = jnp.moveaxis(B, 0, -1)
    has_snapshot = chunk_has_snapshot(spans)

    def load(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, seq = carry[1], spans.chunk_seq[c]
        h = lax.dynamic_index_in_dim(state, base + slots[seq], keepdims=False).astype(jnp.float32)
        return jnp.where(spans.first_pos[seq] > 0, h, 0.0), state

    def update(c: Array, carry: Carry) -> Carry:
        y, h, state = carry
        start, length, seq = spans.chunk_start[c], spans.chunk_len[c], spans.chunk_seq[c]
        is_first = start == spans.query_start[seq]
        is_last = start + length == spans.query_start[seq + 1]
        h, state = repeat_if(is_first, c, load, (h, state))
        xdt_c, log_decay_c, C_c = (lax.dynamic_slice_in_dim(a, start, Q) for a in (xdt, log_decay, C))
        B_c = lax.dynamic_slice_in_dim(B, start, Q, axis=2)
        y_c, h = chunk_update(h, xdt_c, log_decay_c, B_c, C_c, length)
        # In order of start, so what comes next overwrites what this chunk leaves past its length.
        y = lax.dynamic_update_slice_in_dim(y, y_c, start, 0)

        def store(i: Array, state: Array) -> Array:
            slot = jnp.where(is_last & (i == 0), spans.write_slot[seq], spans.chunk_snapshot[c])
            return lax.dynamic_update_index_in_dim(state, h.astype(state.dtype), base + slot, 0)

        stores = is_last.astype(jnp.int32) + has_snapshot[c].astype(jnp.int32)
        return y, h, lax.fori_loop(0, stores, store, state)

    def chunk(c: Array, carry: Carry) -> Carry:
        return repeat_if(~is_single[spans.chunk_seq[c]], c, update, carry)

    carry = (jnp.zeros((T + Q, width)), jnp.zeros(state.shape[1:]), state)
    y, _, state = lax.fori_loop(0, spans.num_chunks, chunk, carry)
    return y[:T], state


def _single_tokens(
    tokens: Tokens, y: Array, state: Array, is_single: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of one token, whose states lie in their write rows: each is read and written once, block by block."""
    (_, N, width), block = state.shape, math.gcd(state.shape[1], STATE_BLOCK)
    xdt, log_decay, B, C = tokens
    decay = token_decay(log_decay, width)
    has_snapshot = chunk_has_snapshot(spans)

    def chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        t, seq = spans.chunk_start[c], spans.chunk_seq[c]
        row = base + spans.write_slot[seq]
        from_zero = spans.first_pos[seq] == 0

        def part(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y_t, state = carry
            n = k * block
            B_n, C_n = (lax.dynamic_slice(a, (t, 0, n), (1, a.shape[1], block))[0] for a in (B, C))
            h = lax.dynamic_slice(state, (row, n, 0), (1, block, width))[0]
            h = token_update(jnp.where(from_zero, 0, h).astype(jnp.float32), xdt[t], decay[t], B_n)
            state = lax.dynamic_update_slice(state, h[None].astype(state.dtype), (row, n, 0))
            # Read back rather than used twice: XLA would compute h again, from a state that has changed.
            h = lax.dynamic_slice(state, (row, n, 0), (1, block, width))[0].astype(jnp.float32)
            return y_t + read_state(C_n[None], h), state

        y, state = carry
        parts = jnp.where(is_single[seq], N // block, 0)
        y_t, state = lax.fori_loop(0, parts, part, (jnp.zeros((1, width)), state))
        y_t = jnp.where(is_single[seq], y_t, lax.dynamic_slice_in_dim(y, t, 1))
        y = lax.dynamic_update_slice_in_dim(y, y_t, t, 0)
        return y, copy_row(state, row, base + spans.chunk_snapshot[c], has_snapshot[c] & is_single[seq])

    return lax.fori_loop(0, spans.num_chunks, chunk, (y, state))
