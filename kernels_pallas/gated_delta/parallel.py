"""gated_delta in plain JAX for devices with thousands of lanes: one token of all sequences, or many chunks, at once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.decays import STRONGEST
from kernels_pallas.gated_delta.chunk import HIGHEST, affine_chunk
from kernels_pallas.recurrence import is_single
from kernels_pallas.rows import put_rows, start_slots, states_before
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans
from kernels_pallas.zeros import zeros_after

CHUNKS_AT_ONCE = 16  # of which each has three matrices like a state beside the cache

Tokens = tuple[Array, ...]  # q, k [T,Hk,dk], v [T,H,dv], g [T,H,1 or dk], beta [T,H,1]


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
    """As `kernels_pallas.gated_delta.gated_delta`, for spans with a state; dense ones are left to others."""
    if state is None:
        raise NotImplementedError(f"{spans.kind} spans")
    tokens = (q, k, v, g.reshape(*v.shape[:2], -1), beta[:, :, None])
    o = zeros_after(v.astype(jnp.float32), v.shape)
    if spans.kind == "ragged":
        state, slots = start_slots(state, spans, base)
        spans = replace(spans, read_slot=slots)
        o, state = _chunks(tokens, o, state, spans, base)
    o, state = _singles(tokens, o, state, spans, base)
    return o.astype(v.dtype), state


def _singles(tokens: Tokens, o: Array, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """Sequences of one token: sums of products rather than matrix products, so that XLA fuses them with the update."""
    T, single = o.shape[0], is_single(spans)
    if spans.kind == "ragged":
        of = jnp.minimum(spans.query_start[:-1], T - 1)
        tokens = tuple(a[of] for a in tokens)  # [S, ...]
    q, k, v, g, beta = (a.astype(jnp.float32) for a in tokens)
    q, k = (jnp.repeat(a, v.shape[1] // k.shape[1], axis=1)[..., None] for a in (q, k))  # [S, H, dk, 1]
    h = states_before(state, spans, base) * jnp.exp(jnp.maximum(g, STRONGEST))[..., None]
    u = beta * (v - jnp.sum(k * h, axis=2))  # [S, H, dv]
    h = h + k * u[:, :, None]
    of_singles = jnp.sum(q * h, axis=2)
    if spans.kind == "ragged":
        o = o.at[jnp.where(single, spans.query_start[:-1], T)].set(of_singles, mode="drop")
    else:
        o = jnp.where(single[:, None, None], of_singles, o)
    wanted = chunk_has_snapshot(spans) & single[spans.chunk_seq]
    snapshot = jnp.full(spans.num_seqs, -1).at[jnp.where(wanted, spans.chunk_seq, spans.num_seqs)]
    snapshot = snapshot.set(base + spans.chunk_snapshot, mode="drop")
    return o, put_rows(put_rows(state, base + spans.write_slot, h, single), snapshot, h, snapshot >= 0)


def _chunks(tokens: Tokens, o: Array, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """Sequences of several tokens, many chunks at once; what one passes on to the next is a product, chunk by chunk."""
    T, Q, C = o.shape[0], spans.chunk_size, spans.chunk_len.shape[0]
    K = min(CHUNKS_AT_ONCE, C)
    has_snapshot = chunk_has_snapshot(spans)
    wanted = (jnp.arange(C) < spans.num_chunks) & ~is_single(spans)[spans.chunk_seq]
    order, count = jnp.argsort(~wanted), wanted.sum()  # wanted ones first, in order

    def many(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        o, state = carry
        index = i * K + jnp.arange(K)
        real, c = index < count, order[jnp.minimum(index, C - 1)]
        seq, start = jnp.where(real, spans.chunk_seq[c], -1), spans.chunk_start[c]
        length = jnp.where(real, spans.chunk_len[c], 0)
        places = start[:, None] + jnp.arange(Q)
        q, k, v, g, beta = (a.at[places].get(mode="clip").astype(jnp.float32).swapaxes(1, 2) for a in tokens)
        o_c, reads, passes, adds = jax.vmap(affine_chunk)(q, k, v, g, beta, length)

        first = real & (seq != jnp.roll(seq, 1).at[0].set(-1))  # of its sequence in this turn
        begins = start == spans.query_start[seq]
        row = base + jnp.where(begins, spans.read_slot[seq], spans.write_slot[seq])
        known = first & ~(begins & (spans.first_pos[seq] == 0))
        held = state.at[row].get(mode="promise_in_bounds").astype(jnp.float32)
        held = jnp.where(known[:, None, None, None], held, 0.0)

        def step(h: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            first, held, passes, adds = chunk
            before = jnp.where(first, held, h)
            after = jnp.einsum("hij,hjd->hid", passes, before, precision=HIGHEST) + adds
            return after, (before, after)

        _, (before, after) = lax.scan(step, jnp.zeros_like(adds[0]), (first, held, passes, adds))
        o_c += jnp.einsum("khqd,khdv->khqv", reads, before, precision=HIGHEST)
        last = real & (seq != jnp.roll(seq, -1).at[-1].set(-1))
        state = put_rows(state, base + spans.write_slot[seq], after, last)
        state = put_rows(state, base + spans.chunk_snapshot[c], after, real & has_snapshot[c])
        mine = jnp.arange(Q) < length[:, None]
        return o.at[jnp.where(mine, places, T)].set(o_c.swapaxes(1, 2), mode="drop"), state

    return lax.fori_loop(0, -(-count // K), many, (o, state))
