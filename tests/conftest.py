"""Settings of the whole test run: CPU, and one folder of compiled executables that all test processes share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JHYBRID_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "executables"))

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="module")
def forgets_what_was_compiled() -> Iterator[None]:
    """Each compiled function takes mappings of memory, of which a process may have 65,530: more end in a crash."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
