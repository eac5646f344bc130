"""Rows of a state array on an NVIDIA GPU: the kernel around ops that update a state by one token, bound by bandwidth.

Each thread block takes a tile of one sequence's row: the copy engine brings it to shared memory, the update is done in
registers, and the copy engine takes it back. So a row is read once and written once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic_gpu import MATRIX, index, launch, load, store, strided
from kernels_pallas.recurrence import is_single
from kernels_pallas.rows import moved_rows
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans

SINGLE, GOES_ON, SNAPSHOTS, MOVED, LOAD, STORE, SNAPSHOT, READ = range(8)
"""Columns of a table of sequences: four flags, and rows of the state array."""

BLOCK_ELEMENTS = 8192  # of a state, in the registers of a thread block: 64 a thread

Window = Callable[[Any, Any, Any], Any]  # (state Ref, row, block) -> the tile of that row that a thread block takes


def block_columns(state_size: int, group_width: int) -> int:
    """Columns of a state [state_size, ...] that a thread block takes, all of one group of `group_width`."""
    if state_size % 64 or state_size > 256:
        raise NotImplementedError(f"state size {state_size}: the kernel needs 64, 128, 192 or 256")
    columns = math.gcd(group_width, 1 << (BLOCK_ELEMENTS // state_size).bit_length() - 1)
    if columns < 16:
        raise NotImplementedError(f"groups of {group_width} channels: the kernel needs a multiple of 16")
    return columns


def table_of(spans: Spans, base: int | Array) -> Array:
    """[S, 8] int32. LOAD is where the state lies after `move`, READ where it lay before; SNAPSHOT: of SINGLEs."""
    moved, single = moved_rows(spans), is_single(spans)
    chunk = jnp.where(chunk_has_snapshot(spans) & single[spans.chunk_seq], spans.chunk_seq, spans.num_seqs)
    unset = jnp.full(spans.num_seqs, -1, jnp.int32)
    snapshot = unset.at[chunk].set(spans.chunk_snapshot, mode="drop")
    load = jnp.where(moved, spans.write_slot, spans.read_slot)
    flags = (single, spans.first_pos > 0, snapshot >= 0, moved)
    rows = (base + load, base + spans.write_slot, base + snapshot, base + spans.read_slot)
    return jnp.stack([a.astype(jnp.int32) for a in (*flags, *rows)], axis=1)


def move(
    table: Array, held: Any, blocks: int, tile: tuple[int, ...], window: Window, dtype: Any, interpret: Any
) -> None:
    """Copy each MOVED sequence's row to where it writes: before any other changes it."""

    def move_rows(table: Any, held: Any, h: Any, arrived: Any) -> None:
        s, block = lax.axis_index("sequence"), lax.axis_index("block")

        @pl.when(table[s, MOVED] != 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(window(held, table[s, READ], block), h, arrived)
            plgpu.barrier_wait(arrived)
            plgpu.copy_smem_to_gmem(h, window(held, table[s, STORE], block))
            plgpu.wait_smem_to_gmem(0)

    grid = {"block": blocks, "sequence": table.shape[0]}
    scratch = {"h": plgpu.SMEM(tile, dtype), "arrived": plgpu.Barrier()}
    launch(move_rows, (table, held), grid=grid, scratch=scratch, interpret=interpret)


def move_vectors(table: Array, held: Any, vectors: int, channels: int, interpret: Any) -> None:
    """As `move`, for rows [vectors, D] that are not for the copy engine; a thread block takes `channels` of D."""
    layout = strided(channels)

    def move_rows(table: Any, held: Any) -> None:
        s, at = lax.axis_index("sequence"), pl.ds(lax.axis_index("block") * channels, channels)

        @pl.when(table[s, MOVED] != 0)
        def _() -> None:
            for n in range(vectors):
                store(held.at[table[s, STORE], n, at], load(held.at[table[s, READ], n, at], layout))

    grid = {"block": held.shape[2] // channels, "sequence": table.shape[0]}
    launch(move_rows, (table, held), grid=grid, scratch={}, interpret=interpret)


def chunks_of(spans: Spans, base: int | Array) -> tuple[Array, Array]:
    """[S, 2] int32, each sequence's first chunk and how many it has; [C, 3] int32, of each chunk the first token, the
    number of tokens, and the row for a snapshot after it or -1."""
    real = jnp.arange(spans.chunk_len.shape[0]) < spans.num_chunks
    seq = jnp.where(real, spans.chunk_seq, spans.num_seqs)  # past the end: dropped
    count = jnp.zeros(spans.num_seqs, jnp.int32).at[seq].add(1, mode="drop")
    snapshot = jnp.where(chunk_has_snapshot(spans), base + spans.chunk_snapshot, -1)
    work = jnp.stack([jnp.cumsum(count) - count, count], axis=1)
    chunks = jnp.stack([spans.chunk_start, spans.chunk_len, snapshot], axis=1)
    return work.astype(jnp.int32), chunks.astype(jnp.int32)


def step_singles(
    update: Callable[..., Array],
    inputs: Sequence[Array],
    table: Array,
    held: Any,
    blocks: int,
    tile: tuple[int, int],
    window: Window,
    dtype: Any,
    out: jax.ShapeDtypeStruct,
    interpret: Any,
) -> Array:
    """Update the rows of all SINGLE sequences, a `tile` in each thread block, and what `update` wrote for them.

    `update(h, s, block, *inputs, out)` gives the tile after the token of sequence s from h, the float32 tile before it
    in layout MATRIX; it reads `inputs` and writes to `out` by itself.
    """

    def step_rows(table: Any, held: Any, *refs: Any, h: Any, arrived: Any) -> None:
        s, block = lax.axis_index("sequence"), lax.axis_index("block")

        @pl.when(table[s, SINGLE] != 0)
        def _() -> None:
            goes_on = table[s, GOES_ON] != 0

            @pl.when(goes_on)
            def _() -> None:
                plgpu.copy_gmem_to_smem(window(held, table[s, LOAD], block), h, arrived)
                plgpu.barrier_wait(arrived)

            @pl.when(~goes_on)
            def _() -> None:
                store(h, jnp.zeros(tile, h.dtype))

            new = update(load(h, MATRIX).astype(jnp.float32), s, block, *refs)
            store(h, new.astype(h.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(h, window(held, table[s, STORE], block))

            @pl.when(table[s, SNAPSHOTS] != 0)
            def _() -> None:
                plgpu.copy_smem_to_gmem(h, window(held, table[s, SNAPSHOT], block))

            plgpu.wait_smem_to_gmem(0)

    grid = {"block": blocks, "sequence": table.shape[0]}
    scratch = {"h": plgpu.SMEM(tile, dtype), "arrived": plgpu.Barrier()}
    arguments = (table, held, *inputs)
    return launch(step_rows, arguments, grid=grid, out=out, scratch=scratch, interpret=interpret)


def put_run(source: Any, target: Any, start: Any, count: Any, most: int, width: int = 1) -> None:
    """Copy `count` of `most` runs of `width` rows from shared memory to rows `start * width` on, and nothing else.

    The copy engine moves boxes of sizes that are known when it is compiled, so the runs go in powers of two.
    """
    if most == 1:
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, width)], target.at[pl.ds(start * width, width)])
        return
    for bit in range(most.bit_length()):
        some = 1 << bit

        @pl.when(lax.rem(lax.div(count, some), 2) != 0)
        def _(some: int = some) -> None:
            before = lax.div(count, 2 * some) * 2 * some
            rows = pl.ds(before * width, some * width)
            plgpu.copy_smem_to_gmem(source.at[rows], target.at[pl.ds((start + before) * width, some * width)])


def clear(length: Any, *refs: Any) -> None:
    """Zero the rows from `length` on, of operands that are not the chunk's: they may be NaN, and 0 * NaN is NaN."""

    @pl.when(length < refs[0].shape[0])
    def _() -> None:
        for ref in refs:
            width = min(64, ref.shape[1])  # of more, registers spill
            for n in range(0, ref.shape[1], width):
                part = ref.at[:, pl.ds(n, width)]
                held = load(part, MATRIX)
                store(part, jnp.where(index(held.shape, 0) < length, held, jnp.zeros_like(held)))
        plgpu.commit_smem()
