"""Chip: what a kernel may assume of the TPU it is compiled for. Kernels take it as an argument and look at no device.

Sizes are of one TensorCore, which is what a JAX device is (on v5p two, of which a kernel without a parallel grid
dimension uses one). Bandwidth and peaks are the published ones; the clock is the peak over the multiply-adds that the
matrix units do per cycle.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Chip:
    """A TPU generation: names, memories in bytes, rates per second of one JAX device."""

    name: str
    kinds: tuple[str, ...]  # what `jax.Device.device_kind` says
    topology: str  # the smallest slice that libtpu compiles for
    vmem: int
    hbm: int
    bandwidth: float  # bytes of HBM
    matrix_flops: float  # bfloat16
    clock: float
    fp8: bool  # whether float8_e4m3fn becomes bfloat16 by an instruction; others have one for float8_e4m3b11fnuz

    def __str__(self) -> str:
        return self.name


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), "v5e:2x2", 128 * MIB, 16_000_000_000, 819e9, 197e12, 1.5e9, False),
        Chip("v5p", ("TPU v5", "TPU v5p"), "v5p:2x2x1", 64 * MIB, 95_000_000_000, 2765e9, 459e12, 1.75e9, False),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), "v6e:2x2", 128 * MIB, 32_000_000_000, 1640e9, 918e12, 1.75e9, False),
        Chip("tpu7x", ("TPU7x",), "tpu7x:2x2x1", 64 * MIB, 96_000_000_000, 3690e9, 1153.5e12, 2.2e9, True),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that calls itself `device_kind`; None for what is none of `CHIPS`."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)
