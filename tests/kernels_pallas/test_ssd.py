"""What the contract test does not say of ssd: gradients, precision of decays, and chunked equals whole."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.decays import decay_between, split_cumsum
from kernels_pallas.spans import Spans, dense_spans, make_spans
from kernels_pallas.ssd import ssd

H, P, G, N = 4, 3, 2, 5
ROWS = 4


def _inputs(T: int, seed: int = 0, dt_bias: float = -3.0) -> tuple[jax.Array, ...]:
    """x, dt, A, B, C, D with slow decays, so that early tokens still matter at the end."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    dt = jnp.logaddexp(0.0, normal(T, H) + dt_bias)
    return normal(T, H, P), dt, -jnp.exp(normal(H)), normal(T, G, N), normal(T, G, N), normal(H)


@pytest.mark.parametrize("dt_bias", [-3.0, 100.0])
def test_dense_gradients_are_those_of_the_reference(dt_bias: float) -> None:
    spans = replace(dense_spans(2, 19), chunk_size=4)
    inputs = _inputs(38, dt_bias=dt_bias)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(38, H, P)), jnp.float32)

    def loss(inputs, implementation):
        y, _ = ssd(*inputs, None, spans, implementation=implementation)
        return jnp.sum(y * weights)

    got, want = (jax.grad(loss)(inputs, which) for which in ("xla", "reference"))
    for name, a, b in zip(("x", "dt", "A", "B", "C", "D"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())), rtol=1e-4, err_msg=name)


def test_decays_keep_their_digits_beside_strong_ones() -> None:
    rng = np.random.default_rng(0)
    log_decay = -np.abs(rng.normal(size=(64, 3))).astype(np.float32) * 0.01
    log_decay[::9] = -99.0
    log_decay[5, 0] = -1e6
    sums = np.cumsum(log_decay.astype(np.float64), axis=0)
    cumulative = split_cumsum(jnp.asarray(log_decay))
    for i in range(64):
        for j in (0, i // 2, i):
            at = lambda k: tuple(c[k] for c in cumulative)  # noqa: E731
            np.testing.assert_allclose(decay_between(at(i), at(j)), np.exp(sums[i] - sums[j]), rtol=2e-6, atol=1e-40)


def _run(inputs, state, spans: Spans):
    return ssd(*inputs, state, spans)


def _spans(length: int, first: int, chunk_size: int = 8, snapshots: dict | None = None) -> Spans:
    return make_spans(
        [length], [first], [0], [0], num_tokens=24, num_seqs=2, scratch_slot=ROWS - 1, chunk_size=chunk_size,
        snapshots=snapshots,
    )  # fmt: skip


def test_steps_of_any_size_give_what_one_step_gives() -> None:
    x, dt, A, B, C, D = _inputs(24)
    nan = jnp.full((ROWS, N, H * P), jnp.nan)
    whole, whole_state = _run((x, dt, A, B, C, D), nan, _spans(23, 0, snapshots={(0, 13): 1}))
    state, outputs, first = nan, [], 0
    for length in (1, 12, 3, 1, 6):
        part = (jnp.pad(a[first : first + length], [(0, 24 - length)] + [(0, 0)] * (a.ndim - 1)) for a in (x, dt, B, C))
        px, pdt, pB, pC = part
        y, state = _run((px, pdt, A, pB, pC, D), state, _spans(length, first))
        outputs.append(y[:length])
        first += length
        if first == 13:
            np.testing.assert_allclose(whole_state[1], state[0], atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate(outputs), whole[:23], atol=1e-5)
    np.testing.assert_allclose(state[0], whole_state[0], atol=1e-5)


def test_the_first_token_reaches_the_last_output() -> None:
    """Positive control of the test above: with decays this slow a lost state would show."""
    inputs = _inputs(24)
    other = (inputs[0].at[0].add(1.0), *inputs[1:])
    nan = jnp.full((ROWS, N, H * P), jnp.nan)
    y, changed = (_run(i, nan, _spans(23, 0))[0][22] for i in (inputs, other))
    assert float(jnp.abs(y - changed).max()) > 1e-2


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"'cuda'.*parallel, reference, tpu, xla"):
        ssd(*_inputs(4), None, dense_spans(1, 4), implementation="cuda")


def test_state_and_kind_must_go_together() -> None:
    with pytest.raises(NotImplementedError, match="None with 'ragged'"):
        ssd(*_inputs(24), None, _spans(3, 0))
