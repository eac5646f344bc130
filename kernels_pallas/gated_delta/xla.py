"""gated_delta in plain JAX: loops over chunks and single tokens for cached sequences, a batched scan for dense ones.

Within a chunk, CPU runs token after token where the decay is per channel or the states are small, else the WY form, as
other platforms always do. 512 tokens in chunks of 64 on two busy AVX-512 cores (JAX 0.10.2), in turns, milliseconds:

| heads, dk x dv, decay | WY form | token after token |
|---|---|---|
| 12, 64 x 64, per head | 54 | 19 |
| 12, 64 x 64, per channel | 128 | 13 |
| 16, 128 x 128, per head | 76 | 96 |
| 16, 128 x 128, per channel | 308 | 123 |
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.decays import STRONGEST
from kernels_pallas.gated_delta.chunk import HIGHEST, chunk_update
from kernels_pallas.recurrence import is_single, scan_chunks, step_singles
from kernels_pallas.rows import start_slots
from kernels_pallas.spans import Spans

HEADS_AT_ONCE = 4  # whose states one step of the decoding loop updates
SMALL_STATE = 96 * 96  # numbers of a head's state up to which the WY form does not pay on CPU
CACHED_BYTES = 1 << 18  # of the states that the loop over a chunk's tokens works on: what a core's cache holds

Tokens = tuple[Array, ...]  # q, k [T,Hk,dk], v [T,H,dv], g [T,H,1 or dk], beta [T,H,1], float32


def gated_delta(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | None,
    spans: Spans,
    *,
    base: int | Array = 0,
    always_wy: bool = False,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.gated_delta.gated_delta`; `always_wy` takes the WY form on CPU too."""
    if (state is None) != (spans.kind == "dense"):
        raise NotImplementedError(f"state is {'None' if state is None else 'given'} with {spans.kind!r} spans")
    T, H, dv = v.shape
    g, beta = g.reshape(T, H, -1), beta[:, :, None]
    tokens = tuple(a.astype(jnp.float32) for a in (q, k, v, g, beta))
    if state is None:
        return _dense(tokens, spans).astype(v.dtype), None
    state, slots = start_slots(state, spans, base, in_place=is_single(spans))
    o = jnp.zeros((T, H, dv))
    if spans.kind == "ragged":
        small = state.shape[2] * state.shape[3] <= SMALL_STATE or g.shape[2] > 1
        on_cpu = _chunks_by_token if small and not always_wy else _chunks
        arguments = (tokens, o, state, slots, spans, base)
        done: tuple[Array, Array] = lax.platform_dependent(*arguments, cpu=on_cpu, default=_chunks)
        o, state = done
    o, state = _single_tokens(tokens, o, state, spans, base)
    return o.astype(v.dtype), state


