"""The place of a checkpoint tensor in the parameter tree: its view of a parameter, and the count of what is covered.

The safetensors loader fills places; the exporter reads them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jhybrid.weights.names import TensorName

Place = tuple[str, ...]


def leaves(tree: Mapping[str, Any], at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(path, leaf) of every leaf of a nested dict, in order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def nest(flat: Mapping[Place, Any]) -> dict[str, Any]:
    """The nested dict whose `leaves` are `flat`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def dotted(path: Place) -> str:
    """How messages write a parameter's path."""
    return ".".join(path)


def slices(name: TensorName) -> tuple[Any, ...]:
    """The index expression of the name's place in its parameter; always gives a view, also of one element."""
    index = () if name.index is None else (name.index,)
    rows = () if name.rows is None else (slice(*name.rows),)
    return (*index, *rows, ...)


def place_shape(name: TensorName, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the name's place in a parameter of this shape. A place outside it is a bug of the family's."""
    axes = list(shape)
    if name.index is not None:
        assert 0 <= name.index < axes[0], f"{name} lies outside the parameter's shape {shape}"
        axes.pop(0)
    if name.rows is not None:
        assert 0 <= name.rows[0] < name.rows[1] <= axes[0], f"{name} lies outside the shape {shape}"
        axes[0] = name.rows[1] - name.rows[0]
    return tuple(axes)


def stored_shape(name: TensorName, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the whole tensor in a file, but for axes of length 1; `shape` is the parameter's."""
    place = place_shape(name, shape)
    if name.file_rows is None:
        return place
    assert name.file_rows.count == place[0], f"{name}: its place has shape {place}"
    return (name.file_rows.groups * name.file_rows.size, *place[1:])


def taken(name: TensorName, tensor: np.ndarray) -> np.ndarray:
    """What the name's place takes of a file's tensor: [groups, rows, ...], a view, or the tensor itself."""
    rows = name.file_rows
    if rows is None:
        return tensor
    return tensor.reshape(rows.groups, rows.size, *tensor.shape[1:])[:, rows.start : rows.stop]


def whole(names: Sequence[TensorName]) -> bool:
    """Whether the places of these names, all of one tensor, each take the whole of it, or together each row once."""
    parts = sorted((n.file_rows.start, n.file_rows.stop, n.file_rows.size) for n in names if n.file_rows is not None)
    if not parts:
        return True
    ends = [0, *(stop for _, stop, _ in parts)]
    together = [start for start, *_ in parts] == ends[:-1] and {size for *_, size in parts} == {ends[-1]}
    return together and len(parts) == len(names)


def same_but_for_ones(left: Iterable[int], right: Iterable[int]) -> bool:
    """Whether two shapes are equal once their axes of length 1 are dropped."""
    return [n for n in left if n != 1] == [n for n in right if n != 1]


class Coverage:
    """How often each row of one parameter has been claimed by a name."""

    def __init__(self, shape: tuple[int, ...], names: Iterable[TensorName]):
        names = list(names)
        axes = 2 if any(n.index is not None and n.rows is not None for n in names) else 1
        whole = all(n.index is None and n.rows is None for n in names)
        self._counts = np.zeros(() if whole else shape[:axes], np.uint16)

    def of(self, name: TensorName) -> np.ndarray:
        """The counts of the name's place, a view."""
        return self._counts[slices(name)]

    def claim(self, name: TensorName) -> None:
        """Count the name's place once more."""
        self.of(name)[...] += 1

    @property
    def gaps(self) -> bool:
        """Whether some of the parameter is claimed by no name."""
        return bool((self._counts == 0).any())

    @property
    def overlaps(self) -> bool:
        """Whether some of the parameter is claimed by more than one name."""
        return bool((self._counts > 1).any())
