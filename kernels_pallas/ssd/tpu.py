"""ssd on TPU: a kernel for chunks of sequences, whose products run on the matrix unit, and one for single tokens."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import block_sizes, largest_divisor
from kernels_pallas.pieces import Pieces, Singles, pieces_of, singles_of
from kernels_pallas.spans import Spans
from kernels_pallas.ssd.chunk import token_decay
from kernels_pallas.target import Target
from kernels_pallas.tpu_decays import LARGEST, log_decay_parts
from kernels_pallas.tpu_rows import SUBLANES, Loads, Stores, begin_step, first_tokens, in_hbm, put_singles, start_slots

LANES = 128


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
    """As `kernels_pallas.ssd.ssd`, for `spans.target.chip`. With bfloat16 x, products of chunks are bfloat16."""
    chip = spans.target.chip
    if chip is None:
        raise NotImplementedError("the TPU kernels of ssd are for TPUs, which this device is not")
    if state is None:
        raise NotImplementedError("the TPU kernels of ssd need a state; dense spans have none")
    check_shapes(x, B, state)
    sizes = block_sizes(chip, "ssd")
    A, D, dt = (a.astype(jnp.float32) for a in (A, D, dt))
    if spans.kind == "decode":
        singles = singles_of(spans, spans.read_slot, base)
        y, state = _step(x, dt, A, B, C, D, state, singles, spans.target, sizes["step_lanes"])
        return y, state
    state, slots = start_slots(state, spans, base)
    pieces = pieces_of(spans, slots, base, sizes["chunk_tokens"])
    y, state = _chunks(x, dt, A, B, C, D, state, pieces, spans.target, sizes)
    singles = singles_of(spans, slots, base)
    at = first_tokens(spans)
    rows, state = _step(x[at], dt[at], A, B[at], C[at], D, state, singles, spans.target, sizes["step_lanes"])
    return put_singles(y, rows, singles, spans), state


def check_shapes(x: Array, B: Array, state: Array) -> None:
    """NotImplementedError for what the tiles of the TPU cannot hold."""
    (_, H, P), (_, G, N) = x.shape, B.shape
    dtype = state.dtype.name
    if dtype not in SUBLANES or x.dtype.name not in SUBLANES:
        raise NotImplementedError(f"state {dtype}, x {x.dtype}: the TPU kernels of ssd take float32 and bfloat16")
    if N % SUBLANES[dtype]:
        raise NotImplementedError(f"state_size {N} is no multiple of {SUBLANES[dtype]}, the rows of a {dtype} tile")
    if H // G * P % LANES:
        raise NotImplementedError(f"{H // G} heads per group of width {P} are no multiple of {LANES} lanes")
    if P < 16:
        raise NotImplementedError(f"head_dim {P} is below 16: runs of as many tokens would be cut out of a tile")
    if LANES % P and P % LANES:
        raise NotImplementedError(f"head_dim {P} neither divides {LANES} lanes nor is a multiple")


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
    """One token of each of S sequences: y [S,H,P] of entries that `singles` names, else 0, and the state."""
    (S, H, P), (_, G, N), L = x.shape, B.shape, state.shape[2]
    lanes = LANES * largest_divisor(L // LANES, most_lanes // LANES)
    if lanes % (L // G) and L // G % lanes:
        lanes = math.gcd(lanes, L // G)
    blocks, in_block = L // lanes, max(1, lanes * G // L)
    xf = x.astype(jnp.float32)
    xdt = (xf * dt[:, :, None]).reshape(S, 1, L)
    decay = token_decay(dt * A, L).reshape(S, 1, L)
    B, C = (a.astype(jnp.float32).reshape(S, G // in_block, in_block, N) for a in (B, C))

    def row(i, b, items, *_):
        return items[0, i], 0, b

    def group(i, b, items, *_):
        return items[0, i], b * lanes * G // L // in_block, 0, 0

    of_row, of_group = pl.BlockSpec((None, 1, lanes), row), pl.BlockSpec((None, None, in_block, N), group)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    y, state = pl.pallas_call(
        functools.partial(_step_kernel, group_lanes=min(lanes, L // G)),
        name="ssd_step",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(singles.count, blocks),
            in_specs=[of_row, of_row, of_group, of_group, anywhere],
            out_specs=[of_row, anywhere],
            scratch_shapes=[
                pltpu.VMEM((2, N, lanes), state.dtype),
                pltpu.VMEM((2, N, lanes), state.dtype),
                pltpu.SMEM((2, 2), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((S, 1, L), jnp.float32), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={5: 1},
        cost_estimate=pl.CostEstimate(
            flops=5 * S * L * N, transcendentals=0, bytes_accessed=2 * S * L * N * state.dtype.itemsize
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=target.simulate or False,
    )(singles.table(), xdt, decay, B, C, in_hbm(state))
    y = y.reshape(S, H, P) + D[:, None] * xf
    done = jnp.zeros(S, bool).at[singles.seq].set(jnp.arange(S) < singles.count)
    return jnp.where(done[:, None, None], y, 0).astype(x.dtype), state


def _step_kernel(items, xdt, decay, B, C, _, y, state, loaded, stored, pending, load_done, store_done, *, group_lanes):
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

    tile = SUBLANES[loaded.dtype.name]
    N = loaded.shape[1]
    for g in range(B.shape[0]):
        wide = LANES * largest_divisor(group_lanes // LANES, 4)  # what is computed side by side hides latencies
        column = lambda ref, g=g: jnp.swapaxes(ref[g : g + 1, :], 0, 1)  # [N, 1]  # noqa: E731
        B_n, C_n = (jnp.broadcast_to(column(ref), (N, LANES)) for ref in (B, C))

        def lane_tiles(n, carry, g=g, B_n=B_n, C_n=C_n, wide=wide):
            start = g * group_lanes + n * wide
            tiles = [pl.ds(pl.multiple_of(start + k * LANES, LANES), LANES) for k in range(wide // LANES)]
            totals = [jnp.zeros((tile, LANES), jnp.float32)] * len(tiles)
            for m in range(0, N, tile):  # few rows at a time stay in registers
                for k, at in enumerate(tiles):
                    h = loaded[parity, m : m + tile, at].astype(jnp.float32) * decay[:, at]
                    h += xdt[:, at] * B_n[m : m + tile]
                    stored[parity, m : m + tile, at] = h.astype(stored.dtype)
                    totals[k] += h * C_n[m : m + tile]
            for total, at in zip(totals, tiles, strict=True):
                y[:, at] = jnp.sum(total, axis=0, keepdims=True)
            return carry

        lax.fori_loop(0, group_lanes // wide, lane_tiles, 0)
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
    sizes: dict[str, int],
) -> tuple[Array, Array]:
    """The tokens of `pieces`: y [T,H,P], what lies outside of them unspecified, and the state."""
    (T, H, P), (_, G, N), L = x.shape, B.shape, state.shape[2]
    per_group = H // G
    unit = max(1, LANES // P)  # heads of one lane tile
    tile, most_lanes = sizes["chunk_tokens"], min(sizes["chunk_lanes"], LANES * P)
    run = min(tile, LANES // unit)  # tokens; those of all heads of a lane tile fit on it side by side
    groups = largest_divisor(G, max(1, most_lanes // (per_group * P)))  # of a block
    heads = groups * unit * largest_divisor(per_group // unit, max(1, most_lanes // P // unit // groups))
    blocks, lanes = H // heads, heads * P
    room = -T % tile
    x, dt = jnp.pad(x.reshape(T, L), [(0, room), (0, 0)]), jnp.pad(dt, [(0, room), (0, 0)])
    B, C = (jnp.pad(a.astype(x.dtype).swapaxes(0, 1), [(0, 0), (0, room), (0, 0)]) for a in (B, C))  # [G, T, N]

    def tokens(p, b, items, *_):
        return items[0, p], b

    def all_heads(p, b, items, *_):
        return items[0, p], 0

    def all_groups(p, b, items, *_):
        return 0, items[0, p], 0

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    parts = 2 if x.dtype == jnp.float32 else 1
    rows = pltpu.VMEM((2, N, lanes), state.dtype)
    y, state = pl.pallas_call(
        functools.partial(_chunk_kernel, heads=heads, groups=groups, blocks_per_group=max(1, per_group // heads)),
        name="ssd_chunks",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pieces.count, blocks),
            in_specs=[
                pl.BlockSpec((tile, lanes), tokens),
                pl.BlockSpec((tile, H), all_heads),
                pl.BlockSpec((1, H), lambda *_: (0, 0)),
                pl.BlockSpec((G, tile, N), all_groups),
                pl.BlockSpec((G, tile, N), all_groups),
                pl.BlockSpec((1, lanes), lambda p, b, *_: (0, b)),
                anywhere,
            ],
            # All lanes of a tile, so that its next piece still finds what this one has left.
            out_specs=[pl.BlockSpec((tile, L), lambda p, b, items, *_: (items[0, p], 0)), anywhere],
            scratch_shapes=[
                pltpu.VMEM((blocks, N, lanes), jnp.float32),
                pltpu.VMEM((parts + 1, -(-blocks // (LANES // heads)), tile, LANES), jnp.float32),
                pltpu.VMEM((parts, tile // run, blocks, heads, run * unit), jnp.float32),
                pltpu.VMEM((G, N, tile), x.dtype),
                pltpu.VMEM((G, tile // run, tile, run * unit), jnp.float32),
                pltpu.VMEM((tile, lanes), x.dtype),
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
            flops=2 * T * (H * (tile * P + 2 * N * P) + G * tile * N),
            transcendentals=T * H * tile,
            bytes_accessed=2 * T * (L + G * N) * x.dtype.itemsize,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=64 * 1024 * 1024
        ),
        interpret=target.simulate or False,
    )(pieces.table(), x, dt, A[None], B, C, jnp.repeat(D, P)[None], in_hbm(state))
    return y[:T].reshape(T, H, P), state


def _chunk_kernel(
    items, x, dt, A, B, C, D, _, y, state,
    h, columns, rows, keys, scores, kept, loaded, stored, pending, load_done, store_done,
    *, heads, groups, blocks_per_group,
):  # fmt: skip
    """One block of heads of one piece.

    y_i = sum_{j<=i} C_i B_j decay(i, j) dt_j x_j + decay(i, start) C_i h + D x_i. The j are taken a run at a time:
    those of all heads of a lane tile lie side by side on the lanes, and their x on a diagonal of blocks, so that one
    product gives all these heads. What is a factor of i, or of j in the state, is fetched along the lanes from a column
    per head; what is a factor of j in y is a row, dt as a term of the exponents. Vector instructions are what counts.
    """
    p, b = pl.program_id(0), pl.program_id(1)
    (Q, lanes), dtype = x.shape, x.dtype
    P, parts, (runs, _, beside) = lanes // heads, rows.shape[0], scores.shape[1:]
    run, of_column_tile = Q // runs, LANES // heads  # blocks
    unit = beside // run  # heads of a lane tile
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def window(row, block):
        return state.at[row, :, pl.ds(pl.multiple_of(block * lanes, LANES), lanes)]

    def side_by_side(values, r):
        """Those of run r, along the last axis, once for each head of a lane tile."""
        return jnp.concatenate([values[:, r * run : (r + 1) * run]] * unit, axis=1)

    loads = Loads(loaded, load_done, window)
    stores = Stores(stored, store_done, pending, window)
    step, steps = begin_step(loads, stores, lambda item: items[4, item])
    token = lax.broadcasted_iota(jnp.int32, (Q, 1), 0)
    mine = (token >= items[1, p]) & (token < items[2, p])
    lower = lax.broadcasted_iota(jnp.int32, (Q, Q), 0) >= lax.broadcasted_iota(jnp.int32, (Q, Q), 1)
    of_block = pl.ds(pl.multiple_of(b * lanes, LANES), lanes)

    @pl.when(b == 0)
    def _():
        def put(n, values):
            for m in range(columns.shape[1]):
                part = values[:, m * of_column_tile * heads : (m + 1) * of_column_tile * heads]
                columns[n, m, :, : part.shape[1]] = part

        of_token = jnp.where(mine, dt[...], 0.0)
        to_end = jnp.zeros_like(of_token)
        for n, part in enumerate(log_decay_parts(of_token * A[...], parts)):
            sums = jnp.dot(lower.astype(jnp.float32), part, precision=lax.Precision.HIGHEST)  # [Q, H]
            to_end += sums[Q - 1 :] - sums
            put(n, sums)
            if n == parts - 1:
                sums -= jnp.log2(of_token)
            sums_of_row = jnp.swapaxes(sums, 0, 1)
            for r in range(runs):
                of_run = side_by_side(sums_of_row, r)
                for m in range(h.shape[0]):
                    rows[n, r, m] = of_run[m * heads : (m + 1) * heads]
        put(parts, jnp.exp2(to_end) * of_token)
        for g in range(B.shape[0]):
            of_state = jnp.swapaxes(jnp.where(mine, B[g].astype(jnp.float32), 0.0), 0, 1).astype(dtype)  # [N, Q]
            keys[g] = of_state
            of_group = jnp.where(lower, product(C[g], of_state), 0.0)
            for r in range(runs):
                scores[g, r] = side_by_side(of_group, r)

    loads.wait(step, items[4, p], b)

    @pl.when(items[3, p] == 1)
    def _():
        before = loaded[step % 2].astype(jnp.float32)
        h[b] = jnp.where(items[4, p] >= 0, before, 0.0)

    @pl.when(items[1, p] > 0)  # earlier pieces of the tile
    def _():
        kept[...] = y[:, of_block]

    # [Q, LANES], of the head of each lane
    fetch = functools.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    column = lax.broadcasted_iota(jnp.int32, (Q, LANES), 1) // P + b % of_column_tile * heads
    head_of_lane = lax.broadcasted_iota(jnp.int32, (run, LANES), 1) // P  # of a lane tile
    head_beside = lax.broadcasted_iota(jnp.int32, (1, beside), 1) // run
    following = h[b, :, :LANES]
    for n in range(lanes // LANES):
        at, first, before = slice(n * LANES, (n + 1) * LANES), n * LANES // P, following
        g = b // blocks_per_group * groups + n * LANES * groups // lanes
        *since, to_end = (fetch(columns[m, b // of_column_tile], first + column) for m in range(parts + 1))
        wide = jnp.where(mine, x[:, at].astype(jnp.float32), 0.0)
        from_start, x_n = jnp.exp2(sum(since)), wide.astype(dtype)
        out = product(C[g], before.astype(dtype)) * from_start + wide * D[:, at]
        added = product(keys[g], (wide * to_end).astype(dtype))
        if n + 1 < lanes // LANES:  # before the store, which the compiler would have it wait for
            following = h[b, :, (n + 1) * LANES : (n + 2) * LANES]
        h[b, :, at] = before * from_start[Q - 1 :] + added
        for r in range(runs):
            start = r * run
            between = jnp.zeros((), jnp.float32)
            for m, part in enumerate(since):
                row = rows[m, r, b, first : first + 1]
                for k in range(1, unit):
                    row = jnp.where(head_beside == k, rows[m, r, b, first + k : first + k + 1], row)
                between += part[start:, :beside] - row
            own = jnp.minimum(between[:run], LARGEST)  # what is not earlier has a score of 0
            between = own if r + 1 == runs else jnp.concatenate([own, between[run:]], axis=0)
            weights = scores[g, r, start:] * jnp.exp2(between)
            x_r = x_n[start : start + run]
            of_heads = [jnp.where(head_of_lane == k, x_r, jnp.zeros_like(x_r)) for k in range(unit)]
            got = product(weights.astype(dtype), jnp.concatenate(of_heads, axis=0))
            out = got + out if start == 0 else jnp.concatenate([out[:start], out[start:] + got], axis=0)
        y[:, pl.ds(pl.multiple_of(b * lanes + n * LANES, LANES), LANES)] = out.astype(dtype)

    @pl.when(items[1, p] > 0)
    def _():
        y[:, of_block] = jnp.where(token < items[1, p], kept[...], y[:, of_block])

    targets = (items[5, p], items[6, p])

    @pl.when((targets[0] >= 0) | (targets[1] >= 0))
    def _():
        stores.free(step, 0, 0)
        stored[step % 2] = h[b].astype(stored.dtype)
        stores.start(step, targets, b)

    @pl.when(step + 1 == steps)
    def _():
        stores.end(0, 0)
