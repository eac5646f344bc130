"""What the contract test does not say of causal_conv: a window of more rows than there are taps changes no answer."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.causal_conv import causal_conv, window_rows
from kernels_pallas.specs import decode, ragged

SLOTS, D = 5, 6


@pytest.mark.parametrize("spans", [ragged([5, 1, 9], [4, 9, 0], read=[0, 1, 2], write=[0, 3, 2]), decode([8, 0, 2], 4)])
@pytest.mark.parametrize(("taps", "rows"), [(3, 4), (7, 8)])
def test_older_inputs_count_for_nothing(taps: int, rows: int, spans) -> None:
    assert window_rows(taps) == rows
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, weight, window = normal(len(spans.token_seq), D), normal(D, taps), normal(SLOTS + 1, rows, D)
    aligned, held = causal_conv(x, weight, None, window, spans, implementation="reference")
    plain, newest = causal_conv(x, weight, None, window[:, rows - taps :], spans, implementation="reference")
    valid, real = int(spans.num_tokens), slice(SLOTS)  # the last slot is scratch
    np.testing.assert_allclose(aligned[:valid], plain[:valid], atol=1e-6)
    assert held is not None and newest is not None
    np.testing.assert_array_equal(held[real, rows - taps :], newest[real])
