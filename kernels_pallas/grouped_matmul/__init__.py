"""grouped_matmul: rows sorted by group, each multiplied by its group's own weight (experts of an MoE layer)."""

from functools import partial
from typing import Any

import jax
from jax import Array

from kernels_pallas.grouped_matmul import reference, tiles, xla
from kernels_pallas.implementations import choose

IMPLEMENTATIONS = {"reference": reference.grouped_matmul, "tiles": tiles.grouped_matmul, "xla": xla.grouped_matmul}


@partial(jax.jit, static_argnames=("implementation",))
def grouped_matmul(
    x: Array, weight: Array, group_sizes: Array, scale: Array | None = None, *, implementation: str = "xla"
) -> Array:
    """`y[t] = weight[g(t)] @ x[t]`, accumulated in float32.

    Args:
      x: [T, I], the rows of group 0 first, then those of group 1, and so on.
      weight: [E, O, I], (out, in) as checkpoints store it.
      group_sizes: [E] int32, rows of each group; may sum to less than T.
      scale: [E, O, C] float32 of a weight of 8 bits per number, as in `scaled_matmul`; not differentiable with one.

    Returns [T, O] in x's dtype; rows past the sum of `group_sizes` are exactly 0, whatever they hold in `x`.
    """
    run: Any = choose("grouped_matmul", IMPLEMENTATIONS, implementation)
    return run(x, weight, group_sizes, scale)
