"""Index: what a disk tier knows of its store. Every thread may ask it; it never touches the store itself.

What is given up is doomed: out of the index at once, and out of the store when the tier's thread deletes it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from jhybrid.cache.tiers.chain import Digest
from jhybrid.cache.tiers.manifest import SHORT, Manifest, Piece, size_in


class Index:
    """Prefixes and their data, under a budget of bytes. `has_states`: a prefix is good for nothing but its own end."""

    def __init__(self, budget: int, *, has_states: bool):
        self.budget = budget
        self._has_states = has_states
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[Digest, Manifest] = OrderedDict()  # the least recently used first
        self._references: Counter[str] = Counter()  # key -> manifests, and writes under way, that name it
        self._sizes: dict[str, int] = {}  # key -> bytes, of everything
        self._within: dict[str, Digest] = {}  # page -> a prefix that it is part of
        self._pieces: dict[str, Piece] = {}  # stem -> one such piece, of those that manifests name
        self._bytes = 0
        self._orphans: set[str] = set()  # data that no manifest named at the last look
        self._doomed: list[str] = []  # keys to be deleted
        self.age = 0  # grows when something is to be forgotten

    # looking up

    def find(self, digest: Digest, *, touch: bool = False) -> Manifest | None:
        """What a prefix can be read from: its own manifest, or, where there are no states, that of a longer one.

        With `touch` it becomes the latest used.
        """
        with self._lock:
            manifest = self._find(digest)
            if manifest is not None and touch:
                self._prefixes.move_to_end(manifest.digest)
            return manifest

    def deepest(self, digests: Sequence[Digest]) -> int:
        """How many of these pages make up the longest prefix that is there; 0 if none is."""
        with self._lock:
            return next((at for at in range(len(digests), 0, -1) if self._find(digests[at - 1])), 0)

    def _find(self, digest: Digest) -> Manifest | None:
        if digest not in self._prefixes and not self._has_states:
            digest = self._within.get(digest[:SHORT].hex(), digest)
        return self._prefixes.get(digest)

    def known(self) -> tuple[set[Digest], int]:
        """The prefixes, and the age."""
        with self._lock:
            return set(self._prefixes), self.age

    def size(self) -> tuple[int, int]:
        """Prefixes and bytes."""
        with self._lock:
            return len(self._prefixes), self._bytes

    # adding

    def hold_same(self, stem: str) -> Piece | None:
        """A piece that is there already, by whatever steps it was computed; to be released."""
        with self._lock:
            piece = self._pieces.get(stem)
            if piece is not None:
                self._hold(piece)
            return piece

    def hold(self, piece: Piece) -> None:
        """A piece is about to be written; to be released."""
        with self._lock:
            self._hold(piece)

    def release(self, pieces: Iterable[Piece]) -> None:
        """What no manifest has come to name is doomed."""
        with self._lock:
            for piece in pieces:
                self._release(piece)

    def add(self, manifest: Manifest, size: int) -> None:
        """A prefix whose manifest has so many bytes. Harmless if it is there."""
        with self._lock:
            self._add(manifest, size)

    def _hold(self, piece: Piece) -> None:
        self._references[piece.key] += 1
        if piece.key not in self._sizes:
            self._sizes[piece.key] = piece.size
            self._bytes += piece.size

    def _release(self, piece: Piece) -> None:
        self._references[piece.key] -= 1
        if not self._references[piece.key]:
            del self._references[piece.key]
            if self._pieces.get(piece.stem) == piece:
                del self._pieces[piece.stem]
            self._doom(piece.key)

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

    def take_in(
        self, keys: Iterable[str], found: Iterable[tuple[Manifest, int]], gone: Iterable[Digest], age: int
    ) -> None:
        """The store has these keys, and these manifests that were not known; other engines have given some up.

        Data that no manifest names are doomed when two looks in a row have found them. Nothing is taken in if
        something was to be forgotten since the index was of this `age`: it may be that.
        """
        with self._lock:
            if age != self.age:
                return
            for digest in gone:
                self._remove(digest)
            doomed = set(self._doomed)
            for manifest, size in sorted(found, key=lambda f: f[0].written):
                if manifest.key not in doomed:
                    self._add(manifest, size)
            orphans = {key for key in keys if key.startswith(("data/", "probe.")) and key not in self._references}
            for key in orphans:
                if key not in self._sizes:
                    self._sizes[key] = size_in(key)
                    self._bytes += self._sizes[key]
            for key in orphans & self._orphans:
                self._doom(key)
            self._orphans = orphans - self._orphans

    # giving up

    def make_room(self, size: int) -> tuple[bool, int]:
        """Give up data that belong to nothing, then the least recently used prefixes, until so many bytes more fit.

        Whether they do, and how many prefixes went for it.
        """
        evicted = 0
        with self._lock:
            while self._bytes + size > self.budget and self._orphans:
                key = self._orphans.pop()
                if key not in self._references:
                    self._doom(key)
            while self._bytes + size > self.budget and self._prefixes:
                self._remove(next(iter(self._prefixes)))
                evicted += 1
            return self._bytes + size <= self.budget, evicted

    def discard(self, piece: Piece) -> None:
        """Drop every prefix with a piece that cannot be read as it was written."""
        with self._lock:
            for digest in [d for d, manifest in self._prefixes.items() if piece in manifest.pieces]:
                self._remove(digest)

    def forget(self, digest: Digest) -> None:
        """Drop every prefix that this page is a part of."""
        short = digest[:SHORT].hex()
        with self._lock:
            self.age += 1
            for doomed in [d for d, manifest in self._prefixes.items() if short in manifest.pages]:
                self._remove(doomed)

    def clear(self) -> None:
        """Drop everything that is known."""
        with self._lock:
            self.age += 1
            for digest in list(self._prefixes):
                self._remove(digest)

    def doom(self, key: str) -> None:
        """A key that is not in the index is to be deleted."""
        with self._lock:
            self._doom(key)

    def _remove(self, digest: Digest) -> None:
        """The manifest goes first, so that nothing names what is not there."""
        manifest = self._prefixes.pop(digest, None)
        if manifest is not None:
            self._doom(manifest.key)
            for page in manifest.pages:
                if self._within.get(page) == digest:
                    del self._within[page]
            for piece in manifest.pieces:
                self._release(piece)

    def _doom(self, key: str) -> None:
        self._doomed.append(key)
        self._bytes -= self._sizes.pop(key, 0)

    def take_doomed(self) -> list[str]:
        """What is to be deleted, in order, unless it has been written again since."""
        with self._lock:
            doomed, self._doomed = self._doomed, []
            return [key for key in doomed if key not in self._sizes]

    def put_back(self, doomed: Sequence[str]) -> None:
        """These could not be deleted."""
        with self._lock:
            self._doomed[:0] = doomed
