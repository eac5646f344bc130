"""GrammarGuard: a process that compiles grammars before this one does, so that none can crash or hold up the server.

llguidance is native code that reads what strangers wrote; on some of it its stack has overflowed. `Grammars` asks the
guard before it compiles something new, where it has one. The process is kept, started again when it dies, and ends with
the one that started it.
"""

import pickle
import selectors
import subprocess
import sys
import threading
from typing import IO, Any

START_SECONDS = 120.0
SECONDS = 10.0
"""For one grammar; LIMITS stop what is honest long before."""
MEMORY = 2 * 2**30
"""Bytes beyond what the process has once it knows the vocabulary."""
STEPS = 16
"""Tokens that a grammar is followed for."""


class GrammarGuard:
    """One process for one vocabulary. Safe to call from any thread; callers take turns."""

    def __init__(self, vocabulary: Any):
        """`vocabulary` is what the process compiles for; it is pickled."""
        self._vocabulary = vocabulary
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, source: str) -> str | None:
        """What a grammar does to a process that compiles it, or None where it comes to an end, be it an error."""
        with self._turn:
            if self._process is None:
                self._process = self._started()
            return self._answer(self._process, source, SECONDS)

    def close(self) -> None:
        """End the process. Harmless when repeated."""
        with self._turn:
            if self._process is not None:
                self._end(self._process)

    def _started(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-P", "-m", __name__], stdin=pipe, stdout=pipe, stderr=pipe)
        if fault := self._answer(process, self._vocabulary, START_SECONDS):
            raise RuntimeError(f"the process that compiles grammars does not start: it {fault}")
        return process

    def _answer(self, process: subprocess.Popen[bytes], message: Any, seconds: float) -> str | None:
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            return f"ended with {self._end(process)}"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                self._end(process)
                return f"takes more than {seconds:g} s"
        return None if process.stdout.read(1) else f"ended with {self._end(process)}"

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Kill and forget it; its exit code, a signal's number being negative, if it had ended by itself."""
        self._process = None
        code = process.poll()
        process.kill()
        with process:
            return process.wait() if code is None else code


def main(orders: IO[bytes], answers: IO[bytes]) -> None:
    """The process: a vocabulary, then grammars, each answered by one byte."""
    from jhybrid.grammar import compiled, follow, vocabulary_of

    vocabulary = vocabulary_of(pickle.load(orders))
    _limit_memory()
    while True:
        answers.write(b"\n")
        answers.flush()
        try:
            source = pickle.load(orders)
        except EOFError:
            return
        follow(compiled(vocabulary, source), STEPS)


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
