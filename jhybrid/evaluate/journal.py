"""Journal: what a run over texts has done so far, a JSON line each, so that a killed run goes on from there."""

import json
from pathlib import Path
from typing import Any, Self

from jhybrid.errors import ConfigError
from jhybrid.evaluate.line_file import LineFile, encoded


class Journal:
    """A line that says which run it belongs to, then the run's entries. One that was cut short is done again."""

    def __init__(self, path: Path, run: dict[str, Any]):
        """Open or begin it. Raises ConfigError if it belongs to another run, naming what differs."""
        self._file = LineFile(path, "journal")
        try:
            self.entries = [_parse(path, line) for line in self._file.complete()]
            if self.entries:
                theirs = self.entries.pop(0)
                differing = sorted(key for key in {*theirs, *run} if theirs.get(key) != run.get(key))
                if differing:
                    what = f"{path} is of another run ({', '.join(differing)} differ)"
                    raise ConfigError("journal", f"{what}; remove it or name another")
                self._file.cut()
            elif encoded(run).startswith(self._file.torn):
                self._file.cut()
                self._file.append(run)
            else:
                raise _no_journal(path, "its only line has no end")
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; it survives whatever happens next."""
        self._file.append(entry)

    def remove(self) -> None:
        """The run is finished, and the next one is to start anew."""
        self._file.remove()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse(path: Path, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise _no_journal(path, str(error)) from error
    if not isinstance(entry, dict):
        raise _no_journal(path, f"{entry!r} is no object")
    return entry


def _no_journal(path: Path, why: str) -> ConfigError:
    return ConfigError("journal", f"{path} is no journal: {why}; remove it or name another")
