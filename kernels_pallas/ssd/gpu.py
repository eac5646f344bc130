"""ssd on NVIDIA GPUs from Hopper on: steps of one token per sequence, bound by the bandwidth of the state.

Each thread block takes some columns of one sequence's state: the copy engine brings them to shared memory, the update
is done in registers, and the copy engine takes them back. So a state is read once and written once.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decays import STRONGEST
from kernels_pallas.mosaic_gpu import MATRIX, OF_COLUMNS, OF_ROWS, launch, load, store
from kernels_pallas.rows import moved_rows
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans

BLOCK_ELEMENTS = 8192  # of a state, in the registers of a thread block: 64 a thread


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
    interpret: Any = None,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.ssd.ssd`, for decode spans and states whose size N is a multiple of 64."""
    if state is None or spans.kind != "decode":
        raise NotImplementedError(f"{spans.kind} spans: only decode has a kernel")
    (S, H, P), (_, G, N) = x.shape, B.shape
    columns = block_columns(N, H * P // G)
    xf, dt, B, C = (a.astype(jnp.float32) for a in (x, dt, B, C))
    decay = jnp.repeat(jnp.exp(jnp.maximum(dt * A.astype(jnp.float32), STRONGEST)), P, axis=1)
    xdt = (xf * dt[:, :, None]).reshape(S, H * P)
    y, state = _step(xdt, decay, B, C, state, spans, base, columns, interpret)
    y = y.reshape(S, H, P) + D.astype(jnp.float32)[:, None] * xf
    used = jnp.arange(S) < spans.num_tokens  # nothing is written for padding
    return jnp.where(used[:, None, None], y, 0.0).astype(x.dtype), state


def block_columns(state_size: int, group_width: int) -> int:
    """Columns of a state [state_size, heads * head_dim] that a thread block takes, all of one group's."""
    if state_size % 64 or state_size > 256:
        raise NotImplementedError(f"state size {state_size}: the kernel needs 64, 128, 192 or 256")
    columns = math.gcd(group_width, 1 << (BLOCK_ELEMENTS // state_size).bit_length() - 1)
    if columns < 16:
        raise NotImplementedError(f"groups of {group_width} channels: the kernel needs a multiple of 16")
    return columns


def _step(
    xdt: Array,
    decay: Array,
    B: Array,
    C: Array,
    state: Array,
    spans: Spans,
    base: int | Array,
    columns: int,
    interpret: Any,
) -> tuple[Array, Array]:
    """y [S, H*P] and the state: xdt, decay [S, H*P], B, C [S, G, N], float32."""
    (S, width), (_, G, N) = xdt.shape, B.shape
    moved = moved_rows(spans)
    flags = (
        jnp.arange(S) < spans.num_tokens,
        spans.first_pos > 0,
        chunk_has_snapshot(spans),
        moved,
    )
    rows = (base + jnp.where(moved, spans.write_slot, spans.read_slot), base + spans.write_slot)
    table = jnp.stack([*flags, *rows, base + spans.chunk_snapshot, base + spans.read_slot], axis=1).astype(jnp.int32)
    held = jax.new_ref(state)
    tile = plgpu.SMEM((N, columns), state.dtype)
    grid = {"column": width // columns, "sequence": S}

    def place() -> tuple[Array, Any]:
        return lax.axis_index("sequence"), pl.ds(lax.axis_index("column") * columns, columns)

    def move(table: Any, held: Any, h: Any, arrived: Any) -> None:
        s, at = place()

        @pl.when((table[s, 0] != 0) & (table[s, 3] != 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(held.at[table[s, 7], :, at], h, arrived)
            plgpu.barrier_wait(arrived)
            plgpu.copy_smem_to_gmem(h, held.at[table[s, 5], :, at])
            plgpu.wait_smem_to_gmem(0)

    def step(table: Any, xdt: Any, decay: Any, B: Any, C: Any, held: Any, y: Any, h: Any, arrived: Any) -> None:
        s, at = place()

        @pl.when(table[s, 0] != 0)
        def _() -> None:
            goes_on = table[s, 1] != 0

            @pl.when(goes_on)
            def _() -> None:
                plgpu.copy_gmem_to_smem(held.at[table[s, 4], :, at], h, arrived)
                plgpu.barrier_wait(arrived)

            @pl.when(~goes_on)
            def _() -> None:
                store(h, jnp.zeros((N, columns), h.dtype))

            group = lax.div(lax.axis_index("column") * columns, width // G)
            by_row = [lax.broadcast_in_dim(load(a.at[s, group], OF_ROWS), (N, columns), (0,)) for a in (B, C)]
            kept, added = (
                lax.broadcast_in_dim(load(a.at[s, at], OF_COLUMNS), (N, columns), (1,)) for a in (decay, xdt)
            )
            new = load(h, MATRIX).astype(jnp.float32) * kept + by_row[0] * added
            store(h, new.astype(h.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(h, held.at[table[s, 5], :, at])

            @pl.when(table[s, 2] != 0)
            def _() -> None:
                plgpu.copy_smem_to_gmem(h, held.at[table[s, 6], :, at])

            store(y.at[s, at], (new * by_row[1]).sum(0))
            plgpu.wait_smem_to_gmem(0)

    scratch = {"h": tile, "arrived": plgpu.Barrier()}
    launch(move, (table, held), grid=grid, scratch=scratch, interpret=interpret)
    out = jax.ShapeDtypeStruct((S, width), jnp.float32)
    y = launch(step, (table, xdt, decay, B, C, held), grid=grid, out=out, scratch=scratch, interpret=interpret)
    return y, jax.freeze(held)
