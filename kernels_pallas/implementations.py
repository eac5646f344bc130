"""Choice of an op's implementation. Every op's `__init__.py` calls it.

Ops are jitted functions, so that all layers of a model share one trace; `base` is an argument like any other.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from kernels_pallas.target import Target

log = logging.getLogger(__name__)

Implementations = Mapping[str, Callable[..., Any]]


def run(op: str, implementations: Implementations, forced: str | None, target: Target, call: Callable[..., Any]) -> Any:
    """`call(f)` for the implementation `forced`, or for the first of the target's order that supports the input.

    An implementation that raises NotImplementedError is passed over with one line in the log; where it is forced, the
    error goes to the caller, and so does the last one's.
    """
    if forced is not None:
        return call(choose(op, implementations, forced))
    order = [name for name in target.order if name in implementations]
    for name, following in pairwise(order):
        try:
            return call(implementations[name])
        except NotImplementedError as error:
            _passed_over(op, name, str(error), following)
    return call(implementations[order[-1]])


def choose(op: str, implementations: Implementations, name: str) -> Callable[..., Any]:
    """The implementation called `name`. NotImplementedError with the names that exist otherwise."""
    if name not in implementations:
        have = ", ".join(sorted(implementations))
        raise NotImplementedError(f"{op} has no implementation {name!r}; choose one of: {have}")
    return implementations[name]


def imported_when_run(module: str, name: str) -> Callable[..., Any]:
    """Function `name` of `module`, which is imported when it is first called: Mosaic GPU takes long to import."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return function


@functools.cache
def _passed_over(op: str, name: str, reason: str, following: str) -> None:
    log.warning("%s: %s does not support this (%s); trying %s", op, name, reason, following)
