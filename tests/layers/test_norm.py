"""Norms against the formula; float32 inside a bfloat16 model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.layers.norm import GatedRMSNorm, RMSNorm


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def test_rms_norm():
    x = np.random.default_rng(0).normal(size=(4, 12))
    w = np.linspace(0.5, 1.5, 12)
    ours = RMSNorm(12, 0.1, jnp.dtype("float32")).apply({"params": {"weight": jnp.asarray(w, jnp.float32)}}, x)
    np.testing.assert_allclose(ours, rms(x, 0.1) * w, rtol=1e-5)


def test_offset_of_the_weight():
    """Where checkpoints hold weights less 1: a fresh norm has weight 0, and multiplies by 1."""
    x = np.random.default_rng(0).normal(size=(4, 12))
    norm = RMSNorm(12, 0.1, jnp.dtype("float32"), offset=1.0)
    fresh = norm.init(jax.random.key(0), x)
    assert (fresh["params"]["weight"] == 0).all()
    np.testing.assert_allclose(norm.apply(fresh, x), rms(x, 0.1), rtol=1e-5)
    w = np.linspace(-0.5, 0.5, 12)
    ours = norm.apply({"params": {"weight": jnp.asarray(w, jnp.float32)}}, x)
    np.testing.assert_allclose(ours, rms(x, 0.1) * (1 + w), rtol=1e-5)


def test_gate_of_sigmoid():
    y, gate = np.random.default_rng(0).normal(size=(2, 4, 12))
    norm = GatedRMSNorm(12, 1, 1e-5, jnp.dtype("float32"), norm_before_gate=True, activation="sigmoid")
    ours = norm.apply({"params": {"weight": jnp.ones(12)}}, y, gate)
    np.testing.assert_allclose(ours, rms(y, 1e-5) / (1 + np.exp(-gate)), rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_gated_norm(groups: int, norm_before_gate: bool):
    y, gate = np.random.default_rng(0).normal(size=(2, 4, 12))
    w = np.linspace(0.5, 1.5, 12)
    opened = gate / (1 + np.exp(-gate))
    inner = y if norm_before_gate else y * opened
    expected = rms(inner.reshape(4, groups, -1), 1e-5).reshape(4, 12) * w
    norm = GatedRMSNorm(12, groups, 1e-5, jnp.dtype("float32"), norm_before_gate)
    ours = jax.jit(norm.apply)({"params": {"weight": jnp.asarray(w, jnp.float32)}}, y, gate)
    np.testing.assert_allclose(ours, expected * opened if norm_before_gate else expected, rtol=1e-5)


def test_bfloat16_input_is_normed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)) * 30, jnp.bfloat16)
    norm = RMSNorm(512, 1e-6, jnp.dtype("bfloat16"))
    params = norm.init(jax.random.key(0), x)["params"]
    assert params["weight"].dtype == jnp.float32
    ours = jax.jit(norm.apply)({"params": params}, x)
    assert ours.dtype == jnp.bfloat16
    exact = jnp.asarray(rms(np.asarray(x, np.float64), 1e-6), jnp.bfloat16)
    assert (np.asarray(ours, np.float32) == np.asarray(exact, np.float32)).mean() > 0.99
