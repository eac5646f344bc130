"""Settings of the whole test run: CPU, and one folder of compiled executables that all test processes share."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JHYBRID_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "executables"))

GOLDEN = Path(__file__).parent / "golden"
