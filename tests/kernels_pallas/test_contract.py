"""The contract of every op: each implementation agrees with the reference on every spec of the op.

Checked are the outputs of valid tokens, the cache rows that the step writes, and that every other row stays
bit for bit as it was. Whatever must not be read holds NaN: the scratch rows, every row that no sequence reads,
and page places past the tokens written so far.
"""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas import blocks
from kernels_pallas.spans import Spans
from kernels_pallas.specs import Spec
from kernels_pallas.words import from_words
from tests.kernels_pallas.simulator import races_of, simulated, simulated_gpu

OF_UNROLLED = ("mixed", "snapshots", "fork-beside-its-origin", "last-chunk-of-one", "channels", "decode")
"""The cases of a form that takes long to compile which every run has: they have few shapes."""

NAN_OF_WORDS = 0x7F
"""The bits of an 8-bit NaN."""

OPS = sorted(path.parent.name for path in Path(kernels_pallas.__file__).parent.glob("*/specs.py"))


def _load(op: str) -> tuple[Any, list[Spec]]:
    module = importlib.import_module(f"kernels_pallas.{op}")
    return module, importlib.import_module(f"kernels_pallas.{op}.specs").SPECS


def _cases() -> list[Any]:
    cases = []
    for op in OPS:
        module, specs = _load(op)
        for spec in specs:
            names = [name for name in module.IMPLEMENTATIONS if name not in ("reference", "tpu", "gpu")]
            for name in names:
                unrolled = (op, name) == ("gated_delta", "parallel") and spec.name not in OF_UNROLLED
                marks = [pytest.mark.slow] if spec.slow or unrolled else []
                cases.append(pytest.param(op, spec, name, id=f"{op}-{spec.name}-{name}", marks=marks))
            if spec.tpu and "tpu" in module.IMPLEMENTATIONS:
                for moment in ("eager", "on_wait"):
                    marks = [pytest.mark.slow] if spec.slow or moment == "on_wait" else []
                    id = f"{op}-{spec.name}-tpu-{moment}"
                    cases.append(pytest.param(op, spec, f"tpu-{moment}", id=id, marks=marks))
    return cases


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Block sizes with which the specs' small shapes have several blocks."""
    blocks.block_sizes.cache_clear()
    monkeypatch.setattr(blocks, "FOLDER", Path(__file__).parent / "small_blocks")
    yield
    blocks.block_sizes.cache_clear()


@functools.cache
def _compiled(op: str, options: tuple[str, ...], donated: int | None) -> Any:
    """The op, jitted once for all specs so that those of one shape share an executable."""
    return jax.jit(
        getattr(_load(op)[0], op),
        static_argnames=[*(name for name in options if name != "base"), "implementation"],
        donate_argnums=() if donated is None else donated,
    )


def _sequences(spans: Spans) -> list[int]:
    """Sequences that have tokens in this step."""
    return [int(s) for s in np.flatnonzero(np.diff(spans.query_start))]


