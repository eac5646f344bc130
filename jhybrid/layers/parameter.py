"""Parameters of modules, looked up without tracing their initialisers. Layers declare theirs through this."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
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


def uniform(bound: float) -> Callable[..., Array]:
    """Initialiser: uniform between -bound and bound, drawn in float32."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return init


def log_of_uniform(low: float, high: float) -> Callable[..., Array]:
    """Initialiser: the logarithm of what is uniform between low and high; of A, as Mamba2's code draws it."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, low, high))

    return init


def inverse_softplus_of_log_uniform(low: float, high: float) -> Callable[..., Array]:
    """Initialiser: what softplus makes log-uniform between low and high; of dt_bias, as Mamba2's code draws it."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        start, end = jnp.log(jnp.array((low, high), dtype))
        dt = jnp.exp(jax.random.uniform(key, shape, dtype) * (end - start) + start)
        return dt + jnp.log(-jnp.expm1(-dt))

    return init
