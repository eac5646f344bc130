"""selective_scan, token by token in float32: what every implementation is tested against."""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.replay import replay
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
    """As `kernels_pallas.selective_scan.selective_scan`; keeps the state after every token."""
    dtype = x.dtype
    x, dt, A, B, C, D = (a.astype(jnp.float32) for a in (x, dt, A, B, C, D))

    def token(h: Array, t: Array) -> tuple[Array, Array]:
        h = h * jnp.exp(dt[t] * A.T) + B[t][:, None] * (dt[t] * x[t])
        return h, C[t] @ h + D * x[t]

    y, state = replay(token, A.T.shape, state, spans, base)
    return y.astype(dtype), state
