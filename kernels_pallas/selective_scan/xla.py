"""selective_scan in plain JAX: token after token, since its decays, one per channel and state, make no matrix product.

Each token costs N * D exponentials whatever the form; forms that are parallel over tokens (Blelloch's scan, or
cumulative sums within a chunk) do more arithmetic and write [Q, N, D] to memory, which loses on a CPU.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.recurrence import is_single, scan_chunks, step_singles
from kernels_pallas.rows import load_row, start_slots
from kernels_pallas.spans import Spans

Tokens = tuple[Array, Array, Array, Array]  # dt [T, D], dt * x [T, D], B [T, N], C [T, N], float32


def selective_scan(
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
    """As `kernels_pallas.selective_scan.selective_scan`."""
    if (state is None) != (spans.kind == "dense"):
        raise NotImplementedError(f"state is {'None' if state is None else 'given'} with {spans.kind!r} spans")
    xf, dt, B, C = (a.astype(jnp.float32) for a in (x, dt, B, C))
    tokens = (dt, dt * xf, B, C)
    # [N, D] by a product with the identity: XLA keeps it in memory, where a transposition would become strided
    # reads for every token.
    A = jnp.dot(jnp.eye(A.shape[1]), A.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    if state is None:
        y = _dense(tokens, A, spans)
    else:
        state, slots = start_slots(state, spans, base, in_place=is_single(spans))
        y = jnp.zeros(x.shape)
        if spans.kind == "ragged":
            y, state = _chunks(tokens, A, y, state, slots, spans, base)
        y, state = _single_tokens(tokens, A, y, state, spans, base)
    return (y + D.astype(jnp.float32) * xf).astype(x.dtype), state


def _update(h: Array, A: Array, dt: Array, dtx: Array, B: Array) -> Array:
    """h [N, D] after one token: dt, dtx [D], B [N]."""
    return h * jnp.exp(dt * A) + B[:, None] * dtx


def _chunks(
    tokens: Tokens, A: Array, y: Array, state: Array, slots: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of several tokens: a chunk's are run one by one, as many as it has."""

    def update(h: Array, start: Array, length: Array) -> tuple[Array, Array]:
        def token(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y, h = carry
            dt, dtx, B, C = (lax.dynamic_index_in_dim(a, start + i, keepdims=False) for a in tokens)
            h = _update(h, A, dt, dtx, B)
            return lax.dynamic_update_index_in_dim(y, jnp.sum(C[:, None] * h, axis=0), i, 0), h

        return lax.fori_loop(0, length, token, (jnp.zeros((spans.chunk_size, A.shape[1])), h))

    return scan_chunks(y, state, slots, spans, base, update)


def _single_tokens(
    tokens: Tokens, A: Array, y: Array, state: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of one token: their states are updated in place."""

    def part(_: Array, t: Array, row: Array, from_zero: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state = carry[1]
        dt, dtx, B, C = (lax.dynamic_index_in_dim(a, t, keepdims=False) for a in tokens)
        h = load_row(state, row, ~from_zero).astype(jnp.float32)
        h = lax.optimization_barrier(_update(h, A, dt, dtx, B))  # computed once, for y and for the state
        state = lax.dynamic_update_index_in_dim(state, h.astype(state.dtype), row, 0)
        return jnp.sum(C[:, None] * h, axis=0, keepdims=True), state

    return step_singles(y, state, spans, base, 1, part)


def _dense(tokens: Tokens, A: Array, spans: Spans) -> Array:
    """y [T, D] of whole sequences of one length from zero state; within a chunk, states are computed again for the
    gradient rather than kept."""
    S = spans.num_seqs
    length = tokens[0].shape[0] // S
    Q = min(spans.chunk_size, length)
    chunks = -(-length // Q)

    def chunked(a: Array) -> Array:
        """[S * L, n] -> [chunks, Q, S, n], zeros past the end, which do nothing."""
        a = jnp.pad(a.reshape(S, length, -1), [(0, 0), (0, chunks * Q - length), (0, 0)])
        return a.swapaxes(0, 1).reshape(chunks, Q, S, -1)

    def token(h: Array, inputs: Tokens) -> tuple[Array, Array]:
        h = jax.vmap(_update, (0, None, 0, 0, 0))(h, A, *inputs[:3])  # [S, N, D]
        return h, jnp.sum(inputs[3][:, :, None] * h, axis=1)

    @jax.checkpoint
    def chunk(h: Array, inputs: Tokens) -> tuple[Array, Array]:
        return lax.scan(token, h, inputs)

    _, y = lax.scan(chunk, jnp.zeros((S, *A.shape)), tuple(chunked(a) for a in tokens))  # [chunks, Q, S, D]
    return y.reshape(chunks * Q, S, -1)[:length].swapaxes(0, 1).reshape(S * length, -1)
