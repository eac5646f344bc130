"""Parameters of modules, looked up without tracing their initialisers. Layers declare theirs through this."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jax import Array


def parameter(module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """A module's parameter; `init(key, shape, dtype)` makes it when the module is initialised.

    Flax's own `param` traces `init` at every use to check the shape, which was a quarter of the time to trace a step.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, dtype)
    value = module.get_variable("params", name)
    assert value.shape == shape, (module.path, name, value.shape, shape)
    return value
