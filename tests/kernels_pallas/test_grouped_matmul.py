"""What the contract of grouped_matmul does not cover: its gradients, and the form for TPUs, simulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_matmul, tpu
from kernels_pallas.grouped_matmul.specs import SPECS


@pytest.mark.parametrize(("sizes", "tail"), [([1, 7, 0, 2, 3], 3), ([0, 40, 0, 0], 0)], ids=["mixed", "one_group"])
def test_gradients(sizes, tail):
    tokens = sum(sizes) + tail
    x, weight, along = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(tokens, 11), (len(sizes), 13, 11), (tokens, 13)])
    )

    def grouped(x, weight):
        return jnp.sum(jnp.sin(grouped_matmul(x, weight, jnp.asarray(sizes, jnp.int32))) * along)

    def gathered(x, weight):
        group = np.repeat(np.arange(len(sizes)), sizes)
        y = jnp.einsum("ti,toi->to", x[: len(group)], weight[group])
        return jnp.sum(jnp.sin(y) * along[: len(group)])

    got, want = (jax.jit(jax.grad(f, (0, 1)))(x, weight) for f in (grouped, gathered))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_on_tpu_it_agrees_with_the_reference(spec):
    args, _ = spec.build(0)
    got, want = tpu.grouped_matmul(*args, interpret=True), grouped_matmul(*args, implementation="reference")
    assert got.dtype == want.dtype
    np.testing.assert_allclose(*(np.asarray(y, np.float64) for y in (got, want)), atol=spec.atol, rtol=0)


@pytest.mark.parametrize("sizes", [[1, 7, 0, 2, 3], [0, 40, 0, 0]], ids=["mixed", "one_group"])
def test_gradients_on_tpu(sizes):
    x, weight = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(sum(sizes), 11), (len(sizes), 13, 11)])
    )

    def total(x, weight, function):
        return jnp.sum(jnp.sin(function(x, weight, jnp.asarray(sizes, jnp.int32))))

    def simulated(*args):
        return tpu.grouped_matmul(*args, interpret=True)

    got, want = (jax.grad(total, (0, 1))(x, weight, f) for f in (simulated, grouped_matmul))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
