"""Fetcher: the way up. Finds how deep the lower tiers reach, collects the entries, and brings them to the device."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jhybrid.cache.tiers.chain import Digest
from jhybrid.cache.tiers.copies import IN, Staged
from jhybrid.cache.tiers.counts import MissCause, TierCounts
from jhybrid.cache.tiers.disk import DiskTier
from jhybrid.cache.tiers.form import Blob
from jhybrid.cache.tiers.host import Entry, HostTier, Name
from jhybrid.cache.tiers.manifest import Corrupt
from jhybrid.cache.tiers.store import Gone

TRIES = 2  # fetches for one sequence

Tier = HostTier | DiskTier


class Crowded(TimeoutError):
    """Other prefixes on their way took the time that a fetch had: the device's doing, no tier's."""


class Fetch:
    """A prefix on its way to the device: pages [first, depth) and the state at its end.

    Sequences that want the same share one; it belongs to nobody else and holds no row of any cache.
    """

    def __init__(self, digests: Sequence[Digest], first: int, tier: Tier, deadline: float):
        self.digests, self.first, self.depth = tuple(digests), first, len(digests)
        self.name = (digests[-1], first)
        self.tier = tier  # the lowest that is needed
        self.deadline = deadline
        self.users = 0
        self.is_told = False  # its failure has been counted
        self.is_reading = False  # the entries are being collected
        self.is_void = False  # what it brings was found to be wrong, or was to be forgotten
        self.is_left = self.has_room = False  # by the last user; on the device
        self.future: Future[Staged] | None = None

    @property
    def counts(self) -> TierCounts:
        return self.tier.counts

    @property
    def is_under_way(self) -> bool:
        return self.future is None or not self.future.done()

    @property
    def is_here(self) -> bool:
        """Whether it lies ready on the device."""
        return self.future is not None and self.future.done() and self.future.exception() is None

    @property
    def staged(self) -> Staged:
        """Once `future` is done, and well."""
        assert self.future is not None
        return self.future.result()


class Fetcher:
    """Called on the engine's thread; the work is done by threads of its own.

    `stage` brings blobs to the device and waits for them there, until a time of `monotonic` at most.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        stage: Callable[[Sequence[Blob], Blob | None, float], Staged],
        *,
        page_bytes: int,
        state_bytes: int,
        timeout: float,
        landed: Callable[[], None],
    ):
        self._host, self._disk, self._stage = host, disk, stage
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self._has_pages, self._has_states = page_bytes > 0, state_bytes > 0
        self._timeout = timeout
        self._room, self._lock = threading.Semaphore(IN), threading.Lock()
        self._landed = landed  # called in the thread when a fetch is over
        self._fetches: dict[tuple[Digest, int], Fetch] = {}
        self._pool = ThreadPoolExecutor(IN, thread_name_prefix="jhybrid-fetch")

    def offers(self, digests: Sequence[Digest], first: int) -> list[tuple[int, Tier]]:
        """How many of these pages can be had, if the device has the first few, and from which tier: deepest first."""
        depth = 0
        if self._host.breaker.is_in:
            depth = first + self._host.count_held(digests[first:]) if self._has_pages else len(digests)
            if self._has_states:
                depth = self._host.deepest_state(digests[:depth])
        offers: list[tuple[int, Tier]] = [(depth, self._host)]
        if self._disk is not None:
            offers.append((self._disk.deepest(digests), self._disk))
        return sorted(offers, key=lambda offer: -offer[0])  # of two as deep the host's first

    def size(self, pages: int) -> int:
        """Bytes that come up with so many pages and the state at their end."""
        return pages * self._page_bytes + self._state_bytes

    def start(self, digests: Sequence[Digest], first: int, tier: Tier) -> Fetch:
        """Begin to fetch a whole prefix, or join in."""
        name = (digests[-1], first)
        fetch = self._fetches.get(name)
        if fetch is None or not (fetch.is_here or (fetch.is_under_way and time.monotonic() < fetch.deadline)):
            fetch = self._fetches[name] = Fetch(digests, first, tier, time.monotonic() + self._timeout)
            fetch.future = self._pool.submit(self._run, fetch)
            fetch.future.add_done_callback(lambda _: self._landed())
        fetch.users += 1
        return fetch

    def leave(self, fetch: Fetch) -> None:
        """One user less; after the last, what it has brought is let go."""
        fetch.users -= 1
        if fetch.users:
            return
        if self._fetches.get(fetch.name) is fetch:
            del self._fetches[fetch.name]
        assert fetch.future is not None
        fetch.future.cancel()
        with self._lock:
            fetch.is_left = True
            if fetch.has_room:
                self._room.release()

    def forget(self) -> None:
        """Nobody may use what is under way."""
        for fetch in self._fetches.values():
            fetch.is_void = True
        self._fetches.clear()

    @property
    def num_under_way(self) -> int:
        return sum(fetch.is_under_way for fetch in self._fetches.values())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # in the threads

    def _run(self, fetch: Fetch) -> Staged:
        if time.monotonic() >= fetch.deadline:
            raise Crowded("too many prefixes were being fetched")
        size, started = self.size(fetch.depth - fetch.first), time.perf_counter()
        fetch.is_reading = True
        try:
            pages, state = self._collect(fetch)
        except TimeoutError:
            fetch.tier.loads.saw(size, time.perf_counter() - started)
            raise
        finally:
            fetch.is_reading = False
        read = time.perf_counter() - started
        if not self._room.acquire(timeout=max(0.0, fetch.deadline - time.monotonic())):
            raise Crowded("too many prefixes were on their way to the device")
        started = time.perf_counter()
        try:
            staged = self._stage(pages, state, fetch.deadline)
            self._host.counts.add(read_bytes=size, read_seconds=time.perf_counter() - started)
            return staged
        finally:
            fetch.tier.loads.saw(size, read + time.perf_counter() - started)
            with self._lock:
                fetch.has_room = not fetch.is_left
                if fetch.is_left:
                    self._room.release()

    def _collect(self, fetch: Fetch) -> tuple[list[Blob], Blob | None]:
        """Entries from the host, and, if that lacks some, from the disk, which the host then has as well."""
        pages_of = [Name(digest, "kv") for digest in fetch.digests[fetch.first :]] if self._has_pages else []
        state_of = [Name(fetch.digests[-1], "state")] if self._has_states else []
        age = self._host.age
        found = self._host.get([*pages_of, *state_of])
        if all(blob is not None for blob in found):
            return self._halves([blob for blob in found if blob is not None], len(pages_of))
        if not isinstance(fetch.tier, DiskTier):
            raise Gone("the host has given it up")
        lacking = next(i for i, blob in enumerate(found) if blob is None)
        first = fetch.first + min(lacking, len(pages_of))
        pages, state = fetch.tier.read(
            fetch.digests,
            first,
            has_pages=first < fetch.depth and self._has_pages,
            has_state=self._has_states and found[-1] is None,
            patience=fetch.deadline - time.monotonic(),
        )
        held = [blob for blob in found[: first - fetch.first] if blob is not None]
        state = state if found[-1] is None or not self._has_states else found[-1]
        self._promote(fetch, first, pages, state, age)
        return [*held, *pages], state

    def _halves(self, blobs: list[Blob], pages: int) -> tuple[list[Blob], Blob | None]:
        return blobs[:pages], blobs[pages] if self._has_states else None

    def _promote(self, fetch: Fetch, first: int, pages: list[Blob], state: Blob | None, age: int) -> None:
        """Enter what came from the disk in host memory."""
        entries = [
            (Name(fetch.digests[at], "kv"), Entry(parent_of(fetch.digests, at), at + 1, blob))
            for at, blob in enumerate(pages, first)
        ]
        if state is not None:
            end = fetch.depth - 1
            entries.append(
                (Name(fetch.digests[end], "state"), Entry(parent_of(fetch.digests, end), fetch.depth, state))
            )
        self._host.put(entries, age)


def parent_of(digests: Sequence[Digest], at: int) -> Digest:
    """The digest before one of a whole chain; b"" before the first."""
    return digests[at - 1] if at else b""


def failure(error: BaseException) -> tuple[MissCause, bool]:
    """Why a fetch came to nothing, and whether that speaks against the tier."""
    if isinstance(error, Gone):
        return "gone", False
    if isinstance(error, TimeoutError):
        return "timeout", not isinstance(error, Crowded)
    return ("corrupt" if isinstance(error, Corrupt) else "failed"), True
