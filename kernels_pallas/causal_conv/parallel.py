"""causal_conv in plain JAX for devices with thousands of lanes: every token gathers its own taps, with no loop."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.rows import put_rows, states_before
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
    """As `kernels_pallas.causal_conv.causal_conv`, for spans with a window; dense ones are left to others."""
    if activation not in ("silu", None):
        raise NotImplementedError(f"activation {activation!r}: causal_conv knows 'silu' and None")
    if window is None or spans.kind == "dense":
        raise NotImplementedError("dense spans, and spans without a window")
    (T, _), K = x.shape, weight.shape[1]
    # The barrier keeps XLA from reading the rows anew wherever they are used, for which it would copy the whole array.
    before = states_before(window, spans, base).astype(window.dtype)  # [S, K, D]
    held, before = lax.optimization_barrier((window, before))

    def tap(tokens: Array, seqs: Array, age: int) -> Array:
        """[n, D] float32: the input `age` tokens before each of `tokens` [n] of `seqs` [n]."""
        offset = tokens - spans.query_start[seqs] - age
        ours = x.at[jnp.maximum(tokens - age, 0)].get(mode="clip").astype(jnp.float32)
        return jnp.where((offset >= 0)[:, None], ours, before[seqs, jnp.clip(K + offset, 0, K - 1)])

    ages = [K - 1 - k for k in range(K)]
    all_tokens, taps = jnp.arange(T), weight.astype(jnp.float32)
    y = sum((tap(all_tokens, spans.token_seq, age) * taps[:, k] for k, age in enumerate(ages)), jnp.zeros(x.shape))
    y = y if bias is None else y + bias.astype(jnp.float32)
    y = (jax.nn.silu(y) if activation == "silu" else y).astype(x.dtype)

    def kept(ends: Array, seqs: Array) -> Array:  # [n, K, D]
        return jnp.stack([tap(ends, seqs, age) for age in ages], axis=1)

    used = spans.query_start[1:] > spans.query_start[:-1]
    ends = spans.chunk_start + spans.chunk_len - 1
    held = put_rows(held, base + spans.write_slot, kept(spans.query_start[1:] - 1, jnp.arange(spans.num_seqs)), used)
    return y, put_rows(held, base + spans.chunk_snapshot, kept(ends, spans.chunk_seq), chunk_has_snapshot(spans))
