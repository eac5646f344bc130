"""The one file between this package's GPU kernels and Mosaic GPU, whose interface changes from one JAX to the next.

Kernels are written for JAX 0.10 to 0.12. They take whole arrays; one that they change is given as a `jax.Ref`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.target import Target

MATRIX = plgpu.Layout.WGMMA  # [64 n, 8 m]: as the tensor cores hold accumulators
ENOUGH_BLOCKS = 264  # thread blocks that fill a GPU: two on each of 132 multiprocessors
OF_ROWS, OF_COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)  # what is one number per row, or per column, of such a matrix


def strided(size: int) -> Any:
    """The layout of a vector in which neighbouring threads have neighbouring numbers; `size` a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((size,), size // 128)


def launch(
    body: Callable[..., None],
    arguments: Sequence[jax.Array | jax.Ref],
    *,
    grid: Mapping[str, int],
    out: Any = (),
    scratch: Mapping[str, Any],
    interpret: Any = None,
    approximate: bool = False,
) -> Any:
    """Run `body(*arguments, *outputs, **scratch)` for each point of the grid, in a thread block of one warpgroup.

    `out` is a pytree of shapes. `interpret` is None, or the simulator's parameters (see `simulator`). `approximate`
    allows the chip's own instructions for exponentials and the like.
    """

    def with_scratch(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), **scratch)

    # `plgpu.kernel` of JAX 0.10 does not take Refs.
    kernel = pl.kernel(
        with_scratch,
        out_type=out,
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        # Lane: what 0.10 does by itself. The inference of layouts that is the default since gives up on some kernels.
        compiler_params=plgpu.CompilerParams(approx_math=approximate, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=False if interpret is None else interpret,
        name=body.__name__,
    )
    return kernel(*arguments)


def for_hopper(target: Target) -> None:
    """NotImplementedError on everything else: the kernels were compiled for nothing else."""
    if target.capability is None:
        raise NotImplementedError("the kernels are for Hopper, an NVIDIA GPU, which this device is not")
    if target.capability != "9.0":
        raise NotImplementedError(f"compute capability {target.capability}: the kernels are for Hopper, which has 9.0")
    mesh = jax.sharding.get_abstract_mesh()
    if not (mesh.empty or mesh.are_all_axes_manual):
        raise NotImplementedError("within a mesh, arrays of all of it: the kernels take a device's share (shard_map)")


def simulator(*, detect_races: bool = True) -> Any:
    """Parameters with which `launch` runs a kernel on CPU: its copies, barriers and accesses one by one."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from 0.11 on

    return InterpretGPUParams(detect_races=detect_races)


def races_seen() -> bool:
    """Whether the simulator has seen a race since it was last asked to start afresh."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    races = gpu_callbacks.get_races()
    return bool(races.races_found)


def operand(*shape: int, columns: int = 64) -> Any:
    """Shared memory for bfloat16 matrices [..., m, n] that the tensor cores take; m a multiple of 8, n of `columns`,
    which are 64 or 32: the same for both operands of a product."""
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def transposed(ref: Any) -> Any:
    """A matrix in shared memory the other way round, as an operand of `wgmma`."""
    if hasattr(plgpu, "transpose_ref"):
        return plgpu.transpose_ref(ref, (1, 0))  # 0.10
    return ref.transpose((1, 0))


def product(a: Any, b: Any) -> jax.Array:
    """a @ b in float32 and layout MATRIX, by the tensor cores; both are operands.

    The simulator knows neither accumulators that begin with a value nor operands in registers: so none has either.
    """
    return sum_of_products((a, b))


def products(*pairs: tuple[Any, Any]) -> tuple[jax.Array, ...]:
    """`product` of each pair; the next is begun before the one before it has ended."""

    def multiply(*totals: Any) -> Any:
        for total, (a, b) in zip(totals, pairs, strict=True):
            plgpu.wgmma(total, a, b)
        return tuple(total[...] for total in totals)

    shapes = [plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32) for a, b in pairs]
    return pl.run_scoped(multiply, *shapes)


def sum_of_products(*pairs: tuple[Any, Any]) -> jax.Array:
    """The sum of `product` of each pair, which have one shape."""

    def multiply(total: Any) -> Any:
        for a, b in pairs:
            plgpu.wgmma(total, a, b)
        return total[...]

    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def matrix(value: float, *shape: int, layout: Any = MATRIX) -> jax.Array:
    """Float32 `value` everywhere, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def index(shape: tuple[int, ...], axis: int) -> jax.Array:
    """[m, n] int32 in layout MATRIX: which row, or column, each entry is in."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


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
