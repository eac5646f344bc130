"""Journal: what a run has done so far, a JSON line each, so that a killed run goes on from there.

Each line is on the disk before the next piece of work starts. A line that was cut short by the kill is done again.
"""

import json
import os
from pathlib import Path
from typing import Any, Self

from jhybrid.errors import ConfigError


class Journal:
    """An append-only file: a line that says which run it belongs to, then the run's entries."""

    def __init__(self, path: Path, run: dict[str, Any]):
        """Open or begin it. Raises ConfigError if it belongs to another run, naming what differs."""
        self.path, self.head = path, run
        path.parent.mkdir(parents=True, exist_ok=True)
        self.entries, kept = read_journal(path) if path.exists() else ([], 0)
        begins = not self.entries
        if self.entries:
            theirs = self.entries.pop(0)
            differing = sorted(key for key in {*theirs, *run} if theirs.get(key) != run.get(key))
            if differing:
                raise ConfigError(
                    "journal", f"{path} is of another run ({', '.join(differing)} differ); remove it or name another"
                )
        self._file = path.open("ab")
        self._file.truncate(kept)
        if begins:
            self._write(run)

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; it survives whatever happens next."""
        self._write(entry)
        self.entries.append(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """The run is finished, and the next one is to start anew."""
        self.close()
        self.path.unlink()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a journal, the first of which says whose it is, and their bytes. What was cut short is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break is torn
    return [_parse(path, line) for line in lines], sum(len(line) + 1 for line in lines)


def _parse(path: Path, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError("journal", f"{path} is no journal: {error}; remove it or name another") from error
    if not isinstance(entry, dict):
        raise ConfigError("journal", f"{path} is no journal: {entry!r} is no object; remove it or name another")
    return entry
