"""ssd, token by token in float32: what every implementation is tested against."""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans


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
    """As `kernels_pallas.ssd.ssd`; keeps the state after every token, so memory grows with T*N*H*P."""
    (T, H, P), (_, G, N) = x.shape, B.shape
    xf, dt, A, B, C, D = (a.astype(jnp.float32) for a in (x, dt, A, B, C, D))
    B, C = (jnp.repeat(a, H // G, axis=1) for a in (B, C))  # [T, H, N]
    starts = _start_states(state, spans, base, (N, H, P))

    def token(h: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
        seq = spans.token_seq[t]
        h = jnp.where(t == spans.query_start[seq], starts[seq], h)
        h = h * jnp.exp(dt[t] * A)[None, :, None] + B[t].T[:, :, None] * (dt[t][:, None] * xf[t])[None]
        y = jnp.einsum("hn,nhp->hp", C[t], h) + D[:, None] * xf[t]
        return h, (y, h)

    _, (y, after) = lax.scan(token, jnp.zeros((N, H, P)), jnp.arange(T))
    y = jnp.where(spans.token_valid()[:, None, None], y, 0.0).astype(x.dtype)
    if state is None:
        return y, None
    after = after.reshape(T, N, H * P).astype(state.dtype)
    last = spans.query_start[1:] - 1
    has_tokens = spans.query_start[1:] > spans.query_start[:-1]
    unused = state.shape[0]  # a row past the end, which the scatter drops
    state = state.at[jnp.where(has_tokens, base + spans.write_slot, unused)].set(after[last], mode="drop")
    boundary = spans.chunk_start + spans.chunk_len - 1
    rows = jnp.where(chunk_has_snapshot(spans), base + spans.chunk_snapshot, unused)
    return y, state.at[rows].set(after[boundary], mode="drop")


def _start_states(state: Array | None, spans: Spans, base: int | Array, shape: tuple[int, int, int]) -> Array:
    """[S, N, H, P] float32: the state that each sequence starts from."""
    if state is None:
        return jnp.zeros((spans.num_seqs, *shape), jnp.float32)
    read = state[base + spans.read_slot].reshape(-1, *shape).astype(jnp.float32)
    return jnp.where(spans.first_pos[:, None, None, None] > 0, read, 0.0)
