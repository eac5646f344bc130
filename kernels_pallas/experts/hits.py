"""Which experts a step's tokens chose, for kernels that read only those."""

import jax.numpy as jnp
from jax import Array


def hits(chosen: Array, count: int) -> tuple[Array, Array]:
    """The experts of `count` that any token chose, in order and then anything [count] int32, and how many those are.

    By comparisons and sums, which fuse; a sort would not.
    """
    ids = jnp.arange(count)
    hit = jnp.any(chosen.reshape(-1, 1) == ids, axis=0)
    place = jnp.sum(hit[:, None] & (ids[:, None] < ids), axis=0)
    listed = jnp.sum(jnp.where(hit & (place == ids[:, None]), ids, 0), axis=1, dtype=jnp.int32)
    return listed, jnp.sum(hit, dtype=jnp.int32)
