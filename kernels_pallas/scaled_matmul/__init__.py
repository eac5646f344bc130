"""scaled_matmul: the product with a weight of 8 bits per number, which a scale per row, or more, makes whole."""

from functools import partial
from typing import Any

import jax
from jax import Array

from kernels_pallas.implementations import choose
from kernels_pallas.scaled_matmul import reference, xla

IMPLEMENTATIONS = {"reference": reference.scaled_matmul, "xla": xla.scaled_matmul}


@partial(jax.jit, static_argnames=("implementation",))
def scaled_matmul(x: Array, weight: Array, scale: Array, *, implementation: str = "xla") -> Array:
    """`y[t] = (weight * scale) @ x[t]`, accumulated in float32.

    Args:
      x: [T, I].
      weight: [O, I] of int8 or an 8-bit float, (out, in) as checkpoints store it.
      scale: [O, C] float32; column c is the scale of the c-th of C equal runs of columns of `weight`.

    Returns [T, O] in x's dtype. Not differentiable.
    """
    run: Any = choose("scaled_matmul", IMPLEMENTATIONS, implementation)
    return run(x, weight, scale)
