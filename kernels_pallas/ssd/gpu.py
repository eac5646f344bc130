"""ssd on Hopper GPUs: single tokens, bound by the bandwidth of the state, and chunks, by the tensor cores.

In steps of several tokens per sequence a thread block takes some columns of one head of one sequence and goes over its
chunks in order, the state in registers; the copy engine brings the next chunk meanwhile. So a state is read once and
written once there too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decays import STRONGEST, STRONGEST_IN_BFLOAT16
from kernels_pallas.gpu_rows import (
    GOES_ON,
    LOAD,
    STORE,
    block_columns,
    chunks_of,
    clear,
    move,
    put_run,
    step_singles,
    table_of,
)
from kernels_pallas.mosaic_gpu import (
    MATRIX,
    OF_COLUMNS,
    OF_ROWS,
    for_hopper,
    index,
    launch,
    load,
    operand,
    product,
    store,
    transposed,
)
from kernels_pallas.recurrence import is_single
from kernels_pallas.spans import Spans

Q = 64  # most tokens of a chunk, and rows of a matrix that the tensor cores multiply
COLUMNS = 64  # of a state that a thread block takes, in its registers
STAGES = 2  # chunks in shared memory
MOST_ROWS = 128  # of such a state: with more rows it takes half the columns


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
    """As `kernels_pallas.ssd.ssd`, for states whose size N is a multiple of 64; ragged spans need bfloat16."""
    for_hopper(spans.target)
    if state is None:
        raise NotImplementedError("dense spans")
    (T, H, P), (_, G, N) = x.shape, B.shape
    columns = block_columns(N, H * P // G)
    if spans.kind != "decode":
        _check_chunks(x, B, spans)
    held = jax.new_ref(state)
    table, blocks = table_of(spans, base), H * P // columns
    interpret = spans.target.simulate

    def window(held: Any, row: Any, block: Any) -> Any:
        return held.at[row, :, pl.ds(block * columns, columns)]

    move(table, held, blocks, (N, columns), window, state.dtype, interpret)
    in_chunks, singles = None, (x, dt, B, C)
    if spans.kind != "decode":
        in_chunks = _chunks(x, dt, A, B, C, held, table, spans, base, state.dtype)
        of = jnp.minimum(spans.query_start[:-1], T - 1)
        singles = tuple(a[of] for a in singles)  # [S, ...]
    xs, dt, B, C = (a.astype(jnp.float32) for a in singles)
    decay = jnp.repeat(jnp.exp(jnp.maximum(dt * A.astype(jnp.float32), STRONGEST)), P, axis=1)
    inputs = ((xs * dt[:, :, None]).reshape(-1, H * P), decay, B, C)

    def update(h: Array, s: Any, block: Any, xdt: Any, decay: Any, B: Any, C: Any, y: Any) -> Array:
        at, group = pl.ds(block * columns, columns), lax.div(block * columns, H * P // G)
        B_n, C_n = (lax.broadcast_in_dim(load(a.at[s, group], OF_ROWS), h.shape, (0,)) for a in (B, C))
        kept, added = (lax.broadcast_in_dim(load(a.at[s, at], OF_COLUMNS), h.shape, (1,)) for a in (decay, xdt))
        new = h * kept + B_n * added
        store(y.at[s, at], (new * C_n).sum(0))
        return new

    out = jax.ShapeDtypeStruct((spans.num_seqs, H * P), jnp.float32)
    y = step_singles(update, inputs, table, held, blocks, (N, columns), window, state.dtype, out, interpret)
    if in_chunks is not None:
        tokens = jnp.where(is_single(spans), spans.query_start[:-1], T)  # past the end: dropped
        y = in_chunks.at[tokens].set(y, mode="drop")
    y = y.reshape(T, H, P) + D.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
    # nothing is written for padding
    return jnp.where(spans.token_valid()[:, None, None], y, 0.0).astype(x.dtype), jax.freeze(held)


def _check_chunks(x: Array, B: Array, spans: Spans) -> None:
    """NotImplementedError for what `_chunks` does not take."""
    if x.dtype != jnp.bfloat16 or B.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{spans.kind} spans of {x.dtype}: the kernel of chunks needs bfloat16")
    if spans.chunk_size > Q:
        raise NotImplementedError(f"chunks of {spans.chunk_size} tokens: the kernel takes at most {Q}")
    if x.shape[2] % COLUMNS:
        raise NotImplementedError(f"heads of {x.shape[2]} channels: the kernel of chunks needs a multiple of {COLUMNS}")


def _chunks(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    held: Any,
    table: Array,
    spans: Spans,
    base: int | Array,
    dtype: Any,
) -> Array:
    """y [T, H*P] float32 of sequences of several tokens, without the term of D; their states are written, and nothing
    of other tokens."""
    (T, H, P), (_, G, N) = x.shape, B.shape
    places = spans.chunk_start[:, None] + jnp.arange(Q)
    valid = jnp.arange(Q) < spans.chunk_len[:, None]  # [chunks, Q]
    dt = jnp.where(valid[:, :, None], dt.astype(jnp.float32).at[places].get(mode="clip"), 0.0)
    sums = jnp.cumsum(jnp.maximum(dt * A.astype(jnp.float32), STRONGEST_IN_BFLOAT16), axis=1)  # [chunks, Q, H]
    total = sums[:, -1]
    sums, dt, to_end = (a.swapaxes(1, 2) for a in (sums, dt, jnp.exp(total[:, None] - sums) * dt))  # [chunks, H, Q]
    # A chunk's rows may reach past the last token, and the copy engine wants a multiple of 8.
    x, B, C = (jnp.pad(a.reshape(T, -1), [(0, Q + -T % 8), (0, 0)]) for a in (x, B, C))

    work, of_chunks = chunks_of(spans, base)
    work = jnp.where(is_single(spans)[:, None], 0, work)  # those have a kernel of their own
    kernel = Kernel(H, P, G, N, dtype)
    return launch(
        kernel.scan,
        (
            table,
            work,
            of_chunks,
            sums,
            dt,
            to_end,
            jnp.exp(total),
            x,
            B,
            C,
            held,
        ),
        grid={"block": H * P // kernel.columns, "sequence": spans.num_seqs},
        out=jax.ShapeDtypeStruct((T, H * P), jnp.float32),
        scratch=kernel.scratch(),
        interpret=spans.target.simulate,
        approximate=True,
    )


@dataclass(frozen=True)
class Kernel:
    """What is known of a scan over chunks when it is compiled."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    dtype: Any  # of the state

    @property
    def columns(self) -> int:
        """Of a state, in the registers of a thread block."""
        return COLUMNS if self.state_size <= MOST_ROWS else COLUMNS // 2

    def scratch(self) -> dict[str, Any]:
        N, columns = self.state_size, self.columns
        matrix = partial(operand, columns=columns)
        return {
            "values": matrix(STAGES, Q, columns),
            "keys": matrix(STAGES, Q, N),
            "queries": matrix(STAGES, Q, N),
            "before": matrix(N, columns),
            "weighted": matrix(Q, columns),
            "mixing": matrix(Q, Q),
            "answer": plgpu.SMEM((Q, columns), jnp.float32),
            "row": plgpu.SMEM((N, columns), self.dtype),
            "arrived": plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            "loaded": plgpu.Barrier(),
        }

    def scan(
        self,
        table: Any,
        work: Any,
        chunks: Any,
        sums: Any,
        dt: Any,
        to_end: Any,
        over_all: Any,
        x: Any,
        B: Any,
        C: Any,
        held: Any,
        y: Any,
        *,
        values: Any,
        keys: Any,
        queries: Any,
        before: Any,
        weighted: Any,
        mixing: Any,
        answer: Any,
        row: Any,
        arrived: Any,
        loaded: Any,
    ) -> None:
        """Some columns of one head of one sequence.

        y_i = sum_{j<=i} C_i B_j decay(i, j) dt_j x_j + decay(i, start) C_i h
        """
        block, s = lax.axis_index("block"), lax.axis_index("sequence")
        head = lax.div(block * self.columns, self.head_dim)
        group = lax.div(head, self.heads // self.groups)
        at, of_group = pl.ds(block * self.columns, self.columns), pl.ds(group * self.state_size, self.state_size)
        first, count = work[s, 0], work[s, 1]
        parts = [pl.ds(n, 64) for n in range(0, self.state_size, 64)]

        def fetch(c: Any, slot: Any) -> None:
            tokens = pl.ds(chunks[c, 0], Q)
            for source, target in (
                (x.at[tokens, at], values),
                (B.at[tokens, of_group], keys),
                (C.at[tokens, of_group], queries),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], arrived.at[slot])

        def save(h: Any, target: Any) -> None:
            for part, some in zip(parts, h, strict=True):
                store(row.at[part], some.astype(row.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(row, held.at[target, :, at])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(count > 0)
        def _() -> None:
            goes_on = table[s, GOES_ON] != 0

            @pl.when(goes_on)
            def _() -> None:
                plgpu.copy_gmem_to_smem(held.at[table[s, LOAD], :, at], row, loaded)
                plgpu.barrier_wait(loaded)

            @pl.when(~goes_on)
            def _() -> None:
                store(row, jnp.zeros(row.shape, row.dtype))

            h = tuple(load(row.at[part], MATRIX).astype(jnp.float32) for part in parts)
            fetch(first, 0)

            def chunk(i: Any, h: Any) -> Any:
                c, slot, length = first + i, lax.rem(i, STAGES), chunks[first + i, 1]
                pl.when(i + 1 < count)(partial(fetch, c + 1, 1 - slot))
                plgpu.barrier_wait(arrived.at[slot])
                C_c, B_c, x_c = queries.at[slot], keys.at[slot], values.at[slot]

                clear(length, B_c, x_c)
                by_row = partial(lax.broadcast_in_dim, broadcast_dimensions=(0,))
                by_column = partial(lax.broadcast_in_dim, shape=(Q, Q), broadcast_dimensions=(1,))
                weights = by_row(load(to_end.at[c, head], OF_ROWS), (Q, self.columns))
                store(weighted, (load(x_c, MATRIX).astype(jnp.float32) * weights).astype(jnp.bfloat16))
                for part, some in zip(parts, h, strict=True):
                    store(before.at[part], some.astype(jnp.bfloat16))
                plgpu.commit_smem()

                since = load(sums.at[c, head], OF_ROWS)
                between = by_row(since, (Q, Q)) - by_column(load(sums.at[c, head], OF_COLUMNS))
                seen = index((Q, Q), 0) >= index((Q, Q), 1)
                mixed = product(C_c, transposed(B_c)) * by_column(load(dt.at[c, head], OF_COLUMNS))
                mixed = jnp.where(seen, mixed * jnp.exp(jnp.minimum(between, 0.0)), 0.0)
                store(mixing, mixed.astype(jnp.bfloat16))
                plgpu.commit_smem()
                y_c = product(C_c, before) * by_row(jnp.exp(since), (Q, self.columns)) + product(mixing, x_c)
                kept = over_all[c, head]
                h = tuple(
                    some * kept + product(transposed(keys.at[slot, :, part]), weighted)
                    for part, some in zip(parts, h, strict=True)
                )
                store(answer, y_c)
                plgpu.commit_smem()
                put_run(answer, y.at[:, at], chunks[c, 0], length, Q)
                plgpu.wait_smem_to_gmem(0)
                pl.when(chunks[c, 2] >= 0)(partial(save, h, chunks[c, 2]))
                return h

            h = lax.fori_loop(0, count, chunk, h)
            save(h, table[s, STORE])
