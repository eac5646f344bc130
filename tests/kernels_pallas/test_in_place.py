"""The recurrent ops update a donated cache in place: their executables hold no copy of the whole array.

XLA adds such a copy without a word when a row is read after the array has changed; one costs more than the op.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.gated_delta import gated_delta
from kernels_pallas.program_text import whole_copies
from kernels_pallas.selective_scan import selective_scan
from kernels_pallas.spans import Kind, make_spans
from kernels_pallas.ssd import ssd

LAYERS, ROWS = 2, 5
K = 4


class Sizes(NamedTuple):
    H: int
    P: int
    N: int
    D: int


# XLA fuses large sums otherwise than small ones, and so may need a copy for the one alone.
@pytest.fixture(params=[Sizes(4, 8, 32, 24), Sizes(24, 64, 128, 1536)], ids=["small", "large"])
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return request.param


def _spans(kind: Kind, seqs: int):
    slots = list(range(seqs))
    lens = [1] * seqs if kind == "decode" else [9] + [1] * (seqs - 1)
    size = seqs if kind == "decode" else 12
    return make_spans(
        lens, [3] * seqs, slots, slots, num_tokens=size, num_seqs=seqs, scratch_slot=4, kind=kind, chunk_size=8
    )


def _whole_array_copies(run, array, *args) -> int:
    compiled = jax.jit(run, donate_argnums=0).lower(array, *args).compile()
    return whole_copies(compiled.as_text(), array.shape)


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("kind", ["decode", "ragged"])
def test_ssd(kind: Kind, seqs: int, sizes: Sizes) -> None:
    H, P, N = sizes.H, sizes.P, sizes.N
    spans = _spans(kind, seqs)
    T = spans.token_seq.shape[0]

    def layers(state, x, dt, B, spans):
        for layer in range(LAYERS):
            x, state = ssd(x, dt, -jnp.ones(H), B, B, jnp.ones(H), state, spans, base=layer * ROWS)
        return state, x

    state = jnp.zeros((LAYERS * ROWS, N, H * P))
    assert _whole_array_copies(layers, state, jnp.ones((T, H, P)), jnp.ones((T, H)), jnp.ones((T, 1, N)), spans) == 0


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("kind", ["decode", "ragged"])
def test_causal_conv(kind: Kind, seqs: int, sizes: Sizes) -> None:
    D = sizes.D
    spans = _spans(kind, seqs)

    def layers(window, x, weight, spans):
        for layer in range(LAYERS):
            x, window = causal_conv(x, weight, None, window, spans, base=layer * ROWS)
        return window, x

    window = jnp.zeros((LAYERS * ROWS, K, D))
    assert _whole_array_copies(layers, window, jnp.ones((spans.token_seq.shape[0], D)), jnp.ones((D, K)), spans) == 0


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("kind", ["decode", "ragged"])
def test_gated_delta(kind: Kind, seqs: int, by_channel: bool, sizes: Sizes) -> None:
    H, P, N = sizes.H, sizes.P, sizes.N
    spans = _spans(kind, seqs)
    T = spans.token_seq.shape[0]

    def layers(state, k, v, g, spans):
        for layer in range(LAYERS):
            v, state = gated_delta(k, k, v, g, jnp.ones((T, H)), state, spans, base=layer * ROWS)
        return state, v

    g = jnp.zeros((T, H, N) if by_channel else (T, H))
    state = jnp.zeros((LAYERS * ROWS, H, N, P))
    assert _whole_array_copies(layers, state, jnp.ones((T, 2, N)), jnp.ones((T, H, P)), g, spans) == 0


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("kind", ["decode", "ragged"])
def test_selective_scan(kind: Kind, seqs: int, sizes: Sizes) -> None:
    N, D = sizes.N, sizes.D
    spans = _spans(kind, seqs)
    T = spans.token_seq.shape[0]

    def layers(state, x, dt, B, spans):
        for layer in range(LAYERS):
            A = -jnp.ones((D, N))
            x, state = selective_scan(x, dt, A, B, B, jnp.ones(D), state, spans, base=layer * ROWS)
        return state, x

    state = jnp.zeros((LAYERS * ROWS, N, D))
    assert _whole_array_copies(layers, state, jnp.ones((T, D)), jnp.ones((T, D)), jnp.ones((T, N)), spans) == 0


def test_the_probe_sees_a_copy() -> None:
    """A row read after the array has changed: what the probe is for."""

    def body(_, carry):
        array, total = carry
        row = array[1]
        array = array.at[0].set(row + total)
        return array, row * 2.0 + array[2]

    def run(array):
        return jax.lax.fori_loop(0, 3, body, (array, jnp.zeros(array.shape[1:])))

    array = jnp.zeros((LAYERS * ROWS, 32, 32))
    assert _whole_array_copies(run, array) > 0
