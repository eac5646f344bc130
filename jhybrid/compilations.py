"""Counts what XLA compiles in this process, apart from what an engine compiles while it starts.

A compilation after an engine says ready is a fault (it stalls every request), so it is counted and shown.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax

_lock = threading.Lock()
_starting = 0  # engines that are starting now
_count = 0


def _on_event(event: str, _seconds: float, **_: object) -> None:
    global _count
    if event == "/jax/core/compile/backend_compile_duration":
        with _lock:
            _count += not _starting


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Compilations inside are those of a start, and do not count."""
    global _starting
    with _lock:
        _starting += 1
    try:
        yield
    finally:
        with _lock:
            _starting -= 1


def count() -> int:
    """Compilations so far outside any start."""
    return _count
