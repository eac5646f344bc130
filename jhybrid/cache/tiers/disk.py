"""DiskTier: cached prefixes in a key-value store that outlives the process: a directory, or a bucket in the cloud.

The store is TensorStore's (`file:///...`, `gs://...`, `s3://...`). Below a folder named by the model's fingerprint,
keys and values lie in blocks of BLOCK pages, a prefix's last block is shorter, and a state lies by itself:

    data/<digest of its last page>.kv<pages>.<hash of the data>.<bytes>
    data/<digest>.state.<hash>.<bytes>
    prefixes/<digest>           the manifest: which of these make up the prefix, their hashes, and the pages' digests

A prefix is published by its manifest, which is written last; each of these writes is atomic in the store. What is read
is compared with its hash, and the manifest with its own. Two engines that compute the same prefix in other steps get
other last bits, so names tell the hash, and neither writes over what the other's manifest names. So two engines may
share a folder, and one may be killed at any moment: what is not whole is not there, and data that no manifest names
are removed when two looks in a row have found them. The budget is each model's own; an engine counts what other engines
wrote when it looks, every LOOK seconds.
"""

import contextlib
import hashlib
import json
import logging
import queue
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorstore as ts

from jhybrid.cache.tiers.chain import Digest
from jhybrid.cache.tiers.counts import Breaker, TierCounts
from jhybrid.cache.tiers.form import Blob
from jhybrid.cache.tiers.host import Name
from jhybrid.errors import ConfigError

log = logging.getLogger("jhybrid")

FORMAT = 1
BLOCK = 16  # pages of one value
LOOK = 30.0  # seconds between two looks at what other engines do
SIDE_BY_SIDE = 256  # manifests that are read at a time
PATIENCE = 20.0  # seconds that one operation of the store may take
QUEUE = 64  # prefixes that wait to be written
SHORT = 16  # bytes of a page's digest in a manifest, and of a hash in a name


MANIFEST = re.compile(r"prefixes/[0-9a-f]{64}")  # other names are not ours


class Corrupt(Exception):
    """What was read is not what was written."""


class Gone(Exception):
    """What the index names is no longer there: another engine has given it up."""


@dataclass(frozen=True)
class Piece:
    """One value of the store: the pages [start, end) of a prefix, or the state at its end (start == end)."""

    key: str
    start: int
    end: int
    bytes: int
    sha256: str

    @property
    def is_state(self) -> bool:
        return self.start == self.end

    @property
    def stem(self) -> str:
        """The key without what depends on the data: which part of which prefix it is."""
        return self.key.rsplit(".", 2)[0]


@dataclass(frozen=True)
class Manifest:
    """What a prefix consists of. `written` is when, in seconds since 1970."""

    digest: Digest
    pages: tuple[str, ...]  # the first SHORT bytes of each page's digest
    pieces: tuple[Piece, ...]
    written: float

    @property
    def key(self) -> str:
        return f"prefixes/{self.digest.hex()}"

    def encode(self, fingerprint: str) -> bytes:
        """A line with the hash of the rest, which is JSON."""
        body = json.dumps(
            {
                "format": FORMAT,
                "fingerprint": fingerprint,
                "digest": self.digest.hex(),
                "pages": self.pages,
                "pieces": [[p.key, p.start, p.end, p.bytes, p.sha256] for p in self.pieces],
                "written": self.written,
            }
        ).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def decode(cls, raw: bytes, digest: Digest, fingerprint: str) -> "Manifest":
        """Raises Corrupt."""
        head, _, body = raw.partition(b"\n")
        if head != hashlib.sha256(body).hexdigest().encode():
            raise Corrupt(f"the manifest of {digest.hex()} is not what was written")
        fields = json.loads(body)
        told = (fields["format"], fields["fingerprint"], fields["digest"])
        if told != (FORMAT, fingerprint, digest.hex()):
            raise Corrupt(f"the manifest of {digest.hex()} is one of {told}")
        pieces = tuple(Piece(*piece) for piece in fields["pieces"])
        return cls(digest, tuple(fields["pages"]), pieces, float(fields["written"]))


@dataclass(frozen=True)
class Job:
    """A prefix to be written: the digests of its pages."""

    digests: tuple[Digest, ...]
    age: int  # the tier's when it was queued; nothing that is older than the last `forget` is written


