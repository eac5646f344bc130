"""This step's keys and values, written to their pages in place."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.spans import Spans
from kernels_pallas.tpu_rows import in_hbm
from kernels_pallas.words import to_words

TILE = 32  # tokens of 8 bits that lie on one tile of a TPU


def append(k: Array, v: Array | None, pages: Array, spans: Spans, base: int | Array) -> Array:
    """Pages with this step's keys and values; padding is written nowhere.

    In place if `pages` is donated and nothing else reads it later: so the keys of the next layer that shares the
    array must follow from this layer's output, as they do in a model.
    """
    page_size = pages.shape[1]
    parts = [k] if v is None else [k, v]
    new = to_words(jnp.stack(parts, axis=2).reshape(len(k), -1), pages.dtype)  # [T, W]
    if spans.target.chip is not None and pages.dtype.itemsize == 1 and page_size % TILE == 0:
        return _write_tiles(new, pages, spans, base)
    position = spans.positions()
    row = base + spans.page_table[spans.token_seq, position // page_size]
    row = jnp.where(spans.token_valid(), row, pages.shape[0])  # out of range: dropped
    return pages.at[row, position % page_size].set(new, mode="drop", unique_indices=True)


def _write_tiles(new: Array, pages: Array, spans: Spans, base: int | Array) -> Array:
    """The same on a TPU, for numbers of 8 bits, tile by tile.

    XLA's scatter wants such an array in another layout than that in which programs take it, and so copies the whole
    cache, there and back, in every step.
    """
    (T, W), (_, page, _), S = new.shape, pages.shape, spans.num_seqs
    lens = spans.query_start[1:] - spans.query_start[:-1]
    first, after = spans.first_pos, spans.first_pos + lens
    counts = jnp.where(lens > 0, (after - 1) // TILE - first // TILE + 1, 0)
    ends = jnp.cumsum(counts)
    index = jnp.arange(S if spans.kind == "decode" else min(T, T // TILE + 2 * S), dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, index, side="right"), S - 1).astype(jnp.int32)
    at = (first[seq] // TILE + index - (ends - counts)[seq]) * TILE  # position of the tile's first row
    token = spans.query_start[seq] + at - first[seq]
    rows = token[:, None] + jnp.arange(TILE)
    begin, end = jnp.maximum(first[seq] - at, 0), jnp.minimum(after[seq] - at, TILE)
    page_of = base + spans.page_table[seq, jnp.minimum(at // page, spans.page_table.shape[1] - 1)]
    items = jnp.stack([page_of, at % page // TILE, begin, end])
    held = pl.BlockSpec((None, TILE, W), lambda i, items: (items[0, i], items[1, i], 0))
    return pl.pallas_call(
        _write_kernel,
        name="paged_attention_append",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(ends[-1],),
            in_specs=[pl.BlockSpec((None, TILE, W), lambda i, _: (i, 0, 0)), held],
            out_specs=held,
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=spans.target.simulate or False,
    )(items, new[jnp.clip(rows, 0, T - 1)], in_hbm(pages))


def _write_kernel(items, new, old, written):
    """Rows `begin` up to `end` of a tile. A word of 32 bits has four rows, the first in its lowest bits."""
    i = pl.program_id(0)
    begin, end = items[2, i], items[3, i]
    into_words = functools.partial(pltpu.bitcast, ty=jnp.int32)  # [TILE, W] -> [TILE / 4, W]
    word = 4 * lax.broadcasted_iota(jnp.int32, (TILE // 4, new.shape[1]), 0)
    chosen = jnp.zeros_like(word)
    for n in range(4):
        chosen |= jnp.where((word + n >= begin) & (word + n < end), 0xFF << (8 * n) if n < 3 else -(1 << 24), 0)
    mixed = (into_words(new[...]) & chosen) | (into_words(old[...]) & ~chosen)
    written[...] = pltpu.bitcast(mixed, written.dtype)
