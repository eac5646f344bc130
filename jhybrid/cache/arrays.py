"""Cache arrays: their shapes for a number of slots and pages, and how the bytes of a device are shared out."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jhybrid.cache.router import Cache, Router
from jhybrid.cache.snapshots import SnapshotDtype, bytes_per_snapshot
from jhybrid.errors import OutOfMemoryError
from jhybrid.mesh import placed


def abstract_cache(router: Router, *, slots: int, pages: int, mesh: Mesh | None = None) -> Cache:
    """The cache as shapes, shared out on `mesh`.

    Every layer has one row more than it has slots (pages): the scratch row, its last.

    `slots` counts those of running sequences and, after them, those of snapshots.
    """
    rows = {"slot": slots + 1, "page": pages + 1}
    arrays = {
        name: placed(mesh, jax.ShapeDtypeStruct((layers * rows[part.unit], *part.shape), part.array_dtype), part.axis)
        for name, (part, layers) in router.arrays.items()
    }
    return Cache(router, arrays)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device by kind. Caches include their scratch rows, so that the kinds sum to what is allocated."""

    weights: int
    kv: int
    state: int
    snapshots: int
    sampler: int
    scratch: int  # most that a compiled step needs beside its arguments
    available: int  # what the device offered for all of it together
    num_slots: int  # of running sequences
    num_pages: int
    num_snapshots: int = 0
    num_rows: int = 0  # of the sampler: one for each sequence that may hold anything
    copies: int = 0  # of rows on their way to lower tiers and back
    num_staged: int = 0  # slots in which a step leaves snapshots, where these are stored in another form

    @property
    def snapshot_rows(self) -> int:
        """Slots after those of running sequences: the snapshots themselves, or where they are staged."""
        return self.num_staged or self.num_snapshots

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Kind -> bytes, as the gauges show it."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "state": self.state,
            "snapshots": self.snapshots,
            "sampler": self.sampler,
            "scratch": self.scratch,
            "copies": self.copies,
        }


def plan_memory(
    router: Router,
    *,
    weights: int,
    sampler: int,
    scratch: int,
    available: int,
    max_num_seqs: int,
    pages_per_seq: int,
    num_pages: int | None,
    prefix_caching: bool = False,
    snapshot_slots: int | None = None,
    snapshot_dtype: SnapshotDtype = "auto",
    copies: int = 0,
) -> MemoryPlan:
    """Slots first, then snapshots, pages with the rest: at least one sequence's worth, at most what all can need.

    With prefix caching, pages for as much again, and as many snapshots as `snapshot_slots` says; None: four for each
    running sequence and a few, in at most a quarter of what the slots leave.
    Raises OutOfMemoryError with the bytes asked, the bytes available and what to change.
    """
    num_slots = max_num_seqs if router.has_slots else 0
    state = (num_slots + 1) * router.bytes_per_slot
    left = available - weights - sampler - scratch - state - copies
    if left < 0:
        each = max(1, router.bytes_per_slot + sampler // (max_num_seqs + 1))
        affordable = (available - weights - scratch - copies) // each - 1
        more = "use a smaller model, more devices or more memory, or raise memory_fraction"
        remedy = f"use max_num_seqs of at most {affordable}" if affordable > 0 else more
        raise OutOfMemoryError(
            f"weights ({weights} B), sampler ({sampler} B), scratch ({scratch} B), copies to lower tiers ({copies} B) "
            f"and the state of {num_slots} sequences and of padding ({state} B) need "
            f"{weights + sampler + scratch + copies + state} B, {available} B are available; {remedy}"
        )
    snapshots = staged = size = 0
    if prefix_caching and router.has_slots:
        size = router.bytes_per_slot
        if snapshot_dtype != "auto":
            size, staged = bytes_per_snapshot(router, snapshot_dtype), max_num_seqs + 1
            left -= staged * router.bytes_per_slot
            if left < 0:
                raise OutOfMemoryError(
                    f"snapshot_dtype={snapshot_dtype} stages snapshots in {staged} slots of {router.bytes_per_slot} B, "
                    f"{left + staged * router.bytes_per_slot} B are left; "
                    "use snapshot_dtype=auto, a lower max_num_seqs, or no prefix caching"
                )
        snapshots = _plan_snapshots(snapshot_slots, max_num_seqs, left, size)
        left -= snapshots * size
    pages = 0
    if router.has_pages:
        fits = max(0, left // router.bytes_per_page - 1)
        useful = max_num_seqs * pages_per_seq * (2 if prefix_caching else 1)
        steady = max(_steady(fits), min(fits, pages_per_seq))
        pages = num_pages if num_pages is not None else min(steady, useful)
        if pages > fits:
            raise OutOfMemoryError(
                f"num_pages={pages} needs {(pages + 1) * router.bytes_per_page} B, {left} B are left for pages; "
                f"use num_pages of at most {fits}"
            )
        if pages < pages_per_seq:
            raise OutOfMemoryError(
                f"one sequence of max_model_len needs {pages_per_seq} pages "
                f"({pages_per_seq * router.bytes_per_page} B), "
                + (
                    f"num_pages is {num_pages}; raise it, or lower max_model_len"
                    if num_pages is not None
                    else f"there is room for {pages} ({left} B); "
                    "lower max_model_len or max_num_seqs, or raise memory_fraction"
                )
            )
    return MemoryPlan(
        weights=weights,
        kv=(pages + 1) * router.bytes_per_page,
        state=state,
        snapshots=snapshots * size + staged * router.bytes_per_slot,
        sampler=sampler,
        scratch=scratch,
        available=available,
        num_slots=num_slots,
        num_pages=pages,
        num_snapshots=snapshots,
        num_rows=max_num_seqs,
        num_staged=staged,
        copies=copies,
    )


def _plan_snapshots(asked: int | None, max_num_seqs: int, left: int, size: int) -> int:
    if asked is None:
        count = min(4 * max_num_seqs + 16, _steady(left // 4 // size))
        if count > 0:
            return count
        asked = 1
    if asked * size > left:
        raise OutOfMemoryError(
            f"snapshot_slots={asked} need {asked * size} B, {left} B are left; "
            f"use snapshot_slots of at most {max(0, left // size)}, a lower max_num_seqs, or no prefix caching"
        )
    return asked


def _steady(count: int) -> int:
    """`count` rounded down to four binary digits, so that the next start, with a little more or less memory free,
    wants the same shapes and finds them compiled."""
    unit = 1 << max(0, count.bit_length() - 4)
    return count // unit * unit


def copy_pages(cache: Cache, moves: jax.Array, count: jax.Array) -> Cache:
    """The cache with the first `count` of `moves` [K, 2] done: the page of one row copied to another, in all layers."""
    arrays = dict(cache.arrays)
    for name, (part, layers) in cache.router.arrays.items():
        if part.unit != "page":
            continue
        rows = arrays[name].shape[0] // layers

        def turn(i: jax.Array, array: jax.Array, rows: int = rows) -> jax.Array:
            source, target = moves[i % count] + i // count * rows
            return lax.dynamic_update_index_in_dim(array, lax.dynamic_index_in_dim(array, source), target, 0)

        arrays[name] = lax.fori_loop(0, layers * count, turn, arrays[name])
    return Cache(cache.router, arrays)


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays (or shapes) of a pytree, on one device."""

    def size(a: jax.Array) -> int:
        sharding = getattr(a, "sharding", None)
        shape = a.shape if sharding is None else sharding.shard_shape(a.shape)
        return int(np.prod(shape)) * jnp.dtype(a.dtype).itemsize

    return sum(map(size, jax.tree.leaves(tree)))
