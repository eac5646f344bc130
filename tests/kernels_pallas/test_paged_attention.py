"""What the contract of paged_attention does not cover: pages held as words, gradients, updates in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import paged_attention, tpu
from kernels_pallas.paged_attention.specs import SPECS
from kernels_pallas.spans import dense_spans
from kernels_pallas.words import EIGHT_BITS, from_words, to_words

BFLOAT16 = [s for s in SPECS if s.name in ("bfloat16", "decode_bfloat16")]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("spec", BFLOAT16, ids=lambda s: s.name)
def test_words_are_bfloat16(spec, implementation):
    (q, k, v, pages, spans), options = spec.build(0)
    words = jax.lax.bitcast_convert_type(pages, jnp.uint16)
    run = jax.jit(lambda held: paged_attention(q, k, v, held, spans, **options, implementation=implementation))
    (want, want_pages), (got, got_words) = run(pages), run(words)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    np.testing.assert_array_equal(got_words, jax.lax.bitcast_convert_type(want_pages, jnp.uint16))


@pytest.mark.parametrize("dtype", ["float32", "uint16", "uint8"])
@pytest.mark.parametrize("name", ["decode_one", "mixed"])
def test_the_donated_cache_is_never_copied(name, dtype):
    (spec,) = (s for s in SPECS if s.name == name)
    (q, k, v, pages, spans), options = spec.build(0)
    layers, rows = 3, 1000
    held = jnp.zeros((layers * rows, *pages.shape[1:]), dtype)

    def step(held):
        o = q
        for layer in range(layers):
            keys = k + o[:, : k.shape[1]]  # as in a model, the layer's keys follow from what the layer before gave
            o, held = paged_attention(o, keys, v, held, spans, **{**options, "base": layer * rows})
        return o, held

    memory = jax.jit(step, donate_argnums=0).lower(held).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= held.nbytes
    assert memory.temp_size_in_bytes < held.nbytes / 2, (memory.temp_size_in_bytes, held.nbytes)


def test_eight_bits_are_rounded_to_the_nearest_and_saturate():
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal(4000) * 10.0 ** rng.uniform(-4, 3, 4000))
    x = np.concatenate([x, np.float32([448, 463, 465, -1e9, 0, 2**-9, 2**-10 * 0.9])])
    held = to_words(jnp.asarray(x), jnp.dtype("uint8"))
    every = np.arange(256, dtype=np.uint8).view(EIGHT_BITS).astype(np.float32)
    np.testing.assert_array_equal(from_words(jnp.arange(256, dtype=jnp.uint8)), every)
    finite = every[np.isfinite(every)]
    nearest = np.abs(x[:, None] - finite).min(axis=1)
    np.testing.assert_array_equal(np.abs(np.asarray(from_words(held)) - x), nearest)
    assert np.isnan(from_words(to_words(jnp.array([jnp.inf, -jnp.inf, jnp.nan]), jnp.dtype("uint8")))).all()


def test_dense_is_differentiable():
    q, k, v = (jax.random.normal(jax.random.key(i), (2 * 5, heads, 4)) for i, heads in enumerate((4, 2, 2)))

    def loss(q, k, v, implementation):
        o, _ = paged_attention(q, k, v, None, dense_spans(2, 5), scale=0.5, implementation=implementation)
        return jnp.sin(o).sum()

    got, want = (jax.grad(loss, (0, 1, 2))(q, k, v, name) for name in ("xla", "reference"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("unit", [1, 16])
def test_every_eight_bits_are_the_same_number_on_tpu(unit: int) -> None:
    bits = np.arange(256, dtype=np.uint8)
    bits = bits[bits & 0x7F != 0x7F]  # not of NaN
    held = jnp.asarray(np.resize(bits, (32, 128)))
    shape = jax.ShapeDtypeStruct(held.shape, jnp.float32)

    def kernel(held, out):
        out[...] = tpu.numbers(held[...], unit).astype(jnp.float32) * unit

    got = pl.pallas_call(kernel, out_shape=shape, interpret=pltpu.InterpretParams())(held)
    np.testing.assert_array_equal(got, from_words(held))
