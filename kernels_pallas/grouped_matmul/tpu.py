"""grouped_matmul on TPU: JAX's own kernel (megablox), which takes weights as they are stored.

`ragged_dot` does no more products there, but has every weight transposed first, in every step: for 16 experts of
1856 x 2688 (bfloat16) 157 MiB are written and read again beside the weights themselves.
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.scaled_matmul.xla import whole

MOST_ROWS = 128  # of a tile of x
MOST_COLUMNS = 512  # of a tile of the product
MOST_BYTES = 1 << 22  # of a tile of a weight, of which there are two in vector memory


def grouped_matmul(
    x: Array, weight: Array, group_sizes: Array, scale: Array | None = None, *, interpret: bool = False
) -> Array:
    """See the package. Differentiable in x and weight."""
    from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

    if scale is not None:
        weight = whole(weight, scale, x.dtype)
    (T, I), O = x.shape, weight.shape[1]
    rows, columns = min(MOST_ROWS, -(-T // 16) * 16), min(MOST_COLUMNS, O)
    width = min(I, MOST_BYTES // columns // weight.dtype.itemsize // 128 * 128)
    padded = jnp.pad(x, [(0, -T % rows), (0, 0)])
    y = gmm(padded, weight, group_sizes, x.dtype, (rows, width, columns), None, None, True, interpret)[:T]
    covered = jnp.arange(T) < group_sizes.sum()
    return jnp.where(covered[:, None], y, 0)
