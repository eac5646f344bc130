"""Copies: rows of the caches on their way to the host and back. The runner owns one; everything is compiled at start.

A gather reads rows into arrays of its own, and a scatter writes rows from arrays of its own, `pages` pages or one state
at a time. The transfers between those arrays and the host run beside the steps.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from jhybrid.cache.router import Cache
from jhybrid.cache.snapshots import Store
from jhybrid.cache.tiers.form import Arrays, Blob, Form
from jhybrid.executables import Executables
from jhybrid.mesh import along, placed

MOST_PAGES = 64
"""Pages of one gather or scatter, at most: a step's worth of a prompt, so that saving keeps up with computing."""
OUT, IN = 4, 2
"""Gathers on their way to the host, and prefixes on their way to the device, at most: what memory is set aside for."""


# One row of all layers at a time. XLA's own copy arrays on TPU, whole: gathers those of large rows, on v5e and v5p,
# scatters those of 8-bit numbers, on all chips. On CPU a scatter takes two to three times as long.


def gather(layers: dict[str, int], arrays: Arrays, rows: Array) -> Arrays:
    """Rows [K] of arrays [layers * rows, *shape], as [K, layers, *shape]."""
    by_layer = _by_layer(layers, arrays)
    row = lambda k: {n: lax.dynamic_index_in_dim(a, k, axis=1, keepdims=False) for n, a in by_layer.items()}  # noqa: E731
    return lax.map(row, rows)


def scatter(layers: dict[str, int], arrays: Arrays, values: Arrays, rows: Array) -> Arrays:
    """The arrays with rows [K] set to values [K, layers, *shape]."""

    def put(k: Array, by_layer: Arrays) -> Arrays:
        return {n: lax.dynamic_update_index_in_dim(a, values[n][k], rows[k], 1) for n, a in by_layer.items()}

    written = lax.fori_loop(0, len(rows), put, _by_layer(layers, arrays))
    return {n: written[n].reshape(a.shape) for n, a in arrays.items()}


def _by_layer(layers: dict[str, int], arrays: Arrays) -> Arrays:
    """[layers * rows, *shape] as [layers, rows, *shape]."""
    return {n: a.reshape(layers[n], -1, *a.shape[1:]) for n, a in arrays.items()}


class Outgoing:
    """Gathered rows: once `is_ready`, nothing depends on their sources any more."""

    def __init__(self, take: Callable[[], tuple[list[Blob], Blob | None]], arrays: list[Array]):
        self._take, self._arrays = take, arrays
        self.seconds = 0.0  # that `fetch` took once they were ready

    @property
    def is_ready(self) -> bool:
        return all(array.is_ready() for array in self._arrays)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self) -> None:
        """Until it is ready, or has failed, which `fetch` tells."""
        for array in self._arrays:
            try:
                array.block_until_ready()
            except RuntimeError:
                return

    def fetch(self) -> tuple[list[Blob], Blob | None]:
        """The pages and the state, on the host. Any thread may call it; raises what the device raised."""
        jax.block_until_ready(self._arrays)
        started = time.perf_counter()
        blobs = self._take()
        self.seconds = time.perf_counter() - started
        return blobs


class Staged:
    """Pages, so many in each of `pages` as one scatter takes, and a state: on the device, in no cache yet."""

    def __init__(self, pages: list[Arrays], state: Arrays | None):
        self.pages, self.state = pages, state


