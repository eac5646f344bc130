"""Machine: what this process runs on. Figures are published with it, and kept executables are bound to it."""

import os
import platform
from typing import Any

import jax
import jaxlib.version


def machine() -> dict[str, Any]:
    """What figures were measured on."""
    device = jax.devices()[0]
    name, flags = processor()
    vector = [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in flags]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": f"{name} ({', '.join(vector)})",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # of the last minute: above the number of cores, others were at work too
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }


def processor() -> tuple[str, list[str]]:
    """The processor's name and its feature flags, as far as the system tells them."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine(), []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    flags = facts.get("flags") or facts.get("Features") or ""  # x86, ARM
    return facts.get("model name") or platform.processor() or platform.machine(), flags.split()
