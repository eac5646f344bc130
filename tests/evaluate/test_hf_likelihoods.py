"""The scorer against the harness's own `hf` model; make_hf_likelihoods.py made its numbers."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jhybrid.batch import Layout
from jhybrid.evaluate.scorer import Scorer
from jhybrid.evaluate.windows import continuation_window
from jhybrid.programs import PROMPT_LOGPROB_ROWS, step
from jhybrid.request import Request, SamplingParams
from jhybrid.runner import Runner
from tests.engine.bed import caching, engine_of

GOLDEN = json.loads((Path(__file__).parent / "hf_likelihoods.json").read_text())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", GOLDEN["models"])
def test_totals_and_greedy_flags_are_those_of_hf(name: str, shared: bool):
    cases = GOLDEN["models"][name]
    windows = [continuation_window(c["context"], c["continuation"], GOLDEN["max_length"]) for c in cases]
    engine = engine_of(name)
    scorer = Scorer(engine)
    if shared:
        with caching(engine):
            found = scorer.score(windows)
        assert scorer.tally.cached > 100
    else:
        found = scorer.score(windows)
    for case, window, score in zip(cases, windows, found, strict=True):
        assert score.total == pytest.approx(case["total"], abs=1e-4 * window.num_scored), len(case["context"])
        assert score.is_greedy == case["is_greedy"]
    assert any(score.is_greedy and window.num_scored > 1 for window, score in zip(windows, found, strict=True))


def test_sampled_requests_beside_change_nothing():
    cases = GOLDEN["models"]["nemotron_h_moe"]
    windows = [continuation_window(c["context"], c["continuation"], GOLDEN["max_length"]) for c in cases]
    engine = engine_of("nemotron_h_moe")
    sampling = SamplingParams(max_tokens=200, temperature=2.0, ignore_eos=True)
    for seed in range(3):
        engine.submit(Request(prompt_token_ids=[seed + 5, 7], sampling=replace(sampling, seed=seed)))
    before = engine.stats.output_tokens
    found = Scorer(engine).score(windows)
    assert engine.stats.output_tokens > before + 3
    for name in list(engine._sequences):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    for case, window, score in zip(cases, windows, found, strict=True):
        assert score.total == pytest.approx(case["total"], abs=1e-4 * window.num_scored)
        assert score.is_greedy == case["is_greedy"]


def test_no_step_holds_logits_of_all_of_its_tokens():
    engine = engine_of("nemotron_h_moe")
    runner, vocab = engine.runner, engine.model.vocab_size
    assert isinstance(runner, Runner)
    bucket = max(runner.buckets, key=lambda b: b.tokens)
    layout = Layout(bucket, runner.geometry())
    ints, floats = jnp.zeros(layout.num_ints, jnp.int32), jnp.zeros(layout.num_floats, jnp.float32)
    mask = jnp.zeros((bucket.seqs, -(-vocab // 32)), jnp.uint32)
    arguments = (runner.params, runner.cache, runner.sampler, ints, floats, mask)
    rows = rows_of_logits(jax.make_jaxpr(partial(step, runner._programs.module, layout))(*arguments).jaxpr, vocab)
    assert bucket.tokens == 2 * PROMPT_LOGPROB_ROWS
    assert max(rows) == PROMPT_LOGPROB_ROWS  # of a block, one after the other


def rows_of_logits(program: Any, vocab: int) -> set[int]:
    """Leading dimensions of all arrays over the vocabulary that a program makes, and those within it."""
    found: set[int] = set()
    for equation in program.eqns:
        shapes = [out.aval.shape for out in equation.outvars if hasattr(out.aval, "shape")]
        found |= {math.prod(shape[:-1]) for shape in shapes if shape[-1:] == (vocab,)}
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= rows_of_logits(inner, vocab)
    return found
