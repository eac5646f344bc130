"""ssd in plain JAX for devices with thousands of lanes: all sequences, or many chunks, at once, and few loops."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.decays import STRONGEST, split_cumsum
from kernels_pallas.rows import put_rows, start_slots, states_before
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans
from kernels_pallas.ssd.chunk import HIGHEST, read_state, within_chunk
from kernels_pallas.ssd.tokens import Tokens, by_tokens
from kernels_pallas.zeros import zeros_after

CHUNKS_AT_ONCE = 32  # whose states are held beside the cache; more would need more memory, fewer leave lanes idle


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
    """As `kernels_pallas.ssd.ssd`."""
    cached = partial(_decode if spans.kind == "decode" else _chunks, spans=spans, base=base)
    return by_tokens(cached, x, dt, A, B, C, D, state, spans)


def _decode(tokens: Tokens, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """One token of every sequence: sums of products rather than matrix products, so that XLA fuses the update."""
    xdt, log_decay, B, C = tokens
    (_, N, width), (S, G, _) = state.shape, B.shape
    over = (S, N, G, width // G)
    decay = jnp.repeat(jnp.exp(jnp.maximum(log_decay, STRONGEST)), width // log_decay.shape[1], axis=1)
    h = states_before(state, spans, base).reshape(over)
    h = h * decay.reshape(S, 1, G, -1) + B.swapaxes(1, 2)[..., None] * xdt.reshape(S, 1, G, -1)
    y = jnp.sum(C.swapaxes(1, 2)[..., None] * h, axis=1).reshape(S, width)
    h, used = h.reshape(S, N, width), jnp.arange(S) < spans.num_tokens
    state = put_rows(state, base + spans.write_slot, h, used)
    return y, put_rows(state, base + spans.chunk_snapshot, h, used & chunk_has_snapshot(spans))


def _chunks(tokens: Tokens, state: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """Chunks of sequences of any length, many at once; a sequence longer than that goes on from its own row."""
    state, slots = start_slots(state, spans, base)
    T, Q, C = tokens[0].shape[0], spans.chunk_size, spans.chunk_len.shape[0]
    K = min(CHUNKS_AT_ONCE, C)
    has_snapshot = chunk_has_snapshot(spans)

    def many(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, state = carry
        c = i * K + jnp.arange(K)
        real = c < spans.num_chunks
        c = jnp.minimum(c, C - 1)
        seq, start = jnp.where(real, spans.chunk_seq[c], -1), spans.chunk_start[c]
        places = start[:, None] + jnp.arange(Q)
        valid = real[:, None] & (jnp.arange(Q) < spans.chunk_len[c][:, None])
        xdt, log_decay, B_c, C_c = (_taken(a, places, valid) for a in tokens)
        y_c, from_start, over_all, added = jax.vmap(within_chunk)(xdt, log_decay, jnp.moveaxis(B_c, 1, -1), C_c)

        first = real & (seq != jnp.roll(seq, 1).at[0].set(-1))  # of its sequence in this turn
        begins = start == spans.query_start[seq]
        row = base + jnp.where(begins, slots[seq], spans.write_slot[seq])
        known = first & ~(begins & (spans.first_pos[seq] == 0))
        held = state.at[row].get(mode="promise_in_bounds").astype(jnp.float32)
        before = _passed_on(jnp.where(known[:, None, None], held, 0.0), added, log_decay, seq)
        y_c += jax.vmap(read_state)(C_c, before) * from_start
        after = before * over_all + added
        last = real & (seq != jnp.roll(seq, -1).at[-1].set(-1))
        state = put_rows(state, base + spans.write_slot[seq], after, last)
        state = put_rows(state, base + spans.chunk_snapshot[c], after, real & has_snapshot[c])
        return y.at[jnp.where(valid, places, T)].set(y_c, mode="drop"), state

    turns = -(-spans.num_chunks // K)
    return lax.fori_loop(0, turns, many, (zeros_after(tokens[0], tokens[0].shape), state))


def _taken(a: Array, places: Array, valid: Array) -> Array:
    """Rows of a [T, ...] at `places` [K, Q]; zeros where not `valid`."""
    valid = valid.reshape(*valid.shape, *[1] * (a.ndim - 1))
    return jnp.where(valid, a.at[places].get(mode="clip"), 0.0)


def _passed_on(held: Array, added: Array, log_decay: Array, seq: Array) -> Array:
    """[K, N, H*P]: the state before each of K chunks, neighbours in time within a sequence.

    held [K,N,H*P] is what a sequence brings, at its first chunk, and zero elsewhere; added [K,N,H*P] what each chunk
    adds from zero state; log_decay [K,Q,H]; seq [K].
    """
    (K, N, width), H = added.shape, log_decay.shape[2]
    # A chunk that forgets all is enough of a decay for those after it: so the sums stay exact.
    total = jnp.maximum(jnp.sum(jnp.maximum(log_decay, STRONGEST), axis=1), STRONGEST)  # [K, H]
    exact, small = split_cumsum(total)
    before = [a - t for a, t in zip((exact, small), _parts(total), strict=True)]  # up to the chunk's start
    same = seq[:, None] == seq
    index = jnp.arange(K)

    def weights(since: list[Array], seen: Array) -> Array:  # [K, K, H]
        difference = (before[0][:, None] - since[0]) + (before[1][:, None] - since[1])
        return jnp.exp(jnp.where((seen & same)[:, :, None], difference, -jnp.inf))

    from_held, from_added = weights(before, index[:, None] >= index), weights([exact, small], index[:, None] > index)
    sources = jnp.stack([held, added]).reshape(2, K, N, H, width // H)
    mixed = jnp.einsum("xkjh,xjnhp->knhp", jnp.stack([from_held, from_added]), sources, precision=HIGHEST)
    return mixed.reshape(K, N, width)


def _parts(total: Array) -> tuple[Array, Array]:
    """The exact and the small part of each term, as `split_cumsum` adds them up."""
    exact, small = split_cumsum(total[:, None])
    return exact[:, 0], small[:, 0]