class Copies:
    """`cache` and `store` are given as shapes; `scratch_page` takes what a scatter writes beyond its pages."""

    def __init__(
        self,
        cache: Cache,
        store: Store,
        executables: Executables,
        *,
        pages: int,
        first_snapshot: int,
        scratch_page: int,
        pinned: bool | None = None,
    ):
        """`pinned`: whether transfers go through pinned host memory. None: unless the device is the CPU."""
        self._layers = _layers_of(cache)
        self._shared = {name: part.axis for name, (part, _) in cache.router.arrays.items()}
        self._first_snapshot, self._scratch_page = (0 if store else first_snapshot), scratch_page
        self.size = pages
        shapes_of_pages, shapes_of_states = _pages_of(cache), _states_of(cache, store)
        self.page_form, self.state_form = forms(cache, store)
        self._mesh = executables.mesh
        self._first_device = jax.devices()[0] if self._mesh is None else self._mesh.devices.flat[0]
        self._pinned = self._first_device.platform != "cpu" if pinned is None else pinned
        compiled = partial(self._compile, executables)
        self._read_pages, self._write_pages = compiled("pages", shapes_of_pages, pages)
        self._read_state, self._write_state = compiled("state", shapes_of_states, 1)

    def _compile(self, executables: Executables, kind: str, arrays: Arrays, count: int) -> tuple[Any, Any]:
        """What gathers and what scatters `count` rows of these arrays; nothing if there are none."""
        if not arrays:
            return None, None
        layers = {name: self._layers[name] for name in arrays}
        rows = jax.ShapeDtypeStruct((count,), jnp.int32)
        values = {}
        for name, array in arrays.items():
            shape = jax.ShapeDtypeStruct((count, layers[name], *array.shape[1:]), array.dtype)
            axis = self._shared.get(name)
            values[name] = placed(self._mesh, shape, None if axis is None else axis + 1)
        facts = (sorted(layers.items()),)
        read = executables.get(f"gather {kind}", partial(gather, layers), (arrays, rows), result=values, facts=facts)
        write = executables.get(
            f"scatter {kind}",
            partial(scatter, layers),
            (arrays, values, rows),
            donate=(0,),
            result=arrays,
            facts=facts,
        )
        return read, write

    # down

    def out(self, cache: Cache, store: Store, pages: Sequence[int], snapshot: int | None) -> Outgoing:
        """Start copying at most `size` pages, and a snapshot."""
        kv: Arrays = {}
        state: Arrays = {}
        if pages:
            assert self._read_pages is not None and len(pages) <= self.size, (len(pages), self.size)
            kv = self._read_pages(_pages_of(cache), self._rows(pages))
        if snapshot is not None:
            assert self._read_state is not None
            state = self._read_state(_states_of(cache, store), np.array([self._first_snapshot + snapshot], np.int32))
        arrays = [*kv.values(), *state.values()]
        if self._pinned:
            kv, state = (self._to(tree, "pinned_host") for tree in (kv, state))

        def take() -> tuple[list[Blob], Blob | None]:
            host_pages = self.page_form.split({n: np.asarray(a) for n, a in kv.items()}, len(pages)) if pages else []
            host_state = self.state_form.split({n: np.asarray(a) for n, a in state.items()}, 1) if state else [None]
            return host_pages, host_state[0]

        return Outgoing(take, arrays)

    def _rows(self, pages: Sequence[int]) -> np.ndarray:
        rows = np.full(self.size, self._scratch_page, np.int32)
        rows[: len(pages)] = pages
        return rows

    # up

    def stage(self, pages: Sequence[Blob], state: Blob | None, until: float) -> Staged:
        """Bring pages and a state to the device, in arrays of their own, and wait for them. Any thread may call it.

        TimeoutError if the time `until` of `monotonic` passes before all of it is on its way.
        """
        runs = [pages[at : at + self.size] for at in range(0, len(pages), self.size)]
        staged = Staged(
            [self._put(self.page_form.join(run, self.size), until) for run in runs],
            None if state is None else self._put(self.state_form.join([state], 1), until),
        )
        jax.block_until_ready((staged.pages, staged.state))
        return staged

    def _put(self, arrays: dict[str, np.ndarray], until: float) -> Arrays:
        if time.monotonic() > until:
            raise TimeoutError("the time to bring a prefix to the device is over")
        return self._to(self._to(arrays, "pinned_host") if self._pinned else arrays, None)

    def _to(self, arrays: Any, memory: str | None) -> Arrays:
        """Rows, on their way, in a kind of memory; None: the device's own."""

        def where(name: str) -> Any:
            if self._mesh is None:
                return SingleDeviceSharding(self._first_device, memory_kind=memory)
            axis = self._shared.get(name)
            return NamedSharding(self._mesh, along(None if axis is None else axis + 1), memory_kind=memory)

        return {name: jax.device_put(array, where(name)) for name, array in arrays.items()}

    def into(
        self, cache: Cache, store: Store, staged: Staged, skip: int, pages: Sequence[int], snapshot: int | None
    ) -> tuple[Cache, Store]:
        """Write staged pages from the `skip`-th on, and the state, into these rows. Takes cache and store away."""
        rows = [self._scratch_page] * skip + list(pages)
        arrays = dict(cache.arrays)
        for i, values in enumerate(staged.pages):
            assert self._write_pages is not None
            mine = rows[i * self.size : (i + 1) * self.size]
            if any(row != self._scratch_page for row in mine):
                held = _pages_of(Cache(cache.router, arrays))
                arrays |= self._write_pages(held, values, self._rows(mine))
        if snapshot is not None:
            assert self._write_state is not None and staged.state is not None
            row = np.array([self._first_snapshot + snapshot], np.int32)
            held = _states_of(Cache(cache.router, arrays), store)
            written = self._write_state(held, staged.state, row)
            if store:
                store = {
                    name: packed._replace(values=written[name], scales=written.get(f"{name}.scales"))
                    for name, packed in store.items()
                }
            else:
                arrays |= written
        return Cache(cache.router, arrays), store


def forms(cache: Cache, store: Store) -> tuple[Form, Form]:
    """Of a page and of a state, of which the lower tiers hold what all devices have together; from arrays or shapes."""
    layers = _layers_of(cache)
    return Form.of(_pages_of(cache), layers), Form.of(_states_of(cache, store), layers)


def _pages_of(cache: Cache) -> Arrays:
    return {n: array for n, array in cache.arrays.items() if cache.router.arrays[n][0].unit == "page"}


def _states_of(cache: Cache, store: Store) -> Arrays:
    """The arrays whose rows are snapshots."""
    if not store:
        return {n: array for n, array in cache.arrays.items() if cache.router.arrays[n][0].unit == "slot"}
    arrays = {}
    for name, packed in store.items():
        arrays[name] = packed.values
        if packed.scales is not None:
            arrays[f"{name}.scales"] = packed.scales
    return arrays


def _layers_of(cache: Cache) -> dict[str, int]:
    """How many layers are stacked in each array, and in its scales."""
    layers = {name: layers for name, (_, layers) in cache.router.arrays.items()}
    return layers | {f"{name}.scales": count for name, count in layers.items()}


def pages_per_copy(page_size: int, max_num_batched_tokens: int, pages_per_seq: int) -> int:
    """Pages of one gather or scatter: a step's worth, within reason."""
    return max(1, min(MOST_PAGES, pages_per_seq, -(-max_num_batched_tokens // page_size)))


def bytes_of_copies(page_bytes: int, state_bytes: int, pages: int, pages_per_seq: int) -> int:
    """Device memory that copies under way may hold."""
    whole = -(-pages_per_seq // pages) * pages if page_bytes else 0
    return OUT * (pages * page_bytes + state_bytes) + (IN + 1) * (whole * page_bytes + state_bytes)
