"""Cache rows on TPU: copies of rows before a step, and blocks of rows that move between HBM and a kernel's buffers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.pieces import NONE, Singles
from kernels_pallas.spans import Spans

SUBLANES = {"float32": 8, "bfloat16": 16}  # of a tile
Window = Callable[..., object]  # row -> the part of the array in HBM that a buffer holds


def start_slots(array: Array, spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """As `kernels_pallas.rows.start_slots`: the array, and slots [S] to read from, safe while others write theirs."""
    read, write = spans.read_slot, spans.write_slot
    used = spans.query_start[1:] > spans.query_start[:-1]
    others = ~jnp.eye(spans.num_seqs, dtype=bool) & used
    moved = jnp.any((read[:, None] == write) & others, axis=1) & (read != write) & used & (spans.first_pos > 0)
    at = jnp.flatnonzero(moved, size=spans.num_seqs, fill_value=0)
    rows = base + jnp.stack([read[at], write[at]])
    return _copy_rows(array, rows, jnp.sum(moved, dtype=jnp.int32), spans), jnp.where(moved, write, read)


def in_hbm(array: Array) -> Array:
    """A cache of which a kernel moves rows itself; the compiler would fetch a small one into vector memory, whole."""
    return pltpu.with_memory_space_constraint(array, pltpu.MemorySpace.HBM)


def _copy_rows(array: Array, rows: Array, count: Array, spans: Spans) -> Array:
    """`array` with row rows[1, i] set to row rows[0, i] for i < count, in place."""

    def body(count, rows, _, array, semaphore):
        def copy(i, carry):
            move = pltpu.make_async_copy(array.at[rows[0, i]], array.at[rows[1, i]], semaphore)
            move.start()
            move.wait()
            return carry

        jax.lax.fori_loop(0, count[0], copy, 0)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        name="copy_rows",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={2: 0},
        interpret=spans.target.simulate or False,
    )(count[None], rows, in_hbm(array))


def first_tokens(spans: Spans) -> Array:
    """[S]: the first token of each sequence; any token for sequences that have none."""
    return jnp.minimum(spans.query_start[:-1], spans.token_seq.shape[0] - 1)


def put_singles(y: Array, rows: Array, singles: Singles, spans: Spans) -> Array:
    """y [T, ...] with the rows [S, ...] of sequences of one token put where these lie; padding becomes zeros."""
    rows = rows.at[singles.seq].get(mode="promise_in_bounds")
    target = jnp.where(jnp.arange(spans.num_seqs) < singles.count, singles.token, y.shape[0])
    y = jnp.where(spans.token_valid().reshape(-1, *[1] * (y.ndim - 1)), y, 0)
    return y.at[target].set(rows, mode="drop")


class Loads:
    """Loads of rows into two buffers, each started one step of the grid ahead of its use."""

    def __init__(self, buffers, semaphores, window: Window):
        self._buffers, self._semaphores, self._window = buffers, semaphores, window

    def _copy(self, step, *place):
        parity = step % 2
        return pltpu.make_async_copy(self._window(*place), self._buffers.at[parity], self._semaphores.at[parity])

    def start(self, step, row, *place) -> None:
        """For `step`; nothing if `row` is NONE."""

        @pl.when(row != NONE)
        def _():
            self._copy(step, row, *place).start()

    def wait(self, step, row, *place) -> None:
        @pl.when(row != NONE)
        def _():
            self._copy(step, row, *place).wait()


class Stores:
    """Stores of two buffers to up to two rows each, waited for when the buffer is needed again, or at the end.

    `pending` [2, 2] in scalar memory holds whether a buffer's store to its first and second row is under way.
    """

    def __init__(self, buffers, semaphores, pending, window: Window):
        self._buffers, self._semaphores, self._pending, self._window = buffers, semaphores, pending, window

    def begin(self) -> None:
        """Before the first step of the grid."""
        for parity in range(2):
            for which in range(2):
                self._pending[parity, which] = 0

    def _copy(self, parity, which, *place):
        semaphore = self._semaphores.at[parity, which]
        return pltpu.make_async_copy(self._buffers.at[parity], self._window(*place), semaphore)

    def free(self, step, *place) -> None:
        """Waits until the buffer of `step` may be written; `place` is any place of the array."""
        parity = step % 2
        for which in range(2):

            @pl.when(self._pending[parity, which] == 1)
            def _(which=which):
                self._copy(parity, which, *place).wait()
                self._pending[parity, which] = 0

    def start(self, step, rows, *place) -> None:
        """Stores the buffer of `step` to each of the two `rows` that is not NONE."""
        parity = step % 2
        for which, row in enumerate(rows):

            @pl.when(row != NONE)
            def _(which=which, row=row):
                self._copy(parity, which, row, *place).start()
                self._pending[parity, which] = 1

    def end(self, *place) -> None:
        """After the last step of the grid."""
        for step in range(2):
            self.free(step, *place)


def begin_step(loads: Loads, stores: Stores, row_of: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Begins a step of a grid over (items, blocks of a row): the next step's load is started, the first's too.

    `row_of(item)` is the row it starts from, or NONE. Gives the number of the step, and that of steps.
    """
    item, block, blocks = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    step, steps = item * blocks + block, pl.num_programs(0) * blocks

    @pl.when(step == 0)
    def _():
        stores.begin()
        loads.start(step, row_of(item), block)

    @pl.when(step + 1 < steps)
    def _():
        following = (step + 1) // blocks
        loads.start(step + 1, row_of(following), step + 1 - following * blocks)

    return step, steps
