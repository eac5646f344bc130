"""paged_attention on TPU: one kernel, for tiles of queries of sequences of several tokens, and for single tokens.

A token's row of a page has K and V of every head side by side on the lanes, so that what a block of pages holds of one
head is a slice that the matrix unit takes as it is. Blocks come page by page, one block ahead of their use.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import block_sizes
from kernels_pallas.paged_attention.append import append
from kernels_pallas.pieces import pieces_of, singles_of
from kernels_pallas.spans import Spans
from kernels_pallas.tpu_rows import in_hbm
from kernels_pallas.words import EIGHT_BITS

LANES = 128
ROWS = {"float32": 8, "bfloat16": 16, "uint8": 32}  # of a tile: a page is a multiple of it
MASKED = -1e30  # finite: a block that is wholly masked for a row must not make NaN of its running maximum
SCALAR_MEMORY = 900_000  # bytes that the page table and the work items may take


@dataclass(frozen=True)
class Shape:
    """What a kernel is made for: static numbers."""

    kv_heads: int
    key: int  # lanes of a head's keys; for heads of 64, keys and values lie on the same 128
    value: int  # first lane of a head's values
    values: int  # their lanes
    head: int  # lanes from head to head
    page: int
    pages: int  # of a block
    width: int  # of the page table
    single: bool  # all rows are of one token
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    unit: float  # of the numbers that are made of what is read

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.pages * self.page


def paged_attention(
    q: Array,
    k: Array,
    v: Array | None,
    pages: Array | None,
    spans: Spans,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.paged_attention.paged_attention`, for `spans.target.chip`. Products are in q's dtype."""
    chip = spans.target.chip
    if chip is None:
        raise NotImplementedError("the TPU kernel of paged_attention is for TPUs, which this device is not")
    if pages is None or v is None:
        raise NotImplementedError("the TPU kernel of paged_attention needs pages, and values beside the keys")
    check_shapes(q, k, pages, spans)
    sizes = block_sizes(chip, "paged_attention")
    (T, Hq, Dh), Hkv, page = q.shape, k.shape[1], pages.shape[1]
    S, W = spans.page_table.shape
    group = Hq // Hkv
    pages = append(k, v, pages, spans, base)
    queries = q.reshape(T, Hkv, group, Dh).transpose(1, 2, 0, 3)  # [Hkv, group, T, key lanes]
    if Dh < LANES:  # zeros meet the values that lie beside the keys
        queries = jnp.pad(queries, [(0, 0)] * 3 + [(0, LANES - Dh)])
    whole = max(Dh, LANES)
    shape = Shape(
        kv_heads=Hkv,
        key=whole,
        value=Dh if Dh >= LANES else 0,
        values=whole,
        head=2 * Dh,
        page=page,
        pages=1,
        width=W,
        single=False,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        unit=16.0 if pages.dtype == jnp.uint8 and not chip.fp8 else 1.0,
    )
    rows = base + spans.page_table.reshape(-1)

    def attend(queries: Array, items: Array, count: Array, tile: int, block: int, single: bool) -> Array:
        made_for = {"pages": max(1, block // page), "single": single}
        return _attend(queries, pages, rows, items, count, Shape(**{**vars(shape), **made_for}), tile, spans)

    singles = singles_of(spans, spans.read_slot, base)
    at = jnp.minimum(singles.token, T - 1)
    last = spans.first_pos[singles.seq]
    items = jnp.stack([jnp.arange(S, dtype=jnp.int32), jnp.zeros_like(last), jnp.ones_like(last), singles.seq, last])
    room = -group % 8  # rows of one token fill tiles of 8
    of_singles = jnp.pad(queries[:, :, at], [(0, 0), (0, room), (0, 0), (0, 0)]).swapaxes(1, 2)
    got = attend(of_singles, items, singles.count, 1, sizes["decode_block"], True)
    got = got[:, :, :group].transpose(1, 0, 2, 3)[..., whole - Dh :].reshape(S, Hq, Dh)
    where = jnp.where(jnp.arange(S) < singles.count, singles.token, T)
    if spans.kind == "decode":
        return jnp.zeros_like(q).at[where].set(got, mode="drop"), pages

    tile = min(max(16, sizes["rows"] // group // 16 * 16), -(-T // 16) * 16)
    pieces = pieces_of(spans, spans.read_slot, base, tile)
    start = jnp.minimum(pieces.tile * tile + pieces.start, T - 1)
    seq = spans.token_seq[start]
    first = spans.first_pos[seq] + pieces.tile * tile - spans.query_start[seq]
    items = jnp.stack([pieces.tile, pieces.start, pieces.stop, seq, first])
    of_tiles = jnp.pad(queries, [(0, 0), (0, 0), (0, -T % tile), (0, 0)])
    o = attend(of_tiles, items, pieces.count, tile, sizes["block"], False)
    o = o[:, :, :T, whole - Dh :].transpose(2, 0, 1, 3).reshape(T, Hq, Dh)
    return jnp.where(spans.token_valid()[:, None, None], o, 0).at[where].set(got, mode="drop"), pages


def check_shapes(q: Array, k: Array, pages: Array, spans: Spans) -> None:
    """NotImplementedError for what the tiles and memories of the TPU cannot hold."""
    Dh, dtype = q.shape[2], pages.dtype.name
    if q.dtype not in (jnp.float32, jnp.bfloat16) or dtype not in ROWS:
        raise NotImplementedError(f"q {q.dtype}, pages {dtype}: q may be float32, bfloat16; pages {', '.join(ROWS)}")
    if Dh != 64 and Dh % LANES:
        raise NotImplementedError(f"head_dim {Dh} is neither 64 nor a multiple of {LANES} lanes")
    if LANES % pages.shape[1] and pages.shape[1] % LANES:
        raise NotImplementedError(f"page_size {pages.shape[1]} neither divides {LANES} nor is a multiple")
    if pages.shape[1] % ROWS[dtype]:
        raise NotImplementedError(f"page_size {pages.shape[1]} is no multiple of {ROWS[dtype]}, the rows of {dtype}")
    table = 4 * (spans.page_table.size + 7 * (q.shape[0] // 16 + spans.num_seqs + spans.chunk_len.shape[0]))
    if table > SCALAR_MEMORY:
        raise NotImplementedError(
            f"the page table {spans.page_table.shape} and the work items take {table} B of scalar memory, "
            f"{SCALAR_MEMORY} are there; use a larger page_size"
        )


def _attend(
    queries: Array, pages: Array, rows: Array, items: Array, count: Array, shape: Shape, tile: int, spans: Spans
) -> Array:
    """What `count` items get: queries [Hkv, A, B, key lanes] -> [Hkv, A, B, value lanes], float32 sums in q's dtype.

    An item is (tile, first row, row after the last, sequence, position of the tile's first row). A tile of single
    tokens is [Hkv, 1, B], all of whose rows are one token's; another's is [Hkv, A, tile].
    """
    Hkv, A, B, _ = queries.shape
    block = (Hkv, 1, B) if shape.single else (Hkv, A, tile)
    index = (
        (lambda i, items, *_: (0, items[0, i], 0, 0)) if shape.single else (lambda i, items, *_: (0, 0, items[0, i], 0))
    )
    size = block[1] * block[2]
    table = jnp.pad(rows, (0, shape.pages))  # a block may begin at the last page
    return pl.pallas_call(
        functools.partial(_attend_kernel, shape=shape),
        name="paged_attention_single" if shape.single else "paged_attention_tile",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count,),
            in_specs=[pl.BlockSpec((*block, shape.key), index), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((*block, shape.values), index),
            scratch_shapes=[
                pltpu.VMEM((2, shape.block, pages.shape[2]), pages.dtype),
                pltpu.VMEM((Hkv, size, LANES), jnp.float32),
                pltpu.VMEM((Hkv, size, LANES), jnp.float32),
                pltpu.VMEM((Hkv, size, shape.values), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((Hkv, A, B, shape.values), queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=60 * 1024 * 1024),
        interpret=spans.target.simulate or False,
    )(items, table, queries, in_hbm(pages))


def numbers(held: Array, unit: float) -> Array:
    """What was read from pages, [block, lanes]; of 8 bits in bfloat16, and divided by `unit`, 1 or 16.

    float8_e4m3b11fnuz, from which all but the newest chips convert by an instruction, has the same bits for a 16th of
    each number, but has NaN for negative zero, and 30 for NaN, which so becomes 480 here.
    """
    if held.dtype != jnp.uint8:
        return held
    if unit == 1:
        return lax.bitcast_convert_type(held, EIGHT_BITS).astype(jnp.bfloat16)
    words, low = pltpu.bitcast(held, jnp.int32), 0x7F7F7F7F  # four numbers to a word; low: all but their signs
    words &= ((words & low) + low) | low  # without the signs of zeros
    return lax.bitcast_convert_type(pltpu.bitcast(words, jnp.uint8), jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)


def _attend_kernel(items, table, q, pages, o, held, peak, total, sums, done, arrived, *, shape):
    i, count = pl.program_id(0), pl.num_programs(0)
    Hkv, A, B, _ = q.shape
    size, block = A * B, shape.block
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def reach(i):
        """Blocks [begin, end) that item i sees, and its last position."""
        first = items[4, i]
        last = first if shape.single else first + items[2, i] - 1
        begin = 0
        if shape.sliding_window is not None:
            begin = jnp.maximum(first + (0 if shape.single else items[1, i]) - shape.sliding_window + 1, 0) // block
        return begin, last // block + 1, last

    def pages_of(i, n, parity, act):
        """`act` on the copy of each page of block n of item i; pages past the last position are not read."""
        last = reach(i)[2]
        for k in range(shape.pages):
            page = n * shape.pages + k

            @pl.when(page * shape.page <= last)
            def _(k=k, page=page):
                source = pages.at[table[items[3, i] * shape.width + page]]
                target = held.at[parity, pl.ds(k * shape.page, shape.page)]
                act(pltpu.make_async_copy(source, target, arrived.at[parity]))

    begin, end, last = reach(i)

    @pl.when(i == 0)
    def _():
        done[0] = 0
        pages_of(i, begin, 0, lambda copy: copy.start())

    before = done[0]  # blocks of earlier items
    peak[...] = jnp.full(peak.shape, MASKED)
    total[...] = jnp.zeros(total.shape)
    sums[...] = jnp.zeros(sums.shape)
    first = items[4, i]
    if shape.single:
        position = jnp.full((size, 1), first, jnp.int32)
    else:
        position = first + lax.broadcasted_iota(jnp.int32, (A, B, 1), 1).reshape(size, 1)

    def attend(n, carry, *, masked):
        parity = (before + n - begin) % 2

        @pl.when(n + 1 < end)
        def _():
            pages_of(i, n + 1, 1 - parity, lambda copy: copy.start())

        @pl.when((n + 1 == end) & (i + 1 < count))
        def _():
            pages_of(i + 1, reach(i + 1)[0], 1 - parity, lambda copy: copy.start())

        if masked:
            pages_of(i, n, parity, lambda copy: copy.wait())
        else:  # for all pages at once: what is waited for is a number of bytes
            pltpu.make_async_copy(held.at[parity], held.at[parity], arrived.at[parity]).wait()
        along = n * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        down = n * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
        oldest = None
        if shape.sliding_window is not None:
            oldest = first + (0 if shape.single else items[1, i]) - shape.sliding_window + 1

        def head(h, carry):
            at = pl.multiple_of(h * shape.head, LANES)
            keys = numbers(held[parity, :, pl.ds(at, shape.key)], shape.unit).astype(q.dtype)
            values = numbers(held[parity, :, pl.ds(at + shape.value, shape.values)], shape.unit).astype(q.dtype)
            scores = product(q[h].reshape(size, shape.key), keys, (((1,), (1,)), ((), ())))  # [rows, block]
            scale = shape.scale * shape.unit
            if shape.soft_cap is None:
                scores = scores * (scale * math.log2(math.e))
            else:
                scores = jnp.tanh(scores * (scale / shape.soft_cap)) * (shape.soft_cap * math.log2(math.e))
            if masked:
                seen = along <= position
                read = down <= last
                if shape.sliding_window is not None:
                    seen &= along > position - shape.sliding_window
                    read &= down >= oldest
                scores = jnp.where(seen, scores, MASKED)
                values = jnp.where(read, values, jnp.zeros_like(values))  # what is not read may be NaN
            old = peak[h]
            new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            fade = jnp.exp2(old - new)
            weights = jnp.exp2(scores - new[:, :1])
            part = weights[:, :LANES]
            for c in range(LANES, block, LANES):
                part = part + weights[:, c : c + LANES]
            peak[h] = new
            total[h] = total[h] * fade + part  # summed over lanes at the end
            sums[h] = sums[h] * fade[:, :1] + product(weights.astype(q.dtype), values, (((1,), (0,)), ((), ())))
            return carry

        if not shape.single:
            return lax.fori_loop(0, Hkv, head, carry)
        for h in range(Hkv):  # side by side: a few rows each would leave the units waiting
            head(h, carry)
        return carry

    whole = begin
    if shape.sliding_window is None:  # blocks before the first position of all rows need no mask
        whole = jnp.minimum(jnp.maximum(first + (0 if shape.single else items[1, i]) + 1, 0) // block, end)
        lax.fori_loop(begin, whole, functools.partial(attend, masked=False), 0)
    lax.fori_loop(whole, end, functools.partial(attend, masked=True), 0)
    done[0] = before + end - begin
    mine = (position >= first + items[1, i]) & (position < first + items[2, i])
    for h in range(Hkv):
        got = (sums[h] * shape.unit / jnp.sum(total[h], axis=1, keepdims=True)).astype(o.dtype)
        o[h] = jnp.where(mine | shape.single, got, o[h].reshape(got.shape)).reshape(A, B, shape.values)
