"""gated_delta, token by token in float32: what every implementation is tested against."""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans


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
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.gated_delta.gated_delta`; keeps the state after every token, so memory grows with T."""
    (T, H, dv), dk, dtype = v.shape, k.shape[2], v.dtype
    q, k, v, g, beta = (a.astype(jnp.float32) for a in (q, k, v, g, beta))
    q, k = (jnp.repeat(a, H // a.shape[1], axis=1) for a in (q, k))  # [T, H, dk]
    g = g.reshape(T, H, -1)  # [T, H, 1 or dk]
    starts = jnp.zeros((spans.num_seqs, H, dk, dv))
    if state is not None:
        read = state[base + spans.read_slot].astype(jnp.float32)
        starts = jnp.where(spans.first_pos[:, None, None, None] > 0, read, 0.0)

    def token(S: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
        seq = spans.token_seq[t]
        S = jnp.where(t == spans.query_start[seq], starts[seq], S)
        S = S * jnp.exp(g[t])[:, :, None]
        error = v[t] - jnp.einsum("hkv,hk->hv", S, k[t])
        S = S + jnp.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        return S, (jnp.einsum("hkv,hk->hv", S, q[t]), S)

    _, (o, after) = lax.scan(token, jnp.zeros((H, dk, dv)), jnp.arange(T))
    o = jnp.where(spans.token_valid()[:, None, None], o, 0.0).astype(dtype)
    if state is None:
        return o, None
    after = after.astype(state.dtype)
    last = spans.query_start[1:] - 1
    has_tokens = spans.query_start[1:] > spans.query_start[:-1]
    unused = state.shape[0]  # a row past the end, which the scatter drops
    state = state.at[jnp.where(has_tokens, base + spans.write_slot, unused)].set(after[last], mode="drop")
    boundary = spans.chunk_start + spans.chunk_len - 1
    rows = jnp.where(chunk_has_snapshot(spans), base + spans.chunk_snapshot, unused)
    return o, state.at[rows].set(after[boundary], mode="drop")
