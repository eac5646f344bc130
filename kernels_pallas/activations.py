"""Activations of MLPs and experts, by the names of configs."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def relu2(x: Array) -> Array:
    """max(x, 0)^2 (So et al. 2021, "Primer")."""
    return jnp.square(jnp.maximum(x, 0))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu2": relu2,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "sigmoid": jax.nn.sigmoid,
}


def activate(h: Sequence[Array], activation: str, gate_multiplier: float = 1.0) -> Array:
    """gate and up [..., I] -> act(gate * multiplier) * up [..., I]; up alone -> act(up)."""
    act = ACTIVATIONS[activation]
    if len(h) == 1:
        return act(h[0])
    gate, up = h
    return act(gate * gate_multiplier) * up
