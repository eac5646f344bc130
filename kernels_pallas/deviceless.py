"""Compiling for a TPU on a machine that has none: libtpu's compiler for a named topology, and no device."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.chips import Chip

LONGEST_SIDE = 16

# libtpu is configured by the environment alone. These keep it from looking for a TPU and for a second process.
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def devices_of(topology: str) -> list[Any]:
    """Devices of one host to compile for, on which nothing can run; `topology` is KIND:SHAPE, such as "v5e:2x4".

    Raises ModuleNotFoundError without libtpu, ValueError for a topology that there is not.
    """
    import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]

    shape = topology.partition(":")[2].split("x")
    # A longer side ends the process: it is more than libtpu knows of one host.
    if not all(length.isdecimal() and 1 <= int(length) <= LONGEST_SIDE for length in shape):
        raise ValueError(f"{topology!r} is not KIND:SHAPE, such as v5e:2x4, with sides of 1 to {LONGEST_SIDE}")
    bounds = [*map(int, shape), 1][:3]

    for name, value in SETTINGS.items():
        os.putenv(name, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, chips_per_host_bounds=bounds)
        return list(found.devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{topology!r} is no topology of TPUs: {error}") from error


def compile_for(chip: Chip, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """`function` compiled for one device of `chip`; `args` are pytrees of arrays or shapes, and are not read.

    Raises ModuleNotFoundError without libtpu, and what the compiler raises: vector memory that overflows, misaligned
    tiles, operations that the chip lacks.
    """
    mesh = Mesh(np.array(devices_of(chip.topology)[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()
