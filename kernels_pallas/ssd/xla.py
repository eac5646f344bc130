"""ssd in plain JAX: loops over chunks and single tokens for cached sequences, a batched scan for dense ones."""

import math
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.recurrence import is_single, scan_chunks, step_singles
from kernels_pallas.rows import start_slots
from kernels_pallas.spans import Spans
from kernels_pallas.ssd.chunk import chunk_update, read_state, token_decay, token_update
from kernels_pallas.ssd.tokens import Tokens, by_tokens

# State rows [N, H*P] are updated in blocks of at most so many of N: read, written, and read again from cache
# for the output. 32 is the fastest of 8, 16, 32, 64 and the whole row on a CPU with 2 MB of cache per core.
STATE_BLOCK = 32


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
    return by_tokens(partial(_cached, spans=spans, base=base), x, dt, A, B, C, D, state, spans)


def _cached(tokens: Tokens, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    state, slots = start_slots(state, spans, base, in_place=is_single(spans))
    y = jnp.zeros_like(tokens[0])
    if spans.kind == "ragged":
        y, state = _chunks(tokens, y, state, slots, spans, base)
    return _single_tokens(tokens, y, state, spans, base)


def _chunks(
    tokens: Tokens, y: Array, state: Array, slots: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of several tokens."""
    Q = spans.chunk_size
    # Slices of Q tokens may run past the end, where dynamic_slice would shift them: pad instead.
    xdt, log_decay, B, C = (jnp.pad(a, [(0, Q)] + [(0, 0)] * (a.ndim - 1)) for a in tokens)
    # Transposed once for all: the products with B [N, Q] are several times slower with B [Q, N] on CPU.
    B = jnp.moveaxis(B, 0, -1)

    def update(h: Array, start: Array, length: Array) -> tuple[Array, Array]:
        xdt_c, log_decay_c, C_c = (lax.dynamic_slice_in_dim(a, start, Q) for a in (xdt, log_decay, C))
        B_c = lax.dynamic_slice_in_dim(B, start, Q, axis=2)
        return chunk_update(h, xdt_c, log_decay_c, B_c, C_c, length)

    return scan_chunks(y, state, slots, spans, base, update)


def _single_tokens(tokens: Tokens, y: Array, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """Sequences of one token: their states are updated block by block."""
    (_, N, width), block = state.shape, math.gcd(state.shape[1], STATE_BLOCK)
    xdt, log_decay, B, C = tokens
    decay = token_decay(log_decay, width)

    def part(k: Array, t: Array, row: Array, from_zero: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y_t, state = carry
        n = k * block
        B_n, C_n = (lax.dynamic_slice(a, (t, 0, n), (1, a.shape[1], block))[0] for a in (B, C))
        h = lax.dynamic_slice(state, (row, n, 0), (1, block, width))[0]
        h = token_update(jnp.where(from_zero, 0, h).astype(jnp.float32), xdt[t], decay[t], B_n)
        state = lax.dynamic_update_slice(state, h[None].astype(state.dtype), (row, n, 0))
        # Read back rather than used twice: XLA would compute h again, from a state that has changed.
        h = lax.dynamic_slice(state, (row, n, 0), (1, block, width))[0].astype(jnp.float32)
        return y_t + read_state(C_n[None], h), state

    return step_singles(y, state, spans, base, N // block, part)
