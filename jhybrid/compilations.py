"""Counts what XLA compiles in this process, apart from what an engine compiles while it starts.

A compilation after an engine says ready is a fault (it stalls every request), so it is counted and shown.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

log = logging.getLogger("jhybrid")

_lock = threading.Lock()
_starting = 0  # engines that are starting now
_count = 0


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == "/jax/core/compile/backend_compile_duration":
        with _lock:
            _count += not _starting


jax.monitoring.register_event_duration_secs_listener(_on_event)


def keep_in(directory: Path | None) -> None:
    """Keep compiled executables in `directory` between starts; None for nowhere.

    A directory that cannot be used is a warning, not an error.
    """
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("compilation_cache_dir %s cannot be used (%s); every start compiles anew", directory, error)
            directory = None
    wanted = str(directory) if directory is not None else None
    if jax.config.jax_compilation_cache_dir == wanted:  # pyright: ignore[reportAttributeAccessIssue]
        return
    jax.config.update("jax_compilation_cache_dir", wanted)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()  # JAX opens its cache once and would stay with the former directory


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
