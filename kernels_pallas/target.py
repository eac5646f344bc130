"""Target: where the ops of a step run, and which implementation of each. Spans carry it, as a static field."""

from dataclasses import dataclass

from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.chips import Chip


@dataclass(frozen=True)
class Target:
    """The chip kernels are compiled for, and the implementations that are forced.

    An op tries its implementations in order, the chip's own first, and falls to the next where one raises
    NotImplementedError; a forced one refuses instead.
    """

    chip: Chip | None = None  # None: no accelerator that has kernels of its own
    attention: str | None = None  # forced for paged_attention
    ssm: str | None = None  # forced for the ops with recurrent state
    simulate: pltpu.InterpretParams | None = None  # run TPU kernels in the simulator


NO_ACCELERATOR = Target()
