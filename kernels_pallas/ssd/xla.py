"""ssd in plain JAX: a loop over the chunk table for cached sequences, a batched scan for dense ones."""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans
from kernels_pallas.ssd.chunk import chunk_update, token_update
from kernels_pallas.ssd.dense import ssd_dense


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
    xf, dt = x.astype(jnp.float32), dt.astype(jnp.float32)
    xdt = (xf * dt[:, :, None]).reshape(T, H * P)
    log_decay = dt * A.astype(jnp.float32)  # [T, H]
    B, C = B.astype(jnp.float32), C.astype(jnp.float32)
    if state is None:
        y = ssd_dense(xdt, log_decay, B, C, spans)
    else:
        y, state = (_decode if spans.kind == "decode" else _ragged)(xdt, log_decay, B, C, state, spans, base)
    y = y.reshape(T, H, P) + D.astype(jnp.float32)[:, None] * xf
    return y.astype(x.dtype), state


def _row(state: Array, row: Array) -> Array:
    """[N, H*P] float32: one row of the state array."""
    return lax.dynamic_index_in_dim(state, row, keepdims=False).astype(jnp.float32)


def _put(state: Array, h: Array, row: Array) -> Array:
    return lax.dynamic_update_index_in_dim(state, h.astype(state.dtype), row, 0)


def _decode(
    xdt: Array, log_decay: Array, B: Array, C: Array, state: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """One token per sequence: each state is read once and written once."""
    has_snapshot = chunk_has_snapshot(spans)

    def token(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, state = carry
        h = jnp.where(spans.first_pos[t] > 0, _row(state, base + spans.read_slot[t]), 0.0)
        y_t, h = token_update(h, xdt[t], log_decay[t], B[t], C[t])
        state = _put(state, h, base + spans.write_slot[t])
        state = lax.fori_loop(
            0, has_snapshot[t].astype(jnp.int32), lambda _, s: _put(s, h, base + spans.chunk_snapshot[t]), state
        )
        return lax.dynamic_update_index_in_dim(y, y_t, t, 0), state

    return lax.fori_loop(0, spans.num_tokens, token, (jnp.zeros_like(xdt), state))


def _ragged(
    xdt: Array, log_decay: Array, B: Array, C: Array, state: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Chunk after chunk; the state passes from one chunk of a sequence to the next through its row."""
    T, Q = xdt.shape[0], spans.chunk_size
    # Slices of Q tokens may run past the end, where dynamic_slice would shift them: pad instead.
    xdt, log_decay, B, C = (jnp.pad(a, [(0, Q)] + [(0, 0)] * (a.ndim - 1)) for a in (xdt, log_decay, B, C))
    has_snapshot = chunk_has_snapshot(spans)

    def chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, state = carry
        start, length, seq = spans.chunk_start[c], spans.chunk_len[c], spans.chunk_seq[c]
        is_first = start == spans.query_start[seq]
        from_zero = is_first & (spans.first_pos[seq] == 0)
        row = base + jnp.where(is_first, spans.read_slot[seq], spans.write_slot[seq])
        h = jnp.where(from_zero, 0.0, _row(state, row))
        token_args = tuple(lax.dynamic_slice_in_dim(a, start, Q) for a in (xdt, log_decay, B, C))

        def one_token() -> tuple[Array, Array]:
            y_t, after = token_update(h, *(a[0] for a in token_args))
            return jnp.zeros((Q, xdt.shape[1])).at[0].set(y_t), after

        y_c, h = lax.cond(length == 1, one_token, lambda: chunk_update(h, *token_args, length))
        # In order of start, so the next chunk overwrites what this one leaves past its length.
        y = lax.dynamic_update_slice_in_dim(y, y_c, start, 0)
        state = _put(state, h, base + spans.write_slot[seq])
        state = lax.fori_loop(
            0, has_snapshot[c].astype(jnp.int32), lambda _, s: _put(s, h, base + spans.chunk_snapshot[c]), state
        )
        return y, state

    y, state = lax.fori_loop(0, spans.num_chunks, chunk, (jnp.zeros_like(xdt), state))
    return y[:T], state
