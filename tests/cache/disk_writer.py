"""Processes that write to a disk tier until they are killed. Every entry can be recomputed from its name.

A line on standard input, of folder, budget and seed with tabs between, makes one; its id is printed, and "gone".
"""

import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence

import numpy as np

from jhybrid.cache.tiers.chain import Digest, extend, root
from jhybrid.cache.tiers.disk import DiskTier
from jhybrid.cache.tiers.form import Blob
from jhybrid.cache.tiers.host import Name

FINGERPRINT = hashlib.sha256(b"a model").digest()
PAGE, STATE = 3000, 200_000


def blob_of(name: Name) -> Blob:
    size = PAGE if name.kind == "kv" else STATE
    return np.frombuffer(random.Random(name.digest + name.kind.encode()).randbytes(size), np.uint8)


def blobs_of(names: Sequence[Name]) -> list[Blob | None]:
    return [blob_of(name) for name in names]


def prefix(stem: int, pages: int) -> list[Digest]:
    return extend(root(FINGERPRINT, None), [f"{stem} {at}".encode() for at in range(pages)])


def tier(
    folder: str,
    budget: int = 1 << 30,
    fingerprint: bytes = FINGERPRINT,
    blobs: Callable[[Sequence[Name]], list[Blob | None]] = blobs_of,
    **options: bool,
) -> DiskTier:
    options = {"has_pages": True, "has_states": True} | options
    return DiskTier(f"file://{folder}/", budget, fingerprint, blobs, **options)


if __name__ == "__main__":
    for line in sys.stdin:  # all that takes time to start has been done before a writer begins
        folder, budget, seed = line.split("\t")
        child = os.fork()
        if not child:
            signal.alarm(120)  # should nobody kill it
            break
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
    else:
        sys.exit()
    disk, numbers = tier(folder, int(budget)), random.Random(seed)
    while True:
        disk.write(prefix(numbers.randrange(30), numbers.randrange(1, 60)))
        disk.drain(10.0)
