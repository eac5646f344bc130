"""SnapshotStore: what is packed comes back, close enough, in place, and touches no other row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.cache.arrays import abstract_cache
from jhybrid.cache.router import Cache, Part, Router
from jhybrid.cache.snapshots import abstract_store, bytes_per_snapshot, pack, unpack

LAYERS, SLOTS, ROWS = 3, 5, 4


@pytest.fixture
def router() -> Router:
    conv = Part("conv", "slot", (4, 10), "float32")
    ssm = Part("ssm", "slot", (6, 8), "float32", vector=4)
    kv = Part("kv", "page", (2, 2, 3), "float32")
    return Router([(conv, ssm), (kv,), (conv, ssm), (conv, ssm)])


def filled(router: Router) -> Cache:
    rng = np.random.default_rng(0)
    shapes = abstract_cache(router, slots=SLOTS, pages=2)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("int8", 1 / 126)])
def test_a_state_comes_back(router: Router, dtype, error: float):
    cache = filled(router)
    before = {name: np.array(array) for name, array in cache.arrays.items()}
    store = jax.tree.map(lambda a: jnp.full(a.shape, 77, a.dtype), abstract_store(router, ROWS, dtype))
    moves = jnp.array([[3, 1], [4, 2], [0, 0]])
    store = jax.jit(pack, donate_argnums=1)(cache, store, moves, 2)
    for packed in store.values():
        assert (np.array(packed.values)[[0, 3, 4, 7]] == 77).all(), "another row was written"
    cache = jax.jit(unpack, donate_argnums=0)(cache, store, jnp.array([[1, 0], [2, 2], [0, 1]]), 2)
    for name, array in cache.arrays.items():
        part, layers = router.arrays[name]
        after, rows = np.array(array), array.shape[0] // layers
        if part.unit == "page":
            np.testing.assert_array_equal(after, before[name])
            continue
        for layer in range(layers):
            here, there = after[layer * rows :][:rows], before[name][layer * rows :][:rows]
            for source, target in ((3, 0), (4, 2)):
                largest = np.abs(there[source]).max()
                np.testing.assert_allclose(here[target], there[source], atol=error * largest)
                assert (here[target] != there[source]).any()
            np.testing.assert_array_equal(here[[1, 3, 4, 5]], there[[1, 3, 4, 5]])


def test_zeros_and_infinities_stay_what_they_are_or_show(router: Router):
    """A state of zeros has no scale; one that is not finite comes back not finite, and fails its sequence."""
    cache = jax.tree.map(jnp.zeros_like, filled(router))
    ssm = cache.arrays["ssm"].at[1, 2, 3].set(jnp.nan)
    cache = Cache(router, cache.arrays | {"ssm": ssm})
    store = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_store(router, ROWS, "int8"))
    store = pack(cache, store, jnp.array([[0, 0], [1, 1]]), jnp.int32(2))
    cache = unpack(cache, store, jnp.array([[0, 2], [1, 3]]), jnp.int32(2))
    state = np.array(cache.arrays["ssm"])
    assert (state[2] == 0).all()
    assert not np.isfinite(state[3]).all()


def test_sizes(router: Router):
    per_layer = 4 * 10 * 2, 6 * 8 * 2
    assert bytes_per_snapshot(router, "bfloat16") == LAYERS * sum(per_layer)
    assert bytes_per_snapshot(router, "int8") == LAYERS * (per_layer[0] + 6 * 8 + 6 * 2 * 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_no_array_is_copied_whole(router: Router, dtype):
    rows = 50
    cache = abstract_cache(router, slots=rows, pages=2)
    store = abstract_store(router, rows, dtype)
    moves = jax.ShapeDtypeStruct((3, 2), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    smallest = min(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves((store, cache.arrays["ssm"])))
    for function, donated in ((pack, 1), (unpack, 0)):
        compiled = jax.jit(function, donate_argnums=donated).lower(cache, store, *moves).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes < smallest // 2, function.__name__