def _chunks(
    tokens: Tokens, o: Array, state: Array, slots: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of several tokens."""
    Q = spans.chunk_size
    # Heads first, for the products; slices of Q tokens may run past the end, where dynamic_slice would shift them.
    by_head = [jnp.pad(a.swapaxes(0, 1), [(0, 0), (0, Q), (0, 0)]) for a in tokens]

    def update(S: Array, start: Array, length: Array) -> tuple[Array, Array]:
        q, k, v, g, beta = (lax.dynamic_slice_in_dim(a, start, Q, axis=1) for a in by_head)
        o, S = chunk_update(S, q, k, v, g, beta, length)
        return o.swapaxes(0, 1), S

    return scan_chunks(o, state, slots, spans, base, update)


def _chunks_by_token(
    tokens: Tokens, o: Array, state: Array, slots: Array, spans: Spans, base: int | Array
) -> tuple[Array, Array]:
    """Sequences of several tokens, for a few heads at a time the whole chunk.

    A token's decay goes to what it reads with, and its overlap of query and key to its output, so that the states are
    read once and written once: u = beta (v - S^T (decay k)), o = S^T (decay q) + (q . k) u, S = decay S + k u^T.
    """
    q, k, v, g, beta = tokens
    (_, H, dk, dv), ratio = state.shape, v.shape[1] // k.shape[1]
    heads = next(n for n in range(H, 0, -1) if H % n == 0 and (n == 1 or 4 * n * dk * dv <= CACHED_BYTES))
    decay = jnp.exp(jnp.maximum(g, STRONGEST))  # [T, H, 1 or dk]
    overlap = jnp.repeat(jnp.sum(q * k, axis=2, keepdims=True), ratio, axis=1)  # [T, H, 1]
    q, k = (jnp.repeat(a, ratio, axis=1) for a in (q, k))
    reading = jnp.stack([q, k], axis=2) * decay[:, :, None]  # [T, H, 2, dk]

    def update(S: Array, start: Array, length: Array) -> tuple[Array, Array]:
        def part(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            o, S = carry
            first = n * heads

            def token(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                o, S = carry
                reading_t, k_t, v_t, decay_t, beta_t, overlap_t = (
                    lax.dynamic_slice(a, (start + i, first, *[0] * (a.ndim - 2)), (1, heads, *a.shape[2:]))[0]
                    for a in (reading, k, v, decay, beta, overlap)
                )
                read = jnp.einsum("hxk,hkv->hxv", reading_t, S, precision=HIGHEST)
                u = beta_t * (v_t - read[:, 1])  # [heads, dv]
                o = lax.dynamic_update_slice(o, (read[:, 0] + overlap_t * u)[None], (i, first, 0))
                return o, S * decay_t[:, :, None] + k_t[:, :, None] * u[:, None]

            o, some = lax.fori_loop(0, length, token, (o, lax.dynamic_slice_in_dim(S, first, heads)))
            return o, lax.dynamic_update_slice_in_dim(S, some, first, 0)

        return lax.fori_loop(0, H // heads, part, (jnp.zeros((spans.chunk_size, H, dv)), S))

    return scan_chunks(o, state, slots, spans, base, update)


def _single_tokens(tokens: Tokens, o: Array, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """Sequences of one token: their states are updated a few heads at a time."""
    q, k, v, g, beta = tokens
    (_, H, dk, dv), ratio = state.shape, v.shape[1] // k.shape[1]
    heads = math.gcd(H, HEADS_AT_ONCE)
    qk = jnp.repeat(jnp.stack([q, k], axis=2), ratio, axis=1)  # [T, H, 2, dk]
    overlap = jnp.repeat(jnp.sum(q * k, axis=2, keepdims=True), ratio, axis=1)  # [T, H, 1]
    decay = jnp.exp(jnp.maximum(g, STRONGEST))

    def part(n: Array, t: Array, row: Array, from_zero: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        o_t, state = carry
        qk_n, v_n, decay_n, beta_n, overlap_n = (
            lax.dynamic_slice(a, (t, n * heads, *[0] * (a.ndim - 2)), (1, heads, *a.shape[2:]))[0]
            for a in (qk, v, decay, beta, overlap)
        )
        S = lax.dynamic_slice(state, (row, n * heads, 0, 0), (1, heads, dk, dv))[0]
        S = jnp.where(from_zero, 0, S).astype(jnp.float32) * decay_n[:, :, None]
        read = jnp.einsum("hxk,hkv->hxv", qk_n, S, precision=HIGHEST)
        u = beta_n * (v_n - read[:, 1])  # [heads, dv]
        # S^T q after the update, without reading the state again
        o_t = lax.dynamic_update_slice(o_t, (read[:, 0] + overlap_n * u)[None], (0, n * heads, 0))
        S = S + qk_n[:, 1, :, None] * u[:, None]
        return o_t, lax.dynamic_update_slice(state, S[None].astype(state.dtype), (row, n * heads, 0, 0))

    return step_singles(o, state, spans, base, H // heads, part)


def _dense(tokens: Tokens, spans: Spans) -> Array:
    """o [T, H, dv] of whole sequences of one length from zero state: chunk after chunk of all of them."""
    (T, H, dv), dk, sequences = tokens[2].shape, tokens[1].shape[2], spans.num_seqs
    length = T // sequences
    Q = min(spans.chunk_size, length)
    chunks = -(-length // Q)

    def chunked(a: Array) -> Array:
        """[S * L, heads, d] -> [chunks, S, heads, Q, d], zeros past the end, which do nothing."""
        a = jnp.pad(a.reshape(sequences, length, *a.shape[1:]), [(0, 0), (0, chunks * Q - length), (0, 0), (0, 0)])
        return a.reshape(sequences, chunks, Q, *a.shape[2:]).transpose(1, 0, 3, 2, 4)

    def step(S: Array, chunk: Tokens) -> tuple[Array, Array]:
        o, S = jax.vmap(partial(chunk_update, length=Q))(S, *chunk)
        return S, o

    _, o = lax.scan(step, jnp.zeros((sequences, H, dk, dv)), tuple(chunked(a) for a in tokens))
    return o.transpose(1, 0, 3, 2, 4).reshape(sequences, chunks * Q, H, dv)[:, :length].reshape(T, H, dv)
