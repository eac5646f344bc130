"""Pieces and singles: a step's tokens as the work items of kernels, computed on the device from its spans.

Kernels of ops with recurrent state walk over aligned tiles of the token axis. A piece is a run of tokens of one
sequence within one tile, ended also by a snapshot; a sequence of several tokens is one piece per tile that it touches.
Sequences of one token are singles, with kernels of their own: they are bound by the bandwidth of their state.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.recurrence import is_single
from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans

NONE = -1  # in place of a row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """M entries, of which the first `count` are real, in order of their tokens. Rows are of the cache array."""

    count: Array  # []
    tile: Array  # [M]
    start: Array  # [M] first token within the tile
    stop: Array  # [M] token within the tile after the last
    first: Array  # [M] 1 where a sequence begins
    load: Array  # [M] row of the state before the piece; NONE where it is carried or zero
    store: Array  # [M] row that receives the state after the piece, or NONE
    snapshot: Array  # [M] another such row, or NONE

    def table(self) -> Array:
        """[7, M] int32, for scalar memory."""
        return jnp.stack([self.tile, self.start, self.stop, self.first, self.load, self.store, self.snapshot])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Singles:
    """S entries, of which the first `count` are real: those that read another row than they write come first.

    So a row is read by all others before its own sequence changes it.
    """

    count: Array  # []
    seq: Array  # [S]
    token: Array  # [S]
    load: Array  # [S] as in Pieces
    store: Array  # [S]
    snapshot: Array  # [S]

    def table(self) -> Array:
        """[4, S] int32, for scalar memory: entry, load, store, snapshot."""
        return jnp.stack([self.seq, self.load, self.store, self.snapshot])


def pieces_of(spans: Spans, read_slot: Array, base: int | Array, tile: int) -> Pieces:
    """The pieces of sequences of several tokens, which start from `read_slot` [S], on tiles of `tile` tokens."""
    T = spans.token_seq.shape[0]
    tokens = jnp.arange(T, dtype=jnp.int32)
    has_snapshot, single = chunk_has_snapshot(spans), is_single(spans)
    chunk_end = spans.chunk_start + spans.chunk_len
    begins = (tokens % tile == 0).at[spans.query_start[:-1]].set(True, mode="drop")
    begins = begins.at[jnp.where(has_snapshot, chunk_end, T)].set(True, mode="drop")
    snapshot = jnp.full(T, NONE).at[jnp.where(has_snapshot, chunk_end - 1, T)]
    snapshot = snapshot.set(base + spans.chunk_snapshot, mode="drop")
    begin_at_or_after = lax.cummin(jnp.where(begins, tokens, T), reverse=True)

    wanted = begins & spans.token_valid() & ~single[spans.token_seq]
    most = min(T, -(-T // tile) + spans.num_seqs + spans.chunk_len.shape[0])
    at = jnp.flatnonzero(wanted, size=most, fill_value=T - 1).astype(jnp.int32)
    stop = jnp.append(begin_at_or_after, T)[at + 1]
    stop = jnp.minimum(stop, spans.num_tokens)
    seq = spans.token_seq[at]
    first = at == spans.query_start[seq]
    return Pieces(
        count=jnp.sum(wanted, dtype=jnp.int32),
        tile=at // tile,
        start=at % tile,
        stop=stop - at // tile * tile,
        first=first.astype(jnp.int32),
        load=jnp.where(first & (spans.first_pos[seq] > 0), base + read_slot[seq], NONE),
        store=jnp.where(stop == spans.query_start[seq + 1], base + spans.write_slot[seq], NONE),
        snapshot=snapshot[jnp.maximum(stop - 1, 0)],
    )


def singles_of(spans: Spans, read_slot: Array, base: int | Array) -> Singles:
    """The sequences of one token, which start from `read_slot` [S]."""
    single = is_single(spans)
    order = jnp.argsort(jnp.where(single, read_slot == spans.write_slot, 2), stable=True).astype(jnp.int32)
    has_snapshot = chunk_has_snapshot(spans) & single[spans.chunk_seq]
    snapshot = jnp.full(spans.num_seqs, NONE).at[jnp.where(has_snapshot, spans.chunk_seq, spans.num_seqs)]
    snapshot = snapshot.set(base + spans.chunk_snapshot, mode="drop")
    return Singles(
        count=jnp.sum(single, dtype=jnp.int32),
        seq=order,
        token=spans.query_start[order],
        load=jnp.where(spans.first_pos[order] > 0, base + read_slot[order], NONE),
        store=base + spans.write_slot[order],
        snapshot=snapshot[order],
    )
