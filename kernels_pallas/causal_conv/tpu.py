"""causal_conv on TPU: a kernel for pieces of sequences, and one for single tokens, several at a time."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import block_sizes, largest_divisor
from kernels_pallas.pieces import NONE, Pieces, Singles, pieces_of, singles_of
from kernels_pallas.spans import Spans
from kernels_pallas.target import Target
from kernels_pallas.tpu_rows import Loads, Stores, in_hbm, start_slots

LANES = 128
HISTORY = 8  # rows kept before a tile, one tile of float32
FIRST = 7  # row at which the first window of a step lies, so that the new one begins at a tile
WINDOWS = (2, 4, 8)  # rows of windows that lie in HBM without padding; others are copied whole at every step


def window_rows(taps: int) -> int:
    """Rows of a window for a convolution of so many taps: no fewer, and if there is such a number one of `WINDOWS`."""
    return next((rows for rows in WINDOWS if rows >= taps), taps)


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    window: Array | None,
    spans: Spans,
    *,
    activation: Literal["silu"] | None = "silu",
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.causal_conv.causal_conv`, for `spans.target.chip`."""
    chip, (T, D), K = spans.target.chip, x.shape, weight.shape[1]
    if chip is None:
        raise NotImplementedError("the TPU kernels of causal_conv are for TPUs, which this device is not")
    if window is None:
        raise NotImplementedError("the TPU kernels of causal_conv need a window; dense spans have none")
    if activation not in ("silu", None):
        raise NotImplementedError(f"activation {activation!r}: causal_conv knows 'silu' and None")
    if K not in WINDOWS or D % LANES:
        raise NotImplementedError(
            f"window {window.shape}: it must have one of {WINDOWS} rows, and channels a multiple of {LANES}"
        )
    for name, dtype in (("x", x.dtype), ("window", window.dtype)):
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"{name} {dtype}: the TPU kernels of causal_conv take float32 and bfloat16")
    sizes = block_sizes(chip, "causal_conv")
    taps = weight.T.astype(jnp.float32)
    offset = jnp.zeros((1, D)) if bias is None else bias.astype(jnp.float32)[None]
    weights = (taps, offset, activation == "silu")
    if spans.kind == "decode":
        singles = singles_of(spans, spans.read_slot, base)
        rows, window = _step(x[singles.seq], weights, window, singles, spans.target, sizes["sequences"])
        at = jnp.where(jnp.arange(T) < singles.count, singles.seq, T)
        return jnp.zeros_like(x).at[at].set(rows, mode="drop"), window
    window, slots = start_slots(window, spans, base)
    tile = min(sizes["tokens"], -(-T // 16) * 16)
    y, window = _pieces(x, weights, window, pieces_of(spans, slots, base, tile), spans.target, tile, sizes["lanes"])
    singles = singles_of(spans, slots, base)
    x = x[jnp.minimum(singles.token, T - 1)]
    rows, window = _step(x, weights, window, singles, spans.target, sizes["sequences"])
    at = jnp.where(jnp.arange(spans.num_seqs) < singles.count, singles.token, T)
    return jnp.where(spans.token_valid()[:, None], y, 0).at[at].set(rows, mode="drop"), window


Weights = tuple[Array, Array, bool]  # taps [K,D], bias [1,D], whether silu follows


def _finish(y: Array, silu: bool) -> Array:
    return y * (1 / (1 + jnp.exp(-y))) if silu else y


# Single tokens


def _step(
    x: Array, weights: Weights, window: Array, singles: Singles, target: Target, most: int
) -> tuple[Array, Array]:
    """x [S,D], the tokens of `singles` in its order: y [S,D], past its count unspecified, and the windows."""
    (S, D), K = x.shape, window.shape[1]
    taps, bias, silu = weights
    together = min(most, -(-S // 8) * 8)
    room = -S % together
    rows = jnp.pad(singles.table()[1:], [(0, 0), (0, room)], constant_values=NONE)
    buffers = pltpu.VMEM((2, together, K, D), window.dtype)
    of_tokens = pl.BlockSpec((together, D), lambda i, *_: (i, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    y, window = pl.pallas_call(
        functools.partial(_step_kernel, silu=silu),
        name="causal_conv_step",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(singles.count, together),),
            in_specs=[
                of_tokens,
                pl.BlockSpec((K, D), lambda *_: (0, 0)),
                pl.BlockSpec((1, D), lambda *_: (0, 0)),
                anywhere,
            ],
            out_specs=[of_tokens, anywhere],
            scratch_shapes=[
                buffers,
                buffers,
                pltpu.VMEM((D // LANES, FIRST + 1 + together * K, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2, together)),
                pltpu.SemaphoreType.DMA((2, 2, together)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((S + room, D), jnp.float32), jax.ShapeDtypeStruct(window.shape, window.dtype)],
        input_output_aliases={5: 1},
        cost_estimate=pl.CostEstimate(
            flops=2 * S * K * D, transcendentals=S * D, bytes_accessed=2 * S * K * D * window.dtype.itemsize
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=64 * 1024 * 1024),
        interpret=target.simulate or False,
    )(singles.count[None], rows, jnp.pad(x.astype(jnp.float32), [(0, room), (0, 0)]), taps, bias, in_hbm(window))
    return y[:S].astype(x.dtype), window


def _step_kernel(count, rows, x, taps, bias, _, y, window, loaded, stored, inputs, load_done, store_done, *, silu):
    """`inputs` [channels / 128, rows, 128] holds windows one after another, each token where the oldest of the next
    window was; so a tap of all sequences is every K-th row."""
    step, steps = pl.program_id(0), pl.num_programs(0)
    together = x.shape[0]

    def load(step, n, do):
        row = rows[0, step * together + n]

        @pl.when((step * together + n < count[0]) & (row != NONE))
        def _():
            do(pltpu.make_async_copy(window.at[row], loaded.at[step % 2, n], load_done.at[step % 2, n]))

    def store(step, n, do):
        for which in range(2):
            row = rows[1 + which, step * together + n]

            @pl.when((step * together + n < count[0]) & (row != NONE))
            def _(which=which, row=row):
                semaphore = store_done.at[step % 2, which, n]
                do(pltpu.make_async_copy(stored.at[step % 2, n], window.at[row], semaphore))

    @pl.when(step == 0)
    def _():
        for n in range(together):
            load(step, n, lambda copy: copy.start())

    @pl.when(step + 1 < steps)
    def _():
        for n in range(together):
            load(step + 1, n, lambda copy: copy.start())

    @pl.when(step >= 2)
    def _():
        for n in range(together):
            store(step - 2, n, lambda copy: copy.wait())

    parity, K = step % 2, loaded.shape[2]
    for n in range(together):
        load(step, n, lambda copy: copy.wait())
    starts = [rows[0, step * together + n] == NONE for n in range(together)]

    @pl.when(functools.reduce(jnp.logical_or, starts))
    def _():
        for n, from_zeros in enumerate(starts):
            before = loaded[parity, n]
            loaded[parity, n] = jnp.where(from_zeros, jnp.zeros_like(before), before)

    for c in range(x.shape[1] // LANES):
        lanes = slice(c * LANES, (c + 1) * LANES)
        row = inputs.at[c]
        of_tap = [row.at[pl.ds(FIRST + k, together, stride=K)] for k in range(K + 1)]  # 0 is what drops out
        for n in range(together):
            row[pl.ds(FIRST + n * K, K)] = loaded[parity, n, :, lanes].astype(jnp.float32)
        of_tap[K][...] = x[:, lanes]
        total = bias[:, lanes]
        for k in range(K):
            total = total + of_tap[k + 1][...] * taps[k : k + 1, lanes]
        y[:, lanes] = _finish(total, silu)
        for n in range(together):
            stored[parity, n, :, lanes] = row[pl.ds(FIRST + 1 + n * K, K)].astype(stored.dtype)

    for n in range(together):
        store(step, n, lambda copy: copy.start())

    @pl.when(step + 1 == steps)
    def _():
        for n in range(together):
            pl.when(step >= 1)(lambda n=n: store(step - 1, n, lambda copy: copy.wait()))
            store(step, n, lambda copy: copy.wait())


# Pieces


def _pieces(
    x: Array, weights: Weights, window: Array, pieces: Pieces, target: Target, tile: int, most_lanes: int
) -> tuple[Array, Array]:
    """The tokens of `pieces`: y [T,D], what lies outside of them unspecified, and the windows."""
    (T, D), K = x.shape, window.shape[1]
    taps, bias, silu = weights
    lanes = LANES * largest_divisor(D // LANES, most_lanes // LANES)
    x = jnp.pad(x, [(0, -T % tile), (0, 0)])
    of_tokens = pl.BlockSpec((tile, lanes), lambda d, p, items, *_: (items[0, p], d))
    of_channels = lambda rows: pl.BlockSpec((rows, lanes), lambda d, *_: (0, d))  # noqa: E731
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    y, window = pl.pallas_call(
        functools.partial(_piece_kernel, silu=silu),
        name="causal_conv_pieces",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(D // lanes, pieces.count),
            in_specs=[of_tokens, of_channels(K), of_channels(1), anywhere],
            out_specs=[of_tokens, anywhere],
            scratch_shapes=[
                pltpu.VMEM((HISTORY + tile, lanes), jnp.float32),
                pltpu.VMEM((2, K, lanes), window.dtype),
                pltpu.VMEM((2, K, lanes), window.dtype),
                pltpu.SMEM((2, 2), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(window.shape, window.dtype)],
        input_output_aliases={4: 1},
        cost_estimate=pl.CostEstimate(
            flops=2 * T * K * D, transcendentals=T * D, bytes_accessed=2 * T * D * x.dtype.itemsize
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=target.simulate or False,
    )(pieces.table(), x, taps, bias, in_hbm(window))
    return y[:T], window


def _piece_kernel(items, x, taps, bias, _, y, window, inputs, loaded, stored, pending, load_done, store_done, *, silu):
    """`inputs` holds the tile's tokens after the 8 before it; a sequence's window is laid before its first token."""
    d, p, count = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    step, steps = d * count + p, pl.num_programs(0) * count
    (Q, lanes), K = x.shape, taps.shape[0]
    start, stop = items[1, p], items[2, p]

    def place(row, block):
        return window.at[row, :, pl.ds(pl.multiple_of(block * lanes, LANES), lanes)]

    loads = Loads(loaded, load_done, place)
    stores = Stores(stored, store_done, pending, place)

    @pl.when(step == 0)
    def _():
        stores.begin()
        loads.start(step, items[4, p], d)

    @pl.when(step + 1 < steps)
    def _():
        block = (step + 1) // count
        loads.start(step + 1, items[4, step + 1 - block * count], block)

    @pl.when((p == 0) | (items[0, jnp.maximum(p - 1, 0)] != items[0, p]))
    def _():
        inputs[:HISTORY] = inputs[Q:]
        inputs[HISTORY:] = x[...].astype(jnp.float32)

    loads.wait(step, items[4, p], d)

    @pl.when(items[3, p] == 1)
    def _():
        before = loaded[step % 2].astype(jnp.float32)
        before = jnp.where(items[4, p] >= 0, before, 0.0)
        for k in range(1, K):
            inputs[pl.ds(HISTORY + start - K + k, 1), :] = before[k : k + 1]

    total = bias[...]
    for k in range(K):
        at = HISTORY - K + 1 + k
        total = total + inputs[at : at + Q] * taps[k : k + 1]
    token = lax.broadcasted_iota(jnp.int32, (Q, 1), 0)
    mine = (token >= start) & (token < stop)
    y[...] = jnp.where(mine, _finish(total, silu).astype(y.dtype), y[...])
    targets = (items[5, p], items[6, p])

    @pl.when((targets[0] >= 0) | (targets[1] >= 0))
    def _():
        stores.free(step, 0, 0)
        latest = [inputs[pl.ds(HISTORY + stop - K + k, 1), :] for k in range(K)]
        stored[step % 2] = jnp.concatenate(latest, axis=0).astype(stored.dtype)
        stores.start(step, targets, d)

    @pl.when(step + 1 == steps)
    def _():
        stores.end(0, 0)
