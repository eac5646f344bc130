"""What of a chunk of the gated delta rule does not depend on the state before it: kernels for Hopper GPUs.

A thread block takes one head in one chunk. With A as in chunk.py and X = (I + A)^-1 it gives T = X diag(beta), what the
queries see of the chunk's keys, and with decays per channel also queries and keys as they meet the states.

X comes from the inverses of blocks of 1, 2, 4 ... tokens: where X has those of two neighbours, and C what A has between
them, that of both is X - X C X. No entry of an inverse is above beta, so all are products of bfloat16.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decays import STRONGEST_IN_BFLOAT16
from kernels_pallas.gpu_rows import clear
from kernels_pallas.mosaic_gpu import (
    MATRIX,
    OF_COLUMNS,
    OF_ROWS,
    index,
    launch,
    load,
    operand,
    product,
    products,
    store,
    sum_of_products,
    transposed,
)

Q = 64  # most tokens of a chunk, and rows of a matrix that the tensor cores multiply
PART = 64  # channels whose decays are formed in one piece
LEVELS = tuple(1 << n for n in range(6))  # tokens of blocks of which two neighbours are joined


def solve_by_head(q: Array, k: Array, sums: Array, beta: Array, chunks: Array, dk: int, interpret: Any) -> list[Array]:
    """T and what queries see, [C,H,Q,Q] bfloat16. q, k [T,Hk*dk] bfloat16; `sums` of log decays and `beta` [C,H,Q]."""
    C, H, _ = sums.shape
    return launch(
        Solve(H, k.shape[1] // dk, dk).solve_heads,
        (chunks, sums, beta, q, k),
        grid={"head": H, "chunk": C},
        out=[jax.ShapeDtypeStruct((C, H, Q, Q), jnp.bfloat16)] * 2,
        scratch={
            "queries": operand(Q, dk),
            "keys": operand(Q, dk),
            "inverse": operand(Q, Q),
            "mixed": operand(Q, Q),
            "arrived": plgpu.Barrier(num_arrivals=2),
        },
        interpret=interpret,
        approximate=True,
    )


def solve_by_channel(q: Array, k: Array, g: Array, beta: Array, chunks: Array, dk: int, interpret: Any) -> list[Array]:
    """As `solve_by_head`, for log decays g [T,H*dk] float32. Further gives keys and queries as they read the state
    before the chunk, keys as they are added to the state after it [C,H,Q,dk], and what is kept of that [C,H,dk]."""
    C, H, _ = beta.shape
    square, wide = (jax.ShapeDtypeStruct((C, H, Q, n), jnp.bfloat16) for n in (Q, dk))
    return launch(
        Solve(H, k.shape[1] // dk, dk).solve_channels,
        (chunks, beta, q, k, g),
        grid={"head": H, "chunk": C},
        out=[square, square, wide, wide, wide, jax.ShapeDtypeStruct((C, H, dk), jnp.float32)],
        scratch={
            "queries": operand(Q, dk),
            "keys": operand(Q, dk),
            "coarse": operand(Q, dk),
            "fine": operand(Q, dk),
            "which": operand(Q, Q),
            "near_queries": operand(Q, dk),
            "near_keys": operand(Q, dk),
            "arrived": plgpu.Barrier(num_arrivals=2),
        },
        interpret=interpret,
        approximate=True,
    )


def by_row(a: Any, columns: int = Q) -> Any:
    """A number of each row -> [Q, columns]."""
    return lax.broadcast_in_dim(a, (Q, columns), (0,))


def by_column(a: Any, rows: int = Q) -> Any:
    """A number of each column -> [rows, columns]."""
    return lax.broadcast_in_dim(a, (rows, a.shape[0]), (1,))


def send(source: Any, target: Any) -> None:
    """Copy shared memory that was just written to an array, to the end."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def across(size: int) -> Array:
    """[Q, Q] bool: the later of two neighbouring blocks of `size` tokens in rows, the earlier in columns."""
    row, column = (index((Q, Q), axis) & -size for axis in (0, 1))
    return row == jnp.where(column & size == 0, column + size, -1)


def invert(known: Any, inverse: Any, mixed: Any) -> Array:
    """X [Q, Q] for A in `known`; all are operands, the others are written over."""
    zero = jnp.zeros((), jnp.bfloat16)

    def joined(size: int) -> Array:
        return jnp.where(across(size), load(known, MATRIX), zero)

    X = jnp.where(index((Q, Q), 0) == index((Q, Q), 1), 1.0, 0.0) - joined(1).astype(jnp.float32)
    for size in LEVELS[1:]:
        store(mixed, joined(size))
        store(inverse, X.astype(jnp.bfloat16))
        plgpu.commit_smem()
        store(mixed, product(mixed, inverse).astype(jnp.bfloat16))
        plgpu.commit_smem()
        X = X - product(inverse, mixed)
    return X


