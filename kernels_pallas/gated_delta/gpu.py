"""gated_delta on Hopper GPUs: single tokens, bound by the bandwidth of the state, and chunks (see gpu_chunk.py).

The columns of a state do not depend on each other, so a thread block takes some of one head's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.decays import STRONGEST
from kernels_pallas.gated_delta.gpu_chunk import chunks
from kernels_pallas.gpu_rows import block_columns, move, step_singles, table_of
from kernels_pallas.mosaic_gpu import OF_COLUMNS, OF_ROWS, for_hopper, load, store
from kernels_pallas.recurrence import is_single
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
    """As `kernels_pallas.gated_delta.gated_delta`, for keys of 64 n channels; ragged spans need bfloat16."""
    for_hopper(spans.target)
    if state is None:
        raise NotImplementedError("dense spans")
    (T, H, dv), (_, key_heads, dk), S = v.shape, k.shape, spans.num_seqs
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
    in_chunks, dtype = None, v.dtype
    if spans.kind != "decode":
        in_chunks = chunks(q, k, v, g, beta, held, table, spans, base, state.dtype)
        of = jnp.minimum(spans.query_start[:-1], T - 1)
        q, k, v, g, beta = (a[of] for a in (q, k, v, g, beta))  # [S, ...]
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
    o = o.astype(dtype)
    if in_chunks is not None:
        tokens = jnp.where(is_single(spans), spans.query_start[:-1], T)  # past the end: dropped
        o = in_chunks.at[tokens].set(o, mode="drop")
    # nothing is written for padding
    return jnp.where(spans.token_valid()[:, None, None], o, 0), jax.freeze(held)
