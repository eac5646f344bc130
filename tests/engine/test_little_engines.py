"""Families whose whole test bed is in the long run: cached, chunked, reused and preempted, on small engines."""

from collections.abc import Iterator

import numpy as np
import pytest

from jhybrid import Engine

from .bed import LITTLE, alone, caching, drain, engine_of, golden, greedy, only_pages, prompts, same
from .conftest import clean

LONG_RUN = ("mamba", "lfm2_moe", "zamba2")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in LONG_RUN else name for name in LITTLE])
def little(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield from clean(engine_of(request.param, 1, 16))


def test_everything_in_turn_is_each_alone(little: Engine):
    stem, rest, other = prompts(little, [50, 9, 33])
    requests = [greedy([*stem, *rest[:n]], 14, logprobs=1) for n in (2, 9)] + [greedy(other, 14, logprobs=1)]
    forked = greedy([*stem[:20], (stem[20] + 1) % little.model.vocab_size], 6, logprobs=1)
    expected = [alone(little, request) for request in (*requests, forked)]
    with caching(little), only_pages(little, min(little.ledger.pages.free, 16)):
        for output, reference in zip(little.generate([*requests, forked]), expected, strict=True):
            same(output, reference)
        little.submit(requests[0])
        before = little.scheduler.num_preemptions
        for _ in range(4):
            little.step()
        little.scheduler.preempt(little.scheduler.running[0])
        assert little.scheduler.num_preemptions > before
        drain(little)
        [again] = little.generate(requests[:1])
        same(again, expected[0])
        assert again.cached_tokens >= 40


def test_tokens_are_hugging_faces(little: Engine):
    name = next(name for name in LITTLE if name in little.config.model.split("/"))
    numbers = golden(name)
    output = alone(little, greedy(numbers["prompt"].tolist(), 16))
    assert output.token_ids == np.asarray(numbers["decode_ids"]).tolist()
