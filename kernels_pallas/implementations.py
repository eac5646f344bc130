"""Choice of an op's implementation by name. Every op's `__init__.py` calls it.

Ops are jitted functions, so that all layers of a model share one trace; `base` is an argument like any other.
"""

from collections.abc import Callable, Mapping
from typing import Any


def choose(op: str, implementations: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """The implementation called `name`. NotImplementedError with the names that exist otherwise."""
    if name not in implementations:
        have = ", ".join(sorted(implementations))
        raise NotImplementedError(f"{op} has no implementation {name!r}; choose one of: {have}")
    return implementations[name]
