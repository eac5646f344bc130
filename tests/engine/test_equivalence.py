"""The engine against Hugging Face's numbers, and against itself: chunked = whole, batched = alone, reused = fresh."""

import numpy as np
import pytest

from jhybrid import Engine, Request, SamplingParams

from .bed import (
    HYBRIDS,
    MODELS,
    alone,
    at_most,
    budget,
    drain,
    engine_of,
    golden,
    greedy,
    only_pages,
    poison,
    prompts,
    same,
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_and_logprobs_are_hugging_faces(model: str):
    engine, numbers = engine_of(model), golden(model)
    prompt = numbers["prompt"].tolist()
    output = alone(engine, greedy(prompt, 16, logprobs=5, prompt_logprobs=3))
    assert output.token_ids == numbers["decode_ids"].tolist()
    expected = log_softmax(numbers["decode_logits"])
    assert output.logprobs is not None
    for entry, row in zip(output.logprobs, expected, strict=True):
        assert [token for token, _ in entry] == np.argsort(-row, kind="stable")[:5].tolist()
        np.testing.assert_allclose([lp for _, lp in entry], np.sort(row)[::-1][:5], atol=2e-4)
    full = log_softmax(numbers["full_logits"])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        found = dict(entry)
        assert abs(found[prompt[position + 1]] - full[position, prompt[position + 1]]) < 2e-4
        assert 3 <= len(entry) <= 4


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 96, 97])
def test_any_chunking_of_a_prompt_gives_the_same(engine: Engine, tokens: int):
    [prompt] = prompts(engine, [97])
    request = greedy(prompt, 8, logprobs=2, prompt_logprobs=0)
    whole = alone(engine, request)
    poison(engine)
    with budget(engine, tokens):
        [chunked] = engine.generate([request])
    same(chunked, whole)


def test_first_token_matters_to_the_last(engine: Engine):
    """Positive control: the models remember, so that a lost state would show."""
    [prompt] = prompts(engine, [97])
    other = [(prompt[0] + 1) % engine.model.vocab_size, *prompt[1:]]
    a, b = (alone(engine, greedy(p, 1, logprobs=0)) for p in (prompt, other))
    assert a.logprobs is not None and b.logprobs is not None
    assert a.token_ids != b.token_ids or abs(a.logprobs[0][0][1] - b.logprobs[0][0][1]) > 1e-3


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_gives_what_each_gives_alone(engine: Engine, count: int):
    requests = [greedy(p, 12, logprobs=1) for p in prompts(engine, [40, 1, 17, 5][:count], seed=count)]
    expected = [alone(engine, request) for request in requests]
    poison(engine)
    for output, reference in zip(engine.generate(requests), expected, strict=True):
        same(output, reference)


def test_identical_prompts_give_one_answer(engine: Engine):
    [prompt] = prompts(engine, [23])
    expected = alone(engine, greedy(prompt, 12)).token_ids
    for output in engine.generate([greedy(prompt, 12) for _ in range(9)]):
        assert output.token_ids == expected


def test_more_requests_than_slots_with_mixed_lengths(engine: Engine):
    lengths = [3, 50, 1, 97, 2, 33, 8, 64, 16, 4, 7, 90]
    requests = [greedy(p, 1 + i % 9, logprobs=0) for i, p in enumerate(prompts(engine, lengths, seed=3))]
    expected = [alone(engine, request) for request in requests]
    poison(engine)
    with budget(engine, 24):
        outputs = engine.generate(requests)
    for output, reference in zip(outputs, expected, strict=True):
        same(output, reference)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_reused_slot_does_not_leak_its_last_tenant(engine: Engine, length: int):
    [long, short] = prompts(engine, [90, length], seed=length)
    expected = alone(engine, greedy(short, 10, logprobs=0))
    with at_most(engine, 1):
        _, output = engine.generate([greedy(long, 5), greedy(short, 10, logprobs=0)])
    same(output, expected)


