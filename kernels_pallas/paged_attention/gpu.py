"""paged_attention on Hopper GPUs: decode, bound by the bandwidth of the cache, and prefill, by the tensor cores.

A thread block takes the query heads of one key/value head, of one token or of as many as fill a matrix of 64 rows, and
goes over their context block by block with an online softmax. The copy engine brings pages one block ahead. Where
sequences and heads are too few to fill the GPU, a context is split among several thread blocks.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.gpu_rows import put_run
from kernels_pallas.mosaic_gpu import (
    ENOUGH_BLOCKS,
    MATRIX,
    OF_ROWS,
    for_hopper,
    index,
    launch,
    load,
    matrix,
    operand,
    product,
    store,
    transposed,
)
from kernels_pallas.paged_attention.append import append
from kernels_pallas.paged_attention.xla import MASKED, Rule, whole_blocks
from kernels_pallas.spans import Spans

ROWS = 64  # of a matrix that the tensor cores multiply
BLOCK = 64  # tokens of the cache that are read at a time
STAGES = 2  # blocks in shared memory
PART = 64  # columns of the answer that are computed in one piece: of more, registers spill
LEAST_OF_A_SPLIT = 4  # blocks of a context, below which to split it does not pay
LOG2_E = math.log2(math.e)


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
    """See the package."""
    for_hopper(spans.target)
    if pages is None or v is None:
        raise NotImplementedError("dense spans" if pages is None else "values that are the keys")
    (T, q_heads, dim), kv_heads, page_size = q.shape, k.shape[1], pages.shape[1]
    if pages.dtype != jnp.bfloat16 or q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{q.dtype} queries, {pages.dtype} pages: the kernel needs bfloat16")
    if dim not in (64, 128, 256):
        raise NotImplementedError(f"head_dim {dim}: the kernel needs 64, 128 or 256")
    if page_size % 8 or (BLOCK % page_size and page_size % BLOCK):
        raise NotImplementedError(f"pages of {page_size} tokens: the kernel needs 8, 16, 32 or a multiple of 64")
    group = q_heads // kv_heads
    if group > ROWS:
        raise NotImplementedError(f"{group} query heads for one key head: the kernel takes at most {ROWS}")
    pages = append(k, v, pages, spans, base)
    tokens = 1 if spans.kind == "decode" else ROWS // group  # of a tile
    items, table = _tiles(spans, tokens), whole_blocks(spans.page_table, page_size, BLOCK)
    splits = 1
    if spans.kind == "decode":
        wanted = -(-ENOUGH_BLOCKS // (len(items) * kv_heads))
        splits = max(1, min(wanted, table.shape[1] * page_size // (BLOCK * LEAST_OF_A_SPLIT)))
    by_head = q.reshape(T, kv_heads, group, dim).swapaxes(0, 1).reshape(kv_heads, T * group, dim)
    # A tile's rows may reach past the last token, and the copy engine wants a multiple of 8.
    by_head = jnp.pad(by_head, [(0, 0), (0, ROWS + -T * group % 8), (0, 0)])
    offsets = jnp.arange(ROWS, dtype=jnp.int32) // group
    out = [jax.ShapeDtypeStruct((splits, kv_heads, T * group, dim), jnp.float32)]
    if splits > 1:
        out.append(jax.ShapeDtypeStruct((splits, kv_heads, len(items), ROWS), jnp.float32))
    kernel = Kernel(Rule(scale, sliding_window, soft_cap), page_size, dim, group, tokens, splits)
    o, *lse = launch(
        kernel.attend,
        (items, table + base, offsets, by_head, pages),
        grid={"head": kv_heads, "split": splits, "tile": len(items)},
        out=out,
        scratch=kernel.scratch(),
        interpret=spans.target.simulate,
        approximate=soft_cap is None,  # the approximate tanh is too coarse
    )
    o = o.reshape(splits, kv_heads, T, group, dim)
    if splits > 1:  # [splits, Hkv, T, group]; where a split has nothing, it weighs nothing
        weights = jax.nn.softmax(lse[0][..., :group], axis=0)
        o = jnp.sum(o * weights[..., None], axis=0, keepdims=True)
    o = o[0].swapaxes(0, 1).reshape(q.shape)
    return jnp.where(spans.token_valid()[:, None, None], o, 0.0).astype(q.dtype), pages


def _tiles(spans: Spans, tokens: int) -> Array:
    """[M, 4] int32: first token, number of tokens (0 for unused entries), sequence and first position of each tile."""
    lens = spans.query_start[1:] - spans.query_start[:-1]
    if tokens == 1 and spans.kind == "decode":
        seq, offset = jnp.arange(spans.num_seqs, dtype=jnp.int32), jnp.zeros(spans.num_seqs, jnp.int32)
    else:
        T = spans.token_seq.shape[0]
        ends = jnp.cumsum(-(-lens // tokens))
        m = jnp.arange(min(T, T // tokens + spans.num_seqs), dtype=jnp.int32)
        seq = jnp.minimum(jnp.searchsorted(ends, m, side="right"), spans.num_seqs - 1).astype(jnp.int32)
        before = jnp.where(seq > 0, ends[seq - 1], 0)
        offset = jnp.where(m < ends[-1], (m - before) * tokens, T)
    count = jnp.clip(lens[seq] - offset, 0, tokens)
    return jnp.stack([spans.query_start[seq] + offset, count, seq, spans.first_pos[seq] + offset], axis=1)


@dataclass(frozen=True)
class Kernel:
    """What is known of a call when it is compiled."""

    rule: Rule
    page_size: int
    dim: int
    group: int  # query heads of a key/value head
    tokens: int  # most of a tile
    splits: int  # of a context

    def scratch(self) -> dict[str, Any]:
        parts = BLOCK // min(BLOCK, self.page_size)
        return {
            "queries": operand(ROWS, self.dim),
            "keys": operand(STAGES, BLOCK, self.dim),
            "values": operand(STAGES, BLOCK, self.dim),
            "mixing": operand(ROWS, BLOCK),
            "answer": plgpu.SMEM((ROWS, PART), jnp.float32),
            "weight": plgpu.SMEM((ROWS,), jnp.float32),
            "asked": plgpu.Barrier(),
            "loaded": plgpu.Barrier(num_arrivals=2 * parts, num_barriers=STAGES),
        }

    def attend(
        self,
        items: Any,
        table: Any,
        offsets: Any,
        q: Any,
        pages: Any,
        o: Any,
        *lse: Any,
        queries: Any,
        keys: Any,
        values: Any,
        mixing: Any,
        answer: Any,
        weight: Any,
        asked: Any,
        loaded: Any,
    ) -> None:
        """One tile, one key/value head, one split of the context."""
        head, split, m = (lax.axis_index(name) for name in ("head", "split", "tile"))
        start, count, seq, first = (items[m, n] for n in range(4))

        @pl.when(count > 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(q.at[head, pl.ds(start * self.group, ROWS)], queries, asked)
            fetch = partial(self._fetch, table, pages, keys, values, loaded, seq, head)
            begin, end = self._blocks(first, count, split)
            for n in range(STAGES):
                pl.when(begin + n < end)(partial(fetch, begin + n, n))
            plgpu.barrier_wait(asked)
            position = lax.broadcast_in_dim(load(offsets, OF_ROWS) + first, (ROWS, BLOCK), (0,))

            def turn(block: Any, carry: Any) -> Any:
                sums, peak, total = carry
                slot = lax.rem(block - begin, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                self._clear_unseen(values.at[slot], block, first, count)
                scores = self.rule.scores(product(queries, transposed(keys.at[slot])))
                seen = self.rule.sees(position, index(scores.shape, 1) + block * BLOCK)
                scores = jnp.where(seen, scores, MASKED) * LOG2_E
                new_peak = jnp.maximum(peak, scores.max(axis=1))
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, (0,)))
                fade = jnp.exp2(peak - new_peak)
                total = total * fade + weights.sum(axis=1)
                store(mixing, weights.astype(jnp.bfloat16))
                plgpu.commit_smem()
                for n, part in enumerate(sums):
                    faded = part * lax.broadcast_in_dim(fade, part.shape, (0,))
                    of_part = values.at[slot, :, pl.ds(n * PART, PART)]
                    sums = (*sums[:n], faded + product(mixing, of_part), *sums[n + 1 :])
                pl.when(block + STAGES < end)(partial(fetch, block + STAGES, slot))
                return sums, new_peak, total

            column = partial(matrix, layout=OF_ROWS)
            nothing = (matrix(0.0, ROWS, PART),) * (self.dim // PART)
            carry = nothing, column(MASKED, ROWS), column(0.0, ROWS)
            sums, peak, total = lax.fori_loop(begin, end, turn, carry)
            empty = total <= 0
            total = jnp.where(empty, 1.0, total)
            for n, part in enumerate(sums):
                store(answer, part / lax.broadcast_in_dim(total, part.shape, (0,)))
                plgpu.commit_smem()
                target = o.at[split, head, :, pl.ds(n * PART, PART)]
                put_run(answer, target, start, count, self.tokens, self.group)
                plgpu.wait_smem_to_gmem(0)
            if lse:
                store(weight, jnp.where(empty, MASKED, peak / LOG2_E + jnp.log(total)))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(weight, lse[0].at[split, head, m])
                plgpu.wait_smem_to_gmem(0)

    def _blocks(self, first: Any, count: Any, split: Any) -> tuple[Any, Any]:
        """The blocks of a split, from and to: of those that any of the tile's tokens sees."""
        begin, end = jnp.int32(0), lax.div(first + count - 1, BLOCK) + 1
        if self.rule.sliding_window is not None:
            begin = lax.div(jnp.maximum(first - self.rule.sliding_window + 1, 0), BLOCK)
        if self.splits == 1:
            return begin, end
        share = lax.div(end - begin + self.splits - 1, self.splits)
        begin = begin + split * share
        return begin, jnp.minimum(begin + share, end)

    def _fetch(
        self, table: Any, pages: Any, keys: Any, values: Any, loaded: Any, seq: Any, head: Any, block: Any, slot: Any
    ) -> None:
        """Start the copies of a block's keys and values."""
        part = min(BLOCK, self.page_size)
        for n in range(BLOCK // part):
            at = block * BLOCK + n * part
            row, within = table[seq, lax.div(at, self.page_size)], lax.rem(at, self.page_size)
            within = within if self.page_size > BLOCK else 0
            for side, held in enumerate((keys, values)):
                source = pages.at[row, pl.ds(within, part), pl.ds((2 * head + side) * self.dim, self.dim)]
                plgpu.copy_gmem_to_smem(source, held.at[slot, pl.ds(n * part, part)], loaded.at[slot])

    def _clear_unseen(self, values: Any, block: Any, first: Any, count: Any) -> None:
        """Zero the values that no token of the tile sees: they may be NaN, and 0 * NaN is NaN."""
        window, last = self.rule.sliding_window, first + count - 1
        at_an_end = block * BLOCK + BLOCK - 1 > last
        if window is not None:
            at_an_end |= block * BLOCK <= first - window

        @pl.when(at_an_end)
        def _() -> None:
            held = load(values, MATRIX)
            at = index(held.shape, 0) + block * BLOCK
            seen = at <= last if window is None else (at <= last) & (at > first - window)
            store(values, jnp.where(seen, held, jnp.zeros_like(held)))
            plgpu.commit_smem()
