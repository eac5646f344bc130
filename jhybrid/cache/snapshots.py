"""SnapshotStore: recurrent states kept in fewer bits than the running ones have.

Snapshots are normally rows of the same arrays as the running states: the scan writes them there, and a hit starts from
one without a copy. With `snapshot_dtype` bfloat16 or int8 those rows are only a staging area: right after the step
they are packed into arrays of their own, and before the first step of a hit they are unpacked into the sequence's slot.
Both work on any part of any mixer, because they see nothing but rows.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jhybrid.cache.router import Cache, Part, Router
from jhybrid.mesh import placed
from kernels_pallas.words import from_words, to_words

SnapshotDtype = Literal["auto", "bfloat16", "int8"]


class Packed(NamedTuple):
    """One array of the router's, packed: `values` [layers * rows, *part.shape], and for int8 `scales`.

    `values` are bfloat16 as their bits (uint16), or int8; `scales` [layers * rows, vectors] float32 are the largest
    magnitude of each vector, a run of `part.vector` elements, over 127.
    """

    values: Array
    scales: Array | None


Store = dict[str, Packed]
Moves = Array  # [K, 2] int32: from which row to which


def is_int8(part: Part, dtype: SnapshotDtype) -> bool:
    """Parts without vectors, such as convolution windows, are small, and bfloat16 also in an int8 store."""
    return dtype == "int8" and part.vector is not None


def bytes_per_snapshot(router: Router, dtype: SnapshotDtype) -> int:
    """Bytes of one sequence's state, all layers, as it is stored, on one device."""
    return sum(
        size.size // (router.arrays[name][0].shards if size is packed.values else 1) * jnp.dtype(size.dtype).itemsize
        for name, packed in abstract_store(router, 1, dtype).items()
        for size in packed
        if size is not None
    )


def abstract_store(router: Router, rows: int, dtype: SnapshotDtype, mesh: Mesh | None = None) -> Store:
    """The store as shapes, for `rows` snapshots, shared out on `mesh` but for the scales."""
    store: dict[str, Packed] = {}
    for name, (part, layers) in router.arrays.items():
        if part.unit != "slot":
            continue
        shape = (layers * rows, *part.shape)
        if is_int8(part, dtype):
            assert part.vector is not None
            vectors = part.elements // part.vector
            scales = placed(mesh, jax.ShapeDtypeStruct((layers * rows, vectors), jnp.float32))
            values = placed(mesh, jax.ShapeDtypeStruct(shape, jnp.int8), part.axis)
            store[name] = Packed(values, scales)  # pyright: ignore[reportArgumentType]
        else:
            values = placed(mesh, jax.ShapeDtypeStruct(shape, jnp.uint16), part.axis)
            store[name] = Packed(values, None)  # pyright: ignore[reportArgumentType]
    return store


def pack(cache: Cache, store: Store, moves: Moves, count: Array) -> Store:
    """The store with the first `count` moves done, from slots to store rows."""

    def row(name: str, packed: Packed, source: Array, target: Array) -> Packed:
        part, _ = cache.router.arrays[name]
        state = lax.dynamic_index_in_dim(cache.arrays[name], source, keepdims=False).astype(jnp.float32)
        if packed.scales is None:
            # Were the state only converted, XLA for TPU would convert the whole cache before the loop.
            words = to_words(lax.reduce_precision(state, 8, 7), jnp.dtype("uint16"))
            values = lax.dynamic_update_index_in_dim(packed.values, words, target, 0)
            return Packed(values, None)
        vectors = state.reshape(packed.scales.shape[1], part.vector)
        scales = jnp.max(jnp.abs(vectors), axis=1) / 127.0
        # A maximum may lose a NaN on CPU; a sum does not, and a state with one must not come back as numbers.
        scales = jnp.where(jnp.isfinite(jnp.sum(vectors, axis=1)), scales, jnp.nan)
        rounded = jnp.round(vectors / jnp.where(scales > 0, scales, 1.0)[:, None]).astype(jnp.int8)
        return Packed(
            lax.dynamic_update_index_in_dim(packed.values, rounded.reshape(part.shape), target, 0),
            lax.dynamic_update_index_in_dim(packed.scales, scales, target, 0),
        )

    packed = {}
    for name, array in store.items():
        _, layers = cache.router.arrays[name]
        sizes = (cache.arrays[name].shape[0] // layers, array.values.shape[0] // layers)

        def turn(i: Array, array: Packed, name: str = name, sizes: tuple[int, int] = sizes) -> Packed:
            source, target = moves[i % moves.shape[0]]
            layer = i // moves.shape[0]
            return row(name, array, layer * sizes[0] + source, layer * sizes[1] + target)

        packed[name] = _each(turn, layers, moves, count, array)
    return packed


def unpack(cache: Cache, store: Store, moves: Moves, count: Array) -> Cache:
    """The cache with the first `count` moves done, from store rows to slots."""
    arrays = dict(cache.arrays)
    for name, packed in store.items():
        part, layers = cache.router.arrays[name]
        sizes = (packed.values.shape[0] // layers, arrays[name].shape[0] // layers)

        def turn(
            i: Array, array: Array, part: Part = part, packed: Packed = packed, sizes: tuple[int, int] = sizes
        ) -> Array:
            source, target = moves[i % moves.shape[0]]
            layer = i // moves.shape[0]
            values = lax.dynamic_index_in_dim(packed.values, layer * sizes[0] + source, keepdims=False)
            if packed.scales is None:
                state = from_words(values)
            else:
                scales = lax.dynamic_index_in_dim(packed.scales, layer * sizes[0] + source, keepdims=False)
                state = (values.reshape(-1, part.vector or 1).astype(jnp.float32) * scales[:, None]).reshape(part.shape)
            return lax.dynamic_update_index_in_dim(array, state.astype(array.dtype), layer * sizes[1] + target, 0)

        arrays[name] = _each(turn, layers, moves, count, arrays[name])
    return Cache(cache.router, arrays)


def _each(turn, layers: int, moves: Moves, count: Array, carry):
    """`turn` for the first `count` moves of every layer; i counts moves fastest."""

    def layer(index: Array, carry):
        start = index * moves.shape[0]
        return lax.fori_loop(start, start + count, turn, carry)

    return lax.fori_loop(0, layers, layer, carry)
