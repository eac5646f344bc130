"""What the contract test does not say of gated_delta: gradients, keys that repeat, and chunked equals whole."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gated_delta import gated_delta
from kernels_pallas.gated_delta.chunk import solve_unit_lower
from kernels_pallas.spans import Spans, dense_spans, make_spans

HK, H, DK, DV = 2, 4, 6, 5
ROWS = 4


def _inputs(T: int, by_channel: bool = False, rate: float = 0.01) -> tuple[jax.Array, ...]:
    """q, k, v, g, beta with slow decays, so that early tokens still matter at the end."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(T, HK, DK), normal(T, HK, DK)))
    g = -rate * jnp.exp(normal(T, H, DK) if by_channel else normal(T, H))
    return q, k, normal(T, H, DV), g, 0.3 * jax.nn.sigmoid(normal(T, H))


@pytest.mark.parametrize("rate", [0.01, 100.0])
@pytest.mark.parametrize("by_channel", [False, True])
def test_dense_gradients_are_those_of_the_reference(by_channel: bool, rate: float) -> None:
    spans = replace(dense_spans(2, 29), chunk_size=20)
    inputs = _inputs(58, by_channel, rate)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(58, H, DV)), jnp.float32)

    def loss(inputs, implementation):
        o, _ = gated_delta(*inputs, None, spans, implementation=implementation)
        return jnp.sum(o * weights)

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(inputs, which) for which in ("xla", "reference"))
    for name, a, b in zip(("q", "k", "v", "g", "beta"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("size", [5, 16, 40, 64])
def test_the_system_of_a_repeated_key_is_solved(size: int) -> None:
    """All entries 1 below the diagonal, where powers of the matrix grow as binomials; what is above does not count."""
    A = jnp.ones((1, size, size))
    b = jnp.asarray(np.random.default_rng(0).normal(size=(1, size, 3)), jnp.float32)
    want = np.linalg.solve(np.tril(np.ones((size, size))), np.asarray(b[0], np.float64))
    np.testing.assert_allclose(solve_unit_lower(A, b)[0], want, atol=1e-5)


def _spans(length: int, first: int, snapshots: dict | None = None) -> Spans:
    return make_spans(
        [length], [first], [0], [0], num_tokens=24, num_seqs=2, scratch_slot=ROWS - 1, chunk_size=8, snapshots=snapshots
    )


@pytest.mark.parametrize("by_channel", [False, True])
def test_steps_of_any_size_give_what_one_step_gives(by_channel: bool) -> None:
    inputs = _inputs(24, by_channel)
    nan = jnp.full((ROWS, H, DK, DV), jnp.nan)
    whole, whole_state = gated_delta(*inputs, nan, _spans(23, 0, snapshots={(0, 13): 1}))
    state, outputs, first = nan, [], 0
    for length in (1, 12, 3, 1, 6):
        part = (jnp.pad(a[first : first + length], [(0, 24 - length)] + [(0, 0)] * (a.ndim - 1)) for a in inputs)
        o, state = gated_delta(*part, state, _spans(length, first))
        outputs.append(o[:length])
        first += length
        if first == 13:
            np.testing.assert_allclose(whole_state[1], state[0], atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate(outputs), whole[:23], atol=1e-5)
    np.testing.assert_allclose(state[0], whole_state[0], atol=1e-5)


def test_the_first_token_reaches_the_last_output() -> None:
    """Positive control of the test above: with decays this slow a lost state would show."""
    inputs = _inputs(24)
    other = (*inputs[:2], inputs[2].at[0].add(1.0), *inputs[3:])
    nan = jnp.full((ROWS, H, DK, DV), jnp.nan)
    o, changed = (gated_delta(*i, nan, _spans(23, 0))[0][22] for i in (inputs, other))
    assert float(jnp.abs(o - changed).max()) > 1e-3


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"'cuda'.*reference.*xla"):
        gated_delta(*_inputs(4), None, dense_spans(1, 4), implementation="cuda")


def test_state_and_kind_must_go_together() -> None:
    with pytest.raises(NotImplementedError, match="None with 'ragged'"):
        gated_delta(*_inputs(24), None, _spans(3, 0))
