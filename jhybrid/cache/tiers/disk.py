"""DiskTier: cached prefixes in a key-value store that outlives the process: a directory, or a bucket in the cloud.

Below a folder named by the model's fingerprint, keys and values lie in blocks of BLOCK pages, a prefix's last block is
shorter, and a state lies by itself:

    data/<digest of its last page>.kv<pages>.<hash of the data>.<bytes>
    data/<digest>.state.<hash>.<bytes>
    prefixes/<digest>           the manifest: which of these make up the prefix, their hashes, and the pages' digests

A prefix is published by its manifest, which is written last, and only if there is none yet; each of these writes is
atomic in the store. What is read is compared with its hash, and the manifest with its own. Two engines that compute the
same prefix in other steps get other last bits, so names tell the hash, and neither writes over what the other's
manifest names. So two engines may share a folder, and one may be killed at any moment: what is not whole is not there,
and data that no manifest names are removed when two looks in a row have found them. The budget is each model's own; an
engine counts what other engines wrote when it looks, every LOOK seconds.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jhybrid.cache.tiers.chain import Digest
from jhybrid.cache.tiers.counts import Breaker, TierCounts
from jhybrid.cache.tiers.form import Blob
from jhybrid.cache.tiers.host import Kind, Name
from jhybrid.cache.tiers.index import Index
from jhybrid.cache.tiers.manifest import MANIFEST, SHORT, Corrupt, Manifest, Piece, stem_of
from jhybrid.cache.tiers.price import BYTES, Rate
from jhybrid.cache.tiers.store import Gone, Store

log = logging.getLogger("jhybrid")

BLOCK = 16  # pages of one value
LOOK = 30.0  # seconds between two looks at what other engines do
TURN = 3.0  # seconds between two turns of the thread while nothing is to be written
QUEUE = 64  # prefixes that wait to be written


@dataclass(frozen=True)
class Job:
    """A prefix to be written: the digests of its pages."""

    digests: tuple[Digest, ...]
    age: int  # the index's when it was queued; nothing that is older than the last `forget` is written


class DiskTier:
    """`blobs_of` gives entries that are to be written, from the host; None for those that are gone."""

    def __init__(
        self,
        url: str,
        budget: int,
        fingerprint: bytes,
        blobs_of: Callable[[Sequence[Name]], list[Blob | None]],
        *,
        has_pages: bool,
        has_states: bool,
    ):
        """Raises ConfigError if nothing can be written there. A store that may only be out of order is a tier out."""
        self.counts, self.loads = TierCounts(), Rate(BYTES)
        self.reads, self.writes = Breaker("reading from the disk tier"), Breaker("writing to the disk tier")
        self._fingerprint = fingerprint.hex()
        self._blobs_of = blobs_of
        self._has_pages, self._has_states = has_pages, has_states
        self.store = Store(url, self._fingerprint[:32])
        self.index = Index(budget, has_states=has_states)
        self._jobs: queue.Queue[Job | None] = queue.Queue(QUEUE)
        self._lock = threading.Lock()  # of `_jobs` and `_idle` together
        self._deleting = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._look_at, self._is_untidy = 0.0, False
        try:
            self.store.probe()
        except (OSError, ValueError) as error:
            self.counts.add(failures=1)
            self.writes.trip(error)
        else:
            self._tidy()
        self._thread = threading.Thread(target=self._run, name="jhybrid-disk-tier", daemon=True)
        self._thread.start()

    # looking up

    def deepest(self, digests: Sequence[Digest]) -> int:
        """How many of these pages make up the longest prefix that is there; 0 if none is."""
        return self.index.deepest(digests) if self.reads.is_in else 0

    def read(
        self, digests: Sequence[Digest], first: int, *, has_pages: bool, has_state: bool, patience: float
    ) -> tuple[list[Blob], Blob | None]:
        """The pages of a whole prefix from the `first` on, and its state, if these are wanted.

        Raises Gone, Corrupt, TimeoutError, or what the store raises. What is not as it was written is removed.
        """
        count = len(digests)
        manifest = self.index.find(digests[-1], touch=True)
        if manifest is None:
            raise Gone(digests[-1].hex())
        wanted = [
            p for p in manifest.pieces if (has_state if p.is_state else has_pages and p.start < count and p.end > first)
        ]
        started = time.perf_counter()
        pages: list[Blob] = []
        state = None
        values = self.store.read_all([piece.key for piece in wanted], patience)
        for piece in wanted:
            try:
                value = next(values)
                piece.check(value)
            except (Gone, Corrupt):
                self.index.discard(piece)
                raise
            blob = np.frombuffer(value, np.uint8)
            if piece.is_state:
                state = blob
            else:
                rows = blob.reshape(piece.end - piece.start, -1)
                pages += [row.copy() for row in rows[max(0, first - piece.start) : count - piece.start]]
        if (has_state and state is None) or (has_pages and len(pages) != count - first):
            raise Corrupt(f"{manifest.key} names {len(pages)} pages of {count - first}")
        size = sum(piece.size for piece in wanted)
        self.counts.add(read_bytes=size, read_seconds=time.perf_counter() - started)
        return pages, state

    # writing

    def write(self, digests: Sequence[Digest]) -> None:
        """Queue a prefix whose entries the host has. It is dropped, and counted, if the queue is full."""
        job = Job(tuple(digests), self.index.age)
        if self.index.find(digests[-1]) is not None:
            return
        if not self.writes.is_in:
            self.counts.add(dropped=1)
            return
        try:
            with self._lock:
                self._jobs.put_nowait(job)
                self._idle.clear()
        except queue.Full:
            self.counts.add(dropped=1)

    def drain(self, patience: float) -> bool:
        """Wait until everything queued is written or dropped. False if it took too long."""
        return self._idle.wait(patience)

    def close(self, patience: float) -> None:
        """Write what is queued, for at most so many seconds, and stop."""
        self.drain(patience)
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            self._tidy()
            try:
                job = self._jobs.get(timeout=TURN)
            except queue.Empty:
                continue
            if job is None:
                self._tidy()
                return
            if self.writes.is_in:
                self._do(job)
            else:
                self.counts.add(dropped=1)
            with self._lock:
                if self._jobs.empty():
                    self._idle.set()

    def _do(self, job: Job) -> None:
        """Write a prefix. What goes wrong speaks against the tier, and fails nothing else."""
        if self.index.find(job.digests[-1]) is not None:
            return
        try:
            if self._write(job):
                self.writes.succeeded()
            else:
                self.counts.add(dropped=1)
        except Exception as error:  # noqa: BLE001 - whatever the store raises, the engine goes on without the tier
            self.counts.add(failures=1)
            self.writes.failed(error)

    def _tidy(self) -> None:
        """Delete what was given up and, now and then, look.

        A store that cannot be tidied is left alone until the next look is due. That is counted and said, but is no
        ground to take the tier out: nobody was waiting for it, and a write that fails will tell.
        """
        now = time.monotonic()
        is_due = now >= self._look_at
        try:
            if is_due:
                self._look_at = now + LOOK
                self.look()
            elif not self._is_untidy:
                self.delete_doomed()
            self._is_untidy = False
        except Exception as error:  # noqa: BLE001 - as in `_do`
            self.counts.add(failures=1)
            if not self._is_untidy:
                log.warning("the disk tier cannot be tidied up: %r", error)
            self._is_untidy = True

    def _write(self, job: Job) -> bool:
        """Data first, then the manifest. False if the host has lost a part of it, or there is no room."""
        started = time.perf_counter()
        pieces: list[Piece] = []
        try:
            written = self._write_pieces(job, pieces)
            if written is None or job.age != self.index.age:
                return False
            pages = tuple(digest[:SHORT].hex() for digest in job.digests)
            manifest = Manifest(job.digests[-1], pages, tuple(pieces), time.time())
            if not self._publish(manifest):
                return False
            if job.age != self.index.age:
                self.index.forget(job.digests[-1])
        finally:
            self.index.release(pieces)
        self.counts.add(writes=1, written_bytes=written, write_seconds=time.perf_counter() - started)
        return True

    def _write_pieces(self, job: Job, pieces: list[Piece]) -> int | None:
        """Add a prefix's pieces to a list, held, and write the new ones. Their bytes; None if one cannot be had."""
        count = len(job.digests)
        spans = [(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)] if self._has_pages else []
        if self._has_states:
            spans.append((count, count))
        written = 0
        for start, end in spans:
            stem = stem_of(job.digests[end - 1], end - start)
            piece = self.index.hold_same(stem)
            if piece is not None:
                pieces.append(piece)
                continue
            kind: Kind = "state" if start == end else "kv"
            blobs = self._blobs_of([Name(digest, kind) for digest in job.digests[min(start, end - 1) : end]])
            value = b"".join(blob.data for blob in blobs if blob is not None)
            if any(blob is None for blob in blobs) or not self._make_room(len(value)):
                return None
            piece = Piece.of(stem, start, end, value)
            self.index.hold(piece)
            pieces.append(piece)
            self.store.write(piece.key, value)
            written += len(value)
        return written

    def _publish(self, manifest: Manifest) -> bool:
        """Write a manifest. If another engine was first, its prefix is taken in instead. False if there is neither."""
        value = manifest.encode(self._fingerprint)
        if not self._make_room(len(value)):
            return False
        if self.store.write_new(manifest.key, value):
            self.index.add(manifest, len(value))
            return True
        for found, size in self._read_manifests({manifest.digest: manifest.key}):
            self.index.add(found, size)
        return self.index.find(manifest.digest) is not None

    def _make_room(self, size: int) -> bool:
        """Give up what is worth least until so many bytes more fit. False if they never will."""
        fits, evicted = self.index.make_room(size)
        self.counts.add(evicted=evicted)
        self.delete_doomed()
        return fits

    # keeping in step with the store

    def delete_doomed(self) -> None:
        """Delete what was given up. When it returns, all of it is gone, whichever thread began with it."""
        with self._deleting:
            doomed = self.index.take_doomed()
            for at, key in enumerate(doomed):
                try:
                    self.store.delete(key)
                except Exception:
                    self.index.put_back(doomed[at:])
                    raise

    def look(self) -> None:
        """Compare the index with the store: take in what others wrote, and drop what others gave up."""
        known, age = self.index.known()
        self.delete_doomed()  # lest what was given up be found there and taken in again
        keys = self.store.keys()
        manifests = {bytes.fromhex(key.removeprefix("prefixes/")): key for key in keys if MANIFEST.fullmatch(key)}
        found = self._read_manifests({digest: key for digest, key in manifests.items() if digest not in known})
        self.index.take_in(keys, found, known - set(manifests), age)
        self._make_room(0)
        self.store.remove_stale_locks()

    def _read_manifests(self, keys: dict[Digest, str]) -> list[tuple[Manifest, int]]:
        """Manifests and their bytes. Those that are not what was written are given up."""
        found = []
        for (digest, key), raw in zip(keys.items(), self.store.read_each(list(keys.values())), strict=True):
            if raw is None:
                continue
            try:
                found.append((Manifest.decode(raw, digest, self._fingerprint), len(raw)))
            except Corrupt as error:
                log.warning("disk tier: %s; it is removed", error)
                self.index.doom(key)
        return found

    # forgetting

    def forget(self, digest: Digest) -> None:
        """Drop every prefix that this page is a part of, and whatever is about to be written."""
        self.index.forget(digest)

    def clear(self) -> None:
        """Drop everything of this model, also what other engines wrote and this one knows of."""
        self.index.clear()

    def status(self) -> dict:
        """Entries are prefixes."""
        entries, size = self.index.size()
        reasons = [breaker.reason for breaker in (self.reads, self.writes) if not breaker.is_in]
        return {
            "entries": entries,
            "bytes": size,
            "capacity": self.index.budget,
            "queued": self._jobs.qsize(),
            "out": "; ".join(reason for reason in reasons if reason) or None,
        } | self.counts.status()
