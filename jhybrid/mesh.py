"""Mesh: the devices that one model is spread over, and which axis of an array is shared out among them by what name.

Layers name what the axes of their parameters and cache parts consist of (heads, channels, experts, ...); `RULES` says
along which axis of the mesh such units go. The compiler partitions what lies between (GSPMD); the ops, which it could
not see into, run on each device's share (`over_shards`). What does not divide evenly is held, and computed, by all.

The mesh in use is JAX's own context: `using(mesh)` is around whatever describes a model, traces or compiles it. Outside
of one nothing is shared out.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TENSOR = "tensor"
"""The axis of a mesh along which the parts of one layer lie."""
RULES = {
    "heads": TENSOR,  # of attention, Mamba2 and the gated delta rule, with their keys' heads or groups
    "channels": TENSOR,  # of Mamba1 and short convolutions
    "intermediate": TENSOR,  # of an MLP
    "experts": TENSOR,
    "vocabulary": TENSOR,
}


def make_mesh(devices: Sequence[Any]) -> Mesh:
    """These devices, over which a model is spread in this order."""
    return Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def using(mesh: Mesh | None) -> Iterator[None]:
    """Within, the mesh is in use, in this thread. It may be of devices that are only compiled for."""
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def shards(units: str, count: int, groups: int | None = None) -> int:
    """Among how many shards `count` units are shared out, with the `groups` of neighbours that they belong to: 1 if
    they do not divide evenly. Where there are more shards than groups, a group is held by several."""
    size = jax.sharding.get_abstract_mesh().shape.get(RULES[units], 1)
    fits = count % size == 0 and (groups is None or groups % size == 0 or size % groups == 0)
    return size if fits else 1


@dataclass(frozen=True)
class Piece:
    """A run of rows of a parameter: `units` times `width` of them, each unit held `copies` times."""

    units: int
    width: int = 1
    copies: int = 1

    @property
    def rows(self) -> int:
        """As checkpoints have them."""
        return self.units * self.width

    @property
    def held(self) -> int:
        return self.rows * self.copies


@jax.tree_util.register_static
@dataclass(frozen=True)
class Layout:
    """How a parameter is shared out: evenly, along `axis`. Where its rows (axis 0) are several `pieces`, one after the
    other in checkpoints, they are held shard by shard, so that each has its share of every piece."""

    shards: int = 1
    axis: int = 0
    pieces: tuple[Piece, ...] = ()

    @property
    def held(self) -> int:
        """Rows that are held."""
        return sum(piece.held for piece in self.pieces)

    @property
    def shared_axis(self) -> int | None:
        """The axis along which it is shared out; None: held by all."""
        return None if self.shards == 1 else self.axis

    @property
    def order(self) -> np.ndarray | None:
        """The row in a checkpoint of each row that is held; None: they are the same."""
        if self.shards == 1 or not self.pieces:
            return None
        starts = np.cumsum([0, *(piece.rows for piece in self.pieces)])
        rows = []
        for shard in range(self.shards):
            for start, piece in zip(starts, self.pieces, strict=False):
                units = np.repeat(np.arange(piece.units), piece.copies).reshape(self.shards, -1)[shard]
                rows.append((start + units[:, None] * piece.width + np.arange(piece.width)).reshape(-1))
        return np.concatenate(rows)

    def arranged(self, array: Any) -> Any:
        """An array as checkpoints have it, as it is held."""
        return array if self.order is None else array[self.order]


WHOLE = Layout()
AS_STORED: Mapping[tuple[str, ...], Layout] = {}
"""No parameter has a layout, by its path: all are held as checkpoints have them."""


def along(axis: int | None) -> PartitionSpec:
    """An array shared out along an axis; None: held by all."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TENSOR)


def placed(mesh: Mesh | None, shape: Any, axis: int | None = None) -> jax.ShapeDtypeStruct:
    """A shape with where such an array lies; without a mesh, nowhere in particular."""
    sharding = None if mesh is None else NamedSharding(mesh, along(axis))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """An array's, or a shape's, with where it lies on a mesh."""
    sharding = array.sharding if isinstance(array.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def local_shape(shape: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Of each device's share of an array."""
    return shape.shape if shape.sharding is None else shape.sharding.shard_shape(shape.shape)


def split(x: Array, widths: Sequence[int], shards: int) -> list[Array]:
    """x [T, sum of `widths`], held shard by shard -> [T, width] each, their shares in the order of the shards."""
    ends = np.cumsum(widths)[:-1] // shards
    if shards == 1:
        return jnp.split(x, ends, axis=1)
    return [a.reshape(len(x), -1) for a in jnp.split(x.reshape(len(x), shards, -1), ends, axis=2)]


def on_all(x: Array) -> Array:
    """x, whole on every device: sums over shards are taken here."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def over_shards(
    function: Callable[..., Any], shards: int, inputs: Sequence[int | None], outputs: Sequence[int | None] | int | None
) -> Callable[..., Any]:
    """`function` on each device's share of the arguments, by the axes along which these and its results are shared out.

    With one shard every device does the whole. Without a mesh, `function` itself.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function

    def specs(axes: Any) -> Any:
        if isinstance(axes, Sequence):
            return tuple(specs(axis) for axis in axes)
        return along(axes if shards > 1 else None)

    return jax.shard_map(function, in_specs=specs(inputs), out_specs=specs(outputs), check_vma=False)


def summed_over_shards(function: Callable[..., Array], shards: int, inputs: Sequence[int | None]) -> Callable[..., Any]:
    """As `over_shards`, of a function whose results on all shards are to be added up."""

    def total(*arguments: Any) -> Array:
        y = function(*arguments)
        return y if shards == 1 else jax.lax.psum(y, TENSOR)

    if jax.sharding.get_abstract_mesh().empty:
        return function
    return over_shards(total, shards, inputs, None)


def shard_index(shards: int) -> Array | int:
    """Within `over_shards`: which shard this is."""
    return 0 if shards == 1 else jax.lax.axis_index(TENSOR)
