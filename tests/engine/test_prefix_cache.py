"""A hit equals the cold run, whatever else happens: preemption, cancellation, chunking, eviction, failure.

The oracle is the same request alone with nothing cached.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jhybrid import Engine, Output, Request
from jhybrid.runner import StepHandle
from jhybrid.weights.load import make_ledger

from .bed import alone, budget, caching, drain, greedy, only_pages, parameters, poison, prompts, same

PAGE = 8


@pytest.fixture
def cached(engine: Engine) -> Iterator[Engine]:
    with caching(engine):
        yield engine


@pytest.fixture
def recurrent(hybrid: Engine) -> Iterator[Engine]:
    with caching(hybrid):
        yield hybrid


def ask(engine: Engine, request: Request) -> Output:
    """Through the cache, with everything free poisoned first."""
    poison(engine)
    [output] = engine.generate([request])
    return output


def counts(engine: Engine) -> dict:
    return engine.status()["prefix_cache"]


@pytest.mark.parametrize("budget_tokens", [128, 20])
def test_a_hit_of_any_depth_is_the_cold_run(cached: Engine, budget_tokens: int):
    """Around every page and chunk boundary, the two prompts forking there or inside a page."""
    [base, other] = prompts(cached, [60, 12])
    for shared in (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 59, 60):
        cached.flush_cache()
        asked = [greedy(base, 3, logprobs=2), greedy(base[:shared] + other, 3, logprobs=2)]
        expected = [alone(cached, request) for request in asked]
        with budget(cached, budget_tokens):
            for _ in range(3):
                for request, cold in zip(asked, expected, strict=True):
                    same(ask(cached, request), cold)
        again = ask(cached, asked[1])
        assert again.cached_tokens == (len(base[:shared] + other) - 1) // PAGE * PAGE


def test_a_branch_point_is_found_once_and_used_from_then_on(recurrent: Engine):
    """A shared prefix and many suffixes: the second request finds the branch, the third starts from it."""
    [prefix] = prompts(recurrent, [40])
    reached = []
    for i, length in enumerate((30, 5, 77, 12, 3, 50)):
        [suffix] = prompts(recurrent, [length], seed=i + 1)
        request = greedy(prefix + suffix, 4, logprobs=1)
        expected = alone(recurrent, request)
        output = ask(recurrent, request)
        same(output, expected)
        reached.append((output.cached_tokens, output.miss_cause))
    assert reached[0] == (0, None)
    assert reached[1] == (0, "no_branch")
    assert all(depth == 40 and cause is None for depth, cause in reached[2:])


def test_a_prompt_of_one_page_can_hit(cached: Engine):
    [prompt] = prompts(cached, [PAGE + 1])
    expected = alone(cached, greedy(prompt, 4))
    depths = []
    for _ in range(2):
        output = ask(cached, greedy(prompt, 4))
        same(output, expected)
        depths.append(output.cached_tokens)
    assert depths == [0, PAGE]


def test_marks_of_the_request_leave_snapshots(recurrent: Engine):
    """`snapshot_at`: the second request of a system prompt hits at once, at the page below the mark."""
    [system, a, b] = prompts(recurrent, [30, 9, 14])
    ask(recurrent, dataclasses.replace(greedy(system + a, 2), snapshot_at=[30]))
    request = greedy(system + b, 6, logprobs=1)
    expected = alone(recurrent, request)
    output = ask(recurrent, request)
    same(output, expected)
    assert output.cached_tokens == 24


def test_every_interval_leaves_snapshots(recurrent: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent.ledger, "snapshot_interval", 2 * PAGE)
    [base] = prompts(recurrent, [97])
    for shared in (1, 15, 16, 17, 40, 66, 80, 96):
        recurrent.flush_cache()
        ask(recurrent, greedy(base, 1))
        request = greedy(base[:shared] + prompts(recurrent, [3], seed=shared)[0], 2)
        expected = alone(recurrent, request)
        output = ask(recurrent, request)
        same(output, expected)
        assert output.cached_tokens >= shared // (2 * PAGE) * 2 * PAGE


def test_a_conversation_computes_only_what_is_new(cached: Engine):
    """Ten turns; the next prompt is the last, its answer and some tokens: found to the end of the answer."""
    [history] = prompts(cached, [20])
    known = 0
    for turn in range(10):
        request = greedy(history, 7, logprobs=1)
        expected = alone(cached, request)
        output = ask(cached, request)
        same(output, expected)
        if turn:
            assert output.cached_tokens >= known - PAGE, turn
        known = len(history) + len(output.token_ids) - 1  # the last one sampled was not computed
        history = history + output.token_ids + prompts(cached, [9], seed=turn)[0]


def test_a_conversation_that_drops_the_end_of_an_answer_falls_back_to_its_prompt(recurrent: Engine):
    [history] = prompts(recurrent, [33])
    answer = ask(recurrent, greedy(history, 40)).token_ids
    request = greedy(history + answer[:20] + [1, 2, 3], 6, logprobs=1)
    expected = alone(recurrent, request)
    output = ask(recurrent, request)
    same(output, expected)
    assert output.cached_tokens == 32
    assert output.miss_cause == "no_branch"
    same(ask(recurrent, request), expected)


def test_a_prefix_that_is_used_stays_as_it_was(cached: Engine):
    """Generations from a cached prefix, greedy and sampled in turns, do not change it."""
    [p, x, y] = prompts(cached, [41, 7, 20])
    requests = [greedy(p, 50, logprobs=0), greedy(p + x, 9), greedy(p + y, 9), greedy(p, 9)]
    expected = [alone(cached, request) for request in requests]
    depths = set()
    for round_ in range(5):
        for request, cold in zip(requests, expected, strict=True):
            same(ask(cached, request), cold)
        sampled = dataclasses.replace(requests[0].sampling, temperature=1.0, seed=round_)
        ask(cached, dataclasses.replace(requests[0], sampling=sampled))
        depths.add(ask(cached, requests[3]).cached_tokens)
    assert depths == {40}


def test_requests_that_arrive_together_compute_their_prefix_once(cached: Engine):
    [prefix, *suffixes] = prompts(cached, [64, 5, 9, 2, 6])
    requests = [greedy(prefix + suffix, 6, logprobs=1) for suffix in suffixes]
    expected = [alone(cached, request) for request in requests]
    before = cached.stats.prompt_tokens
    poison(cached)
    for output, cold in zip(cached.generate(requests), expected, strict=True):
        same(output, cold)
    assert cached.stats.prompt_tokens - before == 64 + sum(map(len, suffixes))


def test_several_answers_share_their_prompt(cached: Engine):
    [prompt] = prompts(cached, [50])
    expected = alone(cached, greedy(prompt, 8, n=3, temperature=0.8, seed=5, logprobs=1))
    cached.flush_cache()
    before = cached.stats.prompt_tokens
    output = ask(cached, greedy(prompt, 8, n=3, temperature=0.8, seed=5, logprobs=1))
    for a, b in zip(output.completions, expected.completions, strict=True):
        assert a.token_ids == b.token_ids
    assert cached.stats.prompt_tokens - before == 50 + 2 * 2


def test_without_its_state_a_prefix_is_no_hit(recurrent: Engine):
    """A5: keys and values stay, snapshots go: nothing is reused, and the reason is counted."""
    [prompt] = prompts(recurrent, [50])
    expected = alone(recurrent, greedy(prompt, 6, logprobs=1))
    ask(recurrent, greedy(prompt, 6))
    tree = recurrent.ledger.tree
    assert tree is not None
    while tree.evict_snapshot():
        pass
    output = ask(recurrent, greedy(prompt, 6, logprobs=1))
    same(output, expected)
    assert (output.cached_tokens, output.miss_cause) == (0, "evicted")
    assert counts(recurrent)["missed_tokens"]["evicted"] == 48
    assert ask(recurrent, greedy(prompt, 6)).cached_tokens == 48


def test_with_snapshots_off_the_ledger_shares_nothing(recurrent: Engine):
    config = recurrent.config
    memory = dataclasses.replace(recurrent.runner.memory, num_snapshots=0)
    assert make_ledger(config, recurrent.model, memory).tree is None


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None)])
def test_salts_keep_prefixes_apart(cached: Engine, salts: tuple[str | None, ...]):
    [prompt] = prompts(cached, [40])
    for salt in salts:
        assert ask(cached, dataclasses.replace(greedy(prompt, 2), cache_salt=salt)).cached_tokens == 0
    for salt in salts:
        assert ask(cached, dataclasses.replace(greedy(prompt, 2), cache_salt=salt)).cached_tokens == 32


def test_requests_that_arrive_together_wait_also_for_a_prompt_of_several_steps(cached: Engine):
    """The first takes the whole budget of every step until it is through; the others ask for their part meanwhile."""
    [prefix, *suffixes] = prompts(cached, [80, 20, 20, 20])
    requests = [greedy(prefix + suffix, 4, logprobs=1) for suffix in suffixes]
    expected = [alone(cached, request) for request in requests]
    before = cached.stats.prompt_tokens
    poison(cached)
    with budget(cached, 16):
        for output, cold in zip(cached.generate(requests), expected, strict=True):
            same(output, cold)
    assert cached.stats.prompt_tokens - before == 80 + 3 * 20


def test_a_mark_at_the_end_of_a_prompt_of_whole_pages_is_kept(recurrent: Engine):
    [system, user] = prompts(recurrent, [32, 9])
    ask(recurrent, dataclasses.replace(greedy(system, 40), snapshot_at=[32]))
    request = greedy(system + user, 4, logprobs=1)
    expected = alone(recurrent, request)
    output = ask(recurrent, request)
    same(output, expected)
    assert (output.cached_tokens, output.miss_cause) == (32, None)


def test_counters_are_the_sum_of_what_answers_say(cached: Engine):
    outputs = []
    for i in range(6):
        [prompt] = prompts(cached, [40], seed=i % 2)
        outputs.append(ask(cached, greedy(prompt, 3, n=1 + i % 3)))
    assert counts(cached)["hit_tokens"] == sum(output.cached_tokens for output in outputs) == 4 * 32
    assert counts(cached)["query_tokens"] == 6 * 40


def test_scored_prompts_are_computed_whole(cached: Engine):
    [prompt] = prompts(cached, [40])
    request = greedy(prompt, 4, prompt_logprobs=1)
    expected = alone(cached, request)
    for _ in range(2):
        output = ask(cached, request)
        same(output, expected)
        assert output.cached_tokens == 0
    assert ask(cached, greedy(prompt, 4)).cached_tokens == 32


def test_scoring_from_an_index_on_shares_what_lies_before(cached: Engine):
    """Several continuations of one context: scored from one prefix, as when each is computed whole."""
    [context, *endings] = prompts(cached, [50, 7, 1, 12, 7])
    sequences = [context + ending for ending in endings]
    expected = [[None] * 50 + cached.score([tokens])[0][50:] for tokens in sequences]
    cached.flush_cache()
    poison(cached)
    before = cached.stats.prompt_tokens
    found = cached.score(sequences, [50] * 4)
    for row, cold in zip(found, expected, strict=True):
        assert row[:50] == cold[:50]
        np.testing.assert_allclose(row[50:], cold[50:], atol=1e-4)  # pyright: ignore[reportArgumentType]
    assert cached.stats.prompt_tokens - before == 50 + 3 * 2 + sum(map(len, endings))


@pytest.mark.parametrize("start", [0, 1, 2, 8, 9, 17, 39, 40, 41, 10**6])
def test_logprobs_of_the_prompt_from_an_index_on(cached: Engine, start: int):
    [prompt] = prompts(cached, [40])
    whole = alone(cached, greedy(prompt, 4, prompt_logprobs=2)).prompt_logprobs
    assert whole is not None
    ask(cached, greedy(prompt, 1))
    for _ in range(2):
        output = ask(cached, greedy(prompt, 4, prompt_logprobs=2, prompt_logprobs_from=start))
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[:start] == [None] * min(start, 40)
        for entry, expected in zip(output.prompt_logprobs[start:], whole[start:], strict=True):
            assert (entry is None) == (expected is None)
            np.testing.assert_allclose([lp for _, lp in entry or []], [lp for _, lp in expected or []], atol=1e-4)


@pytest.mark.parametrize("pages", [14, 20])
@pytest.mark.parametrize("policy", ["lru", "flop_aware"])
def test_a_crowd_under_pressure_is_right(engine: Engine, pages: int, policy: str):
    """Preemption and eviction while prefixes are shared: more is asked than pages and snapshots can hold."""
    if not engine.ledger.pages.size:
        pytest.skip("this model has no pages to run out of")
    [base] = prompts(engine, [40])
    requests = [greedy(base[: 8 * i] + prompts(engine, [10 + i], seed=i)[0], 40, logprobs=1) for i in range(5)]
    expected = [alone(engine, request) for request in requests]
    with caching(engine, policy), only_pages(engine, pages):
        before = engine.status()["preemptions"]
        for _ in range(3):
            poison(engine)
            for output, cold in zip(engine.generate(requests), expected, strict=True):
                same(output, cold)
        assert engine.status()["preemptions"] > before
        assert counts(engine)["evicted_pages"] > 0
        engine.flush_cache()


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_cancelled_request_publishes_nothing_wrong(cached: Engine, steps: int):
    [prompt] = prompts(cached, [60])
    expected = alone(cached, greedy(prompt, 12, logprobs=1))
    with budget(cached, 16):
        name = cached.submit(greedy(prompt, 12))
        for _ in range(steps):
            cached.step()
        cached.abort(name)
        drain(cached)
        same(ask(cached, greedy(prompt, 12, logprobs=1)), expected)
    same(ask(cached, greedy(prompt, 12, logprobs=1)), expected)


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_failed_step_publishes_nothing(cached: Engine, monkeypatch: pytest.MonkeyPatch, failing: int):
    """The step has run and what it wrote is garbage: it is poisoned, and nobody may ever read it."""
    [prompt] = prompts(cached, [60])
    request = greedy(prompt, 12, logprobs=1)
    expected = alone(cached, request)
    result, calls = StepHandle.result, 0

    def fail(self: StepHandle) -> object:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("injected")
        return result(self)

    with budget(cached, 16), monkeypatch.context() as patch:
        patch.setattr(StepHandle, "result", fail)
        output = ask(cached, request)
    assert output.finish_reason == "error"
    for _ in range(2):
        same(ask(cached, request), expected)


def test_nothing_survives_lost_caches(cached: Engine, monkeypatch: pytest.MonkeyPatch):
    [prompt] = prompts(cached, [60])
    request = greedy(prompt, 6, logprobs=1)
    expected = alone(cached, request)
    ask(cached, request)

    def lose(batch: object) -> StepHandle:
        for array in jax.tree.leaves((cached.runner.cache, cached.runner.sampler)):
            array.delete()
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(cached.runner, "run", lose)
        [failed] = cached.generate([request])
    assert failed.finish_reason == "error"
    output = ask(cached, request)
    same(output, expected)
    assert output.cached_tokens == 0


def test_nan_in_the_middle_of_a_prompt_is_not_shared(recurrent: Engine):
    """The chunk with the NaN fails its sequence at once; what came before it is good and stays."""
    [prompt] = prompts(recurrent, [60])
    prompt = [token if token != 5 else 6 for token in prompt]
    prompt[37] = 5
    expected = alone(recurrent, greedy(prompt, 4, logprobs=1))

    def poisoned(path: str, array: np.ndarray) -> np.ndarray:
        if "embed" in path:
            array[5] = np.nan
        return array

    with budget(recurrent, 16), parameters(recurrent, poisoned):
        output = ask(recurrent, greedy(prompt, 4))
        assert output.finish_reason == "error"
    for _ in range(2):
        output = ask(recurrent, greedy(prompt, 4, logprobs=1))
        same(output, expected)


def test_a_stale_snapshot_would_be_seen(recurrent: Engine):
    """Positive control: with another state in the snapshots, a hit gives other log-probabilities."""
    [prompt] = prompts(recurrent, [60])
    request = greedy(prompt, 6, logprobs=1)
    expected = alone(recurrent, request)
    ask(recurrent, request)
    spoil_snapshots(recurrent)
    with pytest.raises(AssertionError):
        same(ask(recurrent, request), expected)
    recurrent.flush_cache()


@pytest.mark.parametrize("what", ["snapshot", "page"])
def test_the_guard_finds_and_forgets_a_corrupt_prefix(cached: Engine, monkeypatch: pytest.MonkeyPatch, what: str):
    """A planted fault in a state, or in a page in the middle, is found by computing hits again, and forgotten."""
    if (what == "snapshot" and not cached.ledger.slots.size) or (what == "page" and not cached.ledger.pages.size):
        pytest.skip("this model has none")
    [prompt] = prompts(cached, [60])
    request = greedy(prompt, 6, logprobs=1)
    expected = alone(cached, request)
    ask(cached, request)
    monkeypatch.setattr(cached._guard, "rate", 1.0)
    same(ask(cached, request), expected)
    assert (counts(cached)["verified"], counts(cached)["quarantined"]) == (1, 0)
    if what == "snapshot":
        spoil_snapshots(cached)
    else:
        spoil_page(cached, 3)
    assert ask(cached, request).cached_tokens == 56  # wrong, and found out right afterwards
    assert counts(cached)["quarantined"] >= 1
    output = ask(cached, request)
    same(output, expected)
    assert output.cached_tokens < 56


def test_a_prefix_with_nan_fails_one_request_and_is_forgotten(recurrent: Engine):
    """No rate of checks is set: a hit that fails is checked in any case."""
    [prompt] = prompts(recurrent, [60])
    request = greedy(prompt, 6, logprobs=1)
    expected = alone(recurrent, request)
    ask(recurrent, request)
    spoil_snapshots(recurrent, np.nan)
    assert ask(recurrent, request).finish_reason == "error"
    assert counts(recurrent)["quarantined"] >= 1
    same(ask(recurrent, request), expected)


def spoil_page(engine: Engine, depth: int) -> None:
    """Other keys and values in the page at a depth of the only cached path."""
    tree, cache = engine.ledger.tree, engine.runner.cache
    assert tree is not None
    [root] = tree.roots.values()
    node = root
    for _ in range(depth):
        [node] = node.children.values()
    for name, (part, layers) in engine.runner.router.arrays.items():
        if part.unit == "page":
            array = np.array(cache.arrays[name])
            array[node.page :: array.shape[0] // layers] += 1.0
            cache.arrays[name] = jax.device_put(array)


def spoil_snapshots(engine: Engine, factor: float = 0.7) -> None:
    """Scale every used snapshot's state."""
    cache, ledger = engine.runner.cache, engine.ledger
    used = sorted(set(range(ledger.snapshots.size)) - set(ledger.snapshots.free_rows()))
    for name, (part, layers) in engine.runner.router.arrays.items():
        if part.unit == "slot":
            array = np.array(cache.arrays[name])
            rows = array.shape[0] // layers
            where = [layer * rows + ledger.slots.size + row for layer in range(layers) for row in used]
            array[where] *= factor
            cache.arrays[name] = jax.device_put(array)
