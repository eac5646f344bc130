"""causal_conv, token by token in float32: what every implementation is tested against."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.snapshots import chunk_has_snapshot
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
    (T, D), (_, K) = x.shape, weight.shape
    xf, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if window is None:
        starts = jnp.zeros((spans.num_seqs, K, D), jnp.float32)
    else:
        kept = window[base + spans.read_slot].astype(jnp.float32)
        starts = jnp.where(spans.first_pos[:, None, None] > 0, kept, 0.0)

    def token(inputs: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
        seq = spans.token_seq[t]
        inputs = jnp.where(t == spans.query_start[seq], starts[seq], inputs)
        inputs = jnp.concatenate([inputs[1:], xf[t][None]])  # [K, D]
        y = jnp.sum(inputs * weight.T, axis=0)
        return inputs, (y, inputs)

    _, (y, after) = lax.scan(token, jnp.zeros((K, D)), jnp.arange(T))
    y = y if bias is None else y + bias.astype(jnp.float32)
    y = jax.nn.silu(y) if activation == "silu" else y
    y = jnp.where(spans.token_valid()[:, None], y, 0.0).astype(x.dtype)
    if window is None:
        return y, None
    after = after.astype(window.dtype)
    last = spans.query_start[1:] - 1
    has_tokens = spans.query_start[1:] > spans.query_start[:-1]
    unused = window.shape[0]  # a row past the end, which the scatter drops
    window = window.at[jnp.where(has_tokens, base + spans.write_slot, unused)].set(after[last], mode="drop")
    boundary = spans.chunk_start + spans.chunk_len - 1
    rows = jnp.where(chunk_has_snapshot(spans), base + spans.chunk_snapshot, unused)
    return y, window.at[rows].set(after[boundary], mode="drop")
