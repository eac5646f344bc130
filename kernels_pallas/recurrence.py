"""The loops of ops with recurrent state over the chunks of a step, updating the state array in place.

`scan_chunks` runs sequences of several tokens, `step_singles` those of one. An op gives the arithmetic alone.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.rows import copy_row, repeat_if
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans

ChunkUpdate = Callable[[Array, Array, Array], tuple[Array, Array]]
Carry = tuple[Array, Array, Array]  # y, h (a float32 row of the state), state
TokenPart = Callable[[Array, Array, Array, Array, tuple[Array, Array]], tuple[Array, Array]]


def is_single(spans: Spans) -> Array:
    """[S] bool: sequences of one token in this step."""
    return spans.query_start[1:] - spans.query_start[:-1] == 1


def scan_chunks(
    y: Array, state: Array, slots: Array, spans: Spans, base: int | Array, update: ChunkUpdate
) -> tuple[Array, Array]:
    """Sequences of several tokens, chunk after chunk; the state is carried until the sequence's last one.

    `update(h, start, length)` gives the outputs of Q tokens from `start`, of which `length` are the chunk's, and the
    state after those, from h, a float32 row of `state`. y [T, ...] and `state` come back with what they gave.
    """
    T, single, has_snapshot = y.shape[0], is_single(spans), chunk_has_snapshot(spans)

    def load(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, seq = carry[1], spans.chunk_seq[c]
        h = lax.dynamic_index_in_dim(state, base + slots[seq], keepdims=False).astype(jnp.float32)
        return jnp.where(spans.first_pos[seq] > 0, h, 0.0), state

    def run(c: Array, carry: Carry) -> Carry:
        y, h, state = carry
        start, length, seq = spans.chunk_start[c], spans.chunk_len[c], spans.chunk_seq[c]
        is_first = start == spans.query_start[seq]
        is_last = start + length == spans.query_start[seq + 1]
        h, state = repeat_if(is_first, c, load, (h, state))
        y_c, h = update(h, start, length)
        # In order of start, so what comes next overwrites what this chunk leaves past its length.
        y = lax.dynamic_update_slice_in_dim(y, y_c, start, 0)

        def store(i: Array, state: Array) -> Array:
            slot = jnp.where(is_last & (i == 0), spans.write_slot[seq], spans.chunk_snapshot[c])
            return lax.dynamic_update_index_in_dim(state, h.astype(state.dtype), base + slot, 0)

        stores = is_last.astype(jnp.int32) + has_snapshot[c].astype(jnp.int32)
        return y, h, lax.fori_loop(0, stores, store, state)

    def chunk(c: Array, carry: Carry) -> Carry:
        return repeat_if(~single[spans.chunk_seq[c]], c, run, carry)

    # A chunk's Q outputs may run past the end, where the update would be shifted: pad.
    y = jnp.pad(y, [(0, spans.chunk_size)] + [(0, 0)] * (y.ndim - 1))
    y, _, state = lax.fori_loop(0, spans.num_chunks, chunk, (y, jnp.zeros(state.shape[1:]), state))
    return y[:T], state


def step_singles(
    y: Array, state: Array, spans: Spans, base: int | Array, parts: int, update: TokenPart
) -> tuple[Array, Array]:
    """Sequences of one token, whose states lie in their write rows: each is read and written once, part by part.

    `update(k, t, row, from_zero, (y_t, state))` does part k of `parts` of the state in `row`, with token t; y_t
    [1, ...] is the token's output, zeros before part 0. `from_zero` says that what the row holds does not count.
    """
    single, has_snapshot = is_single(spans), chunk_has_snapshot(spans)

    def chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, state = carry
        t, seq = spans.chunk_start[c], spans.chunk_seq[c]
        row, wanted = base + spans.write_slot[seq], single[seq]
        from_zero = spans.first_pos[seq] == 0

        def part(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return update(k, t, row, from_zero, carry)

        y_t, state = lax.fori_loop(0, jnp.where(wanted, parts, 0), part, (jnp.zeros((1, *y.shape[1:])), state))
        y_t = jnp.where(wanted, y_t, lax.dynamic_slice_in_dim(y, t, 1))
        y = lax.dynamic_update_slice_in_dim(y, y_t, t, 0)
        return y, copy_row(state, row, base + spans.chunk_snapshot[c], has_snapshot[c] & wanted)

    return lax.fori_loop(0, spans.num_chunks, chunk, (y, state))
