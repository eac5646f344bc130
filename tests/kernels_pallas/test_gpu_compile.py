"""The ops compiled for an H200 that is not there: caches stay in place, and nothing is done for all experts or for the
whole cache at once. Needs the `gpu-compile` extra (`make test-gpu-compile`); skipped without it."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape

from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.experts import experts
from kernels_pallas.gated_delta import gated_delta
from kernels_pallas.gpus import GPUS
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.program_text import kernels_in, whole_copies
from kernels_pallas.selective_scan import selective_scan
from kernels_pallas.spans import Kind, Spans, make_spans
from kernels_pallas.ssd import ssd
from kernels_pallas.target import Target

H200 = GPUS["h200"]
LAYERS, SLOTS = 2, 64
S, T = 32, 512
BF16 = jnp.bfloat16

try:
    H200.devices()
except ModuleNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


def _spans(kind: Kind) -> Spans:
    lens, tokens = ([1] * S, S) if kind == "decode" else ([T - S + 1] + [1] * (S - 1), T)
    slots = list(range(S))
    spans = make_spans(
        lens, [3] * S, slots, slots, num_tokens=tokens, num_seqs=S, scratch_slot=SLOTS, kind=kind, table_width=256
    )
    return replace(spans, target=Target(capability=H200.capability))


def _compiled(run: Any, *shapes: Any) -> Any:
    """`run`, which is given its first argument to keep."""
    return jax.jit(run, donate_argnums=0).lower(*H200.place(shapes)).compile()


@cache
def _op(name: str, kind: Kind, implementation: str | None) -> tuple[Any, Shape, int]:
    """Two layers of an op, compiled; the shape of their cache; and how many tokens a step has."""
    spans = _spans(kind)
    n, rows = spans.token_seq.shape[0], LAYERS * (SLOTS + 1)
    half = lambda *shape: Shape(shape, BF16)  # noqa: E731
    full = lambda *shape: Shape(shape, jnp.float32)  # noqa: E731
    held, run, inputs = {
        "ssd": (
            full(rows, 128, 4096),
            lambda x, h, a, s, base: ssd(x, *a, h, s, base=base, implementation=implementation),
            (half(n, 64, 64), full(n, 64), full(64), half(n, 8, 128), half(n, 8, 128), full(64)),
        ),
        "causal_conv": (
            half(rows, 4, 6144),
            lambda x, h, a, s, base: causal_conv(x, *a, h, s, base=base, implementation=implementation),
            (half(n, 6144), half(6144, 4), half(6144)),
        ),
        "gated_delta": (
            full(rows, 32, 128, 128),
            lambda v, h, a, s, base: gated_delta(a[0], a[0], v, *a[1:], h, s, base=base, implementation=implementation),
            (half(n, 32, 128), half(n, 16, 128), full(n, 32), full(n, 32)),
        ),
        "selective_scan": (
            full(rows, 16, 4096),
            lambda x, h, a, s, base: selective_scan(x, *a, h, s, base=base, implementation=implementation),
            (half(n, 4096), full(n, 4096), full(4096, 16), half(n, 16), half(n, 16), full(4096)),
        ),
        "paged_attention": (
            half(LAYERS * 8192, 16, 4 * 128),
            lambda q, h, a, s, base: paged_attention(
                q, a[0] + q[:, :2], a[1], h, s, scale=0.1, base=base, implementation=implementation
            ),
            (half(n, 32, 128), half(n, 2, 128), half(n, 2, 128)),
        ),
    }[name]

    def layers(cache: Any, x: Any, others: Any, spans: Spans) -> Any:
        for layer in range(LAYERS):
            x, cache = run(x, cache, others, spans, layer * (held.shape[0] // LAYERS))
        return cache, x

    return _compiled(layers, held, inputs[0], inputs[1:], spans), held, n


RECURRENT = [("ssd", "decode"), ("ssd", "ragged"), ("causal_conv", "decode"), ("causal_conv", "ragged")]
RECURRENT += [("gated_delta", "decode"), ("gated_delta", "ragged"), ("selective_scan", "decode")]


@pytest.mark.parametrize(("name", "kind"), [*RECURRENT, ("paged_attention", "decode"), ("paged_attention", "ragged")])
def test_caches_are_updated_in_place(name: str, kind: Kind) -> None:
    compiled, held, _ = _op(name, kind, "parallel")
    memory = compiled.memory_analysis()
    assert whole_copies(compiled.as_text(), held.shape) == 0
    assert memory.alias_size_in_bytes >= held.size * held.dtype.itemsize, "the donated cache was not taken"


@pytest.mark.parametrize("name", ["ssd", "causal_conv", "gated_delta", "selective_scan"])
def test_a_decode_step_has_no_loop_over_sequences(name: str) -> None:
    compiled, held, _ = _op(name, "decode", "parallel")
    assert " while(" not in compiled.as_text()
    rows = S * held.size * 4 // held.shape[0]  # of the sequences' states, in float32
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * rows


def test_attention_gathers_a_part_of_the_cache_at_a_time() -> None:
    compiled, _, _ = _op("paged_attention", "decode", "parallel")
    contexts = S * 256 * 16 * 4 * 128 * 2  # bytes of what the page tables can name
    assert compiled.memory_analysis().temp_size_in_bytes < contexts


def test_experts_without_rows_cost_nothing() -> None:
    E, O, I = 128, 1856, 2688
    rows = 64 * 6
    run = lambda x, w, sizes: grouped_matmul(x, w, sizes)  # noqa: E731
    shapes = Shape((rows, I), BF16), Shape((E, O, I), BF16), Shape((E,), jnp.int32)
    compiled = jax.jit(run).lower(*H200.place(shapes)).compile()
    weights = E * O * I * 2
    assert compiled.memory_analysis().temp_size_in_bytes < weights / 8
    assert whole_copies(compiled.as_text(), (E, O, I)) + whole_copies(compiled.as_text(), (E, I, O)) == 0
    assert f"[{E},{rows}," not in compiled.as_text(), "every row meets every expert"


@pytest.mark.parametrize(("tokens", "kernels"), [(1, 2), (64, 2), (200, 4)])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_of_few_tokens_are_read_where_they_lie(gated: bool, tokens: int, kernels: int) -> None:
    E, I, D, k = 64, 512, 2048, 6
    up, down = (E, 2 * I if gated else I, D), (E, D, I)
    run = partial(experts, activation="silu", target=Target(capability=H200.capability))
    routing = Shape((tokens, k), jnp.int32), Shape((tokens, k), jnp.float32)
    shapes = Shape((tokens, D), BF16), *routing, Shape(up, BF16), Shape(down, BF16)
    compiled = jax.jit(run).lower(*H200.place(shapes)).compile()
    assert kernels_in(compiled.as_text()) == {"experts": kernels}
    assert " while(" not in compiled.as_text(), "a loop asks the host before each turn"
    assert not any(whole_copies(compiled.as_text(), shape) for shape in (up, down))
    handed_on = 4 * E * (I + D // 8) * 128  # what passes between the kernels, and the splits' sums
    assert compiled.memory_analysis().temp_size_in_bytes < handed_on


def test_layers_of_experts_share_their_scratch() -> None:
    E, width, rows = 32, 512, 20480

    def scratch(layers: int) -> int:
        def run(x: Any, weights: Any, sizes: Any) -> Any:
            for layer in range(layers):
                x = grouped_matmul(x, weights[layer], sizes)
            return x

        weights = Shape((layers, E, width, width), BF16)
        compiled = _compiled(run, Shape((rows, width), BF16), weights, Shape((E,), jnp.int32))
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch(8) < 1.5 * scratch(1)


def test_the_probe_sees_a_copy() -> None:
    """The loops that suit a CPU transpose the whole state on a GPU: what the probe is for."""
    compiled, held, _ = _op("ssd", "decode", "xla")
    by_state = (held.shape[2], held.shape[0], held.shape[1])
    assert whole_copies(compiled.as_text(), held.shape) + whole_copies(compiled.as_text(), by_state) > 0


OF_ITS_OWN = [("ssd", "decode", 2), ("gated_delta", "decode", 2), ("causal_conv", "decode", 2)]
OF_ITS_OWN += [("selective_scan", "decode", 2), ("selective_scan", "ragged", 2), ("ssd", "ragged", 3)]
OF_ITS_OWN += [("gated_delta", "ragged", 4)]
OF_ITS_OWN += [("paged_attention", "decode", 1), ("paged_attention", "ragged", 1)]


@pytest.mark.parametrize(("name", "kind", "kernels"), OF_ITS_OWN)
def test_a_gpu_gets_its_kernels_unasked(name: str, kind: Kind, kernels: int) -> None:
    compiled, held, _ = _op(name, kind, None)
    assert kernels_in(compiled.as_text()) == {name: kernels * LAYERS}
    assert whole_copies(compiled.as_text(), held.shape) == 0
    assert compiled.memory_analysis().alias_size_in_bytes >= held.size * held.dtype.itemsize


def test_what_is_forced_has_no_kernels() -> None:
    compiled, _, _ = _op("ssd", "decode", "parallel")
    assert not kernels_in(compiled.as_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_dim", "state", "groups"), [(64, 64, 128, 8), (24, 128, 256, 1)])
def test_the_ssd_kernel_compiles_and_stays_in_place(
    heads: int, head_dim: int, state: int, groups: int, dtype: str
) -> None:
    held = Shape((LAYERS * (SLOTS + 1), state, heads * head_dim), jnp.dtype(dtype))
    vectors = Shape((S, groups, state), BF16)
    inputs = (
        Shape((S, heads), jnp.float32),
        Shape((heads,), jnp.float32),
        vectors,
        vectors,
        Shape((heads,), jnp.float32),
    )

    def layers(cache: Any, x: Any, others: Any, spans: Spans) -> Any:
        for layer in range(LAYERS):
            x, cache = ssd(x, *others, cache, spans, base=layer * (SLOTS + 1))
        return cache, x

    compiled = _compiled(layers, held, Shape((S, heads, head_dim), BF16), inputs, _spans("decode"))
    size = held.size * held.dtype.itemsize
    assert kernels_in(compiled.as_text()) == {"ssd": 2 * LAYERS}
    assert whole_copies(compiled.as_text(), held.shape) == 0
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    assert compiled.memory_analysis().temp_size_in_bytes < size / 16
