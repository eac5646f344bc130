"""Parameters of modules, looked up without tracing their initialisers. Layers declare theirs through this."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.mesh import WHOLE, Layout

LAYOUTS = "layouts"
"""Collection, filled by `init` alone, in which layers say how parameters are shared out on the mesh in use."""


def parameter(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    shape: tuple[int, ...],
    dtype: Any,
    layout: Layout = WHOLE,
) -> Array:
    """A module's parameter; `init(key, shape, dtype)` makes it when the module is initialised. `shape` is the held one.

    Flax's own `param` traces `init` at every use to check the shape, which was a quarter of the time to trace a step.
    """
    if not module.has_variable("params", name):
        if module.is_initializing():
            module.put_variable(LAYOUTS, name, layout)
        return module.param(name, init, shape, dtype)
    value = module.get_variable("params", name)
    assert value.shape == shape, (module.path, name, value.shape, shape)
    return value


class Scaled(NamedTuple):
    """A weight of 8 bits per number, [..., O, I], and its scales [..., O, C], each for I / C columns of a row."""

    values: Array
    scale: Array


QUANTISABLE = "quantisable"
"""Collection, filled by `init` alone, in which layers name the parameters that may be quantised."""


def scale_of(name: str) -> str:
    """What a quantised parameter's scales are called, which lie beside it in the tree."""
    return f"{name}_scale"


def weight(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    shape: tuple[int, ...],
    dtype: Any,
    layout: Layout = WHOLE,
) -> Array | Scaled:
    """A parameter of shape [..., O, I] that is used in products alone, and so may be quantised."""
    initialising = not module.has_variable("params", name)
    values = parameter(module, name, init, shape, dtype, layout)
    if initialising:
        module.put_variable(QUANTISABLE, name, ())
    if not module.has_variable("params", scale_of(name)):
        return values
    scale = module.get_variable("params", scale_of(name))
    assert scale.shape[:-1] == shape[:-1] and shape[-1] % scale.shape[-1] == 0, (module.path, name, scale.shape, shape)
    return Scaled(values, scale)


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
