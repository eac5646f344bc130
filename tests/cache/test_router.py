"""Router: any layer order and any mix of shapes, and every layer finds its own rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.cache.arrays import abstract_cache, plan_memory, tree_bytes
from jhybrid.cache.router import Cache, NoCache, Part, Router
from jhybrid.errors import OutOfMemoryError

SSM = Part("ssm", "slot", (4, 6), "float32")
WIDE = Part("ssm", "slot", (4, 8), "float32")
CONV = Part("conv", "slot", (3, 5), "bfloat16")
KV = Part("kv", "page", (2, 4, 8), "float32")
LAYERS = [(SSM, CONV), (), (KV,), (WIDE, CONV), (KV,), (SSM,)]


def concrete(router: Router, slots: int, pages: int) -> Cache:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_cache(router, slots=slots, pages=pages))


def test_places_are_by_name_and_shape():
    router = Router(LAYERS)
    assert {name: layers for name, (_, layers) in router.arrays.items()} == {"ssm": 2, "conv": 2, "kv": 2, "ssm_1": 1}
    assert (router.place(5, "ssm").array, router.place(5, "ssm").index) == ("ssm", 1)
    assert (router.place(3, "ssm").array, router.place(3, "ssm").index) == ("ssm_1", 0)
    assert router.has("conv")
    assert not router.has("delta")
    assert router.parts_of(1) == []
    with pytest.raises(KeyError, match=r"layer 2 has no part 'ssm'; it has \['kv'\]"):
        router.place(2, "ssm")


def test_bytes_per_slot_and_page_are_those_of_the_arrays():
    router = Router(LAYERS)
    assert router.bytes_per_slot == 4 * (24 + 24 + 32) + 2 * (15 + 15)
    assert router.bytes_per_page == 4 * 2 * 64
    cache = concrete(router, slots=3, pages=5)
    assert tree_bytes(cache) == 4 * router.bytes_per_slot + 6 * router.bytes_per_page
    assert sum(a.nbytes for a in cache.arrays.values()) == tree_bytes(cache)


def test_rows_of_layers_are_disjoint_and_cover_the_arrays():
    router, slots, pages = Router(LAYERS), 3, 5
    cache = concrete(router, slots, pages)
    for layer, parts in enumerate(LAYERS):
        for part in parts:
            array, base = cache.open(layer, part.name)
            rows = (slots if part.unit == "slot" else pages) + 1
            cache = cache.put(layer, part.name, array.at[base : base + rows].add(1))
    for name, array in cache.arrays.items():
        np.testing.assert_array_equal(np.asarray(array, np.float32), 1.0, err_msg=name)


def test_a_cache_is_a_pytree_that_keeps_its_router():
    cache = concrete(Router(LAYERS), 1, 1)
    again = jax.jit(lambda c: c)(cache)
    assert again.router is cache.router
    assert set(again.arrays) == set(cache.arrays)


def test_a_part_declared_twice_is_a_bug():
    with pytest.raises(AssertionError, match="declares part 'ssm' twice"):
        Router([(SSM, SSM)])


def test_there_is_no_cache_to_write_for_whole_sequences():
    cache = NoCache()
    assert cache.open(0, "ssm") == (None, 0)
    assert cache.put(0, "ssm", None) is cache


PLAN = {"weights": 100, "sampler": 10, "scratch": 20, "max_num_seqs": 3, "pages_per_seq": 4, "num_pages": None}


def test_slots_come_first_and_pages_take_the_rest():
    router = Router(LAYERS)
    fixed = 130 + 4 * router.bytes_per_slot
    plan = plan_memory(router, available=fixed + 8 * router.bytes_per_page, **PLAN)
    assert (plan.num_slots, plan.num_pages) == (3, 7)
    assert plan.total == fixed + 8 * router.bytes_per_page == sum(plan.by_kind().values())
    assert plan_memory(router, available=10**9, **PLAN).num_pages == 12  # what all sequences can need, no more


def test_a_little_more_or_less_memory_gives_the_same_pages():
    """Else the next start would find nothing compiled. What is given up for that is less than an eighth."""
    router = Router(LAYERS)

    def pages(fits: int, per_seq: int = 3000) -> int:
        available = 130 + 4 * router.bytes_per_slot + (fits + 1) * router.bytes_per_page
        return plan_memory(router, available=available, **PLAN | {"pages_per_seq": per_seq}).num_pages

    assert {pages(fits) for fits in range(3584, 3840)} == {3584}
    assert all(7 / 8 * fits < pages(fits) <= fits for fits in range(3000, 6000))
    assert pages(3001, 3001) == 3001  # room for one sequence is not given up for it


@pytest.mark.parametrize(
    ("changes", "available", "message"),
    [
        ({}, 1000, "use max_num_seqs of at most 1"),
        ({}, 100, "use a smaller model"),
        ({}, 3800, "one sequence of max_model_len needs 4 pages"),
        ({"num_pages": 50}, 10_000, "use num_pages of at most"),
        ({"num_pages": 3}, 10_000, "needs 4 pages .* num_pages is 3; raise it, or lower max_model_len"),
        ({"sampler": 90_000, "max_num_seqs": 999}, 10_000, "use max_num_seqs of at most"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(changes: dict, available: int, message: str):
    with pytest.raises(OutOfMemoryError, match=message):
        plan_memory(Router(LAYERS), available=available, **PLAN | changes)


def test_a_remedy_works():
    """The number in a refusal is one that is then accepted."""
    router = Router(LAYERS)
    with pytest.raises(OutOfMemoryError) as refusal:
        plan_memory(router, available=6000, **PLAN | {"max_num_seqs": 50})
    fits = int(str(refusal.value).split("at most ")[1].split()[0])
    with pytest.raises(OutOfMemoryError, match="max_model_len"):  # slots fit now; pages are the next thing
        plan_memory(router, available=6000, **PLAN | {"max_num_seqs": fits})
