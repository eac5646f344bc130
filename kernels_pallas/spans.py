"""Spans: where each sequence's tokens lie on the packed axis, and which cache rows they read and write.

Every op of this package takes one. The engine's packer builds it on the host (and the tests by hand
through `make_spans`); on the device it is a pytree of int32 arrays.

Dimension letters: T packed tokens, S sequences, C chunks, Q most tokens of a chunk, W page-table width.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas.target import NO_ACCELERATOR, Target

Kind = Literal["ragged", "decode", "dense"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Spans:
    """How packed tokens map to sequences, chunks and cache rows.

    Kinds (static; an op may have its own code for each):
      `ragged`  any number of tokens per sequence, packed back to back; the general case.
      `decode`  T == S == C and token i is the only token of sequence i (padding rows have no token).
      `dense`   T == S * L, every sequence has exactly L tokens starting at position 0, there is no
                cache (state arrays are None); differentiable, used for training.

    Tokens at or past `query_start[S]` are padding. Padding sequences have equal query starts and the
    scratch row as their slots. The scratch row is the last row of a layer's slots (and pages); what it
    holds is never read into a valid output, and it may be NaN.

    A chunk is a run of 1..Q tokens of one sequence; chunks partition the valid tokens in order, the
    first `num_chunks` entries are real. A sequence's state after chunk c is also written to slot
    `chunk_snapshot[c]` unless that is the scratch row.
    """

    query_start: Array  # [S + 1] int32: first token of each sequence; query_start[S] = number of valid tokens
    first_pos: Array  # [S] int32: position of its first token; 0 means zero state and nothing is read
    token_seq: Array  # [T] int32: the sequence of each token; 0 for padding
    read_slot: Array  # [S] int32: slot with the state over positions [0, first_pos)
    write_slot: Array  # [S] int32: slot that receives the state after the last token
    page_table: Array  # [S, W] int32: pages of positions [0, page), [page, 2 page), ...; scratch where unused
    chunk_start: Array  # [C] int32: first token of each chunk
    chunk_len: Array  # [C] int32: 1..Q; 0 for unused entries
    chunk_seq: Array  # [C] int32
    chunk_snapshot: Array  # [C] int32: slot for a snapshot after the chunk; the scratch row for none
    num_chunks: Array  # [] int32
    num_snapshots: Array  # [] int32: how many entries of chunk_snapshot are not scratch
    kind: Kind = field(default="ragged", metadata={"static": True})
    chunk_size: int = field(default=64, metadata={"static": True})  # Q
    target: Target = field(default=NO_ACCELERATOR, metadata={"static": True})

    @property
    def num_seqs(self) -> int:
        """S, padding included."""
        return self.first_pos.shape[0]

    @property
    def num_tokens(self) -> Array:
        """Valid tokens, a scalar on the device."""
        return self.query_start[-1]

    def token_valid(self) -> Array:
        """[T] bool: False for padding."""
        return jnp.arange(self.token_seq.shape[0], dtype=jnp.int32) < self.num_tokens

    def positions(self) -> Array:
        """[T] int32: position of each token in its sequence; 0 for padding."""
        tokens = jnp.arange(self.token_seq.shape[0], dtype=jnp.int32)
        offset = tokens - self.query_start[self.token_seq]
        return jnp.where(self.token_valid(), self.first_pos[self.token_seq] + offset, 0)


def make_spans(
    query_lens: list[int],
    first_pos: list[int],
    read_slot: list[int],
    write_slot: list[int],
    page_table: list[list[int]] | None = None,
    *,
    num_tokens: int,
    num_seqs: int,
    scratch_slot: int,
    scratch_page: int = 0,
    table_width: int = 1,
    kind: Kind = "ragged",
    chunk_size: int = 64,
    snapshots: dict[tuple[int, int], int] | None = None,
) -> Spans:
    """Spans from plain lists, padded to `num_tokens` and `num_seqs`.

    `snapshots` maps (sequence, number of its tokens in this step) to the slot that is to hold the state
    at that boundary; chunks are cut there.
    """
    snapshots = snapshots or {}
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    pad = num_seqs - len(query_lens)
    assert pad >= 0 and starts[-1] <= num_tokens, (query_lens, num_tokens, num_seqs)
    chunks: list[tuple[int, int, int, int]] = []
    for seq, length in enumerate(query_lens):
        cuts = sorted({c for s, c in snapshots if s == seq and 0 < c <= length} | {length})
        done = 0
        for cut in cuts:
            while done < cut:
                size = min(chunk_size, cut - done)
                slot = snapshots.get((seq, done + size), scratch_slot)
                chunks.append((int(starts[seq]) + done, size, seq, slot))
                done += size
    capacity = num_seqs if kind == "decode" else num_tokens // chunk_size + num_seqs + len(snapshots)
    assert len(chunks) <= capacity
    chunk_rows = chunks + [(0, 0, 0, scratch_slot)] * (capacity - len(chunks))
    columns = [np.array(c, np.int32) for c in zip(*chunk_rows, strict=True)]
    table = np.full((num_seqs, table_width), scratch_page, np.int32)
    for seq, pages in enumerate(page_table or []):
        table[seq, : len(pages)] = pages
    token_seq = np.zeros(num_tokens, np.int32)
    token_seq[: starts[-1]] = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
    ints = lambda values, fill: jnp.asarray(np.array(list(values) + [fill] * pad, np.int32))  # noqa: E731
    return Spans(
        query_start=jnp.asarray(np.concatenate([starts, np.full(pad, starts[-1], np.int32)])),
        first_pos=ints(first_pos, 0),
        token_seq=jnp.asarray(token_seq),
        read_slot=ints(read_slot, scratch_slot),
        write_slot=ints(write_slot, scratch_slot),
        page_table=jnp.asarray(table),
        chunk_start=jnp.asarray(columns[0]),
        chunk_len=jnp.asarray(columns[1]),
        chunk_seq=jnp.asarray(columns[2]),
        chunk_snapshot=jnp.asarray(columns[3]),
        num_chunks=jnp.asarray(len(chunks), jnp.int32),
        num_snapshots=jnp.asarray(sum(s != scratch_slot for *_, s in chunks), jnp.int32),
        kind=kind,
        chunk_size=chunk_size,
    )


def dense_spans(num_seqs: int, length: int) -> Spans:
    """Spans of `num_seqs` whole sequences of `length` tokens from position 0, with no cache."""
    base = make_spans(
        [length] * num_seqs,
        [0] * num_seqs,
        [0] * num_seqs,
        [0] * num_seqs,
        num_tokens=num_seqs * length,
        num_seqs=num_seqs,
        scratch_slot=0,
        kind="dense",
    )
    return base
