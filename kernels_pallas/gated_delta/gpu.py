"""gated_delta on Hopper GPUs: steps of one token per sequence, bound by the bandwidth of the state.

The columns of a state do not depend on each other, so a thread block takes some of one head's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.decays import STRONGEST
from kernels_pallas.gpu_rows import block_columns, move, step_singles, table_of
from kernels_pallas.mosaic_gpu import OF_COLUMNS, OF_ROWS, for_hopper, load, store
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
    """As `kernels_pallas.gated_delta.gated_delta`, for decode spans and keys whose size is a multiple of 64."""
    for_hopper(spans.target)
    if state is None or spans.kind != "decode":
        raise NotImplementedError(f"{spans.kind} spans: only decode has a kernel")
    (S, H, dv), (_, key_heads, dk) = v.shape, k.shape
    columns = block_columns(dk, dv)
    per_head = dv // columns
    held = jax.new_ref(state)
    table, blocks, interpret = table_of(spans, base), H * per_head, spans.target.simulate

    def place(block: Any) -> tuple[Any, Any]:
        return lax.div(block, per_head), pl.ds(lax.rem(block, per_head) * columns, columns)

    def window(held: Any, row: Any, block: Any) -> Any:
        head, at = place(block)
        return held.at[row, head, :, at]

    move(table, held, blocks, (dk, columns), window, state.dtype, interpret)
    decay = jnp.broadcast_to(jnp.exp(jnp.maximum(g.astype(jnp.float32), STRONGEST)).reshape(S, H, -1), (S, H, dk))
    inputs = (*(a.astype(jnp.float32) for a in (q, k, v)), decay, beta.astype(jnp.float32))

    def update(h: Array, s: Any, block: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, o: Any) -> Array:
        head, at = place(block)
        key_head = lax.div(head, H // key_heads)
        by_row = (q.at[s, key_head], k.at[s, key_head], decay.at[s, head])
        q_n, k_n, kept = (lax.broadcast_in_dim(load(a, OF_ROWS), h.shape, (0,)) for a in by_row)
        h = h * kept
        u = beta[s, head] * (load(v.at[s, head, at], OF_COLUMNS) - (h * k_n).sum(0))
        h = h + k_n * lax.broadcast_in_dim(u, h.shape, (1,))
        store(o.at[s, head, at], (h * q_n).sum(0))
        return h

    out = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    o = step_singles(update, inputs, table, held, blocks, (dk, columns), window, state.dtype, out, interpret)
    used = jnp.arange(S) < spans.num_tokens  # nothing is written for padding
    return jnp.where(used[:, None, None], o, 0.0).astype(v.dtype), jax.freeze(held)
