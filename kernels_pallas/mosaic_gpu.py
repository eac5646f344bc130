"""The one file between this package's GPU kernels and Mosaic GPU, whose interface changes from one JAX to the next.

Kernels are written for JAX 0.10 to 0.12. They take whole arrays; one that they change is given as a `jax.Ref`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MATRIX = plgpu.Layout.WGMMA  # [64 n, 8 m]: as the tensor cores hold accumulators
OF_ROWS, OF_COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)  # what is one number per row, or per column, of such a matrix


def launch(
    body: Callable[..., None],
    arguments: Sequence[jax.Array | jax.Ref],
    *,
    grid: Mapping[str, int],
    out: Any = (),
    scratch: Mapping[str, Any],
    interpret: Any = None,
) -> Any:
    """Run `body(*arguments, *outputs, **scratch)` for each point of the grid, in a thread block of one warpgroup.

    `out` is a pytree of shapes. `interpret` is None, or the simulator's parameters (see `simulator`).
    """

    def with_scratch(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), **scratch)

    # `plgpu.kernel` of JAX 0.10 does not take Refs.
    kernel = pl.kernel(
        with_scratch,
        out_type=out,
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name=body.__name__,
    )
    return kernel(*arguments)


def simulator(*, detect_races: bool = True) -> Any:
    """Parameters with which `launch` runs a kernel on CPU: its copies, barriers and accesses one by one."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from 0.11 on

    return InterpretGPUParams(detect_races=detect_races)


def races_seen() -> bool:
    """Whether the simulator has seen a race since it was last asked to start afresh."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    races = gpu_callbacks.get_races()
    return bool(races.races_found)


def load(ref: Any, layout: Any) -> jax.Array:
    """The values of a Ref in registers, in any layout, from memory in any order."""
    where = () if hasattr(plgpu, "store") else ((),)  # 0.10 asks for an index
    return plgpu.load(ref, *where, layout=layout, optimized=False)


def store(ref: Any, values: jax.Array) -> None:
    """Write registers of any layout to a Ref."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = values
