"""Apart: pieces of work in a process of their own, which may fail, die, hang or spoil its device.

What they gave until then is kept, and a new process goes on after the piece at fault. `Piece.perform` and `work` run in
that process, which tells of itself in lines of JSON; `results_of` starts it and listens. Called by `gpu.py`.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

SPOILT = 3  # what a process returns whose device takes no more work
STARTS_IN = 120.0  # seconds from the start of a process until it knows its pieces
LEAST_PATIENCE, PATIENCE = 30.0, 4.0  # seconds, and times those that a piece needs, after which it hangs


@dataclass(frozen=True)
class Piece:
    """One figure to be found, which takes at least `needs` seconds and gives what it found by name."""

    name: str
    needs: float
    work: Callable[[], dict[str, Any]]

    def perform(self, left: float) -> dict[str, Any]:
        """What the work gives, with its seconds; or why there is nothing: it failed, or needs more than is left."""
        if left < self.needs:
            return skipped(self.name, self.needs, left)
        started = time.time()
        try:
            result = {"name": self.name} | self.work()
        except Exception as error:  # noqa: BLE001 - the rest must go on, whatever this was
            result = {"name": self.name, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
        return result | {"seconds": round(time.time() - started, 2)}


def skipped(name: str, needs: float, left: float) -> dict[str, Any]:
    return {"name": name, "skipped": f"needs {needs:.0f} s, {left:.0f} s are left"}


def work(
    pieces: Sequence[Piece], first: int, report: TextIO, deadline: float, usable: Callable[[], bool], **facts: Any
) -> None:
    """Perform all pieces from the `first` on. Ends the process where a failed one has left the device unusable."""

    def say(line: Any) -> None:
        print(json.dumps(line), file=report, flush=True)

    say(facts | {"pieces": [[piece.name, piece.needs] for piece in pieces]})
    for piece in pieces[first:]:
        result = piece.perform(deadline - time.time())
        say(result)
        if "failed" in result and not usable():
            sys.exit(SPOILT)


def results_of(command: Sequence[str], deadline: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts and results of the pieces of `command --first N --report FILE`, which calls `work`."""
    facts: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    while time.time() < deadline:
        reason = _listen(command, deadline, facts, results)
        pieces = facts.get("pieces")
        if pieces is None:
            results.append({"name": "", "failed": reason or "told nothing"})
            break
        if len(results) < len(pieces) and reason is not None:
            results.append({"name": pieces[len(results)][0], "failed": reason})
        if len(results) >= len(pieces):
            break
    rest = facts.pop("pieces", [["", 0.0]])[len(results) :]
    return facts, results + [skipped(name, needs, 0.0) for name, needs in rest]


def _listen(
    command: Sequence[str], deadline: float, facts: dict[str, Any], results: list[dict[str, Any]]
) -> str | None:
    """Run the pieces that have no results yet; adds to both. Why the one that has none has none, if it is at fault."""
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder, "report"), Path(folder, "errors")
        report.touch()
        with report.open() as lines, errors.open("w") as stderr:
            begin = ["--first", str(len(results)), "--report", str(report)]
            process = subprocess.Popen([*command, *begin], stdout=sys.stderr, stderr=stderr)
            heard, patience, part = time.time(), STARTS_IN, ""
            while True:
                ended = process.poll() is not None
                for line in lines:  # the last may not be whole yet
                    part += line
                    if not part.endswith("\n"):
                        continue
                    told, part, heard = json.loads(part), "", time.time()
                    facts.update(told) if "pieces" in told else results.append(told)
                    needs = [needs for _, needs in facts["pieces"]]
                    patience = LEAST_PATIENCE + PATIENCE * sum(needs[len(results) :][:1])
                if ended:
                    break
                if time.time() > min(deadline, heard + patience):
                    process.kill()
                    process.wait()
                    late = time.time() > deadline
                    return "the time was over" if late else f"hung for {time.time() - heard:.0f} s, and was killed"
                time.sleep(0.05)
        said = errors.read_text(errors="replace").strip()
    if process.returncode in (0, SPOILT):
        return None
    died = process.returncode
    how = signal.Signals(-died).name if died < 0 else f"exit code {died}"
    return f"its process ended with {how}: {said[-500:]}"
