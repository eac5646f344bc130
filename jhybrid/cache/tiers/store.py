"""Store: TensorStore's key-value store with a time limit on everything: a directory, or a bucket in the cloud."""

import contextlib
import os
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorstore as ts

from jhybrid.errors import ConfigError

PATIENCE = 20.0  # seconds that one operation may take
SIDE_BY_SIDE = 256  # values that are read at a time
PASSING = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL")
"""Statuses of a store that may be well later: full, not to be reached, overloaded."""


class Gone(Exception):
    """What was there is no longer: given up, by this engine or another."""


class Store:
    """What lies in a folder under a URL. Whatever TensorStore raises, and TimeoutError, comes through."""

    def __init__(self, url: str, folder: str = ""):
        """Raises ConfigError if there can be no such store."""
        self._asked, self._url = url, (url if url.endswith("/") else f"{url}/") + (f"{folder}/" if folder else "")
        try:
            # What a crash of the machine tears is found by its hash, so nothing need be forced to the disk.
            opened = ts.KvStore.open(self._url, context=ts.Context({"file_io_sync": False}))
            self._kv = opened.result(timeout=PATIENCE)
        except (ValueError, NotImplementedError) as error:
            raise self._refusal("opened", error) from error

    def _refusal(self, what: str, error: Exception) -> ConfigError:
        cause = str(error)
        if "[os_error_code" in cause:  # what comes before names a file below, with its own escapes
            cause = cause.rpartition(": ")[2].partition(" [")[0]
        remedy = "give file:///DIRECTORY/, gs://BUCKET/PATH/ or s3://BUCKET/PATH/ that this process may write to"
        return ConfigError("disk_cache_url", f"{self._asked!r} cannot be {what}: {cause}; {remedy}")

    def probe(self) -> None:
        """Write a value, read it and delete it.

        Raises ConfigError if that cannot be; OSError or ValueError if it is out of order and may be well later.
        """
        key, value = f"probe.{uuid.uuid4().hex}.5", b"probe"  # who is killed here leaves it to the looks
        try:
            self.write(key, value)
            [found] = self.read_each([key])
            self.delete(key)
        except ValueError as error:
            if str(error).startswith(PASSING):
                raise
            raise self._refusal("written to", error) from error
        if found != value:
            raise OSError(f"{key} was written as {value!r} and read as {found!r}")

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

    def write_new(self, key: str, value: bytes) -> bool:
        """Write a value unless there is one. False if there is."""
        found = self._kv.read(key).result(timeout=PATIENCE)
        if found.state == "value":
            return False
        written = self._kv.write(key, value, if_equal=found.stamp.generation).result(timeout=PATIENCE)
        return bool(written.generation)

    def delete(self, key: str) -> None:
        self._kv.delete_range(ts.KvStore.KeyRange(key, key + "\0")).result(timeout=PATIENCE)

    def keys(self) -> list[str]:
        """Every key that is UTF-8, as all of ours are."""
        keys = []
        for key in self._kv.list().result(timeout=PATIENCE):
            with contextlib.suppress(UnicodeDecodeError):
                keys.append(key.decode() if isinstance(key, bytes) else key)
        return keys

    def remove_stale_locks(self) -> None:
        """TensorStore writes a file under another name first, which stays behind when the process is killed."""
        if not self._url.startswith("file://"):
            return
        folder = os.fsdecode(urllib.parse.unquote_to_bytes(self._url.removeprefix("file://")))
        for path in Path(folder).rglob("*.__lock"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > 20 * PATIENCE:
                    path.unlink()