class Store:
    """TensorStore's key-value store with a time limit on everything."""

    def __init__(self, url: str):
        # What a crash of the machine tears is found by its hash, so nothing need be forced to the disk.
        self._kv = ts.KvStore.open(url, context=ts.Context({"file_io_sync": False})).result(timeout=PATIENCE)

    def read_all(self, keys: Sequence[str], patience: float) -> Iterator[bytes]:
        """Values in the keys' order, read side by side. Raises Gone at one that is not there."""
        until = time.monotonic() + patience
        futures = [self._kv.read(key) for key in keys]
        for key, future in zip(keys, futures, strict=True):
            found = future.result(timeout=max(0.001, until - time.monotonic()))
            if found.state != "value":
                raise Gone(key)
            yield found.value

    def read_each(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the keys' order, None where there is none, many side by side."""
        values: list[bytes | None] = []
        for at in range(0, len(keys), SIDE_BY_SIDE):
            futures = [self._kv.read(key) for key in keys[at : at + SIDE_BY_SIDE]]
            found = [future.result(timeout=PATIENCE) for future in futures]
            values += [value.value if value.state == "value" else None for value in found]
        return values

    def write(self, key: str, value: bytes) -> None:
        self._kv.write(key, value).result(timeout=PATIENCE)

    def delete(self, key: str) -> None:
        self._kv.delete_range(ts.KvStore.KeyRange(key, key + "\0")).result(timeout=PATIENCE)

    def keys(self) -> list[str]:
        return [key.decode() if isinstance(key, bytes) else key for key in self._kv.list().result(timeout=PATIENCE)]


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
        self.budget = budget
        self.counts = TierCounts()
        self.reads, self.writes = Breaker("reading from the disk tier"), Breaker("writing to the disk tier")
        self._fingerprint = fingerprint.hex()
        self._blobs_of = blobs_of
        self._has_pages, self._has_states = has_pages, has_states
        self._url = f"{url.rstrip('/')}/{self._fingerprint[:32]}/"
        try:
            self.store = Store(self._url)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                "disk_cache_url", f"{url!r} cannot be opened: {error}; give file:///DIRECTORY/, gs:// or s3://"
            ) from error
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[Digest, Manifest] = OrderedDict()  # the least recently used first
        self._references: Counter[str] = Counter()  # key -> manifests that name it
        self._sizes: dict[str, int] = {}  # key -> bytes, of all data
        self._within: dict[str, Digest] = {}  # page -> a prefix that it is part of
        self._pieces: dict[str, Piece] = {}  # stem -> one such piece, of those that manifests name
        self._bytes = 0
        self._orphans: set[str] = set()  # data that no manifest named at the last look
        self._doomed: list[str] = []  # keys to be deleted by the thread
        self._age = 0
        self._jobs: queue.Queue[Job | None] = queue.Queue(QUEUE)
        self._looked_at = 0.0
        self._idle = threading.Event()
        self._idle.set()
        self._guarded(self.look)
        self._thread = threading.Thread(target=self._run, name="jhybrid-disk-tier", daemon=True)
        self._thread.start()

    # looking up

    def deepest(self, digests: Sequence[Digest]) -> int:
        """How many of these pages make up the longest prefix that is there; 0 if none is."""
        if not self.reads.is_in:
            return 0
        with self._lock:
            return next((at for at in range(len(digests), 0, -1) if self._find(digests[at - 1])), 0)

    def _find(self, digest: Digest) -> Manifest | None:
        """What a prefix can be read from: its own manifest, or, where there are no states, that of a longer one."""
        if digest not in self._prefixes and not self._has_states:
            digest = self._within.get(digest[:SHORT].hex(), digest)
        return self._prefixes.get(digest)

    def read(
        self, digests: Sequence[Digest], first: int, *, has_pages: bool, has_state: bool, patience: float
    ) -> tuple[list[Blob], Blob | None]:
        """The pages of a whole prefix from the `first` on, and its state, if these are wanted.

        Raises Gone, Corrupt, TimeoutError, or what the store raises. What is not as it was written is removed.
        """
        count = len(digests)
        with self._lock:
            manifest = self._find(digests[-1])
            if manifest is None:
                raise Gone(digests[-1].hex())
            self._prefixes.move_to_end(manifest.digest)
        wanted = [
            p
            for p in manifest.pieces
            if (has_state if p.start == p.end else has_pages and p.start < count and p.end > first)
        ]
        started = time.perf_counter()
        pages: list[Blob] = []
        state = None
        values = self.store.read_all([piece.key for piece in wanted], patience)
        for piece in wanted:
            try:
                value = next(values)
                if len(value) != piece.bytes or hashlib.sha256(value).hexdigest() != piece.sha256:
                    raise Corrupt(f"{piece.key} is not what was written")
            except (Gone, Corrupt):
                self._discard(piece)
                raise
            blob = np.frombuffer(value, np.uint8)
            if piece.is_state:
                state = blob
            else:
                rows = blob.reshape(piece.end - piece.start, -1)
                pages += [row.copy() for row in rows[max(0, first - piece.start) : count - piece.start]]
        if (has_state and state is None) or (has_pages and len(pages) != count - first):
            raise Corrupt(f"{manifest.key} names {len(pages)} pages of {count - first}")
        size = sum(piece.bytes for piece in wanted)
        self.counts.add(read_bytes=size, read_seconds=time.perf_counter() - started)
        return pages, state

    # writing

    def write(self, digests: Sequence[Digest]) -> None:
        """Queue a prefix whose entries the host has. It is dropped, and counted, if the queue is full."""
        with self._lock:
            if self._find(digests[-1]) is not None:
                return
            job = Job(tuple(digests), self._age)
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
            self._guarded(self._delete_doomed)
            try:
                job = self._jobs.get(timeout=LOOK / 10)
            except queue.Empty:
                if time.monotonic() - self._looked_at > LOOK:
                    self._guarded(self.look)
                continue
            if job is None:
                self._guarded(self._delete_doomed)
                return
            if self.writes.is_in:
                self._guarded(lambda job=job: self._write(job))
            else:
                self.counts.add(dropped=1)
            with self._lock:
                if self._jobs.empty():
                    self._idle.set()

    def _guarded(self, work: Callable[[], bool]) -> None:
        """Do something that says whether it has written. What goes wrong with it is counted, and no more."""
        try:
            if work():
                self.writes.succeeded()
        except Exception as error:  # noqa: BLE001 - whatever the store raises, the engine goes on without the tier
            self.counts.add(failures=1)
            self.writes.failed(error)

    def _write(self, job: Job) -> bool:
        """Data first, then the manifest. Nothing is published of a prefix of which the host has lost a part."""
        started = time.perf_counter()
        pieces: list[Piece] = []
        try:
            written = self._write_pieces(job, pieces)
            if written is None or job.age != self._age:
                self.counts.add(dropped=1)
                return False
            pages = tuple(digest[:SHORT].hex() for digest in job.digests)
            manifest = Manifest(job.digests[-1], pages, tuple(pieces), time.time())
            value = manifest.encode(self._fingerprint)
            if not self._make_room(len(value)):
                self.counts.add(dropped=1)
                return False
            self.store.write(manifest.key, value)
            with self._lock:
                self._add(manifest, len(value))
            if job.age != self._age:
                self.forget(job.digests[-1])
        finally:
            with self._lock:
                for piece in pieces:
                    self._release(piece)
        self.counts.add(writes=1, written_bytes=written, write_seconds=time.perf_counter() - started)
        return True

    def _write_pieces(self, job: Job, pieces: list[Piece]) -> int | None:
        """Add a prefix's pieces to a list, held, and write the new ones. Their bytes; None if one cannot be had."""
        spans = [(at, min(at + BLOCK, len(job.digests))) for at in range(0, len(job.digests), BLOCK)]
        if not self._has_pages:
            spans = []
        if self._has_states:
            spans.append((len(job.digests), len(job.digests)))
        written = 0
        for start, end in spans:
            last = job.digests[end - 1].hex()
            stem = f"data/{last}.state" if start == end else f"data/{last}.kv{end - start}"
            with self._lock:
                piece = self._pieces.get(stem)  # by whatever steps it was computed, it will do
                if piece is not None:
                    self._hold(piece)
            if piece is None:
                kind = "state" if start == end else "kv"
                blobs = self._blobs_of([Name(digest, kind) for digest in job.digests[min(start, end - 1) : end]])
                value = b"".join(blob.data for blob in blobs if blob is not None)
                if any(blob is None for blob in blobs) or not self._make_room(len(value)):
                    return None
                sha256 = hashlib.sha256(value).hexdigest()
                piece = Piece(f"{stem}.{sha256[: 2 * SHORT]}.{len(value)}", start, end, len(value), sha256)
                with self._lock:
                    self._hold(piece)
                pieces.append(piece)
                self.store.write(piece.key, value)
                written += len(value)
                continue
            pieces.append(piece)
        return written

    # keeping the index; what follows is called with the lock held, but for `_make_room`, `look` and `_delete_doomed`

    def _hold(self, piece: Piece) -> None:
        self._references[piece.key] += 1
        if piece.key not in self._sizes:
            self._sizes[piece.key] = piece.bytes
            self._bytes += piece.bytes

    def _release(self, piece: Piece) -> None:
        self._references[piece.key] -= 1
        if not self._references[piece.key]:
            del self._references[piece.key]
            if self._pieces.get(piece.stem) == piece:
                del self._pieces[piece.stem]
            self._doom(piece.key)

    def _doom(self, key: str) -> None:
        self._doomed.append(key)
        self._bytes -= self._sizes.pop(key, 0)

    def _add(self, manifest: Manifest, size: int) -> None:
        if manifest.digest in self._prefixes:
            return
        self._prefixes[manifest.digest] = manifest
        self._sizes[manifest.key] = size
        self._bytes += size
        for page in () if self._has_states else manifest.pages:
            self._within.setdefault(page, manifest.digest)
        for piece in manifest.pieces:
            self._hold(piece)
            self._pieces[piece.stem] = piece

    def _remove(self, digest: Digest) -> None:
        """Take a prefix out of the index and, the manifest first, out of the store."""
        manifest = self._prefixes.pop(digest, None)
        if manifest is not None:
            self._doom(manifest.key)
            for page in manifest.pages:
                if self._within.get(page) == digest:
                    del self._within[page]
            for piece in manifest.pieces:
                self._release(piece)

    def _make_room(self, size: int) -> bool:
        """Give up data that belong to nothing, then the least recently used prefixes, until so many bytes more fit.

        False if they never will.
        """
        with self._lock:
            while self._bytes + size > self.budget and self._orphans:
                key = self._orphans.pop()
                if key not in self._references:
                    self._doom(key)
            while self._bytes + size > self.budget and self._prefixes:
                self._remove(next(iter(self._prefixes)))
                self.counts.add(evicted=1)
            fits = self._bytes + size <= self.budget
        self._delete_doomed()
        return fits

    def _delete_doomed(self) -> bool:
        """Delete what was given up, unless it has been written again since."""
        with self._lock:
            doomed, self._doomed = self._doomed, []
            doomed = [key for key in doomed if key not in self._sizes]
        for at, key in enumerate(doomed):
            try:
                self.store.delete(key)
            except Exception:
                with self._lock:
                    self._doomed += doomed[at:]
                raise
        return False

    def look(self) -> bool:
        """Compare the index with the store: take in what others wrote, and drop what others gave up."""
        self._looked_at = time.monotonic()
        with self._lock:
            known, age = set(self._prefixes), self._age
        self._delete_doomed()  # lest what was given up be found there and taken in again
        keys = self.store.keys()
        manifests = {bytes.fromhex(key.removeprefix("prefixes/")): key for key in keys if MANIFEST.fullmatch(key)}
        new = [digest for digest in manifests if digest not in known]
        values = self.store.read_each([manifests[digest] for digest in new])
        found = [
            self._decode(digest, manifests[digest], value)
            for digest, value in zip(new, values, strict=True)
            if value is not None
        ]
        with self._lock:
            if age != self._age:
                return False
            for digest in known - set(manifests):
                self._remove(digest)
            doomed = set(self._doomed)
            for manifest, size in sorted((f for f in found if f is not None), key=lambda f: f[0].written):
                if manifest.key not in doomed:
                    self._add(manifest, size)
            orphans = {key for key in keys if key.startswith("data/") and key not in self._references}
            for key in orphans:
                if key not in self._sizes:
                    self._sizes[key] = _size_in(key)
                    self._bytes += self._sizes[key]
            for key in orphans & self._orphans:
                self._doom(key)
            self._orphans = orphans - self._orphans
        self._make_room(0)
        _remove_stale_locks(self._url)
        return False

    def _decode(self, digest: Digest, key: str, raw: bytes) -> tuple[Manifest, int] | None:
        try:
            return Manifest.decode(raw, digest, self._fingerprint), len(raw)
        except Corrupt as error:
            log.warning("disk tier: %s; it is removed", error)
            with self._lock:
                self._doomed.append(key)
            return None

    # forgetting

    def _discard(self, piece: Piece) -> None:
        """Drop every prefix with a piece that cannot be read as it was written."""
        with self._lock:
            for digest in [d for d, manifest in self._prefixes.items() if piece in manifest.pieces]:
                self._remove(digest)

    def forget(self, digest: Digest) -> None:
        """Drop every prefix that this page is a part of, and whatever is about to be written."""
        short = digest[:SHORT].hex()
        with self._lock:
            self._age += 1
            for doomed in [d for d, manifest in self._prefixes.items() if short in manifest.pages]:
                self._remove(doomed)

    def clear(self) -> None:
        """Drop everything of this model, also what other engines wrote and this one knows of."""
        with self._lock:
            self._age += 1
            for digest in list(self._prefixes):
                self._remove(digest)

    def status(self) -> dict:
        with self._lock:
            entries, size, waiting = len(self._prefixes), self._bytes, self._jobs.qsize()
        reasons = [breaker.reason for breaker in (self.reads, self.writes) if not breaker.is_in]
        return {
            "entries": entries,
            "bytes": size,
            "capacity": self.budget,
            "queued": waiting,
            "out": "; ".join(reason for reason in reasons if reason) or None,
        } | self.counts.status()


def _size_in(key: str) -> int:
    """The bytes that the name of a piece tells."""
    size = key.rpartition(".")[2]
    return int(size) if size.isdecimal() else 0


def _remove_stale_locks(url: str) -> None:
    """TensorStore writes a file under another name first, which stays behind when the process is killed."""
    if not url.startswith("file://"):
        return
    for path in Path(url.removeprefix("file://")).rglob("*.__lock"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 20 * PATIENCE:
                path.unlink()
