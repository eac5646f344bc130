"""Manifest: which data of the store make up a prefix. The formats and names of what lies on the disk."""

import json
import re
from dataclasses import dataclass

import xxhash

from jhybrid.cache.tiers.chain import Digest

FORMAT = 2
SHORT = 16  # bytes of a page's digest in a manifest, and of a hash
MANIFEST = re.compile(r"prefixes/[0-9a-f]{64}")  # other names are not ours


class Corrupt(Exception):
    """What was read is not what was written."""


def hash_of(data: bytes) -> str:
    """128 bits that tell whether data are what was written. XXH3: a thirtieth of the time that SHA-256 takes."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class Piece:
    """One value of the store: the pages [start, end) of a prefix, or the state at its end (start == end)."""

    key: str
    start: int
    end: int
    size: int  # bytes
    hash: str

    @classmethod
    def of(cls, stem: str, start: int, end: int, value: bytes) -> "Piece":
        """A value named after its data: other data of the same pages have another name."""
        found = hash_of(value)
        return cls(f"{stem}.{found}.{len(value)}", start, end, len(value), found)

    @property
    def is_state(self) -> bool:
        return self.start == self.end

    @property
    def stem(self) -> str:
        """The key without what depends on the data: which part of which prefix it is."""
        return self.key.rsplit(".", 2)[0]

    def check(self, value: bytes) -> None:
        """Raises Corrupt unless the value is what was written."""
        if len(value) != self.size or hash_of(value) != self.hash:
            raise Corrupt(f"{self.key} is not what was written")


def stem_of(digest: Digest, pages: int) -> str:
    """Of the key of so many pages that end with this one, or, for 0 pages, of the state after it."""
    return f"data/{digest.hex()}.{f'kv{pages}' if pages else 'state'}"


def size_in(key: str) -> int:
    """The bytes that the key of a piece tells."""
    size = key.rpartition(".")[2]
    return int(size) if size.isdecimal() else 0


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
                "pieces": [[p.key, p.start, p.end, p.size, p.hash] for p in self.pieces],
                "written": self.written,
            }
        ).encode()
        return hash_of(body).encode() + b"\n" + body

    @classmethod
    def decode(cls, raw: bytes, digest: Digest, fingerprint: str) -> "Manifest":
        """Raises Corrupt."""
        head, _, body = raw.partition(b"\n")
        if head != hash_of(body).encode():
            raise Corrupt(f"the manifest of {digest.hex()} is not what was written")
        fields = json.loads(body)
        told = (fields["format"], fields["fingerprint"], fields["digest"])
        if told != (FORMAT, fingerprint, digest.hex()):
            raise Corrupt(f"the manifest of {digest.hex()} is one of {told}")
        pieces = tuple(Piece(*piece) for piece in fields["pieces"])
        return cls(digest, tuple(fields["pages"]), pieces, float(fields["written"]))
