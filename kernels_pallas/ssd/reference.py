"""ssd, token by token in float32: what every implementation is tested against."""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.replay import replay
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
    (_, H, P), (_, G, N) = x.shape, B.shape
    xf, dt, A, B, C, D = (a.astype(jnp.float32) for a in (x, dt, A, B, C, D))
    B, C = (jnp.repeat(a, H // G, axis=1) for a in (B, C))  # [T, H, N]

    def token(h: Array, t: Array) -> tuple[Array, Array]:
        h = h * jnp.exp(dt[t] * A)[None, :, None] + B[t].T[:, :, None] * (dt[t][:, None] * xf[t])[None]
        return h, jnp.einsum("hn,nhp->hp", C[t], h) + D[:, None] * xf[t]

    y, state = replay(token, (N, H, P), state, spans, base)
    return y.astype(x.dtype), state
