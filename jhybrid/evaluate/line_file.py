"""LineFile: JSON lines on the disk, added at the end alone, so that a killed run finds what it had done.

The journal of a run is one, and so is the file of answers to a batch.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jhybrid.errors import ConfigError


class LineFile:
    """Open for one run at a time. Each added line is on the disk before the next piece of work starts."""

    def __init__(self, path: Path, field: str):
        """Open or make it. Raises ConfigError for `field` if it is a pipe or a device, if another run has it open, and,
        here and later, if it cannot be written.
        """
        self.path, self.field = path, field
        if path.exists() and not path.is_file():
            raise ConfigError(field, f"{path} is no regular file, to which a run could come back; name one")
        with self._blamed():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(field, f"another run is writing {path}; wait for it, or name another file") from error
        except OSError:  # some network file systems have no locks
            pass

    def complete(self) -> Iterator[bytes]:
        """The lines that are whole, without their line breaks. What follows them was cut short by a kill: `torn`."""
        self._whole, self.torn = 0, b""
        with self._blamed(), self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._whole += len(line)
                    yield line[:-1]
                else:
                    self.torn = line

    def cut(self) -> None:
        """Take away what was torn, once the caller knows that the file is its own."""
        with self._blamed():
            self._file.truncate(self._whole)

    def append(self, record: dict[str, Any]) -> None:
        """Add a line; it survives whatever happens next."""
        line = encoded(record) + b"\n"
        with self._blamed():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    def remove(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{self.path} cannot be written: {error.strerror}"
            raise ConfigError(self.field, f"{what}; make room or name another file, what is there is kept") from error


def encoded(record: dict[str, Any]) -> bytes:
    """A record as it is written: in UTF-8, but for records with a lone surrogate, which only an escape can carry."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def decoded(line: str | bytes) -> Any:
    """What a line says. Raises ValueError for what is no JSON, and for numbers and nesting beyond what Python reads."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
