"""Gpu: what is known of an NVIDIA GPU that need not be at hand, and the compiler's stand-in for one.

XLA compiles to machine code for a described GPU without a driver or a card; that needs the wheels of the
`gpu-compile` extra alone. Rates are the published ones.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }} device_memory_size: {memory} memory_bandwidth: {bandwidth}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{kind}"
"""


@dataclass(frozen=True)
class Gpu:
    """A kind of NVIDIA GPU: memory in bytes, rates per second."""

    name: str
    kind: str  # what `jax.Device.device_kind` says
    memory: int
    bandwidth: float  # bytes of device memory
    matrix_flops: float  # bfloat16, dense
    cores: int = 132  # multiprocessors
    clock: float = 1.98e9
    capability: str = "9.0"  # what `jax.Device.compute_capability` says

    def devices(self, count: int = 1) -> list[Any]:
        """Devices of one machine to compile for, on which nothing can run. ModuleNotFoundError without the plugin's
        wheels."""
        return list(_devices(self, count))

    def place(self, tree: Any) -> Any:
        """The shapes of a pytree of arrays or shapes, as arguments of a program compiled for this GPU."""
        sharding = SingleDeviceSharding(self.devices()[0])
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    def floors(self, moved_bytes: float, flops: float = 0.0, exponentials: float = 0.0) -> dict[str, float]:
        """The least seconds that moving so many bytes takes, and so many bfloat16 operations and exponentials: each
        multiprocessor has 16 of those in a clock."""
        return {
            "bandwidth": moved_bytes / self.bandwidth,
            "tensor cores": flops / self.matrix_flops,
            "exponentials": exponentials / (16 * self.cores * self.clock),
        }

    def floor_seconds(self, moved_bytes: float, flops: float = 0.0, exponentials: float = 0.0) -> float:
        """The greatest of `floors`."""
        return max(self.floors(moved_bytes, flops, exponentials).values())


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", "NVIDIA H100 80GB HBM3", 85_000_000_000, 3.35e12, 790e12),
        Gpu("h200", "NVIDIA H200", 150_000_000_000, 4.8e12, 790e12),
    )
}


@functools.cache
def _devices(gpu: Gpu, count: int) -> tuple[Any, ...]:
    described = HOPPER.format(memory=gpu.memory, bandwidth=int(gpu.bandwidth), kind=gpu.kind)
    name = f"1x1x{count}"  # partitions, machines, devices of a machine
    options = {"topology": name, "target_config": described}
    try:
        return tuple(topologies.get_topology_desc(platform="cuda", topology_name=name, **options).devices)
    except NotImplementedError as error:
        raise ModuleNotFoundError(
            f"no compiler for {gpu.kind}: install the gpu-compile extra; without a GPU, set JAX_PLATFORMS=cpu"
        ) from error
