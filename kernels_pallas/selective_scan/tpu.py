"""selective_scan on TPU: a kernel for chunks of sequences, token after token, and one for single tokens.

Channels lie on lanes and the N numbers of a channel's state on sublanes, as in the cache. The decays, one per channel
and number, make no matrix product: both kernels are the work of the vector unit.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import block_sizes, largest_divisor
from kernels_pallas.pieces import Pieces, Singles, pieces_of, singles_of
from kernels_pallas.spans import Spans
from kernels_pallas.target import Target
from kernels_pallas.tpu_rows import SUBLANES, Loads, Stores, begin_step, first_tokens, in_hbm, put_singles, start_slots

LANES = 128
GROUP = 16  # tokens of one turn of the loop: the rows of a bfloat16 tile


def selective_scan(
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
    """As `kernels_pallas.selective_scan.selective_scan`, for `spans.target.chip`."""
    chip = spans.target.chip
    if chip is None:
        raise NotImplementedError("the TPU kernels of selective_scan are for TPUs, which this device is not")
    if state is None:
        raise NotImplementedError("the TPU kernels of selective_scan need a state; dense spans have none")
    check_shapes(x, state)
    sizes = block_sizes(chip, "selective_scan")
    dt, A, B, C, D = (a.astype(jnp.float32) for a in (dt, A.T * math.log2(math.e), B, C, D))
    if spans.kind == "decode":
        singles = singles_of(spans, spans.read_slot, base)
        return _step(x, dt, A, B, C, D, state, singles, spans.target, sizes["step_lanes"])
    state, slots = start_slots(state, spans, base)
    tile = min(sizes["chunk_tokens"], -(-x.shape[0] // GROUP) * GROUP)
    pieces = pieces_of(spans, slots, base, tile)
    y, state = _chunks(x, dt, A, B, C, D, state, pieces, spans.target, tile, sizes["chunk_lanes"])
    singles, at = singles_of(spans, slots, base), first_tokens(spans)
    rows, state = _step(x[at], dt[at], A, B[at], C[at], D, state, singles, spans.target, sizes["step_lanes"])
    return put_singles(y, rows, singles, spans), state


def check_shapes(x: Array, state: Array) -> None:
    """NotImplementedError for what the tiles of the TPU cannot hold."""
    (_, N, D), dtype = state.shape, state.dtype.name
    if dtype not in SUBLANES or x.dtype.name not in SUBLANES:
        raise NotImplementedError(
            f"state {dtype}, x {x.dtype}: the TPU kernels of selective_scan take float32 and bfloat16"
        )
    if N % SUBLANES[dtype]:
        raise NotImplementedError(f"state_size {N} is no multiple of {SUBLANES[dtype]}, the rows of a {dtype} tile")
    if D % LANES:
        raise NotImplementedError(f"{D} channels are no multiple of {LANES} lanes")


def _column(row: Array) -> Array:
    """[N, LANES] from row [1, N]: what is the same for all channels."""
    return jnp.broadcast_to(jnp.swapaxes(row, 0, 1), (row.shape[1], LANES))


# Single tokens


def _step(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    state: Array,
    singles: Singles,
    target: Target,
    most_lanes: int,
) -> tuple[Array, Array]:
    """One token of each of S sequences: y [S,D] of entries that `singles` names, else 0, and the state. A [N,D], with
    log2(e) in it."""
    (S, channels), N = x.shape, B.shape[1]
    lanes = LANES * largest_divisor(channels // LANES, most_lanes // LANES)
    xf = x.astype(jnp.float32)

    def of_token(width, block):
        return pl.BlockSpec((None, 1, width), lambda i, b, items, *_: (items[0, i], 0, b if block else 0))

    anywhere, rows = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((2, N, lanes), state.dtype)
    y, state = pl.pallas_call(
        _step_kernel,
        name="selective_scan_step",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(singles.count, channels // lanes),
            in_specs=[
                of_token(lanes, True),
                of_token(lanes, True),
                of_token(N, False),
                of_token(N, False),
                pl.BlockSpec((N, channels), lambda *_: (0, 0)),
                anywhere,
            ],
            out_specs=[of_token(lanes, True), anywhere],
            scratch_shapes=[
                rows,
                rows,
                pltpu.SMEM((2, 2), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((S, 1, channels), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={6: 1},
        cost_estimate=pl.CostEstimate(
            flops=6 * S * channels * N,
            transcendentals=S * channels * N,
            bytes_accessed=2 * S * channels * N * state.dtype.itemsize,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=target.simulate or False,
    )(singles.table(), dt[:, None], (dt * xf)[:, None], B[:, None], C[:, None], A, in_hbm(state))
    done = jnp.zeros(S, bool).at[singles.seq].set(jnp.arange(S) < singles.count)
    return jnp.where(done[:, None], y[:, 0] + D * xf, 0).astype(x.dtype), state


def _step_kernel(items, dt, dtx, B, C, A, _, y, state, loaded, stored, pending, load_done, store_done):
    i, b = pl.program_id(0), pl.program_id(1)
    lanes = loaded.shape[2]

    def window(row, block):
        return state.at[row, :, pl.ds(pl.multiple_of(block * lanes, LANES), lanes)]

    loads = Loads(loaded, load_done, window)
    stores = Stores(stored, store_done, pending, window)
    step, steps = begin_step(loads, stores, lambda item: items[1, item])
    stores.free(step, 0, 0)
    parity = step % 2
    loads.wait(step, items[1, i], b)

    @pl.when(items[1, i] < 0)
    def _():
        loaded[parity] = jnp.zeros(loaded.shape[1:], loaded.dtype)

    B_n, C_n = _column(B[...]), _column(C[...])
    wide = LANES * largest_divisor(lanes // LANES, 4)  # what is computed side by side hides latencies

    def lane_tiles(n, carry):
        for k in range(0, wide, LANES):
            at = pl.ds(pl.multiple_of(n * wide + k, LANES), LANES)
            A_n = A[:, pl.ds(pl.multiple_of(b * lanes + n * wide + k, LANES), LANES)]
            h = loaded[parity, :, at].astype(jnp.float32) * jnp.exp2(dt[:, at] * A_n) + dtx[:, at] * B_n
            stored[parity, :, at] = h.astype(stored.dtype)
            y[:, at] = jnp.sum(h * C_n, axis=0, keepdims=True)
        return carry

    lax.fori_loop(0, lanes // wide, lane_tiles, 0)
    stores.start(step, (items[2, i], items[3, i]), b)

    @pl.when(step + 1 == steps)
    def _():
        stores.end(0, 0)


# Chunks


def _chunks(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    state: Array,
    pieces: Pieces,
    target: Target,
    tile: int,
    most_lanes: int,
) -> tuple[Array, Array]:
    """The tokens of `pieces`: y [T,D], what lies outside of them unspecified, and the state."""
    (T, channels), N = x.shape, B.shape[1]
    lanes = LANES * largest_divisor(channels // LANES, most_lanes // LANES)
    blocks = channels // lanes
    x, dt, B, C = (jnp.pad(a, [(0, -T % tile), (0, 0)]) for a in (x, dt, B, C))

    def tokens(width, block):
        return pl.BlockSpec((tile, width), lambda p, b, items, *_: (items[0, p], b if block else 0))

    anywhere, rows = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((2, N, lanes), state.dtype)
    y, state = pl.pallas_call(
        _chunk_kernel,
        name="selective_scan_chunks",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pieces.count, blocks),
            in_specs=[
                tokens(lanes, True),
                tokens(lanes, True),
                tokens(N, False),
                tokens(N, False),
                pl.BlockSpec((N, lanes), lambda p, b, *_: (0, b)),
                pl.BlockSpec((1, lanes), lambda p, b, *_: (0, b)),
                anywhere,
            ],
            # All channels of a tile, so that its next piece still finds what this one has left.
            out_specs=[tokens(channels, False), anywhere],
            scratch_shapes=[
                pltpu.VMEM((blocks, N, lanes), jnp.float32),
                pltpu.VMEM((2, tile, N, LANES), jnp.float32),
                rows,
                rows,
                pltpu.SMEM((2, 2), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={7: 1},
        cost_estimate=pl.CostEstimate(
            flops=6 * T * channels * N,
            transcendentals=T * channels * N,
            bytes_accessed=T * channels * (2 * x.dtype.itemsize + 4),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=56 * 1024 * 1024
        ),
        interpret=target.simulate or False,
    )(pieces.table(), x, dt, B, C, A, D[None], in_hbm(state))
    return y[:T], state


def _chunk_kernel(
    items, x, dt, B, C, A, D, _, y, state, h, columns, loaded, stored, pending, load_done, store_done
):  # fmt: skip
    """One block of channels of one piece. Tokens that are not the piece's have dt = 0, and so change nothing."""
    p, b = pl.program_id(0), pl.program_id(1)
    Q, lanes = x.shape

    def window(row, block):
        return state.at[row, :, pl.ds(pl.multiple_of(block * lanes, LANES), lanes)]

    loads = Loads(loaded, load_done, window)
    stores = Stores(stored, store_done, pending, window)
    step, steps = begin_step(loads, stores, lambda item: items[4, item])
    start, stop = items[1, p], items[2, p]

    @pl.when(b == 0)
    def _():
        token = lax.broadcasted_iota(jnp.int32, (Q, 1), 0)
        mine = (token >= start) & (token < stop)
        for n, ref in enumerate((B, C)):
            of_token = jnp.swapaxes(jnp.where(mine, ref[...], 0.0), 0, 1)  # [N, Q]
            for t in range(Q):
                columns[n, t] = jnp.broadcast_to(of_token[:, t : t + 1], columns.shape[2:])

    loads.wait(step, items[4, p], b)

    @pl.when(items[3, p] == 1)
    def _():
        before = loaded[step % 2].astype(jnp.float32)
        h[b] = jnp.where(items[4, p] >= 0, before, 0.0)

    wide = LANES * largest_divisor(lanes // LANES, 4)  # what is computed side by side hides latencies

    def lane_tiles(n, carry):
        first = n * wide
        tiles = [pl.ds(pl.multiple_of(first + k, LANES), LANES) for k in range(0, wide, LANES)]

        def tokens(m, hs):
            at = pl.ds(pl.multiple_of(m * GROUP, GROUP), GROUP)
            token = m * GROUP + lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0)
            mine = (token >= start) & (token < stop)
            after = []
            for lane, h_k in zip(tiles, hs, strict=True):
                x_k = jnp.where(mine, x[at, lane], jnp.zeros((GROUP, LANES), x.dtype)).astype(jnp.float32)
                dt_k = jnp.where(mine, dt[at, lane], 0.0)
                dtx, rows = dt_k * x_k, []
                for t in range(GROUP):
                    row = slice(t, t + 1)
                    decay = jnp.exp2(dt_k[row] * A[:, lane])
                    h_k = h_k * decay + dtx[row] * columns[0, m * GROUP + t]
                    rows.append(jnp.sum(h_k * columns[1, m * GROUP + t], axis=0, keepdims=True))
                y_k = (jnp.concatenate(rows, axis=0) + D[:, lane] * x_k).astype(y.dtype)
                of_y = pl.ds(pl.multiple_of(b * lanes + lane.start, LANES), LANES)
                y[at, of_y] = jnp.where(mine, y_k, y[at, of_y])
                after.append(h_k)
            return tuple(after)

        hs = lax.fori_loop(start // GROUP, (stop + GROUP - 1) // GROUP, tokens, tuple(h[b, :, lane] for lane in tiles))
        for lane, h_k in zip(tiles, hs, strict=True):
            h[b, :, lane] = h_k
        return carry

    lax.fori_loop(0, lanes // wide, lane_tiles, 0)
    targets = (items[5, p], items[6, p])

    @pl.when((targets[0] >= 0) | (targets[1] >= 0))
    def _():
        stores.free(step, 0, 0)
        stored[step % 2] = h[b].astype(stored.dtype)
        stores.start(step, targets, b)

    @pl.when(step + 1 == steps)
    def _():
        stores.end(0, 0)
