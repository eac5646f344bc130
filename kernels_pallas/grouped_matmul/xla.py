"""grouped_matmul in plain JAX: a loop over the groups that have rows on CPU. GPUs and TPUs have forms of their own.

On CPU `ragged_dot` multiplies every row by every group's weight (110 ms against 2 ms for 8 rows and 32 groups of
1024 x 512), so the loop there does the true products only, and reads only the weights that are hit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import products
from kernels_pallas.grouped_matmul import tiles, tpu
from kernels_pallas.grouped_matmul.tiles import tile_rows
from kernels_pallas.scaled_matmul.xla import whole

WEIGHT_TILE_BYTES = 1 << 17  # of the part of a weight that stays in a core's cache while rows pass over it


def grouped_matmul(x: Array, weight: Array, group_sizes: Array, scale: Array | None = None) -> Array:
    """See the package. Differentiable in x and weight."""
    inputs, cpu = (x, weight, group_sizes), _differentiable
    if scale is not None:
        inputs, cpu = (*inputs, scale), _by_groups
    return lax.platform_dependent(
        *inputs, cpu=cpu, cuda=tiles.grouped_matmul, tpu=tpu.grouped_matmul, default=_ragged_dot
    )


def _ragged_dot(x: Array, weight: Array, group_sizes: Array, scale: Array | None = None) -> Array:
    if scale is not None:
        weight = whole(weight, scale, x.dtype)
    y = lax.ragged_dot(x, weight.swapaxes(1, 2), group_sizes, preferred_element_type=jnp.float32)
    covered = jnp.arange(x.shape[0]) < group_sizes.sum()
    return jnp.where(covered[:, None], y, 0.0).astype(x.dtype)


def _by_groups(x: Array, weight: Array, group_sizes: Array, scale: Array | None = None) -> Array:
    """[T, O]: for each non-empty group, for each tile of its weight's rows, for each tile of its rows of x."""
    tokens, (groups, out, width) = x.shape[0], weight.shape
    tile = tile_rows(tokens, groups)
    columns = min(out, max(1, WEIGHT_TILE_BYTES // (4 * width)))
    starts = jnp.cumsum(group_sizes) - group_sizes
    padded = jnp.pad(x.astype(jnp.float32), ((0, tile - 1), (0, 0)))  # a tile may reach past the last row

    def group(g: Array, y: Array) -> Array:
        def weight_tile(j: Array, y: Array) -> Array:
            column = jnp.minimum(j * columns, out - columns)
            # Tied to the loop's index, lest XLA convert all weights to float32 ahead of the loop.
            all_groups, at = lax.optimization_barrier((weight, column))
            part = lax.dynamic_slice(all_groups, (g, at, 0), (1, columns, width))[0].astype(jnp.float32)
            if scale is not None:
                part = whole(part, lax.dynamic_slice(scale, (g, at, 0), (1, columns, scale.shape[2]))[0], part.dtype)

            def rows(i: Array, y: Array) -> Array:
                row = starts[g] + i * tile
                mine = i * tile + jnp.arange(tile) < group_sizes[g]
                new = products.on_cpu(lax.dynamic_slice_in_dim(padded, row, tile), part, part.dtype)
                old = lax.dynamic_slice(y, (row, column), (tile, columns))
                return lax.dynamic_update_slice(y, jnp.where(mine[:, None], new, old), (row, column))

            return lax.fori_loop(0, -(-group_sizes[g] // tile), rows, y)

        return lax.fori_loop(0, -(-out // columns), weight_tile, y)

    y = _for_hit_groups(group, group_sizes, jnp.zeros((tokens + tile - 1, out), jnp.float32))
    return y[:tokens].astype(x.dtype)


def _for_hit_groups(body: Callable[[Array, Array], Array], group_sizes: Array, value: Array) -> Array:
    """`value` after `value = body(g, value)` for every group g that has rows."""
    groups = group_sizes.shape[0]
    index = jnp.where(group_sizes > 0, jnp.arange(groups, dtype=jnp.int32), groups)
    following = jnp.append(lax.cummin(index, reverse=True), jnp.int32(groups))
    _, value = lax.while_loop(
        lambda carry: carry[0] < groups,
        lambda carry: (following[carry[0] + 1], body(carry[0], carry[1])),
        (following[0], value),
    )
    return value


def _forward(x: Array, weight: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _by_groups(x, weight, group_sizes), (x, weight, group_sizes)


def _backward(kept: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    """dx is the same product with transposed weights; dweight[g] sums over the rows of g."""
    x, weight, group_sizes = kept
    tile = tile_rows(x.shape[0], weight.shape[0])
    starts = jnp.cumsum(group_sizes) - group_sizes
    dy_rows, x_rows = (jnp.pad(a.astype(jnp.float32), ((0, tile - 1), (0, 0))) for a in (dy, x))

    def group(g: Array, dweight: Array) -> Array:
        def rows(i: Array, total: Array) -> Array:
            mine = (i * tile + jnp.arange(tile) < group_sizes[g])[:, None]
            left = jnp.where(mine, lax.dynamic_slice_in_dim(dy_rows, starts[g] + i * tile, tile), 0.0)
            right = jnp.where(mine, lax.dynamic_slice_in_dim(x_rows, starts[g] + i * tile, tile), 0.0)
            return total + left.T @ right

        total = lax.fori_loop(0, -(-group_sizes[g] // tile), rows, jnp.zeros(weight.shape[1:], jnp.float32))
        return lax.dynamic_update_index_in_dim(dweight, total, g, 0)

    dweight = _for_hit_groups(group, group_sizes, jnp.zeros(weight.shape, jnp.float32))
    return _by_groups(dy, weight.swapaxes(1, 2), group_sizes), dweight.astype(weight.dtype), None


@jax.custom_vjp
def _differentiable(x: Array, weight: Array, group_sizes: Array) -> Array:
    return _by_groups(x, weight, group_sizes)


_differentiable.defvjp(_forward, _backward)
