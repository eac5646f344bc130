"""Pages of 8-bit floats: a quarter of the bytes, log-probabilities near those of float32 pages, and the same answer
whether a prompt is cut, shared with others, interrupted, or comes from the host.

Where a key lies between two 8-bit floats, sums in another order may round it to the other one; so answers are equal to
within a distance.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jhybrid import Engine, Output

from .bed import alone, budget, caching, down, engine_of, greedy, only_pages, poison, prompts, tiered

NEAR = 0.02
MODELS = ("lfm2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("nemotron_h_moe", "kimi_linear", "zamba2")))


@pytest.fixture(params=MODELS)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One with 8-bit pages, and one with float32 pages."""
    whole = engine_of(request.param)
    config = dataclasses.replace(whole.config, kv_cache_dtype="fp8", max_num_seqs=2, max_num_batched_tokens=16)
    with Engine(config) as engine:
        assert engine.ledger.tiers is not None
        engine.ledger.tiers.close(engine.ledger.tree)
        engine.ledger.tree = engine.ledger.tiers = engine._tuner = None  # as `engine_of` does
        yield engine, whole


def distance(a: Output, b: Output) -> float:
    """Of the log-probabilities of the same prompt's tokens, on average: one that decides between experts moves much."""
    pairs = zip(a.prompt_logprobs or [], b.prompt_logprobs or [], strict=True)
    return float(np.mean([abs(x[0][1] - y[0][1]) for x, y in pairs if x is not None and y is not None]))


def test_answers_do_not_depend_on_how_they_come_about(engines: tuple[Engine, Engine]):
    engine, whole = engines
    assert 4 * engine.model.router.bytes_per_page == whole.model.router.bytes_per_page
    memory = engine.runner.memory
    assert "uint8" in {str(array.dtype) for array in engine.runner.cache.arrays.values()}
    assert memory.kv == (memory.num_pages + 1) * engine.model.router.bytes_per_page
    requests = [greedy(p, 20, prompt_logprobs=0, logprobs=0) for p in prompts(engine, [60, 33, 90], seed=2)]
    expected = [alone(engine, request) for request in requests]
    rounding = [distance(e, alone(whole, request)) for e, request in zip(expected, requests, strict=True)]
    assert all(0 < r < 0.3 for r in rounding), rounding

    def check(outputs: list[Output]) -> None:
        for output, reference in zip(outputs, expected, strict=True):
            assert output.token_ids == reference.token_ids
            assert distance(output, reference) < NEAR

    poison(engine)
    with budget(engine, 7):
        check(engine.generate(requests))
    before = engine.scheduler.num_preemptions
    with only_pages(engine, 16):
        check(engine.generate(requests))
    assert engine.scheduler.num_preemptions > before
    plain = [greedy(r.prompt_token_ids or [], 20) for r in requests]
    with caching(engine):
        for kind in ("cold", "hit"):
            outputs = engine.generate(plain)
            assert [o.token_ids for o in outputs] == [e.token_ids for e in expected], kind
        assert all(o.cached_tokens >= 24 for o in outputs)
    with tiered(engine):
        engine.generate(plain)
        down(engine)
        outputs = engine.generate(plain)
        assert [o.token_ids for o in outputs] == [e.token_ids for e in expected]
        assert all(o.cached_tokens >= 24 for o in outputs)
