"""Products with weights: both forms give the same, and XLA keeps the form that was chosen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.products import WEIGHT_FIRST, times_weight

OUT, WIDTH = 40, 24
ROWS = (1, WEIGHT_FIRST[0], 16, WEIGHT_FIRST[-1], WEIGHT_FIRST[-1] + 1)


def operands(rows: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    return tuple(jnp.asarray(rng.standard_normal((n, WIDTH)), dtype) for n in (rows, OUT))  # pyright: ignore


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_product(rows: int, dtype: str) -> None:
    x, weight = operands(rows, dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for asked in ("float32", dtype):
        y = jax.jit(times_weight, static_argnums=2)(x, weight, jnp.dtype(asked))
        assert y.dtype == asked and y.shape == (rows, OUT)
        tolerance = 1e-5 if asked == "float32" else 2**-7
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_more_axes_than_two() -> None:
    x, weight = operands(16, "float32")
    y = times_weight(x.reshape(4, 4, WIDTH), weight, x.dtype)
    np.testing.assert_allclose(y.reshape(16, OUT), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_it_has_gradients() -> None:
    x, weight = operands(16, "float32")
    got = jax.grad(lambda *a: jnp.sum(jnp.sin(times_weight(*a, x.dtype))), (0, 1))(x, weight)
    expected = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), (0, 1))(x, weight)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
def test_xla_does_not_exchange_the_operands(rows: int) -> None:
    x, weight = operands(rows, "float32")
    lowered = jax.jit(times_weight, static_argnums=2).trace(x, weight, x.dtype).lower(lowering_platforms=("cpu",))
    dots = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", lowered.compile().as_text() or "")
    assert dots == [(str(OUT), str(rows)) if rows in WEIGHT_FIRST else (str(rows), str(OUT))]
