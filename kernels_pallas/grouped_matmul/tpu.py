"""grouped_matmul on TPU: JAX's own kernel (megablox), which takes weights as they lie in memory.

`ragged_dot` does no more products there, but has every weight transposed first, in every step: for 16 experts of
1856 x 2688 (bfloat16) 157 MiB are written and read again beside the weights themselves.

Which of a weight's last two axes lies along the lanes is the compiler's choice: the one that takes less padding. The
kernel takes either, and is told which.
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.scaled_matmul.xla import whole

MOST_ROWS = 128  # of a tile of x
MOST_COLUMNS = 512  # of a tile of the product
MOST_BYTES = 1 << 22  # of a tile of a weight, of which there are two in vector memory
SUBLANES, LANES = 8, 128


def grouped_matmul(
    x: Array, weight: Array, group_sizes: Array, scale: Array | None = None, *, interpret: bool = False
) -> Array:
    """See the package. Differentiable in x and weight."""
    covered = jnp.arange(x.shape[0]) < group_sizes.sum()
    y = rows_of_groups(x, weight, group_sizes, scale, interpret=interpret)
    return jnp.where(covered[:, None], y, 0)


def rows_of_groups(
    x: Array, weight: Array, group_sizes: Array, scale: Array | None = None, *, interpret: bool = False
) -> Array:
    """As `grouped_matmul`, but rows past the sum of `group_sizes` may be anything."""
    from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

    if scale is not None:
        weight = whole(weight, scale, x.dtype)
    (T, I), O = x.shape, weight.shape[1]
    rows, columns = min(MOST_ROWS, -(-T // 16) * 16), min(MOST_COLUMNS, O)
    width = min(I, MOST_BYTES // columns // weight.dtype.itemsize // LANES * LANES)
    padded = jnp.pad(x, [(0, -T % rows), (0, 0)])
    as_stored = not outputs_on_lanes(O, I)
    weight = weight if as_stored else weight.swapaxes(1, 2)
    return gmm(padded, weight, group_sizes, x.dtype, (rows, width, columns), None, None, as_stored, interpret)[:T]


def outputs_on_lanes(outputs: int, inputs: int) -> bool:
    """Whether the compiler lays out a parameter [E, outputs, inputs] with its outputs along the lanes."""

    def padded(rows: int, lanes: int) -> int:
        return -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES

    return padded(inputs, outputs) < padded(outputs, inputs)
