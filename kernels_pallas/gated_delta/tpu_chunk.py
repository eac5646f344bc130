"""The TPU kernel of gated_delta for chunks of sequences: the WY form (see chunk.py), its products on the matrix unit.

With w = u / beta, which lets beta be a factor of columns:

(I + A) w = v - (k exp c) S_0        A_ij = beta_j sum_d k_id k_jd exp(c_id - c_jd) for j < i, else 0
"""

import functools
import math
from collections.abc import Callable, Generator, Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import largest_divisor
from kernels_pallas.decays import STRONGEST
from kernels_pallas.pieces import Pieces
from kernels_pallas.target import Target
from kernels_pallas.tpu_decays import LARGEST, log_decay_parts
from kernels_pallas.tpu_rows import Loads, Stores, begin_step, in_hbm

BLOCK = 8  # tokens of a block that is inverted row by row: the rows of a register

Product = Callable[[Array, Array], Array]
total = functools.partial(functools.reduce, jnp.add)


def chunks(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    pieces: Pieces,
    target: Target,
    tile: int,
    most_heads: int,
) -> tuple[Array, Array]:
    """The tokens of `pieces`: o [T,H,dv], what lies outside of them unspecified, and the state.

    q, k [T,Hk,dk]; g [T,H,1 or dk], beta [T,H] float32; `tile` is a power of 2.
    """
    (T, H, dv), (_, Hk, dk), ratio, dtype = v.shape, k.shape, v.shape[1] // k.shape[1], v.dtype
    keys = largest_divisor(Hk, max(1, most_heads // ratio))
    heads, blocks = keys * ratio, Hk // keys
    by_head = g.shape[2] == 1
    room = -T % tile
    q, k, v, g = (jnp.pad(a.reshape(T, -1), [(0, room), (0, 0)]) for a in (q.astype(dtype), k.astype(dtype), v, g))
    beta = jnp.pad(beta, [(0, room), (0, 0)])

    def tokens(lanes):
        return pl.BlockSpec((tile, lanes), lambda p, b, items, *_: (items[0, p], b))

    def all_heads(lanes):
        return pl.BlockSpec((tile, lanes), lambda p, b, items, *_: (items[0, p], 0))

    anywhere, rows = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((2, heads, dk, dv), state.dtype)
    parts = 2 if dtype == jnp.float32 else 1
    of_tokens = [pltpu.VMEM((blocks, heads, tile), jnp.float32)]
    if by_head:
        of_tokens += [pltpu.VMEM((parts, blocks, tile, heads), jnp.float32)]
        of_tokens += [pltpu.VMEM((parts, blocks, heads, tile), jnp.float32)]
    else:
        of_tokens += [pltpu.VMEM(((2 + tile.bit_length() - 1) * tile, tile), jnp.float32)]
    o, state = pl.pallas_call(
        functools.partial(_kernel, by_head=by_head),
        name="gated_delta_chunks",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pieces.count, blocks),
            in_specs=[
                tokens(keys * dk),
                tokens(keys * dk),
                tokens(heads * dv),
                all_heads(H) if by_head else tokens(heads * dk),
                all_heads(H),
                anywhere,
            ],
            # All heads of a tile, so that its next piece still finds what this one has left.
            out_specs=[all_heads(H * dv), anywhere],
            scratch_shapes=[
                *of_tokens,
                pltpu.VMEM((blocks, heads, dk, dv), jnp.float32),
                rows,
                rows,
                pltpu.SMEM((2, 2), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(v.shape, dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={6: 1},
        cost_estimate=pl.CostEstimate(
            flops=2 * T * H * (3 * dk * dv + tile * (dk + 2 * dv)),
            transcendentals=T * H * tile,
            bytes_accessed=2 * T * (H * dv + Hk * dk) * dtype.itemsize,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=56 * 1024 * 1024
        ),
        interpret=target.simulate or False,
    )(pieces.table(), q, k, v, g, beta, in_hbm(state))
    return o[:T].reshape(T, H, dv), state


def _kernel(items, q, k, v, g, beta, _, o, state, weights, *rest, by_head):
    """One block of heads of one piece. `weights` holds, of each token j of a head, what weighs its key in the state at
    the end (with decays per channel: beta alone)."""
    *of_tokens, S, loaded, stored, pending, load_done, store_done = rest
    p, b = pl.program_id(0), pl.program_id(1)
    _, heads, dk, dv = S.shape
    Q, dtype, ratio = q.shape[0], v.dtype, heads * dk // q.shape[1]
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def product(a, b):
        return jnp.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)

    def window(row, block):
        return state.at[row, pl.ds(block * heads, heads)]

    loads = Loads(loaded, load_done, window)
    stores = Stores(stored, store_done, pending, window)
    step, steps = begin_step(loads, stores, lambda item: items[4, item])
    token = lax.broadcasted_iota(jnp.int32, (Q, 1), 0)
    mine = (token >= items[1, p]) & (token < items[2, p])
    row, column = (lax.broadcasted_iota(jnp.int32, (Q, Q), axis) for axis in (0, 1))
    if by_head:
        _when_first(b, lambda: _sum_by_head(g, beta, mine, row >= column, weights, *of_tokens))
    else:
        _when_first(step, lambda: _segments(of_tokens[0], Q))
        _when_first(b, lambda: _beta_rows(beta, mine, weights))
    loads.wait(step, items[4, p], b)

    @pl.when(items[3, p] == 1)
    def _():
        before = loaded[step % 2].astype(jnp.float32)
        S[b] = jnp.where(items[4, p] >= 0, before, 0.0)

    def lanes(ref, n, width):
        values = ref[:, n * width : (n + 1) * width]
        return jnp.where(mine, values, jnp.zeros_like(values))

    def head(h: int, q_n, k_n, k_T, plain) -> Iterator[None]:
        """One head of block b, a product after those before it at a time."""
        if by_head:
            columns, rows = of_tokens
            sums = [jnp.broadcast_to(columns[m, b, :, h : h + 1], (Q, max(Q, dv))) for m in range(len(columns))]
            between = total([part[:, :Q] - rows[m, b, h : h + 1] for m, part in enumerate(sums)])
            decay = jnp.exp2(jnp.minimum(between, LARGEST))
            seen = jnp.where(row >= column, plain[:Q] * decay, 0.0)
            known = jnp.where(row > column, plain[Q:] * decay, 0.0)
            from_start = jnp.exp2(total(sums)[:, :dv])
            before = S[b, h]
            read = product(jnp.concatenate([q_n, k_n]), before) * jnp.concatenate([from_start, from_start])
            keys, left = k_T * weights[b, h : h + 1], before * from_start[Q - 1 :]
        else:
            sums = _segment_sums(of_tokens[0], lanes(g, h, dk), dtype)
            beta_h = weights[b, h : h + 1]
            seen, known = (a * beta_h for a in _by_channel(q_n, k_n, sums[2:], plain[:Q], row, column, dtype))
            since, to_end = (jnp.exp2(a) for a in sums[:2])
            before = S[b, h]
            read = product(jnp.concatenate([a.astype(jnp.float32) * since for a in (q_n, k_n)]), before)
            keys = jnp.swapaxes(k_n.astype(jnp.float32) * to_end, 0, 1) * beta_h
            left = before * jnp.swapaxes(since[Q - 1 :], 0, 1)
        yield
        w = yield from _solution(known, lanes(v, h, dv).astype(jnp.float32) - read[Q:], row, column, product)
        added = product(jnp.concatenate([seen, keys]), w)
        of_o = pl.ds(pl.multiple_of((b * heads + h) * dv, 128), dv)
        o[:, of_o] = jnp.where(mine, (read[:Q] + added[:Q]).astype(dtype), o[:, of_o])
        S[b, h] = left + added[Q:]

    stages = []
    for n in range(heads // ratio):
        q_n, k_n = lanes(q, n, dk), lanes(k, n, dk)
        k_T = jnp.swapaxes(k_n.astype(jnp.float32), 0, 1)  # [dk, Q]
        plain = product(jnp.concatenate([q_n, k_n]), k_T)
        stages += [head(h, q_n, k_n, k_T, plain) for h in range(n * ratio, (n + 1) * ratio)]
    _side_by_side(stages)
    targets = (items[5, p], items[6, p])

    @pl.when((targets[0] >= 0) | (targets[1] >= 0))
    def _():
        stores.free(step, 0, 0)
        stored[step % 2] = S[b].astype(stored.dtype)
        stores.start(step, targets, b)

    @pl.when(step + 1 == steps)
    def _():
        stores.end(0, 0)


def _side_by_side(chains: list[Iterator[None]]) -> None:
    """Runs all to their ends, each up to its next `yield` in turn.

    The compiler keeps products in the order in which it meets them: one that follows from the product before it would
    keep the matrix unit waiting, so between the two lie those of other chains.
    """
    while chains:
        chains = [chain for chain in chains if next(chain, chains) is None]


def _when_first(index, body: Callable[[], None]) -> None:
    pl.when(index == 0)(body)


# Decays per head


def _sum_by_head(g, beta, mine, lower, weights, columns, rows) -> None:
    """Of all heads: `columns` are the sums of log decays, to be broadcast over lanes, which the chip is slowest at;
    `rows` are those less the logarithm of beta, and `weights` the decays up to the end, times beta."""
    Q, heads = lower.shape[0], rows.shape[2]
    of_row = jnp.log2(jnp.swapaxes(jnp.where(mine, beta[...], 0.0), 0, 1))  # [H, Q]
    to_end = of_row
    for n, part in enumerate(log_decay_parts(jnp.where(mine, g[...], 0.0), columns.shape[0])):
        sums = jnp.dot(lower.astype(jnp.float32), part, precision=lax.Precision.HIGHEST)  # [Q, H]
        sums_of_row = jnp.swapaxes(sums, 0, 1)
        to_end += sums_of_row[:, Q - 1 :] - sums_of_row
        if n == columns.shape[0] - 1:
            sums_of_row -= of_row
        for m in range(rows.shape[1]):
            columns[n, m] = sums[:, m * heads : (m + 1) * heads]
            rows[n, m] = sums_of_row[m * heads : (m + 1) * heads]
    weight = jnp.exp2(to_end)
    for m in range(rows.shape[1]):
        weights[m] = weight[m * heads : (m + 1) * heads]


# Decays per channel


def _beta_rows(beta, mine, weights) -> None:
    heads = weights.shape[1]
    of_row = jnp.swapaxes(jnp.where(mine, beta[...], 0.0), 0, 1)  # [H, Q]
    for m in range(weights.shape[0]):
        weights[m] = of_row[m * heads : (m + 1) * heads]


def _levels(Q: int) -> list[int]:
    """Sizes of blocks of which two neighbours are joined: 1, 2, 4 ... Q / 2."""
    return [1 << n for n in range(Q.bit_length() - 1)]


def _segments(segments, Q: int) -> None:
    """Which log decays each token sums: from the start; to the end; at each level between it and the border of two
    neighbours. So no decay is above 1, and none is a difference."""
    i, j = (lax.broadcasted_iota(jnp.int32, (Q, Q), axis) for axis in (0, 1))
    wanted = [j <= i, j > i]
    for size in _levels(Q):
        border = (i & -(2 * size)) + size
        wanted.append(((j >= border) & (j <= i)) | ((j < border) & (j > i)))
    for n, mask in enumerate(wanted):
        segments[n * Q : (n + 1) * Q] = mask.astype(jnp.float32)


def _segment_sums(segments, g: Array, dtype) -> list[Array]:
    """[Q, dk] each: the sums that `_segments` names, of logarithms to base 2."""
    g, Q = jnp.maximum(g, STRONGEST) * math.log2(math.e), g.shape[0]
    if dtype == jnp.float32:
        sums = jnp.dot(segments[...], g, precision=lax.Precision.HIGHEST)
    else:
        coarse = g.astype(dtype)
        parts = (coarse, (g - coarse.astype(jnp.float32)).astype(dtype))
        ones = segments[...].astype(dtype)
        sums = total([jnp.dot(ones, part, preferred_element_type=jnp.float32) for part in parts])
    return [sums[n * Q : (n + 1) * Q] for n in range(sums.shape[0] // Q)]


def _by_channel(q, k, sums: list[Array], plain: Array, row: Array, column: Array, dtype) -> tuple[Array, Array]:
    """[Q, Q] each: sum_d q_id k_jd exp(c_id - c_jd) for j <= i, and of k for j < i; `plain` is q k^T.

    Tokens of neighbouring blocks meet through the decays to their border, level by level.
    """
    Q = q.shape[0]
    q, k = (a.astype(jnp.float32) for a in (q, k))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    seen, known = jnp.where(row == column, plain, 0.0), jnp.zeros((Q, Q), jnp.float32)
    for size, log_decay in zip(_levels(Q), sums, strict=True):
        decay = jnp.exp2(log_decay)
        left = jnp.concatenate([q * decay, k * decay], axis=0).astype(dtype)
        met = lax.dot_general(
            left, left[Q:], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        across = ((row ^ column) & -size == size) & (row & size == size)
        seen, known = jnp.where(across, met[:Q], seen), jnp.where(across, met[Q:], known)
    return seen, known


# The triangular system


def _solution(A: Array, b: Array, row: Array, column: Array, product: Product) -> Generator[None, None, Array]:
    """w [Q, dv] with (I + A) w = b, where A [Q, Q] is zero on its diagonal and above; a product at a time.

    Blocks of 8 on the diagonal are inverted by elimination, all side by side in one register. Then two neighbours are
    joined, again and again: with C below the inverses X and Y, the inverse has -Y C X there. The last two are not: the
    second half of w follows from the first.
    """
    Q, half = row.shape[0], row.shape[0] // 2
    block_of_lane = lax.broadcasted_iota(jnp.int32, (BLOCK, Q), 1) // BLOCK
    blocks = range(Q // BLOCK)
    diagonal = total([jnp.where(block_of_lane == n, A[n * BLOCK : (n + 1) * BLOCK], 0.0) for n in blocks])
    inverse = _inverse_of_blocks(diagonal)
    inverse = jnp.concatenate([jnp.where(block_of_lane == n, inverse, 0.0) for n in blocks])
    size = BLOCK
    while size < half:
        across = ((row ^ column) & -size == size) & (row & size == size)
        starts = range(size, Q, 2 * size)
        Y = jnp.concatenate([inverse[at : at + size] for at in starts])  # [Q / 2, Q]
        yield
        YC = product(Y, jnp.where(across, A, 0.0))
        yield
        Y = Y - product(YC, inverse)
        joined = []
        for n, at in enumerate(starts):
            joined += [inverse[at - size : at], Y[n * size : (n + 1) * size]]
        inverse = jnp.concatenate(joined)
        size *= 2
    yield
    first = product(inverse[:half, :half], b[:half])
    yield
    known = product(A[half:, :half], first)
    yield
    second = product(inverse[half:, half:], b[half:] - known)
    yield
    return jnp.concatenate([first, second])


def _inverse_of_blocks(A: Array) -> Array:
    """[8, Q]: the inverses of I + A_n for blocks A_n [8, 8] side by side, by elimination of column after column."""
    rows, Q = A.shape
    i, lane = (lax.broadcasted_iota(jnp.int32, A.shape, axis) for axis in (0, 1))
    spread = {0: A}  # after each pass, column j of each block fills the lanes of its part of the block
    for size in (1, 2, 4):
        wider = {}
        for j, values in spread.items():
            low = lane & size == 0
            wider[j] = jnp.where(low, values, pltpu.roll(values, size, 1))
            wider[j + size] = jnp.where(low, pltpu.roll(values, Q - size, 1), values)
        spread = wider
    inverse = jnp.where(i == lane % rows, 1.0, 0.0)
    for j in range(rows - 1):
        inverse -= spread[j] * inverse[j : j + 1]
    return inverse
