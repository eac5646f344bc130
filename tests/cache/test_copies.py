"""Rows of caches on their way to lower tiers, to other rows and back: nothing is copied whole, whatever its numbers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jhybrid.cache import snapshots
from jhybrid.cache.arrays import abstract_cache, copy_pages
from jhybrid.cache.router import Part, Router
from jhybrid.cache.tiers.copies import gather, scatter
from kernels_pallas.chips import CHIPS
from kernels_pallas.deviceless import compile_for

PAGES = (8, 3001, 64, 2048)  # layers, pages, and a page of 8 heads of 128
STATES = (24, 65, 128, 4096)
WINDOWS = (24, 65, 4, 6144)


def _arguments(dtype: Any, sizes: tuple[int, ...], count: int) -> tuple[Any, Any, Any]:
    layers, rows, *shape = sizes
    held, values = (layers * rows, *shape), (count, layers, *shape)
    arrays = ({"rows": jax.ShapeDtypeStruct(shape, dtype)} for shape in (held, values))
    return *arrays, jax.ShapeDtypeStruct((count,), jnp.int32)


def _check(compiled: Any, held: Any) -> None:
    sizes = [a.size * a.dtype.itemsize for a in jax.tree.leaves(held)]
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < max(sizes) / 100
    assert memory.alias_size_in_bytes >= sum(sizes)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_rows_come_back_in_place_on_cpu(dtype: str) -> None:
    arrays, values, rows = _arguments(dtype, PAGES, 16)
    compiled = jax.jit(partial(scatter, {"rows": 8}), donate_argnums=0).lower(arrays, values, rows).compile()
    _check(compiled, arrays["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("sizes", "dtype", "count"),
    [
        (PAGES, "uint8", 16),
        (PAGES, "bfloat16", 16),
        (STATES, "float32", 1),
        (STATES, "int8", 1),
        (WINDOWS, "bfloat16", 1),
    ],
)
def test_rows_go_and_come_back_in_place_on_tpu(chip: str, sizes: tuple[int, ...], dtype: str, count: int) -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it and runs this")
    arrays, values, rows = _arguments(dtype, sizes, count)
    layers = {"rows": sizes[0]}
    _check(compile_for(CHIPS[chip], partial(scatter, layers), arrays, values, rows, donate=(0,)), arrays["rows"])
    taken = compile_for(CHIPS[chip], partial(gather, layers), arrays, rows)
    assert taken.memory_analysis().temp_size_in_bytes < arrays["rows"].size / 100


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_rows_move_in_place_on_tpu(chip: str) -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it and runs this")
    mixer = Part("ssm", "slot", STATES[2:], "float32", vector=128), Part("conv", "slot", WINDOWS[2:], "bfloat16")
    router = Router([mixer] * STATES[0] + [(Part("kv", "page", PAGES[2:], "fp8"),)] * PAGES[0])
    cache = abstract_cache(router, slots=STATES[1] - 1, pages=PAGES[1] - 1)
    moves = jax.ShapeDtypeStruct((16, 2), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    _check(compile_for(CHIPS[chip], copy_pages, cache, *moves, donate=(0,)), cache.arrays["kv"])
    for dtype in ("bfloat16", "int8"):
        store = snapshots.abstract_store(router, 64, dtype)
        _check(compile_for(CHIPS[chip], snapshots.pack, cache, store, *moves, donate=(1,)), store)
        unpacked = compile_for(CHIPS[chip], snapshots.unpack, cache, store, *moves, donate=(0,))
        _check(unpacked, [cache.arrays[name] for name in ("ssm", "conv")])
