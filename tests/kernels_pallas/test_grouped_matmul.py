"""What the contract of grouped_matmul does not cover: its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_matmul


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
