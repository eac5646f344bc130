"""Choice of an op's implementation. Every op's `__init__.py` calls it.

Ops are jitted functions, so that all layers of a model share one trace; `base` is an argument like any other.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kernels_pallas.target import Target

log = logging.getLogger(__name__)

Implementations = Mapping[str, Callable[..., Any]]


def run(op: str, implementations: Implementations, forced: str | None, target: Target, call: Callable[..., Any]) -> Any:
    """`call(f)` for the implementation `forced`, or for the first that supports the input.

    The order is: the kernel for the target's chip, then plain JAX. An implementation that raises NotImplementedError
    is passed over with one line in the log; where it is forced, the error goes to the caller, and so does the last
    one's.
    """
    if forced is not None:
        return call(choose(op, implementations, forced))
    order = [name for name in ("tpu",) if target.chip is not None and name in implementations]
    for name in order:
        try:
            return call(implementations[name])
        except NotImplementedError as error:
            _passed_over(op, name, str(error))
    return call(implementations["xla"])


def choose(op: str, implementations: Implementations, name: str) -> Callable[..., Any]:
    """The implementation called `name`. NotImplementedError with the names that exist otherwise."""
    if name not in implementations:
        have = ", ".join(sorted(implementations))
        raise NotImplementedError(f"{op} has no implementation {name!r}; choose one of: {have}")
    return implementations[name]


@functools.cache
def _passed_over(op: str, name: str, reason: str) -> None:
    log.warning("%s: %s does not support this (%s); using xla", op, name, reason)
