"""gated_delta, token by token in float32: what every implementation is tested against."""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.replay import replay
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

    def token(S: Array, t: Array) -> tuple[Array, Array]:
        S = S * jnp.exp(g[t])[:, :, None]
        error = v[t] - jnp.einsum("hkv,hk->hv", S, k[t])
        S = S + jnp.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        return S, jnp.einsum("hkv,hk->hv", S, q[t])

    o, state = replay(token, (H, dk, dv), state, spans, base)
    return o.astype(dtype), state
