"""Rotary positions against complex rotation, and rescaled frequencies against transformers' numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.errors import ConfigError
from jhybrid.layers.rope import Rope, plain_frequencies
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_rope import read_rope


@pytest.mark.parametrize("rotated", [16, 8])
def test_rotation_of_complex_pairs(rotated: int):
    x = np.random.default_rng(0).normal(size=(5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 7, 300, 100_000], np.int32)
    frequencies = plain_frequencies(10000.0, rotated)
    ours = np.asarray(Rope(tuple(frequencies.tolist()))(jnp.asarray(x), jnp.asarray(positions)))
    half = rotated // 2
    angles = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
    turned = (x[..., :half] + 1j * x[..., half:rotated]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(ours[..., :half], turned.real, atol=1e-4)
    np.testing.assert_allclose(ours[..., half:rotated], turned.imag, atol=1e-4)
    np.testing.assert_array_equal(ours[..., rotated:], x[..., rotated:])


def test_interleaved_pairs_give_the_same_products():
    q, k = np.random.default_rng(0).normal(size=(2, 5, 3, 12)).astype(np.float32)
    positions = jnp.array([0, 1, 7, 300, 5000])
    frequencies = tuple(plain_frequencies(10000.0, 8).tolist())
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 12)]
    apart, together = Rope(frequencies), Rope(frequencies, interleaved=True)
    theirs = np.einsum("thd,shd->hts", apart(q[..., order], positions), apart(k[..., order], positions))
    ours = np.einsum("thd,shd->hts", together(jnp.asarray(q), positions), together(jnp.asarray(k), positions))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(ours - np.einsum("thd,shd->hts", apart(q, positions), apart(k, positions))).max() > 0.1


PLAIN = [1.0, 0.31622776, 0.1, 0.031622775, 0.01, 0.0031622779, 0.001, 0.00031622779]
LLAMA3 = [1.0, 0.31622776, 0.042751178, 0.0039528473, 0.00125, 0.00039528473, 0.000125, 3.9528473e-05]
YARN = [1.0, 0.23717082, 0.05, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05]
# ROPE_INIT_FUNCTIONS of transformers 5.24 for head_dim 16 and theta 10000, max_position_embeddings 512.
KINDS = {
    "default": ({}, PLAIN, 1.0),
    "linear": ({"factor": 4.0}, [f / 4 for f in PLAIN], 1.0),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
        LLAMA3,
        1.0,
    ),
    "proportional": ({"partial_rotary_factor": 0.7, "factor": 2.0}, [f / 2 for f in PLAIN[:5]] + [0.0] * 3, 1.0),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 128}, YARN, 1.1386294),
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_as_transformers_computes_them(kind: str):
    settings, frequencies, magnitude = KINDS[kind]
    nested = {"rope_theta": 10000.0, "rope_type": kind, **settings}
    rope = read_rope(HfConfig({"rope_parameters": nested, "max_position_embeddings": 512}), 16)
    np.testing.assert_allclose(rope.frequencies, frequencies, rtol=2e-6)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-6)
    old = {"rope_theta": 10000.0, "rope_scaling": {"type": kind, **settings}, "max_position_embeddings": 512}
    assert read_rope(HfConfig(old), 16) == rope


def test_what_is_not_understood_is_refused():
    nested = {"rope_theta": 1e4, "rope_type": "longrope"}
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type: 'longrope' is not implemented"):
        read_rope(HfConfig({"rope_parameters": nested}), 16)
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor: config\.json lacks this key"):
        read_rope(HfConfig({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}), 16)
    with pytest.raises(ConfigError, match=r"rope_theta: .*lacks this key"):
        read_rope(HfConfig({}), 16)
