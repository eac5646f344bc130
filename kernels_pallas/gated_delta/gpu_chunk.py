"""The Hopper kernels of gated_delta for chunks of sequences: the WY form (see chunk.py).

First what does not depend on states, of all chunks of all heads at once (gpu_solve.py); then a thread block takes some
columns of one head of one sequence through its chunks in order, the state in registers. Products are of bfloat16 with
float32 sums, by the tensor cores.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decays import STRONGEST_IN_BFLOAT16
from kernels_pallas.gated_delta.gpu_solve import Q, by_row, solve_by_channel, solve_by_head
from kernels_pallas.gpu_rows import GOES_ON, LOAD, STORE, chunks_of, clear, put_run
from kernels_pallas.mosaic_gpu import (
    MATRIX,
    OF_ROWS,
    launch,
    load,
    operand,
    product,
    products,
    store,
    transposed,
)
from kernels_pallas.recurrence import is_single
from kernels_pallas.spans import Spans

COLUMNS = 64  # of a state that a thread block takes
PART = 64  # rows of a state that are computed in one piece


def chunks(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    held: Any,
    table: Array,
    spans: Spans,
    base: int | Array,
    dtype: Any,
) -> Array:
    """o [T,H,dv] bfloat16 of sequences of several tokens; their states, of `dtype` in `held`, are written,
    and nothing of other tokens.

    Arguments as of `kernels_pallas.gated_delta.gated_delta`; `table` as in `gpu_rows`. NotImplementedError for what the
    kernels do not take.
    """
    (T, H, dv), (_, key_heads, dk), interpret = v.shape, k.shape, spans.target.simulate
    _check(q, k, v, g, spans)
    single = is_single(spans)
    work, of_chunks = chunks_of(spans, base)
    C = of_chunks.shape[0]
    work = jnp.where(single[:, None], 0, work)  # those have a kernel of their own
    wanted = (jnp.arange(C) < spans.num_chunks) & ~single[spans.chunk_seq]
    of_chunks = of_chunks.at[:, 1].set(jnp.where(wanted, of_chunks[:, 1], 0))
    # A chunk's rows may reach past the last token, and the copy engine wants a multiple of 8.
    q, k, v = (jnp.pad(a.reshape(T, -1), [(0, Q + -T % 8), (0, 0)]) for a in (q, k, v))

    def in_chunks(a: Array) -> Array:
        """[T, H] -> [C, H, Q] float32, 0 past the end of each."""
        places = spans.chunk_start[:, None] + jnp.arange(Q)
        valid = jnp.arange(Q) < spans.chunk_len[:, None]
        return jnp.where(valid[:, :, None], a.astype(jnp.float32).at[places].get(mode="clip"), 0.0).swapaxes(1, 2)

    by_channel, beta = g.ndim == 3, in_chunks(beta)
    if by_channel:
        g = jnp.pad(g.astype(jnp.float32).reshape(T, -1), [(0, Q), (0, 0)])
        inverses, seen, k, q, added_keys, kept = solve_by_channel(q, k, g, beta, of_chunks, dk, interpret)
        of_tokens = (q, k, added_keys, v, inverses, seen)
        decays = ()
    else:
        sums = jnp.cumsum(jnp.maximum(in_chunks(g), STRONGEST_IN_BFLOAT16), axis=2)
        of_tokens = (q, k, k, v, *solve_by_head(q, k, sums, beta, of_chunks, dk, interpret))
        decays, kept = (jnp.exp(sums), jnp.exp(sums[:, :, -1:] - sums)), jnp.exp(sums[:, :, -1])
    kernel = Kernel(H, key_heads, dk, dv, dtype, by_channel)
    o = launch(
        kernel.scan,
        (table, work, of_chunks, *of_tokens, kept, held, *decays),
        grid={"block": H * dv // COLUMNS, "sequence": spans.num_seqs},
        out=jax.ShapeDtypeStruct((T, H * dv), jnp.bfloat16),
        scratch=kernel.scratch(),
        interpret=interpret,
    )
    return o.reshape(T, H, dv)


def _check(q: Array, k: Array, v: Array, g: Array, spans: Spans) -> None:
    for name, a in (("queries", q), ("keys", k), ("values", v)):
        if a.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{spans.kind} spans, {a.dtype} {name}: the kernel of chunks needs bfloat16")
    if spans.chunk_size > Q:
        raise NotImplementedError(f"chunks of {spans.chunk_size} tokens: the kernel takes at most {Q}")
    if k.shape[2] not in (64, 128):
        raise NotImplementedError(f"keys of {k.shape[2]} channels: the kernel of chunks needs 64 or 128")
    if v.shape[2] % COLUMNS:
        raise NotImplementedError(f"values of {v.shape[2]} channels: the kernel of chunks needs multiples of {COLUMNS}")


@dataclass(frozen=True)
class Kernel:
    """What is known of a scan over chunks when it is compiled."""

    heads: int
    key_heads: int
    dk: int
    dv: int
    dtype: Any  # of the state
    by_channel: bool

    def scratch(self) -> dict[str, Any]:
        return {
            "keys": operand(Q, self.dk),
            "added_keys": operand(Q, self.dk),
            "queries": operand(Q, self.dk),
            "values": operand(Q, COLUMNS),
            "solved": operand(Q, Q),
            "mixing": operand(Q, Q),
            "before": operand(self.dk, COLUMNS),
            "rest": operand(Q, COLUMNS),
            "taken": operand(Q, COLUMNS),
            "answer": plgpu.SMEM((Q, COLUMNS), jnp.bfloat16),
            "reading": plgpu.Barrier(num_arrivals=2),
            "solving": plgpu.Barrier(),
            "answering": plgpu.Barrier(num_arrivals=2),
            "adding": plgpu.Barrier(),
        }

    def scan(
        self,
        table: Any,
        work: Any,
        chunks: Any,
        q: Any,
        k: Any,
        k_added: Any,
        v: Any,
        inverses: Any,
        seen: Any,
        kept: Any,
        held: Any,
        *decays_and_out: Any,
        keys: Any,
        added_keys: Any,
        queries: Any,
        values: Any,
        solved: Any,
        mixing: Any,
        before: Any,
        rest: Any,
        taken: Any,
        answer: Any,
        reading: Any,
        solving: Any,
        answering: Any,
        adding: Any,
    ) -> None:
        """Some columns of one head of one sequence.

        u = T (v - exp(c) k S)    o = exp(c) q S + seen u    S' = exp(total) S + k^T (exp(total - c) u)

        With decays per channel queries and keys have them already. What the next chunk brings is loaded as soon as the
        products that read what this one brought have ended.
        """
        *decays, o = decays_and_out
        block, s = lax.axis_index("block"), lax.axis_index("sequence")
        per_head = self.dv // COLUMNS
        head = lax.div(block, per_head)
        key_head = lax.div(head, self.heads // self.key_heads)
        at, of_head = pl.ds(block * COLUMNS, COLUMNS), pl.ds(lax.rem(block, per_head) * COLUMNS, COLUMNS)
        first, count = work[s, 0], work[s, 1]
        parts = [pl.ds(n, PART) for n in range(0, self.dk, PART)]

        def of_key(a: Any, c: Any) -> Any:
            if self.by_channel:
                return a.at[c, head]
            return a.at[pl.ds(chunks[c, 0], Q), pl.ds(key_head * self.dk, self.dk)]

        def fetch_reading(c: Any) -> None:
            plgpu.copy_gmem_to_smem(of_key(k, c), keys, reading)
            plgpu.copy_gmem_to_smem(v.at[pl.ds(chunks[c, 0], Q), at], values, reading)

        def fetch_solving(c: Any) -> None:
            plgpu.copy_gmem_to_smem(inverses.at[c, head], solved, solving)

        def fetch_answering(c: Any) -> None:
            plgpu.copy_gmem_to_smem(of_key(q, c), queries, answering)
            plgpu.copy_gmem_to_smem(seen.at[c, head], mixing, answering)

        def save(S: Any, target: Any) -> None:
            for part, some in zip(parts, S, strict=True):
                store(held.at[target, head, part, of_head], some.astype(self.dtype))

        @pl.when(count > 0)
        def _() -> None:
            fetch_reading(first)
            fetch_solving(first)
            fetch_answering(first)
            goes_on, row = table[s, GOES_ON] != 0, table[s, LOAD]
            S = (load(held.at[row, head, part, of_head], MATRIX).astype(jnp.float32) for part in parts)
            S = tuple(jnp.where(goes_on, some, 0.0) for some in S)

            def chunk(i: Any, S: Any) -> Any:
                c, goes_on = first + i, i + 1 < count
                start, length, snapshot = (chunks[c, n] for n in range(3))
                if self.by_channel:
                    left = [by_row(load(kept.at[c, head, part], OF_ROWS), COLUMNS) for part in parts]
                else:
                    left = [kept[c, head]] * len(parts)
                since, to_end = [by_row(load(a.at[c, head], OF_ROWS), COLUMNS) for a in decays] or (1.0, 1.0)
                for part, some in zip(parts, S, strict=True):
                    store(before.at[part], some.astype(jnp.bfloat16))
                plgpu.commit_smem()
                plgpu.copy_gmem_to_smem(of_key(k_added, c), added_keys, adding)
                plgpu.barrier_wait(reading)
                clear(length, keys, values)
                read = product(keys, before)
                store(rest, (load(values, MATRIX).astype(jnp.float32) - read * since).astype(jnp.bfloat16))
                plgpu.commit_smem()
                pl.when(goes_on)(partial(fetch_reading, c + 1))
                plgpu.barrier_wait(solving)
                u = product(solved, rest)
                store(taken, u.astype(jnp.bfloat16))
                plgpu.commit_smem()
                pl.when(goes_on)(partial(fetch_solving, c + 1))
                store(rest, (u * to_end).astype(jnp.bfloat16))
                plgpu.barrier_wait(answering)
                read, mixed = products((queries, before), (mixing, taken))
                store(answer, (read * since + mixed).astype(jnp.bfloat16))
                plgpu.commit_smem()
                pl.when(goes_on)(partial(fetch_answering, c + 1))
                put_run(answer, o.at[:, at], start, length, Q)
                plgpu.barrier_wait(adding)
                if not self.by_channel:
                    clear(length, added_keys)
                S = tuple(
                    some * a + product(transposed(added_keys.at[:, part]), rest)
                    for part, some, a in zip(parts, S, left, strict=True)
                )
                plgpu.wait_smem_to_gmem(0)
                pl.when(snapshot >= 0)(partial(save, S, snapshot))
                return S

            save(lax.fori_loop(0, count, chunk, S), table[s, STORE])
