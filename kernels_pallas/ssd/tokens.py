"""What the plain JAX forms of ssd share: the tokens' factors before the recurrence, and what follows it."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from kernels_pallas.spans import Spans
from kernels_pallas.ssd.dense import ssd_dense

Tokens = tuple[Array, Array, Array, Array]  # xdt [T, H*P], log_decay [T, H], B [T, G, N], C [T, G, N], float32


def by_tokens(
    cached: Callable[[Tokens, Array], tuple[Array, Array]],
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    state: Array | None,
    spans: Spans,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.ssd.ssd`; `cached` gives y [T, H*P] and the state for sequences that have one."""
    if (state is None) != (spans.kind == "dense"):
        raise NotImplementedError(f"state is {'None' if state is None else 'given'} with {spans.kind!r} spans")
    T, H, P = x.shape
    xf, dt, B, C = (a.astype(jnp.float32) for a in (x, dt, B, C))
    tokens = ((xf * dt[:, :, None]).reshape(T, H * P), dt * A.astype(jnp.float32), B, C)
    if state is None:
        y = ssd_dense(*tokens, spans)
    else:
        y, state = cached(tokens, state)
    y = y.reshape(T, H, P) + D.astype(jnp.float32)[:, None] * xf
    return y.astype(x.dtype), state