def _page_rows(spans: Spans, page: int, seq: int, positions: range) -> list[tuple[int, int]]:
    """(page, place within it) of positions of a sequence."""
    table = np.asarray(spans.page_table)[seq]
    return [(int(table[p // page]), p % page) for p in positions]


def _readable(op: str, spans: Spans, cache: np.ndarray, base: int) -> np.ndarray:
    """Bool mask over the cache: what a step may read."""
    mask = np.zeros(cache.shape, bool)
    for s in _sequences(spans):
        first = int(spans.first_pos[s])
        if op == "paged_attention":
            for page, place in _page_rows(spans, cache.shape[1], s, range(first)):
                mask[base + page, place] = True
        elif first > 0:
            mask[base + int(spans.read_slot[s])] = True
    return mask


def _written(op: str, spans: Spans, cache: np.ndarray, base: int) -> np.ndarray:
    """Bool mask over the cache: what a step must write."""
    mask = np.zeros(cache.shape, bool)
    for s in _sequences(spans):
        first, length = int(spans.first_pos[s]), int(spans.query_start[s + 1] - spans.query_start[s])
        if op == "paged_attention":
            for page, place in _page_rows(spans, cache.shape[1], s, range(first, first + length)):
                mask[base + page, place] = True
        else:
            mask[base + int(spans.write_slot[s])] = True
    if op != "paged_attention":
        asked = sorted(np.asarray(spans.chunk_snapshot)[: int(spans.num_chunks)])[: int(spans.num_snapshots)]
        mask[[base + int(slot) for slot in asked]] = True  # scratch is the largest slot, so it is cut off
    return mask


def _f64(a: Any) -> np.ndarray:
    return np.asarray(from_words(a) if a.dtype == jnp.uint8 else a, np.float64)


def _run(step: Any, *args: Any, **kwargs: Any) -> Any:
    """What the op gives; a case that an implementation leaves to others is skipped with its reason."""
    try:
        return step(*args, **kwargs)
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("op", "spec", "name"), _cases())
def test_agrees_with_the_reference(op: str, spec: Spec, name: str) -> None:
    module, _ = _load(op)
    run = getattr(module, op)
    args, kwargs = spec.build(0)
    name, _, moment = name.partition("-")
    targets = {"tpu": lambda: simulated(moment, spec.chip), "gpu": simulated_gpu}
    if not isinstance(args[-1], Spans):  # no sequences and no cache: the answer alone
        where = {"target": targets[name]()} if name in targets else {}
        call = run if name in targets else functools.partial(_run, run)  # a kernel takes the cases chosen for it
        want = run(*args, **kwargs, implementation="reference")
        with races_of() as races:
            got = jax.block_until_ready(call(*args, **kwargs, **where, implementation=name))
        assert not races()
        assert got.dtype == want.dtype
        np.testing.assert_allclose(_f64(got), _f64(want), atol=spec.atol, rtol=0)
        return
    *inputs, cache, spans = args
    valid = int(spans.num_tokens)
    if cache is not None:
        base = kwargs.get("base", 0)
        original = np.asarray(cache).copy()
        original[~_readable(op, spans, original, base)] = NAN_OF_WORDS if cache.dtype == jnp.uint8 else np.nan
    answers = []
    step = _compiled(op, tuple(kwargs), None if cache is None else len(inputs))
    for which in ("reference", name):
        copy = None if cache is None else jnp.array(original)
        where = replace(spans, target=targets[which]()) if which in targets else spans
        call = step if which in targets else functools.partial(_run, step)
        with races_of() as races:
            answers.append(jax.block_until_ready(call(*inputs, copy, where, **kwargs, implementation=which)))
        assert not races()
    (want, want_cache), (got, got_cache) = answers
    assert got.dtype == want.dtype
    assert np.all(np.isfinite(_f64(want)[:valid])), "the spec's own answer is not finite"
    np.testing.assert_allclose(_f64(got)[:valid], _f64(want)[:valid], atol=spec.atol, rtol=0)
    assert np.all(np.isfinite(_f64(got))), "padding tokens must stay finite"
    if cache is None:
        assert got_cache is None
        return
    assert got_cache.dtype == cache.dtype
    written = _written(op, spans, original, base)
    assert np.all(np.isfinite(_f64(want_cache)[written])), "the reference left a row out"
    np.testing.assert_allclose(_f64(got_cache)[written], _f64(want_cache)[written], atol=spec.atol, rtol=0)
    untouched = ~written
    rows = spec.rows or original.shape[0]
    untouched[base + rows - 1] = False  # scratch takes what padding writes
    for array in (got_cache, want_cache):
        bits = np.asarray(array).view(np.uint8).reshape(*original.shape, -1)
        np.testing.assert_array_equal(bits[untouched], original.view(np.uint8).reshape(bits.shape)[untouched])
