"""What a request may ask of its answer: lengths, stops, seeds, n, penalties, biases, log-probabilities."""

import dataclasses
from collections.abc import Iterator

import pytest

from jhybrid import Engine, Request, SamplingParams
from jhybrid.engine import fold_seed
from jhybrid.tokenizer import ByteTokenizer

from .bed import alone, at_most, drain, engine_of, greedy, poison, prompts


@pytest.fixture
def speaking() -> Iterator[Engine]:
    """An engine with a byte tokenizer, so that answers have text."""
    silent = engine_of("nemotron_h_moe")
    tokenizer = ByteTokenizer(silent.model.vocab_size)
    model = dataclasses.replace(silent.model, tokenizer=tokenizer, eos_token_ids=frozenset({257}))
    engine = Engine.with_runner(silent.config, model, silent.runner)
    poison(engine)
    yield engine
    assert engine.ledger.slots.used == 0


def test_max_tokens_zero_one_and_none(engine: Engine):
    [prompt] = prompts(engine, [10])
    for wanted in (0, 1):
        output = alone(engine, greedy(prompt, wanted))
        assert len(output.token_ids) == wanted
        assert output.finish_reason == "length"
    output = alone(engine, greedy(prompt, None))
    assert len(output.token_ids) == engine.model.max_model_len - 10
    assert output.token_ids == alone(engine, greedy(prompt, 246)).token_ids


def test_stop_tokens_end_the_answer_and_min_tokens_forbids_them(nemotron: Engine):
    [prompt] = prompts(nemotron, [10])
    free = alone(nemotron, greedy(prompt, 12)).token_ids
    stop = free[4]
    first = free.index(stop)
    output = alone(nemotron, greedy(prompt, 12, stop_token_ids=[stop]))
    assert output.token_ids == free[: first + 1]
    assert (output.finish_reason, output.completions[0].stop_reason) == ("stop", stop)
    later = alone(nemotron, greedy(prompt, 12, stop_token_ids=[stop], min_tokens=first + 3))
    assert stop not in later.token_ids[: first + 3]
    assert len(later.token_ids) >= first + 3


def test_eos_ends_unless_ignored_or_too_early(speaking: Engine):
    likely = {257: 100.0}
    base = SamplingParams(max_tokens=6, temperature=0.0, logit_bias=likely)

    def ask(**changes: object):
        sampling = dataclasses.replace(base, **changes)
        return speaking.generate([Request(prompt_token_ids=[1, 2], sampling=sampling)])[0]

    output = ask()
    assert (output.token_ids, output.text, output.finish_reason) == ([257], "", "stop")
    output = ask(ignore_eos=True)
    assert (output.token_ids, output.finish_reason) == ([257] * 6, "length")
    output = ask(min_tokens=3)
    assert 257 not in output.token_ids[:3]
    assert output.token_ids[3:] == [257]


def test_a_stop_string_across_tokens_is_cut(speaking: Engine):
    [prompt] = prompts(speaking, [10])
    sampling = SamplingParams(max_tokens=40, temperature=0.0, logit_bias=dict.fromkeys(range(97, 123), 5.0))
    [free] = speaking.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
    stop = free.text[5:9]
    assert len(stop) == 4
    at = free.text.index(stop)
    for include in (False, True):
        params = dataclasses.replace(sampling, stop=[stop], include_stop_str_in_output=include)
        [output] = speaking.generate([Request(prompt_token_ids=prompt, sampling=params)])
        assert output.text == free.text[: at + 4 * include]
        assert (output.finish_reason, output.completions[0].stop_reason) == ("stop", stop)
        streamed = "".join(d.text for d in speaking.stream(Request(prompt_token_ids=prompt, sampling=params)))
        assert streamed == output.text


def test_streamed_text_is_the_whole_text(speaking: Engine):
    for seed in range(5):
        request = Request(prompt="Now is", sampling=SamplingParams(max_tokens=30, temperature=3.0, seed=seed))
        streamed = "".join(d.text for d in speaking.stream(request))
        [output] = speaking.generate([request])
        assert streamed == output.text
        assert speaking.tokenizer is not None
        assert output.text == speaking.tokenizer.decode(output.token_ids)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(engine: Engine):
    [prompt, *others] = prompts(engine, [12, 30, 3, 7, 50])
    seeded = Request(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=12, temperature=1.3, seed=42, ignore_eos=True)
    )
    noise = [
        Request(prompt_token_ids=p, sampling=SamplingParams(max_tokens=9, temperature=2.0, seed=s, top_k=k, top_p=0.9))
        for p, s, k in zip(others, (None, 1, None, 42), (0, 5, 50, 0), strict=True)
    ]
    expected = alone(engine, seeded).token_ids
    assert engine.generate([seeded, *noise])[0].token_ids == expected
    assert engine.generate([*noise, seeded])[-1].token_ids == expected
    other = dataclasses.replace(seeded, sampling=dataclasses.replace(seeded.sampling, seed=43))
    assert alone(engine, other).token_ids != expected


