"""causal_conv, token by token in float32: what every implementation is tested against."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.replay import replay
from kernels_pallas.spans import Spans


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    window: Array | None,
    spans: Spans,
    *,
    activation: Literal["silu"] | None = "silu",
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.causal_conv.causal_conv`; keeps the window after every token."""
    if activation not in ("silu", None):
        raise NotImplementedError(f"activation {activation!r}: causal_conv knows 'silu' and None")
    D, K = weight.shape
    xf, weight = x.astype(jnp.float32), weight.astype(jnp.float32)

    def token(inputs: Array, t: Array) -> tuple[Array, Array]:
        inputs = jnp.concatenate([inputs[1:], xf[t][None]])  # [K, D]
        y = jnp.sum(inputs * weight.T, axis=0)
        y = y if bias is None else y + bias.astype(jnp.float32)
        return inputs, jax.nn.silu(y) if activation == "silu" else y

    y, window = replay(token, (K, D), window, spans, base)
    return y.astype(x.dtype), window
