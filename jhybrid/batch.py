"""Batch: what one step gets from the host, packed into one int32 and one float32 vector of a bucket's fixed layout.

Two vectors, whatever a step needs to know, because every array argument costs dispatch time. `Packer.pack` writes
them on the host; `unpack` slices them apart inside the compiled step.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jhybrid.errors import MissingBucketError
from jhybrid.sampling import MAX_BANNED, SamplingBatch
from jhybrid.scheduler import Item
from jhybrid.sequence import Sequence
from kernels_pallas.spans import Spans
from kernels_pallas.target import NO_ACCELERATOR, Target

FROM_DEVICE = -1  # a token id that the host does not know yet: the last one sampled for that row
NO_TARGET = -1

Ints = np.ndarray
Floats = np.ndarray


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled batch shape. `decode`: every sequence has one token."""

    kind: Literal["decode", "ragged"]
    tokens: int  # T
    seqs: int  # S

    def __str__(self) -> str:
        return f"{self.kind}[T={self.tokens},S={self.seqs}]"


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Decode shapes by powers of two; ragged ones by powers of four from 16 tokens, the budget always among them."""
    most = min(max_num_seqs, max_num_batched_tokens)
    decode = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    ragged = [16 * 4**i for i in range(16) if 16 * 4**i < max_num_batched_tokens] + [max_num_batched_tokens]
    return [Bucket("decode", n, n) for n in decode] + [Bucket("ragged", t, min(t, max_num_seqs)) for t in ragged]


@dataclass(frozen=True)
class Geometry:
    """What a batch layout depends on besides the bucket."""

    page_size: int
    table_width: int  # W; 0 for a model without attention
    has_slots: bool
    scratch_slot: int
    scratch_page: int
    scratch_row: int
    chunk_size: int  # Q
    first_snapshot: int = 0  # row of snapshot 0 among the slots
    has_snapshots: bool = False
    has_staging: bool = False  # those slots are where a step leaves snapshots that are then stored elsewhere
    target: Target = NO_ACCELERATOR  # where the step's ops run


@dataclass(frozen=True)
class Layout:
    """Where each named field lies in the two vectors of a bucket."""

    bucket: Bucket
    geometry: Geometry

    @property
    def chunks(self) -> int:
        """C: entries of the chunk table. A snapshot ends a chunk early, at most once a page and at a sequence's end."""
        bucket, geometry = self.bucket, self.geometry
        if bucket.kind == "decode":
            return bucket.seqs
        cuts = bucket.tokens // geometry.page_size + bucket.seqs if geometry.has_snapshots else 0
        return bucket.tokens // geometry.chunk_size + bucket.seqs + cuts

    @cached_property
    def ints(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Field -> (offset, shape). No slots without recurrent layers, no page table without attention."""
        tokens, seqs, chunks = self.bucket.tokens, self.bucket.seqs, self.chunks
        shapes: dict[str, tuple[int, ...]] = {
            "num_chunks": (),
            "num_snapshots": (),
            "token_ids": (tokens,),
            "targets": (tokens,),
            "query_start": (seqs + 1,),
            "first_pos": (seqs,),
            "row": (seqs,),
            "sample": (seqs,),
            "step": (seqs,),
            "top_k": (seqs,),
            "seed": (seqs,),
            "num_logprobs": (seqs,),
            "adjust": (seqs,),
            "masked": (seqs,),
            "banned": (seqs, MAX_BANNED),
        }
        if self.geometry.has_slots:
            shapes |= {"read_slot": (seqs,), "write_slot": (seqs,)}
        if self.geometry.table_width:
            shapes["page_table"] = (seqs, self.geometry.table_width)
        if self.bucket.kind == "ragged":
            shapes |= {"token_seq": (tokens,), "chunk_start": (chunks,), "chunk_len": (chunks,), "chunk_seq": (chunks,)}
        if self.geometry.has_slots:
            shapes["chunk_snapshot"] = (chunks,)
        return _offsets(shapes)

    @cached_property
    def floats(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return _offsets(dict.fromkeys(FLOAT_FIELDS, (self.bucket.seqs,)))

    @property
    def num_ints(self) -> int:
        return _length(self.ints)

    @property
    def num_floats(self) -> int:
        return _length(self.floats)


FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _offsets(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    fields, at = {}, 0
    for name, shape in shapes.items():
        fields[name] = (at, shape)
        at += math.prod(shape)
    return fields


def _length(fields: dict[str, tuple[int, tuple[int, ...]]]) -> int:
    offset, shape = list(fields.values())[-1]
    return offset + math.prod(shape)


class Batch(NamedTuple):
    """A packed step, still on the host."""

    bucket: Bucket
    ints: Ints
    floats: Floats
    items: list[Item]
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    loads: list[tuple[int, int]]  # stored snapshot -> slot, before the step; none where snapshots are slots themselves
    saves: list[tuple[int, int]]  # slot -> stored snapshot, after the step
    mask: np.ndarray | None  # [S, words] uint32: tokens allowed to `masked` sequences; None where there are none


class DeviceBatch(NamedTuple):
    """A step's inputs inside the compiled function."""

    token_ids: Array  # [T] int32, FROM_DEVICE already replaced
    targets: Array  # [T] int32: the token whose log-probability is wanted at each position, or NO_TARGET
    spans: Spans
    sampling: SamplingBatch


def unpack(layout: Layout, ints: Array, floats: Array, mask: Array, last_token: Array) -> DeviceBatch:
    """The named fields of a batch, inside jit. `last_token` [rows] is the sampler's memory of each row."""
    geometry, bucket = layout.geometry, layout.bucket
    get = {name: ints[at : at + math.prod(shape)].reshape(shape) for name, (at, shape) in layout.ints.items()}
    real = {name: floats[at : at + math.prod(shape)].reshape(shape) for name, (at, shape) in layout.floats.items()}
    if bucket.kind == "decode":
        every = jnp.arange(bucket.seqs, dtype=jnp.int32)
        valid = every < get["query_start"][-1]
        get |= {
            "token_seq": jnp.where(valid, every, 0),
            "chunk_start": every,
            "chunk_len": valid.astype(jnp.int32),
            "chunk_seq": every,
        }
    none = jnp.zeros((bucket.seqs,), jnp.int32)
    spans = Spans(
        query_start=get["query_start"],
        first_pos=get["first_pos"],
        token_seq=get["token_seq"],
        read_slot=get.get("read_slot", none),
        write_slot=get.get("write_slot", none),
        page_table=get.get("page_table", none[:, None]),
        chunk_start=get["chunk_start"],
        chunk_len=get["chunk_len"],
        chunk_seq=get["chunk_seq"],
        chunk_snapshot=get.get("chunk_snapshot", jnp.zeros((layout.chunks,), jnp.int32)),
        num_chunks=get["num_chunks"],
        num_snapshots=get["num_snapshots"],
        kind=bucket.kind,
        chunk_size=geometry.chunk_size,
        target=geometry.target,
    )
    sampling = SamplingBatch(
        row=get["row"],
        sample=get["sample"] > 0,
        step=get["step"],
        top_k=get["top_k"],
        seed=get["seed"].astype(jnp.uint32),
        num_logprobs=get["num_logprobs"],
        adjust=get["adjust"] > 0,
        masked=get["masked"] > 0,
        mask=mask,
        banned=get["banned"],
        **real,
    )
    known = get["token_ids"]
    token_ids = jnp.where(known == FROM_DEVICE, last_token[get["row"][get["token_seq"]]], known)
    return DeviceBatch(token_ids, get["targets"], spans, sampling)


class Packer:
    """Turns plans into batches. Keeps what never changes about a running sequence in tables by row."""

    def __init__(self, buckets: Seq[Bucket], geometry: Geometry):
        self.layouts = {bucket: Layout(bucket, geometry) for bucket in buckets}
        self._views = {
            bucket: [(name, slice(at, at + math.prod(shape)), shape) for name, (at, shape) in layout.ints.items()]
            for bucket, layout in self.layouts.items()
        }
        self._ordered = {kind: sorted(b for b in buckets if b.kind == kind) for kind in ("decode", "ragged")}
        self._geometry = geometry
        rows = geometry.scratch_row + 1
        self._floats = np.zeros((len(FLOAT_FIELDS), rows), np.float32)
        self._row_ints = {name: np.zeros(rows, np.int32) for name in ("top_k", "seed", "num_logprobs", "adjust")}
        self._banned = np.full((rows, MAX_BANNED), -1, np.int32)
        self._tables = np.full((rows, max(1, geometry.table_width)), geometry.scratch_page, np.int32)
        self._pages = [0] * rows  # how many pages of a row's table are filled in
        self._min_tokens = np.zeros(rows, np.int32)
        self._row_ints["num_logprobs"][:] = -1
        self._floats[FLOAT_FIELDS.index("top_p")] = 1.0
        self._floats[FLOAT_FIELDS.index("repetition_penalty")] = 1.0

    def admit(self, sequence: Sequence) -> None:
        """Fill in the tables of a sequence that has just been given a row."""
        holding, sampling = sequence.holding, sequence.request.sampling
        assert holding is not None
        row = holding.row
        self._floats[:, row] = [getattr(sampling, name) for name in FLOAT_FIELDS]
        self._row_ints["top_k"][row] = max(0, min(sampling.top_k, 2**31 - 1))
        self._row_ints["seed"][row] = np.uint32(sequence.seed & 0xFFFFFFFF).view(np.int32)
        self._row_ints["num_logprobs"][row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._row_ints["adjust"][row] = needs_row(sequence)
        self._banned[row] = -1
        self._min_tokens[row] = sampling.min_tokens
        if sampling.min_tokens:
            ids = sorted(stop_ids(sequence))
            self._banned[row, : len(ids)] = ids
        self._tables[row] = self._geometry.scratch_page
        self._pages[row] = 0

    def bucket_for(self, num_tokens: int, num_seqs: int) -> Bucket:
        """The smallest bucket that holds a step. MissingBucketError if none does."""
        kind = "decode" if num_tokens == num_seqs else "ragged"
        for bucket in self._ordered[kind]:
            if bucket.tokens >= num_tokens and bucket.seqs >= num_seqs:
                return bucket
        raise MissingBucketError(f"no {kind} bucket holds {num_tokens} tokens of {num_seqs} sequences")

    def pack(self, items: list[Item]) -> Batch:
        """One step's batch. Takes the sequences' holdings as they are now."""
        lengths = np.array([item.num_tokens for item in items], np.int32)
        bucket = self.bucket_for(int(lengths.sum()), len(items))
        ints, field = self._fields(bucket)
        rows = np.full(bucket.seqs, self._geometry.scratch_row, np.int32)
        rows[: len(items)] = [item.holding.row for item in items]
        self._pack_tokens(field, items, lengths)
        scores = self._pack_targets(field, items)
        self._pack_rows(field, items, rows)
        if self._geometry.has_slots:
            field["chunk_snapshot"][:] = self._geometry.scratch_slot
        shares = self._geometry.has_snapshots
        loads = self._pack_sources(field, items) if shares else []
        cuts = shares and any(item.snapshots for item in items)
        last_chunks = np.arange(len(items))
        if bucket.kind == "ragged":
            last_chunks = self._pack_chunks(field, items, lengths, cuts)
        else:
            field["num_chunks"][...] = len(items)
        saves = self._pack_snapshots(field, items, last_chunks) if cuts else []
        floats = self._floats[:, rows].reshape(-1)
        wants_logprobs = bool((field["num_logprobs"] >= 0).any())
        mask = self._pack_masks(field, items, bucket)
        return Batch(bucket, ints, floats, items, wants_logprobs, scores, loads, saves, mask)

    def _fields(self, bucket: Bucket) -> tuple[Ints, dict[str, np.ndarray]]:
        """A fresh int vector of a bucket and views of its fields."""
        ints = np.zeros(self.layouts[bucket].num_ints, np.int32)
        return ints, {name: ints[span].reshape(shape) for name, span, shape in self._views[bucket]}

    def _pack_tokens(self, field: dict[str, np.ndarray], items: list[Item], lengths: np.ndarray) -> None:
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        count = len(items)
        field["query_start"][: count + 1] = starts
        field["query_start"][count + 1 :] = starts[-1]
        if "token_seq" in field:
            field["token_seq"][: starts[-1]] = np.repeat(np.arange(count, dtype=np.int32), lengths)
        ids: list[int] = []
        for item in items:
            known = item.sequence.token_ids[item.first_pos : item.first_pos + item.num_tokens]
            ids += known
            ids += [FROM_DEVICE] * (item.num_tokens - len(known))
        field["token_ids"][: len(ids)] = ids

    def _pack_targets(self, field: dict[str, np.ndarray], items: list[Item]) -> bool:
        """The prompt tokens whose log-probabilities are wanted; whether there are any."""
        field["targets"][:] = NO_TARGET
        scores = False
        for i, item in enumerate(items):
            sequence = item.sequence
            if sequence.prompt_logprobs is None:
                continue
            first = max(item.first_pos + 1, sequence.request.sampling.prompt_logprobs_from)
            wanted = sequence.token_ids[first : min(item.first_pos + item.num_tokens + 1, sequence.prompt_len)]
            if wanted:
                start = field["query_start"][i] + first - 1 - item.first_pos
                field["targets"][start : start + len(wanted)] = wanted
                scores = True
        return scores

    def _pack_rows(self, field: dict[str, np.ndarray], items: list[Item], rows: np.ndarray) -> None:
        count, geometry = len(items), self._geometry
        field["row"][:] = rows
        field["first_pos"][:count] = [item.first_pos for item in items]
        field["sample"][:count] = [item.samples for item in items]
        field["step"][:count] = [item.step for item in items]
        for name, table in self._row_ints.items():
            field[name][:] = table[rows]
        field["banned"][:] = -1
        below = np.flatnonzero(field["step"] < self._min_tokens[rows])
        field["banned"][below] = self._banned[rows[below]]
        if geometry.has_slots:
            slots = [item.holding.slot for item in items]
            reads = [
                slot if item.read_slot is None else item.read_slot for slot, item in zip(slots, items, strict=True)
            ]
            for name, used in (("read_slot", reads), ("write_slot", slots)):
                field[name][:] = geometry.scratch_slot
                field[name][:count] = used
        if geometry.table_width:
            for item in items:
                pages, row = item.holding.pages, item.holding.row
                filled = self._pages[row]
                if len(pages) > filled:
                    self._tables[row, filled : len(pages)] = pages[filled:]
                    self._pages[row] = len(pages)
            field["page_table"][:] = self._tables[rows]

    def _pack_masks(self, field: dict[str, np.ndarray], items: list[Item], bucket: Bucket) -> np.ndarray | None:
        """The masks of the sequences that have a grammar and sample in this step."""
        bound = [(i, item.sequence.constraint) for i, item in enumerate(items) if item.samples]
        masks = {i: constraint.mask for i, constraint in bound if constraint is not None}
        if not masks:
            return None
        packed = np.zeros((bucket.seqs, len(next(iter(masks.values())))), np.uint32)
        for i, mask in masks.items():
            packed[i] = mask
            field["masked"][i] = 1
        return packed

    def _pack_sources(self, field: dict[str, np.ndarray], items: list[Item]) -> list[tuple[int, int]]:
        """Let sequences start from snapshots: from where these are, or, if stored elsewhere, after loading them."""
        loads = []
        for i, item in enumerate(items):
            if item.source is None:
                continue
            if self._geometry.has_staging:
                assert item.holding.slot is not None
                loads.append((item.source, item.holding.slot))
            else:
                field["read_slot"][i] = self._geometry.first_snapshot + item.source
        return loads

    def _pack_chunks(
        self, field: dict[str, np.ndarray], items: list[Item], lengths: np.ndarray, cuts: bool
    ) -> np.ndarray:
        """Cut each sequence's tokens into runs that end where it leaves snapshots, and these into chunks of <= Q.

        `cuts` says whether any does. Returns the last chunk of every run.
        """
        size = self._geometry.chunk_size
        owners, runs = np.arange(len(items), dtype=np.int32), lengths
        if cuts:
            borders = [sorted({item.first_pos, *item.snapshots, item.first_pos + item.num_tokens}) for item in items]
            owners = np.repeat(owners, [len(ends) - 1 for ends in borders])
            runs = np.concatenate([np.diff(ends) for ends in borders])
        per_run = -(-runs // size)
        total = int(per_run.sum())
        run = np.repeat(np.arange(len(runs), dtype=np.int32), per_run)
        first = np.cumsum(per_run) - per_run
        offset = (np.arange(total, dtype=np.int32) - first[run]) * size
        field["num_chunks"][...] = total
        field["chunk_seq"][:total] = owners[run]
        field["chunk_start"][:total] = (np.cumsum(runs) - runs)[run] + offset
        field["chunk_len"][:total] = np.minimum(size, runs[run] - offset)
        return np.cumsum(per_run) - 1

    def _pack_snapshots(
        self, field: dict[str, np.ndarray], items: list[Item], last_chunks: np.ndarray
    ) -> list[tuple[int, int]]:
        """Name the slots of the snapshots. `last_chunks` are those of each run of an item, in the items' order."""
        first, saves, run = self._geometry.first_snapshot, [], 0
        for item in items:
            for boundary in sorted({*item.snapshots, item.first_pos + item.num_tokens}):
                if boundary in item.snapshots:
                    row = item.snapshots[boundary]
                    slot = first + (len(saves) if self._geometry.has_staging else row)
                    field["chunk_snapshot"][last_chunks[run]] = slot
                    saves.append((slot, row))
                run += 1
        field["num_snapshots"][...] = len(saves)
        return saves if self._geometry.has_staging else []


def stop_ids(sequence: Sequence) -> frozenset[int]:
    """Token ids that end a sequence."""
    return sequence.eos_token_ids | frozenset(sequence.request.sampling.stop_token_ids)


def needs_row(sequence: Sequence) -> bool:
    """Whether the sampler must know the sequence's tokens or biases."""
    s = sequence.request.sampling
    return bool(s.logit_bias or s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0)
