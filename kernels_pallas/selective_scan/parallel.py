"""selective_scan in plain JAX for devices with thousands of lanes: one token of all sequences at once."""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.rows import put_rows, states_before
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans


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
    """As `kernels_pallas.selective_scan.selective_scan`, for decode spans; the others are left to others."""
    if state is None or spans.kind != "decode":
        raise NotImplementedError(f"{spans.kind} spans")
    xf, dt, B, C = (a.astype(jnp.float32) for a in (x, dt, B, C))
    decay = jnp.exp(dt[:, None] * A.astype(jnp.float32).T)  # [S, N, D]
    h = states_before(state, spans, base) * decay + B[:, :, None] * (dt * xf)[:, None]
    y = jnp.sum(C[:, :, None] * h, axis=1) + D.astype(jnp.float32) * xf
    used = jnp.arange(spans.num_seqs) < spans.num_tokens
    state = put_rows(state, base + spans.write_slot, h, used)
    return y.astype(x.dtype), put_rows(state, base + spans.chunk_snapshot, h, used & chunk_has_snapshot(spans))
