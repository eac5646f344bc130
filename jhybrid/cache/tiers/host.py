"""HostTier: entries of cached prefixes in host memory, under a byte budget. Every thread may call it."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jhybrid.cache.tiers.chain import Digest
from jhybrid.cache.tiers.counts import Breaker, TierCounts
from jhybrid.cache.tiers.form import Blob
from jhybrid.cache.tiers.price import BYTES, Rate
from jhybrid.errors import ConfigError

Kind = Literal["kv", "state"]
KINDS: tuple[Kind, ...] = ("kv", "state")


class Name(NamedTuple):
    """Of an entry: the prefix it belongs to, and which half it is."""

    digest: Digest
    kind: Kind


@dataclass(frozen=True)
class Entry:
    """`blob` is never written again, so whoever has got it keeps it, also when the tier has given it up."""

    parent: Digest  # the prefix one page shorter
    depth: int  # pages
    blob: Blob


class Shelf:
    """Entries by recency of use, within a budget of bytes."""

    def __init__(self, budget: int):
        self.budget = budget
        self.bytes = 0
        self.held = dict.fromkeys(KINDS, 0)  # entries
        self.entries: OrderedDict[Name, Entry] = OrderedDict()

    def put(self, name: Name, entry: Entry) -> list[Name]:
        """Enter it as the latest; what had to go for it, or it itself if it does not fit at all."""
        if entry.blob.nbytes > self.budget:
            return [name]
        self.remove(name)
        self.entries[name] = entry
        self.bytes += entry.blob.nbytes
        self.held[name.kind] += 1
        gone = []
        while self.bytes > self.budget:
            oldest = next(iter(self.entries))
            self.remove(oldest)
            gone.append(oldest)
        return gone

    def remove(self, name: Name) -> None:
        """Harmless if it is not there."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            self.bytes -= entry.blob.nbytes
            self.held[name.kind] -= 1


class HostTier:
    """KV and states share one budget, unless `state_share` of it is for states alone."""

    def __init__(self, budget: int, state_share: float | None = None):
        self.budget = budget
        self.counts, self.loads = TierCounts(), Rate(BYTES)
        self.breaker = Breaker("the host tier")
        self._lock = threading.Lock()
        self.age = 0  # grows when something is to be forgotten
        self._evicted = dict.fromkeys(KINDS, 0)
        states = 0 if state_share is None else int(budget * state_share)
        kv = Shelf(budget - states)
        self._shelves: dict[Kind, Shelf] = {"kv": kv, "state": kv if state_share is None else Shelf(states)}

    def check(self, page_bytes: int, state_bytes: int, pages_per_seq: int) -> None:
        """ConfigError unless two states and the pages of one whole sequence fit."""
        pages, states = page_bytes * pages_per_seq, 2 * state_bytes
        if pages + states > self.budget:
            raise ConfigError(
                "host_cache_bytes",
                f"{self.budget} is less than two states ({states} B) and the keys and values of one sequence of "
                f"max_model_len ({pages} B); use at least {pages + states}",
            )
        kv, state = self._shelves["kv"].budget, self._shelves["state"].budget
        if pages > kv or states > state:
            raise ConfigError(
                "host_cache_state_share",
                f"leaves {state} B for states and {kv} B for keys and values; two states take {states} B and one "
                f"sequence of max_model_len {pages} B; choose another share, or leave it out to share the bytes",
            )

    @property
    def _distinct(self) -> list[Shelf]:
        kv, state = self._shelves["kv"], self._shelves["state"]
        return [kv] if kv is state else [kv, state]

    def has(self, name: Name) -> bool:
        with self._lock:
            return name in self._shelves[name.kind].entries

    def count_held(self, digests: Sequence[Digest]) -> int:
        """How many pages, from the first on, are there without a gap."""
        entries = self._shelves["kv"].entries
        with self._lock:
            return next((i for i, digest in enumerate(digests) if Name(digest, "kv") not in entries), len(digests))

    def deepest_state(self, digests: Sequence[Digest]) -> int:
        """How many of these pages lead to the last one whose state is there; 0 if none is."""
        entries = self._shelves["state"].entries
        with self._lock:
            return next((at for at in range(len(digests), 0, -1) if Name(digests[at - 1], "state") in entries), 0)

    def get(self, names: Sequence[Name]) -> list[Blob | None]:
        """The blobs of entries, given from the first page on, which becomes the latest used: the ends go before it."""
        found: list[Blob | None] = []
        with self._lock:
            for name in reversed(names):
                shelf = self._shelves[name.kind]
                entry = shelf.entries.get(name)
                if entry is not None:
                    shelf.entries.move_to_end(name)
                found.append(None if entry is None else entry.blob)
        found.reverse()
        return found

    def put(self, entries: Iterable[tuple[Name, Entry]], age: int) -> None:
        """Enter entries, given from the first page on. What does not fit is given up, the least recently used first.

        Nothing is entered if something was to be forgotten since the tier was of this `age`: it may be that.
        """
        entries = list(entries)
        gone: list[Name] = []
        with self._lock:
            if age != self.age:
                return
            for name, entry in reversed(entries):
                gone += self._shelves[name.kind].put(name, entry)
            for name in gone:
                self._evicted[name.kind] += 1
        size = sum(entry.blob.nbytes for _, entry in entries)
        self.counts.add(writes=len(entries), written_bytes=size, evicted=len(gone))

    def forget(self, digest: Digest) -> None:
        """Drop a prefix, all that goes on from it, and all of which that cannot be told."""
        with self._lock:
            self.age += 1
            known = {name.digest: entry for shelf in self._distinct for name, entry in shelf.entries.items()}
            verdicts = {digest: True}
            for shelf in self._distinct:
                for name in list(shelf.entries):
                    if self._descends(name.digest, known, verdicts):
                        shelf.remove(name)

    def _descends(self, digest: Digest, known: dict[Digest, Entry], verdicts: dict[Digest, bool]) -> bool:
        trail, depth = [], 0
        while digest not in verdicts and digest in known:
            trail.append(digest)
            digest, depth = known[digest].parent, known[digest].depth
        verdict = verdicts.get(digest, depth > 1)  # a chain that breaks off before its first page may have led there
        verdicts.update(dict.fromkeys(trail, verdict))
        return verdict

    def clear(self) -> None:
        with self._lock:
            self.age += 1
            for shelf in self._distinct:
                for name in list(shelf.entries):
                    shelf.remove(name)

    def status(self) -> dict:
        with self._lock:
            entries = {kind: sum(shelf.held[kind] for shelf in self._distinct) for kind in KINDS}
            size, evicted = sum(shelf.bytes for shelf in self._distinct), dict(self._evicted)
        return {
            "entries": sum(entries.values()),
            "kv_entries": entries["kv"],
            "state_entries": entries["state"],
            "evicted_kv": evicted["kv"],
            "evicted_state": evicted["state"],
            "bytes": size,
            "capacity": self.budget,
            "out": None if self.breaker.is_in else self.breaker.reason,
        } | self.counts.status()