def test_seeds_and_answers_of_one_seed_are_told_apart():
    seeds = (-1, 0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63)
    assert len({fold_seed(seed, index) for seed in seeds for index in range(5)}) == len(seeds) * 5
    assert fold_seed(-1, 0) == fold_seed(2**64 - 1, 0)


def test_n_answers_are_n_requests_with_their_own_seeds(engine: Engine):
    [prompt] = prompts(engine, [9])
    sampling = SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=5, ignore_eos=True, logprobs=0)
    [first] = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
    [again] = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
    answers = [tuple(c.token_ids) for c in first.completions]
    assert [c.index for c in first.completions] == [0, 1, 2, 3, 4]
    assert len(set(answers)) == 5
    assert answers == [tuple(c.token_ids) for c in again.completions]
    assert all(c.finish_reason == "length" and len(c.logprobs or []) == 8 for c in first.completions)
    single = dataclasses.replace(sampling, n=1)
    assert tuple(alone(engine, Request(prompt_token_ids=prompt, sampling=single)).token_ids) == answers[0]


def test_logit_bias_forces_and_forbids(engine: Engine):
    [prompt] = prompts(engine, [9])
    assert alone(engine, greedy(prompt, 5, logit_bias={11: 100.0})).token_ids == [11] * 5
    free = alone(engine, greedy(prompt, 5)).token_ids
    assert free[0] not in alone(engine, greedy(prompt, 5, logit_bias={free[0]: -100.0})).token_ids


def test_penalties_see_prompt_and_answer_also_after_preemption(nemotron: Engine):
    [prompt] = prompts(nemotron, [30])
    request = greedy(prompt, 30, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    expected = alone(nemotron, request).token_ids
    assert expected != alone(nemotron, greedy(prompt, 30)).token_ids
    name = nemotron.submit(request)
    tokens = []
    for _ in range(12):
        tokens += [t for d in nemotron.step() if d.request_id == name for t in d.token_ids]
    nemotron.scheduler.preempt(nemotron.scheduler.running[0])
    tokens += [t for d in drain(nemotron) for t in d.token_ids]
    assert tokens == expected


def test_the_next_tenant_of_a_row_has_no_penalties_of_the_last(nemotron: Engine):
    [a, b] = prompts(nemotron, [20, 20], seed=1)
    expected = alone(nemotron, greedy(b, 10)).token_ids
    with at_most(nemotron, 1):
        outputs = nemotron.generate([greedy(a, 10, presence_penalty=2.0, logit_bias={5: 50.0}), greedy(b, 10)])
    assert outputs[1].token_ids == expected


def test_logprobs_hold_the_sampled_token_and_are_before_temperature(engine: Engine):
    [prompt] = prompts(engine, [9])
    base = SamplingParams(max_tokens=6, temperature=5.0, seed=1, logprobs=4, ignore_eos=True)
    [output] = engine.generate([Request(prompt_token_ids=prompt, sampling=base)])
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token in [t for t, _ in entry]
        assert [lp for _, lp in entry] == sorted((lp for _, lp in entry), reverse=True)
    scores = engine.score([prompt + output.token_ids])[0][9:]
    for token, entry, score in zip(output.token_ids, output.logprobs, scores, strict=True):
        assert score is not None
        assert abs(dict(entry)[token] - score) < 1e-4
    [none] = engine.generate([Request(prompt_token_ids=prompt, sampling=dataclasses.replace(base, logprobs=0))])
    assert none.logprobs is not None
    assert [[t for t, _ in entry] for entry in none.logprobs] == [[t] for t in none.token_ids]


def test_lower_priority_value_runs_first(nemotron: Engine):
    [prompt] = prompts(nemotron, [5])
    with at_most(nemotron, 1):
        names = [
            nemotron.submit(dataclasses.replace(greedy(prompt, 3), priority=priority)) for priority in (5, 1, 3, 1)
        ]
        ends = [d.request_id for d in drain(nemotron) if d.finish_reason]
    assert ends == [names[1], names[3], names[2], names[0]]
