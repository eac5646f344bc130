"""Which GPUs the kernels are for, and where in a program that is spread over several."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from kernels_pallas.mosaic_gpu import for_hopper
from kernels_pallas.target import Target

HOPPER = Target(capability="9.0")


def test_only_hopper_has_kernels() -> None:
    for_hopper(HOPPER)
    for capability in (None, "8.0", "10.0"):
        with pytest.raises(NotImplementedError, match="for Hopper"):
            for_hopper(Target(capability=capability))


@pytest.mark.parametrize("devices", [1, 8])
def test_on_a_mesh_kernels_take_a_devices_share_alone(devices: int) -> None:
    def share(x: jax.Array) -> jax.Array:
        for_hopper(HOPPER)
        return x

    with jax.sharding.use_abstract_mesh(AbstractMesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))):
        along = PartitionSpec("tensor")
        shared = jax.shard_map(share, in_specs=along, out_specs=along, check_vma=False)
        assert jax.eval_shape(shared, jnp.ones(8)).shape == (8,)
        with pytest.raises(NotImplementedError, match="shard_map"):
            for_hopper(HOPPER)
