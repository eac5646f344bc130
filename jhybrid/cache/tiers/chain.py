"""Chain: names of prefixes. A page's digest tells all tokens up to its end, the salt, and the model."""

import hashlib
from collections.abc import Iterable

from jhybrid.cache.node import Salt

Digest = bytes


def root(fingerprint: bytes, salt: Salt) -> Digest:
    """The digest before the first page."""
    told = b"" if salt is None else b"s" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(fingerprint + told).digest()


def extend(digest: Digest, keys: Iterable[bytes]) -> list[Digest]:
    """The digests of further pages; `keys` are their tokens as 32-bit integers."""
    digests = []
    for key in keys:
        digest = hashlib.sha256(digest + key).digest()
        digests.append(digest)
    return digests