def test_short_prompt_arrives_as_another_finishes(engine: Engine):
    [a, b] = prompts(engine, [20, 1], seed=9)
    expected = alone(engine, greedy(b, 6))
    name = engine.submit(greedy(a, 3))
    seen, answer = 0, []
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id == name:
                seen += len(delta.token_ids)
                if seen == 2:
                    second = engine.submit(greedy(b, 6))
            elif delta.request_id == second:
                answer += delta.token_ids
    assert answer == expected.token_ids


@pytest.mark.parametrize("model", MODELS)
def test_preempted_is_uninterrupted(model: str):
    engine = engine_of(model)
    if not engine.ledger.pages.size:
        return  # pages are what runs out; a model without attention has none
    requests = [greedy(p, 40, logprobs=1) for p in prompts(engine, [40, 33, 17], seed=5)]
    expected = [alone(engine, request) for request in requests]
    before = engine.scheduler.num_preemptions
    poison(engine)
    with only_pages(engine, 16), budget(engine, 16):
        outputs = engine.generate(requests)
    assert engine.scheduler.num_preemptions > before
    for output, reference in zip(outputs, expected, strict=True):
        same(output, reference)


@pytest.mark.parametrize("model", HYBRIDS)
def test_preempted_in_the_middle_of_its_prompt(model: str):
    engine = engine_of(model)
    requests = [greedy(p, 20, logprobs=0) for p in prompts(engine, [30, 90], seed=6)]
    expected = [alone(engine, request) for request in requests]
    engine.submit(requests[0])
    collected: dict[str, list[int]] = {}
    with budget(engine, 8):
        for _ in range(6):
            for delta in engine.step():
                collected.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.submit(requests[1])
        for _ in range(4):
            for delta in engine.step():
                collected.setdefault(delta.request_id, []).extend(delta.token_ids)
        victim = engine.scheduler.running[-1]
        assert 0 < victim.dispatched < 90
        engine.scheduler.preempt(victim)
        for delta in drain(engine):
            collected.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert list(collected.values()) == [reference.token_ids for reference in expected]


def test_synchronous_and_overlapped_steps_agree(engine: Engine):
    requests = [greedy(p, 9, logprobs=0) for p in prompts(engine, [9, 30, 2], seed=8)]
    overlapped = engine.generate(requests)
    config = engine.config
    object.__setattr__(config, "async_scheduling", False)
    try:
        synchronous = engine.generate(requests)
    finally:
        object.__setattr__(config, "async_scheduling", True)
    for a, b in zip(overlapped, synchronous, strict=True):
        same(a, b)


def test_score_is_the_prompts_logprobs(engine: Engine):
    texts = prompts(engine, [1, 2, 40, 256], seed=2)
    for tokens, scores in zip(texts, engine.score(texts), strict=True):
        assert len(scores) == len(tokens)
        assert scores[0] is None
        assert all(score is not None and score < 0 for score in scores[1:])
    numbers = golden("nemotron_h_moe")
    prompt = numbers["prompt"].tolist()
    [scores] = engine_of("nemotron_h_moe").score([prompt])
    full = log_softmax(numbers["full_logits"])
    np.testing.assert_allclose(scores[1:], [full[i, t] for i, t in enumerate(prompt[1:])], atol=2e-4)


@pytest.mark.parametrize("tokens", [1, 5, 16, 128])
def test_prompt_logprobs_do_not_depend_on_chunks_or_neighbours(engine: Engine, tokens: int):
    requests = [
        Request(prompt_token_ids=p, sampling=SamplingParams(max_tokens=n, temperature=0.0, prompt_logprobs=2))
        for p, n in zip(prompts(engine, [37, 12, 50], seed=4), (0, 3, 0), strict=True)
    ]
    expected = [alone(engine, request) for request in requests]
    with budget(engine, tokens):
        outputs = engine.generate(requests)
    for output, reference in zip(outputs, expected, strict=True):
        same(output, reference)
