"""Router: the map from (layer, part) to an array and the first row of that layer in it.

Mixers declare `Part`s; the router lays all layers' parts of one name and shape out in one stacked array
(few arguments per step, one allocation per kind) and answers where a layer's rows begin. Layers, the
ledger and the memory plan ask it for facts; nobody asks for a class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

Unit = Literal["slot", "page"]

HELD_AS = {"fp8": "uint8"}
"""Dtypes of parts whose arrays have the numbers' bits: see `kernels_pallas/words.py`."""


@dataclass(frozen=True)
class Part:
    """One named array of a layer's cache: its shape per slot, or per page, and its dtype, "fp8" being e4m3."""

    name: str  # "kv", "ssm", "conv", ...
    unit: Unit
    shape: tuple[int, ...]  # of one slot or one page
    dtype: str
    vector: int | None = None  # of a state: elements in a row, along the last axis, that belong to one head
    shards: int = 1  # of the mesh, among which it is shared out
    shared_axis: int = -1  # of `shape`, along which it is

    @property
    def elements(self) -> int:
        """Numbers in one slot or page of one layer."""
        return math.prod(self.shape)

    @property
    def array_dtype(self) -> jnp.dtype:
        """Of the array that holds it."""
        return jnp.dtype(HELD_AS.get(self.dtype, self.dtype))

    @property
    def bytes(self) -> int:
        """Bytes of one slot or page of one layer on one device."""
        return self.elements // self.shards * self.array_dtype.itemsize

    @property
    def axis(self) -> int | None:
        """Of a cache array, along which it is shared out."""
        return None if self.shards == 1 else 1 + self.shared_axis % len(self.shape)


@dataclass(frozen=True)
class Place:
    """Where a layer's rows of a part are: the array's name, and the layer's index within that array."""

    array: str
    index: int


class Router:
    """Built once from the parts each layer declares: `layer_parts[i]` are those of layer i (often none)."""

    def __init__(self, layer_parts: Sequence[Sequence[Part]]):
        self._places: dict[tuple[int, str], Place] = {}
        self._arrays: dict[str, tuple[Part, int]] = {}  # array name -> (part, layers)
        for layer, parts in enumerate(layer_parts):
            for part in parts:
                name = self._array_name(part)
                stored, layers = self._arrays.get(name, (part, 0))
                assert stored == part, (name, stored, part)
                assert (layer, part.name) not in self._places, f"layer {layer} declares part {part.name!r} twice"
                self._places[layer, part.name] = Place(name, layers)
                self._arrays[name] = (part, layers + 1)

    def _array_name(self, part: Part) -> str:
        """Layers whose part differs in shape or dtype get an array of their own kind."""
        same = [n for n, (p, _) in self._arrays.items() if p == part]
        if same:
            return same[0]
        taken = sum(p.name == part.name for p, _ in self._arrays.values())
        return part.name if taken == 0 else f"{part.name}_{taken}"

    def place(self, layer: int, part: str) -> Place:
        """Array and layer index of a part. KeyError with both names when the layer has no such part."""
        try:
            return self._places[layer, part]
        except KeyError:
            raise KeyError(f"layer {layer} has no part {part!r}; it has {self.parts_of(layer)}") from None

    def parts_of(self, layer: int) -> list[str]:
        return [name for at, name in self._places if at == layer]

    def has(self, part: str) -> bool:
        """Whether any layer has a part of this name."""
        return any(name == part for _, name in self._places)

    @property
    def arrays(self) -> dict[str, tuple[Part, int]]:
        """Array name -> (part, number of layers stacked in it)."""
        return dict(self._arrays)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's whole recurrent state, all layers, on one device; 0 for a model with none."""
        return sum(part.bytes * layers for part, layers in self._arrays.values() if part.unit == "slot")

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, all attention layers, on one device; 0 for a model with none."""
        return sum(part.bytes * layers for part, layers in self._arrays.values() if part.unit == "page")

    @property
    def num_paged_layers(self) -> int:
        """Layers that keep something per page."""
        return len({layer for (layer, part), at in self._places.items() if self._arrays[at.array][0].unit == "page"})

    @property
    def has_slots(self) -> bool:
        return self.bytes_per_slot > 0

    @property
    def has_pages(self) -> bool:
        return self.bytes_per_page > 0


@jax.tree_util.register_pytree_node_class
class Cache:
    """The device arrays of pages and slots, as one explicit pytree that layers take and return.

    `arrays[name]` is `[layers * rows, *part.shape]`; rows are `slots + 1` or `pages + 1`, the last of each
    layer being the scratch row. A layer's row of slot s is `index * rows + s`.
    """

    def __init__(self, router: Router, arrays: dict[str, Array]):
        self.router = router
        self.arrays = arrays

    def open(self, layer: int, part: str) -> tuple[Array, int]:
        """The array that holds a layer's part, and the layer's first row in it."""
        place = self.router.place(layer, part)
        array = self.arrays[place.array]
        _, layers = self.router.arrays[place.array]
        return array, place.index * (array.shape[0] // layers)

    def put(self, layer: int, part: str, array: Array | None) -> "Cache":
        """This cache with the array that holds a layer's part replaced."""
        place = self.router.place(layer, part)
        assert array is not None
        return Cache(self.router, {**self.arrays, place.array: array})

    def tree_flatten(self):
        names = sorted(self.arrays)
        return [self.arrays[n] for n in names], (self.router, tuple(names))

    @classmethod
    def tree_unflatten(cls, aux, children):
        router, names = aux
        return cls(router, dict(zip(names, children, strict=True)))


class NoCache:
    """The cache of whole sequences from position 0 (`Spans.kind == "dense"`): there is none."""

    def open(self, layer: int, part: str) -> tuple[None, int]:
        return None, 0

    def put(self, layer: int, part: str, array: Array | None) -> "NoCache":
        assert array is None
        return self


AnyCache = Cache | NoCache
