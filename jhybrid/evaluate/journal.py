"""Journal: what a run has done so far, a JSON line each, so that a killed run goes on from there."""

from pathlib import Path
from typing import Any, Self

from jhybrid.errors import ConfigError
from jhybrid.evaluate.line_file import LineFile, decoded, encoded


class Journal:
    """A line that says which run it belongs to, then the run's entries. One that was cut short is done again."""

    def __init__(self, path: Path, run: dict[str, Any], field: str = "journal"):
        """Open or begin it. Raises ConfigError, of this field, if it belongs to another run, naming what differs, and,
        here and later, if it cannot be written.
        """
        self.head = run
        self._file = LineFile(path, field)
        try:
            lines = self._file.complete()
            try:
                self.entries = [_parse(line) for line in lines]
            except ValueError as error:
                raise _no_journal(field, path, str(error)) from error
            if self.entries:
                theirs = self.entries.pop(0)
                differing = sorted(key for key in {*theirs, *run} if theirs.get(key) != run.get(key))
                if differing:
                    what = f"{path} is of another run ({', '.join(differing)} differ)"
                    raise ConfigError(field, f"{what}; remove it or name another")
                self._file.cut()
            elif encoded(run).startswith(self._file.torn):
                self._file.cut()
                self._file.append(run)
            else:
                raise _no_journal(field, path, "its only line has no end")
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; it survives whatever happens next."""
        self._file.append(entry)
        self.entries.append(entry)

    def remove(self) -> None:
        """The run is finished, and the next one is to start anew."""
        self._file.remove()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, the first of which says whose it is; somebody may be writing it.

    Raises OSError, and ValueError if it is no journal.
    """
    return [_parse(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _parse(line: bytes) -> dict[str, Any]:
    entry = decoded(line)
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is no object")
    return entry


def _no_journal(field: str, path: Path, why: str) -> ConfigError:
    return ConfigError(field, f"{path} is no journal: {why}; remove it or name another")
