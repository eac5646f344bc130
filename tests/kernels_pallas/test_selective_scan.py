"""What the contract test does not say of selective_scan: the gradients of whole sequences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.selective_scan import selective_scan
from kernels_pallas.spans import dense_spans

D, N = 6, 4


@pytest.mark.parametrize("dt_bias", [-3.0, 100.0])
def test_dense_gradients_are_those_of_the_reference(dt_bias: float) -> None:
    spans = replace(dense_spans(2, 19), chunk_size=4)
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    dt = jnp.logaddexp(0.0, normal(38, D) + dt_bias)
    inputs = (normal(38, D), dt, -jnp.exp(normal(D, N)), normal(38, N), normal(38, N), normal(D))
    weights = normal(38, D)

    def loss(inputs, implementation):
        y, _ = selective_scan(*inputs, None, spans, implementation=implementation)
        return jnp.sum(y * weights)

    got, want = (jax.grad(loss)(inputs, which) for which in ("xla", "reference"))
    for name, a, b in zip(("x", "dt", "A", "B", "C", "D"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())), rtol=1e-4, err_msg=name)
