"""grouped_matmul in plain JAX for GPUs: batched products of tiles of rows with the weights of their groups.

`ragged_dot` becomes one dense product over all groups there, and transposes every weight first. Here weights are
gathered a few groups at a time, only those that have rows, and only true products are done.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.scaled_matmul.xla import whole
from kernels_pallas.zeros import zeros_after

MOST_TILE_ROWS = 64
GATHERED_BYTES = 1 << 26  # of weights beside the originals


def grouped_matmul(x: Array, weight: Array, group_sizes: Array, scale: Array | None = None) -> Array:
    """See the package. Differentiable in x and weight, by way of `ragged_dot`."""
    return _differentiable(x, weight, group_sizes) if scale is None else _by_tiles(x, weight, group_sizes, scale)


def tile_rows(tokens: int, groups: int) -> int:
    """About the rows of one group, as a power of two: larger tiles waste products, smaller ones repeat loads."""
    return min(MOST_TILE_ROWS, tokens, 1 << (-(-tokens // groups) - 1).bit_length())


def _by_tiles(x: Array, weight: Array, group_sizes: Array, scale: Array | None = None) -> Array:
    """[T, O]: some tiles in each turn, each with a copy of its group's weight."""
    (T, I), (E, O, _) = x.shape, weight.shape
    tile = tile_rows(T, E)
    most = T // tile + min(E, T)  # all full tiles, and one that is not for every group
    at_once = min(most, max(1, GATHERED_BYTES // (O * I * x.dtype.itemsize)))
    tiles = -(-group_sizes // tile)
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(group_sizes) - group_sizes

    def some(i: Array, y: Array) -> Array:
        m = i * at_once + jnp.arange(at_once)
        group = jnp.minimum(jnp.searchsorted(ends, m, side="right"), E - 1)
        offset = (m - (ends - tiles)[group])[:, None] * tile + jnp.arange(tile)
        mine = (m < ends[-1])[:, None] & (offset < group_sizes[group][:, None])
        rows = jnp.where(mine, starts[group][:, None] + offset, T)
        part = x.at[rows].get(mode="fill", fill_value=0)  # [at_once, tile, I]
        # Tied to the turn, lest XLA convert all weights ahead of the loop.
        all_groups, group = lax.optimization_barrier((weight, group))
        held = all_groups[group]
        if scale is not None:
            held = jax.vmap(whole, (0, 0, None))(held, scale[group], x.dtype)
        product = jnp.einsum("mti,moi->mto", part, held, preferred_element_type=jnp.float32)
        return y.at[rows].set(product.astype(y.dtype), mode="drop")

    return lax.fori_loop(0, -(-ends[-1] // at_once), some, zeros_after(x, (T, O)))


_differentiable = jax.custom_vjp(lambda x, weight, group_sizes: _by_tiles(x, weight, group_sizes))


def _forward(x: Array, weight: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _by_tiles(x, weight, group_sizes), (x, weight, group_sizes)


def _backward(kept: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, weight, group_sizes = kept
    product = lambda x, weight: lax.ragged_dot(x, weight.swapaxes(1, 2), group_sizes)  # noqa: E731
    return *jax.vjp(product, x, weight)[1](dy), None


_differentiable.defvjp(_forward, _backward)
