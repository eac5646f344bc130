"""The simulator of TPU kernels, as tests run it: DMAs and semaphores, races, memory that nobody wrote."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.chips import CHIPS
from kernels_pallas.target import Target


def simulated(moment: str, chip: str = "v5e") -> Target:
    """A target whose DMAs are done when they start ("eager") or when they are waited for ("on_wait").

    A store that nobody waits for shows with "eager", what is read before it has come with both.
    """
    simulate = pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        dma_execution_mode=moment,  # pyright: ignore[reportArgumentType]
        out_of_bounds_reads="raise",
    )
    return Target(CHIPS[chip], simulate=simulate)


def simulated_gpu() -> Target:
    """A Hopper GPU whose kernels run in Mosaic's simulator, which detects races."""
    from kernels_pallas.mosaic_gpu import simulator

    return Target(capability="9.0", simulate=simulator())


@contextmanager
def races_of() -> Iterator[Callable[[], bool]]:
    """What it gives says whether any kernel that ran meanwhile had a race. JAX itself remembers the last kernel's."""
    states, Original = [], interpret_pallas_call.RaceDetectionState

    def remembered(*args, **kwargs):
        states.append(Original(*args, **kwargs))
        return states[-1]

    interpret_pallas_call.RaceDetectionState = remembered
    try:
        yield lambda: any(state.races_found for state in states)
    finally:
        interpret_pallas_call.RaceDetectionState = Original
        pltpu.reset_tpu_interpret_mode_state()
