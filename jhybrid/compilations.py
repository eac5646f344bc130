"""Counts what XLA compiles in this process, apart from what an engine compiles while it starts.

A compilation after an engine says ready is a fault (it stalls every request), so it is counted and shown.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

_lock = threading.Lock()
_starting = 0  # engines that are starting now
_jax_cache = True  # whether JAX's persistent cache was on before
_count = 0


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == "/jax/core/compile/backend_compile_duration":
        with _lock:
            _count += not _starting


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Compilations inside are those of a start, and do not count. JAX's persistent cache is off meanwhile, because
    what comes out of it cannot be kept once more (see executables.py)."""
    global _starting, _jax_cache
    with _lock:
        if not _starting:
            _jax_cache = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
            _use_jax_cache(False)
        _starting += 1
    try:
        yield
    finally:
        with _lock:
            _starting -= 1
            if not _starting:
                _use_jax_cache(_jax_cache)


def _use_jax_cache(wanted: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", wanted)
    compilation_cache.reset_cache()  # JAX decides once whether it has one


def count() -> int:
    """Compilations so far outside any start."""
    return _count
