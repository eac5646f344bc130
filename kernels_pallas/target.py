"""Target: where the ops of a step run, and which implementation of each. Spans carry it, as a static field."""

from dataclasses import dataclass
from typing import Any

from kernels_pallas.chips import Chip


@dataclass(frozen=True)
class Target:
    """The device that kernels are compiled for, and the implementations that are forced.

    An op tries its implementations in order, the device's own first, and falls to the next where one raises
    NotImplementedError; a forced one refuses instead.
    """

    chip: Chip | None = None  # the TPU; None elsewhere
    attention: str | None = None  # forced for paged_attention
    ssm: str | None = None  # forced for the ops with recurrent state
    moe: str | None = None  # forced for experts
    simulate: Any = None  # parameters of the simulator of TPU, or GPU, kernels, to run them in it
    capability: str | None = None  # the NVIDIA GPU's compute capability, as "9.0"; None elsewhere

    @property
    def order(self) -> tuple[str, ...]:
        """The names of implementations to try, in order."""
        if self.chip is not None:
            return ("tpu", "xla")
        return ("gpu", "parallel", "xla") if self.capability is not None else ("xla",)


NO_ACCELERATOR = Target()
