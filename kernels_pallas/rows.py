"""The cache rows from which the sequences of a step start, and conditional work on rows, in place."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.spans import Spans

Carry = TypeVar("Carry")


def repeat_if(wanted: Array, index: Array | int, body: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
    """`body(index, carry)` if `wanted`, a scalar bool, else `carry`.

    A loop of no or one turn: XLA updates what a loop carries in place, whereas it may copy whole arrays that
    pass through a conditional. `body` must use the index it is given; what depends on nothing of the loop is
    hoisted out of it and computed in any case.
    """
    return lax.fori_loop(index, index + wanted.astype(jnp.int32), body, carry)


def copy_row(array: Array, source: Array, target: Array, wanted: Array) -> Array:
    """`array` with row `target` set to row `source` if `wanted`, a scalar bool."""

    def copy(_: Array, array: Array) -> Array:
        row = lax.dynamic_index_in_dim(array, source)
        return lax.dynamic_update_index_in_dim(array, row, target, 0)

    return repeat_if(wanted, 0, copy, array)


def load_row(array: Array, row: Array, wanted: Array) -> Array:
    """Row `row` of `array`; zeros, and nothing is read, unless `wanted`, a scalar bool.

    The loop keeps what it read in memory. Otherwise XLA would read the row anew wherever it is used, also after
    the array has changed, and copy the whole array to be able to.
    """
    zeros = jnp.zeros(array.shape[1:], array.dtype)
    read = wanted.astype(jnp.int32)
    return lax.fori_loop(0, read, lambda _, kept: lax.dynamic_index_in_dim(array, row, keepdims=False), zeros)


def moved_rows(spans: Spans, in_place: Array | None = None) -> Array:
    """[S] bool: sequences whose row must be copied to their `write_slot` before anything is written: see
    `start_slots`."""
    read, write = spans.read_slot, spans.write_slot
    is_used = spans.query_start[1:] > spans.query_start[:-1]
    others = ~jnp.eye(spans.num_seqs, dtype=bool) & is_used
    must_move = jnp.any((read[:, None] == write) & others, axis=1)
    must_move = must_move if in_place is None else must_move | in_place
    return must_move & (read != write) & is_used & (spans.first_pos > 0)


def start_slots(array: Array, spans: Spans, base: int | Array, in_place: Array | None = None) -> tuple[Array, Array]:
    """The array and the slots [S] to read each sequence's state from, safe while others write theirs.

    That is `read_slot`, but where another sequence writes that slot in this step (a fork beside its origin), or
    where the op updates a sequence only `in_place` ([S] bool), the row is first copied to `write_slot`.
    """
    read, write = spans.read_slot, spans.write_slot
    moved = moved_rows(spans, in_place)
    first = jnp.argsort(~moved)  # those that move, in order, before all others

    def move(i: Array, array: Array) -> Array:
        s = first[i]
        row = lax.dynamic_index_in_dim(array, base + read[s])
        return lax.dynamic_update_index_in_dim(array, row, base + write[s], 0)

    return lax.fori_loop(0, moved.sum(dtype=jnp.int32), move, array), jnp.where(moved, write, read)


def states_before(array: Array, spans: Spans, base: int | Array) -> Array:
    """[S, ...] float32: what each sequence starts from, zeros at position 0. All at once: S rows beside the array."""
    rows = array.at[base + spans.read_slot].get(mode="promise_in_bounds").astype(jnp.float32)
    return jnp.where((spans.first_pos > 0).reshape(-1, *[1] * (array.ndim - 1)), rows, 0.0)


def put_rows(array: Array, rows: Array, values: Array, wanted: Array) -> Array:
    """`array` with `values` [n, ...] in `rows` [n] where `wanted` [n]; in place if nothing reads the array later.

    The barrier keeps XLA from reading what `values` come from within the scatter, for which it would copy the array.
    """
    rows = jnp.where(wanted, rows, array.shape[0])  # past the end: dropped
    array, values = lax.optimization_barrier((array, values))
    return array.at[rows].set(values.astype(array.dtype), mode="drop")