@dataclass(frozen=True)
class Solve:
    """What is known of a call when it is compiled."""

    heads: int
    key_heads: int
    dk: int

    def _load(self, chunks: Any, q: Any, k: Any, queries: Any, keys: Any, arrived: Any, head: Any, c: Any) -> None:
        key_head = lax.div(head, self.heads // self.key_heads)
        tokens, of_head = pl.ds(chunks[c, 0], Q), pl.ds(key_head * self.dk, self.dk)
        plgpu.copy_gmem_to_smem(q.at[tokens, of_head], queries, arrived)
        plgpu.copy_gmem_to_smem(k.at[tokens, of_head], keys, arrived)

    def solve_heads(
        self,
        chunks: Any,
        sums: Any,
        beta: Any,
        q: Any,
        k: Any,
        inverses: Any,
        seen: Any,
        *,
        queries: Any,
        keys: Any,
        inverse: Any,
        mixed: Any,
        arrived: Any,
    ) -> None:
        head, c = lax.axis_index("head"), lax.axis_index("chunk")
        length = chunks[c, 1]

        @pl.when(length > 0)
        def _() -> None:
            self._load(chunks, q, k, queries, keys, arrived, head, c)
            row, column = index((Q, Q), 0), index((Q, Q), 1)
            between = by_row(load(sums.at[c, head], OF_ROWS)) - by_column(load(sums.at[c, head], OF_COLUMNS))
            decay = jnp.where(row >= column, jnp.exp(jnp.minimum(between, 0.0)), 0.0)
            plgpu.barrier_wait(arrived)
            clear(length, keys)  # rows of queries stay rows: those past the end go nowhere
            store(mixed, (product(queries, transposed(keys)) * decay).astype(jnp.bfloat16))
            send(mixed, seen.at[c, head])
            A = product(keys, transposed(keys)) * decay * by_row(load(beta.at[c, head], OF_ROWS))
            known = keys.at[:, pl.ds(0, Q)]
            store(known, A.astype(jnp.bfloat16))
            X = invert(known, inverse, mixed)
            store(inverse, (X * by_column(load(beta.at[c, head], OF_COLUMNS))).astype(jnp.bfloat16))
            send(inverse, inverses.at[c, head])

    def solve_channels(
        self,
        chunks: Any,
        beta: Any,
        q: Any,
        k: Any,
        g: Any,
        inverses: Any,
        seen: Any,
        reading_keys: Any,
        reading_queries: Any,
        added_keys: Any,
        kept: Any,
        *,
        queries: Any,
        keys: Any,
        coarse: Any,
        fine: Any,
        which: Any,
        near_queries: Any,
        near_keys: Any,
        arrived: Any,
    ) -> None:
        """Tokens of neighbouring blocks meet through the decays to their border, so that none is above 1 and none a
        difference: log decays are summed where `which` says so."""
        head, c = lax.axis_index("head"), lax.axis_index("chunk")
        length = chunks[c, 1]

        parts = [pl.ds(n, PART) for n in range(0, self.dk, PART)]

        row, column = index((Q, Q), 0), index((Q, Q), 1)

        def decayed(begin: Any, end: Any, *targets: tuple[Any, Any]) -> None:
            """Each target gets its source with the decays of each row over tokens `begin` up to `end`."""
            ones = jnp.where((column >= begin) & (column < end), 1.0, 0.0)
            store(which, ones.astype(jnp.bfloat16))
            plgpu.commit_smem()
            for part in parts:
                decay = jnp.exp(sum_of_products((which, coarse.at[:, part]), (which, fine.at[:, part])))
                for source, target in targets:
                    at_border = load(source.at[:, part], MATRIX).astype(jnp.float32) * decay
                    store(target.at[:, part], at_border.astype(jnp.bfloat16))
            plgpu.commit_smem()

        @pl.when(length > 0)
        def _() -> None:
            self._load(chunks, q, k, queries, keys, arrived, head, c)
            for n, part in enumerate(parts):
                of_g = g.at[pl.ds(chunks[c, 0], Q), pl.ds(head * self.dk + n * PART, PART)]
                log_decay = jnp.maximum(load(of_g, MATRIX), STRONGEST_IN_BFLOAT16)
                log_decay = jnp.where(index(log_decay.shape, 0) < length, log_decay, 0.0)
                store(kept.at[c, head, part], jnp.exp(log_decay.sum(0)))
                rounded = log_decay.astype(jnp.bfloat16)
                store(coarse.at[:, part], rounded)
                store(fine.at[:, part], (log_decay - rounded.astype(jnp.float32)).astype(jnp.bfloat16))
            plgpu.barrier_wait(arrived)
            clear(length, keys)  # rows of queries stay rows: those past the end go nowhere

            both = (queries, near_queries), (keys, near_keys)
            decayed(0, row + 1, *both)
            plgpu.copy_smem_to_gmem(near_queries, reading_queries.at[c, head])
            send(near_keys, reading_keys.at[c, head])
            decayed(row + 1, Q, both[1])
            send(near_keys, added_keys.at[c, head])

            met = jnp.where(row == column, product(queries, transposed(keys)), 0.0)
            A = jnp.zeros_like(met)
            for size in LEVELS:
                border = (row & -(2 * size)) + size
                decayed(jnp.minimum(border, row + 1), jnp.maximum(border, row + 1), *both)
                of_queries, of_keys = products(
                    (near_queries, transposed(near_keys)), (near_keys, transposed(near_keys))
                )
                met, A = (jnp.where(across(size), *of) for of in ((of_queries, met), (of_keys, A)))
            store(which, met.astype(jnp.bfloat16))
            send(which, seen.at[c, head])
            known = coarse.at[:, pl.ds(0, Q)]
            store(known, (A * by_row(load(beta.at[c, head], OF_ROWS))).astype(jnp.bfloat16))
            X = invert(known, *(near.at[:, pl.ds(0, Q)] for near in (near_queries, near_keys)))
            store(which, (X * by_column(load(beta.at[c, head], OF_COLUMNS))).astype(jnp.bfloat16))
            send(which, inverses.at[c, head])
