"""Sharding of scales: they follow the weights that they belong to. The loaders of both kinds of checkpoint ask."""

import jax


def along_rows(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Where the scales of a parameter go: with its rows, and to all that share its columns."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:-1]))
