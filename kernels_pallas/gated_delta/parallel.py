"""gated_delta in plain JAX for devices with thousands of lanes: one token of all sequences at once."""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.decays import STRONGEST
from kernels_pallas.rows import put_rows, states_before
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
    """As `kernels_pallas.gated_delta.gated_delta`, for decode spans; the others are left to others.

    Sums of products rather than matrix products, so that XLA fuses them with the update.
    """
    if state is None or spans.kind != "decode":
        raise NotImplementedError(f"{spans.kind} spans")
    S, H, _ = v.shape
    q, k = (jnp.repeat(a.astype(jnp.float32), H // k.shape[1], axis=1)[..., None] for a in (q, k))  # [S, H, dk, 1]
    decay = jnp.exp(jnp.maximum(g.astype(jnp.float32), STRONGEST)).reshape(S, H, -1, 1)
    h = states_before(state, spans, base) * decay
    u = beta.astype(jnp.float32)[:, :, None] * (v.astype(jnp.float32) - jnp.sum(k * h, axis=2))  # [S, H, dv]
    h = h + k * u[:, :, None]
    o = jnp.sum(q * h, axis=2).astype(v.dtype)
    used = jnp.arange(S) < spans.num_tokens
    state = put_rows(state, base + spans.write_slot, h, used)
    return o, put_rows(state, base + spans.chunk_snapshot, h, used & chunk_has_snapshot(spans))
