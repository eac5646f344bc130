"""ssd over whole sequences of one length from zero state: batched over sequences and chunks, differentiable."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.spans import Spans
from kernels_pallas.ssd.chunk import read_state, within_chunk


def ssd_dense(xdt: Array, log_decay: Array, B: Array, C: Array, spans: Spans) -> Array:
    """y [T, H*P] of S sequences of T // S tokens: xdt [T,H*P], log_decay [T,H], B, C [T,G,N], float32."""
    S, T = spans.num_seqs, xdt.shape[0]
    length = T // S
    Q = min(spans.chunk_size, length)
    chunks = -(-length // Q)

    def chunked(a: Array) -> Array:
        """[S * L, ...] -> [chunks, S, Q, ...], zeros past the end, which do nothing."""
        a = a.reshape(S, length, *a.shape[1:])
        a = jnp.pad(a, [(0, 0), (0, chunks * Q - length)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(S, chunks, Q, *a.shape[2:]).swapaxes(0, 1)

    xdt, log_decay, B, C = (chunked(a) for a in (xdt, log_decay, B, C))
    y, from_start, over_all, added = jax.vmap(jax.vmap(within_chunk))(xdt, log_decay, jnp.moveaxis(B, 2, -1), C)

    def step(h: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        over_all, added = chunk
        return h * over_all + added, h

    _, before = lax.scan(step, jnp.zeros_like(added[0]), (over_all, added))  # [chunks, S, N, H*P]
    y = y + jax.vmap(jax.vmap(read_state))(C, before) * from_start
    return y.swapaxes(0, 1).reshape(S, chunks * Q, -1)[:, :length].reshape(T, -1)
