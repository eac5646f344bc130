"""Sampling against a float64 numpy reference, option by option and mixed, and what must never happen."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from scipy import stats

from jhybrid.sampling import (
    LOGPROB_FLOOR,
    MAX_BANNED,
    PROMPT_BIT,
    SampleResult,
    SamplerState,
    SamplingBatch,
    _inverse_cdf,
    _uniforms,
    init_state,
    sample,
    set_row,
    token_logprobs,
)

V = 300  # not a multiple of the block
BLOCK = 128
SIZE = 64
jit_sample = jax.jit(sample)


@dataclass
class Row:
    """One sequence's options, as a request has them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    step: int = 0
    banned: list[int] = field(default_factory=list)
    num_logprobs: int = -1
    adjust: bool = False
    sample: bool = True
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None


def batch_of(rows: list[Row], row_ids: list[int] | None = None) -> SamplingBatch:
    dtypes = {"sample": bool, "top_k": np.int32, "seed": np.uint32, "step": np.int32, "num_logprobs": np.int32}
    dtypes["adjust"] = bool
    names = ["sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
    names += ["frequency_penalty", "seed", "step", "num_logprobs", "adjust"]
    columns = {n: jnp.asarray(np.array([getattr(r, n) for r in rows], dtypes.get(n, np.float32))) for n in names}
    banned = np.full((len(rows), MAX_BANNED), -1, np.int32)
    for i, r in enumerate(rows):
        banned[i, : len(r.banned)] = r.banned
    ids = np.arange(len(rows)) if row_ids is None else np.array(row_ids)
    bits = np.zeros((len(rows), -(-V // 32) * 32), np.uint32)
    for i, r in enumerate(rows):
        bits[i, r.allowed or []] = 1
    mask = (bits.reshape(len(rows), -1, 32) << np.arange(32, dtype=np.uint32)).sum(2, dtype=np.uint32)
    masked = jnp.asarray([r.allowed is not None for r in rows])
    return SamplingBatch(
        row=jnp.asarray(ids, jnp.int32), banned=jnp.asarray(banned), masked=masked, mask=jnp.asarray(mask), **columns
    )


def state_of(rows: list[Row], vocab: int = V) -> SamplerState:
    """State with every row set, and NaN in the scratch row's bias."""
    state = init_state(SIZE, vocab)
    for i, r in enumerate(rows):
        bias = np.zeros(vocab, np.float32)
        bias[list(r.bias)] = list(r.bias.values())
        state = set_row(state, jnp.int32(i), jnp.asarray(count_tokens(r.prompt, r.output, vocab)), jnp.asarray(bias))
    return SamplerState(state.last_token, state.counts, state.bias.at[-1].set(jnp.nan))


def count_tokens(prompt: list[int], output: list[int], vocab: int) -> np.ndarray:
    counts = np.bincount(np.array(output, np.int64), minlength=vocab).astype(np.int32)
    counts[sorted(set(prompt))] += PROMPT_BIT
    return counts


def run(logits: np.ndarray, rows: list[Row], state: SamplerState | None = None) -> tuple[SamplerState, SampleResult]:
    """Sample in a batch of SIZE, the rest of it padding with NaN logits; results of the given rows alone."""
    count = len(rows)
    padding = [Row(sample=False, temperature=1.0, top_k=3)] * (SIZE - count)
    scratch = [SIZE] * len(padding)
    padded = np.full((SIZE, logits.shape[1]), np.nan, np.float32)
    padded[:count] = logits
    state = state_of(rows) if state is None else state
    batch = batch_of(rows + padding, [*range(count), *scratch])
    state, result = jax.device_get(jit_sample(jnp.asarray(padded), state, batch))
    return state, jax.tree.map(lambda x: x[:count], result)


def adjusted(logits: np.ndarray, row: Row) -> np.ndarray:
    x = np.asarray(logits, np.float64).copy()
    if row.adjust:
        seen = sorted(set(row.prompt) | set(row.output))
        x[seen] = np.where(x[seen] > 0, x[seen] / row.repetition_penalty, x[seen] * row.repetition_penalty)
        for token in set(row.output):
            x[token] -= row.presence_penalty + row.frequency_penalty * row.output.count(token)
        for token, bias in row.bias.items():
            x[token] += bias
    x[row.banned] = -np.inf
    if row.allowed is not None:
        x[np.setdiff1d(np.arange(len(x)), row.allowed)] = -np.inf
    return x


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """What a random row is drawn from, by sorting."""
    x = adjusted(logits, row)
    with np.errstate(over="ignore"):
        weight = np.exp((x - x.max()) / row.temperature)
    if 0 < row.top_k < len(x):
        weight[x < np.sort(x)[-row.top_k]] = 0
    order = np.argsort(-weight, kind="stable")
    mass = np.cumsum(weight[order]) / weight.sum()
    if row.top_p < 1:
        last = order[np.argmax(mass >= row.top_p)]
        weight[weight < weight[last]] = 0
    weight[weight < row.min_p] = 0
    return weight / weight.sum()


def uniforms(row: Row) -> tuple[float, float]:
    key = (np.array([row.seed], np.uint32), np.zeros(1, np.uint32))
    words = threefry2x32_p.bind(*map(jnp.asarray, key), jnp.uint32([row.step]), jnp.uint32([0]))
    return tuple((int(w[0]) >> 8) / 2**24 for w in words)


def reference_tokens(logits: np.ndarray, row: Row) -> set[int]:
    """The token that the row must get; two where its random numbers fall within rounding of a border."""
    if row.temperature == 0:
        return {int(np.argmax(adjusted(logits, row)))}
    p = distribution(logits, row)
    p = np.pad(p, (0, -len(p) % BLOCK)).reshape(-1, BLOCK)
    first, second = uniforms(row)
    tokens = set()
    for nudge in (-2e-6, 2e-6):
        block = int(np.argmax(np.cumsum(p.sum(1)) > first + nudge))
        inside = np.cumsum(p[block]) / p[block].sum()
        tokens |= {block * BLOCK + int(np.argmax(inside > second + n)) for n in (-2e-6, 2e-6)}
    return tokens


def random_logits(rows: int, vocab: int = V, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


SINGLE = {
    "greedy": Row(),
    "temperature": Row(temperature=0.8),
    "hot": Row(temperature=1e6),
    "cold": Row(temperature=1e-6),
    "coldest": Row(temperature=1e-45),
    "top_k": Row(temperature=1.0, top_k=7),
    "top_k_one": Row(temperature=2.0, top_k=1),
    "top_k_above_vocabulary": Row(temperature=1.0, top_k=10**6),
    "top_k_minus_one": Row(temperature=1.0, top_k=-1),
    "top_p": Row(temperature=1.5, top_p=0.7),
    "top_p_tiny": Row(temperature=1.0, top_p=1e-7),
    "min_p": Row(temperature=1.5, min_p=0.05),
    "min_p_one": Row(temperature=1.5, min_p=1.0),
    "top_k_then_top_p_then_min_p": Row(temperature=2.0, top_k=20, top_p=0.8, min_p=0.1),
    "repetition": Row(temperature=1.0, adjust=True, repetition_penalty=1.8),
    "presence": Row(temperature=1.0, adjust=True, presence_penalty=1.5),
    "frequency": Row(temperature=1.0, adjust=True, frequency_penalty=1.1),
    "greedy_penalised": Row(adjust=True, repetition_penalty=3.0, presence_penalty=0.5, frequency_penalty=2.0),
    "bias": Row(temperature=1.0, adjust=True, bias={3: 4.0, 299: 5.0, 8: -100.0}),
    "bias_hundred": Row(temperature=1.0, adjust=True, bias={150: 100.0}),
    "banned": Row(banned=list(range(10))),
    "masked": Row(temperature=1.0, allowed=[*range(3, V, 7)]),
    "masked_greedy": Row(allowed=[31, 32, 64, V - 1]),
    "masked_to_one": Row(temperature=2.0, top_k=5, top_p=0.5, allowed=[63]),
    "masked_to_all": Row(temperature=1.0, allowed=[*range(V)]),
    "masked_and_all_else": Row(0.9, 30, 0.9, 0.02, 1.3, 0.4, 0.3, 11, 0, [1, 2], 5, True, allowed=[*range(40)]),
    "everything": Row(0.9, 30, 0.9, 0.02, 1.3, 0.4, 0.3, 11, 0, [1, 2], 5, True, bias={5: 3.0, 77: -2.0}),
}


def with_history(row: Row, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    history = {"prompt": rng.integers(0, V, 20).tolist(), "output": rng.integers(0, 40, 30).tolist()}
    return Row(**{**vars(row), **history, "seed": 1000 + seed, "step": seed % 5})


@pytest.mark.parametrize("name", SINGLE)
def test_each_option_alone_equals_reference(name):
    rows = [with_history(SINGLE[name], i) for i in range(64)]
    logits = random_logits(64)
    if "penal" in name:  # let history hold the likely tokens, so that penalties decide
        for i, r in enumerate(rows):
            r.output = r.output + [int(np.argmax(logits[i]))] * 2
    _, result = run(logits, rows)
    assert result.finite.all()
    for i, row in enumerate(rows):
        assert int(result.tokens[i]) in reference_tokens(logits[i], row), i


def test_all_options_mixed_in_one_batch_equal_reference():
    rows = [with_history(row, i) for i, row in enumerate([*SINGLE.values()] * 3)][:64]
    logits = random_logits(64, seed=1)
    _, result = run(logits, rows)
    for i, row in enumerate(rows):
        assert int(result.tokens[i]) in reference_tokens(logits[i], row), row


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=1.0),
        Row(temperature=3.0),
        Row(temperature=1.0, top_k=5),
        Row(temperature=1.0, top_p=0.8),
        Row(temperature=1.0, min_p=0.1),
        Row(temperature=1.0, adjust=True, repetition_penalty=2.0, presence_penalty=0.5, prompt=[1, 2], output=[3, 3]),
    ],
)
def test_draws_follow_the_distribution(row):
    draws = 4096
    logits = np.random.default_rng(5).standard_normal(40).astype(np.float32)
    p = distribution(logits, row)
    rows = [Row(**{**vars(row), "seed": i}) for i in range(draws)]
    state = state_of([row], 40)
    wide = SamplerState(*(jnp.repeat(x[:1], draws + 1, axis=0) for x in (state.last_token, state.counts, state.bias)))
    _, result = jax.device_get(jit_sample(jnp.tile(logits, (draws, 1)), wide, batch_of(rows)))
    seen = np.bincount(result.tokens, minlength=40)
    assert not seen[p == 0].any()
    likely = p * draws > 5
    observed, expected = np.append(seen[likely], seen[~likely].sum()), np.append(p[likely], p[~likely].sum()) * draws
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_a_mask_of_all_tokens_is_no_mask():
    logits = random_logits(64)
    rows = [Row(temperature=1.0, seed=i) for i in range(64)]
    _, free = run(logits, rows)
    _, masked = run(logits, [Row(temperature=1.0, seed=i, allowed=[*range(V)]) for i in range(64)])
    assert (free.tokens == masked.tokens).all()


def test_log_probabilities_are_the_models_own_under_a_mask():
    logits = random_logits(2)
    _, free = run(logits, [Row(num_logprobs=5)] * 2)
    least = int(np.argmin(logits[0]))
    _, masked = run(logits, [Row(num_logprobs=5, allowed=[least]), Row(num_logprobs=5)])
    assert masked.tokens[0] == least and masked.tokens[1] == free.tokens[1]
    assert (masked.top_ids == free.top_ids).all() and (masked.top_logprobs == free.top_logprobs).all()
    assert masked.logprob[0] == pytest.approx(_log_softmax(logits[0])[least], abs=1e-4)


def test_a_mask_of_no_token_fails_its_row_alone():
    _, result = run(random_logits(2), [Row(allowed=[]), Row(allowed=[9])])
    assert result.finite.tolist() == [False, True] and result.tokens[1] == 9


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x.astype(np.float64)).sum())


def test_successive_steps_of_one_seed_are_independent():
    rows = [Row(temperature=1.0, seed=7, step=i) for i in range(4096)]
    first, second = (np.asarray(u) for u in _uniforms(batch_of(rows).seed, batch_of(rows).step))
    for u in (first, second):
        assert u.min() >= 0
        assert u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.05


def test_a_row_is_the_same_in_any_batch():
    rows = [with_history(row, i) for i, row in enumerate(SINGLE.values())]
    logits = random_logits(len(rows), seed=2)
    _, together = run(logits, rows)
    order = np.random.default_rng(0).permutation(len(rows))
    state = state_of(rows)
    batch = batch_of([rows[i] for i in order], [int(i) for i in order])
    _, shuffled = jax.device_get(jit_sample(jnp.asarray(logits[order]), state, batch))
    assert (shuffled.tokens == together.tokens[order]).all()
    assert (shuffled.logprob == together.logprob[order]).all()
    for at in range(len(rows)):
        _, alone = jit_sample(jnp.asarray(logits[at : at + 1]), state, batch_of(rows[at : at + 1], [at]))
        assert int(alone.tokens[0]) == together.tokens[at], at


def test_seed_and_step_alone_decide():
    logits = np.tile(random_logits(1), (4, 1))
    same, other_step, other_seed = Row(1.0, seed=3, step=2), Row(1.0, seed=3, step=3), Row(1.0, seed=4, step=2)
    tokens = [set(), set(), set()]
    for step in range(30):
        rows = [Row(**{**vars(r), "step": r.step + 10 * step}) for r in (same, same, other_step, other_seed)]
        _, result = run(logits, rows)
        assert result.tokens[0] == result.tokens[1]
        for i in range(3):
            tokens[i].add((step, int(result.tokens[i + 1])))
    assert tokens[0] != tokens[1]
    assert tokens[0] != tokens[2]


def test_ties_take_the_lowest_index_when_greedy_and_are_all_kept_otherwise():
    logits = np.full((64, V), -5.0, np.float32)
    logits[:, [7, 100, 250]] = 2.0
    _, greedy = run(logits, [Row()] * 64)
    assert (greedy.tokens == 7).all()
    _, cut = run(logits, [Row(temperature=1.0, top_k=1, seed=i) for i in range(64)])
    assert set(cut.tokens.tolist()) == {7, 100, 250}
    _, nucleus = run(logits, [Row(temperature=1.0, top_p=0.4, seed=i) for i in range(64)])
    assert set(nucleus.tokens.tolist()) == {7, 100, 250}


def test_top_p_keeps_a_token_that_exactly_reaches_it():
    """Weights of 1, a half and a half, exact in float32: 0.5 is reached by one token, anything more needs the tie."""
    logits = np.full((64, V), -np.inf, np.float32)
    logits[:, 10], logits[:, 20], logits[:, 30] = 0.0, -np.float32(np.log(2)), -np.float32(np.log(2))
    for top_p, kept in ((0.49, {10}), (0.5, {10}), (0.51, {10, 20, 30})):
        _, result = run(logits, [Row(temperature=1.0, top_p=top_p, seed=i) for i in range(64)])
        assert set(result.tokens.tolist()) == kept, top_p


def test_penalties_follow_the_output_over_steps():
    rows = [
        Row(adjust=True, frequency_penalty=1.0, prompt=[0, 1]),
        Row(adjust=True, presence_penalty=1.5),
        Row(adjust=True, repetition_penalty=1.6, prompt=[4, 5]),
        Row(),
    ]
    logits = random_logits(4, seed=3)
    state = state_of(rows)
    for step in range(12):
        state, result = run(logits, rows, state)
        for i, row in enumerate(rows):
            assert result.tokens[i] == np.argmax(adjusted(logits[i], row)), (step, i)
            row.output.append(int(result.tokens[i]))
        assert (state.last_token[:4] == result.tokens).all()
    for i, row in enumerate(rows):
        assert (state.counts[i] == count_tokens(row.prompt, row.output, V)).all()
    assert len(set(rows[0].output)) > 1, "the penalty changed nothing"
    assert state.counts[0, 0] >= PROMPT_BIT


def test_a_row_that_does_not_adjust_ignores_what_the_row_held_before():
    stale = [Row(adjust=True, output=[5] * 9, bias={9: 100.0})] * 2
    logits = random_logits(2)
    _, result = run(logits, [Row(), Row(adjust=True, presence_penalty=0.1)], state_of(stale))
    assert result.tokens[0] == np.argmax(logits[0])
    assert result.tokens[1] == 9


def test_rows_that_do_not_sample_leave_the_state_alone():
    rows = [Row(1.0, sample=False, adjust=True), Row(1.0, adjust=True, output=[3]), Row(sample=False)]
    before = jax.device_get(state_of(rows))
    after, _ = run(random_logits(3), rows)
    for i in (0, 2):
        assert after.last_token[i] == before.last_token[i]
        assert (after.counts[i] == before.counts[i]).all()
    assert after.counts[1].sum() == before.counts[1].sum() + 1
    assert (after.bias[:3] == before.bias[:3]).all()


@pytest.mark.parametrize("options", [Row(), Row(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, adjust=True)])
def test_bad_logits_fail_their_row_alone(options):
    good = random_logits(6, seed=4)
    bad = good.copy()
    bad[0, 17] = np.nan
    bad[1, 299] = np.inf
    bad[2, :] = -np.inf
    bad[3, :] = np.nan
    bad[4, 200:] = -np.inf  # fine: the row can still be sampled
    good[4] = bad[4]
    rows = [Row(**{**vars(options), "seed": i, "num_logprobs": 3}) for i in range(6)]
    before = jax.device_get(state_of(rows))
    state, result = run(bad, rows)
    _, clean = run(good, rows)
    assert result.finite.tolist() == [False] * 4 + [True] * 2
    assert (result.tokens[:4] == 0).all()
    assert (result.logprob[:4] == np.float32(LOGPROB_FLOOR)).all()
    assert (state.counts[:4] == before.counts[:4]).all()
    assert (state.last_token[:4] == before.last_token[:4]).all()
    for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
        assert (getattr(result, name)[4:] == getattr(clean, name)[4:]).all(), name
    assert not np.isnan(result.top_logprobs).any()
    assert result.tokens[4] < 200


def test_a_row_with_no_token_left_is_not_finite():
    logits = np.full((2, V), -np.inf, np.float32)
    logits[:, [4, 5]] = 1.0
    _, result = run(logits, [Row(banned=[4, 5]), Row(banned=[4])])
    assert result.finite.tolist() == [False, True]
    assert result.tokens[1] == 5


def test_bans_hold_and_their_padding_bans_nothing():
    logits = random_logits(3)
    logits[:, V - 1] = 50.0
    logits[:, 0] = 40.0
    _, result = run(logits, [Row(banned=[0]), Row(banned=[V - 1]), Row(temperature=1.0, banned=[V - 1, 0])])
    assert result.tokens[:2].tolist() == [V - 1, 0]
    assert result.tokens[2] not in (0, V - 1)


def test_penalty_that_overflows_is_not_finite_rather_than_wrong():
    logits = random_logits(1)
    logits[0, 3] = 3e38
    _, result = run(logits, [Row(adjust=True, repetition_penalty=0.01, prompt=[3])])
    assert not result.finite[0]


def test_logprobs_are_of_the_unchanged_distribution():
    logits = random_logits(4)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    options = {"temperature": 0.3, "top_k": 3, "adjust": True, "repetition_penalty": 2.0, "bias": {1: 50.0}}
    rows = [Row(**options, seed=i, prompt=[0, 5], num_logprobs=n) for i, n in enumerate((-1, 0, 5, 20))]
    _, result = run(logits, rows)
    for i in range(4):
        np.testing.assert_allclose(result.logprob[i], expected[i, result.tokens[i]], atol=1e-5)
        ids = np.argsort(-expected[i], kind="stable")[:20]
        assert (result.top_ids[i] == ids).all()
        np.testing.assert_allclose(result.top_logprobs[i], expected[i, ids], atol=1e-5)
    _, nobody = run(logits, [Row(**options, num_logprobs=0)] * 4)
    assert (nobody.top_ids == -1).all()


def test_logprob_of_an_impossible_token_is_the_floor_and_lists_end_with_the_vocabulary():
    logits = np.array([[0.0, -np.inf, 1.0, 0.0]], np.float32)
    logprob, ids, tops = jax.device_get(token_logprobs(jnp.asarray(logits), jnp.array([1])))
    assert logprob[0] == np.float32(LOGPROB_FLOOR)
    assert ids[0].tolist() == [2, 0, 3, 1] + [-1] * 16
    assert np.isfinite(tops).all()


def test_token_logprobs_of_given_tokens():
    logits = random_logits(9, seed=6)
    targets = np.arange(9) * 31
    logprob, ids, tops = jax.device_get(jax.jit(token_logprobs)(jnp.asarray(logits), jnp.asarray(targets)))
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(logprob, expected[np.arange(9), targets], atol=1e-5)
    np.testing.assert_allclose(tops, np.take_along_axis(expected, ids, 1), atol=1e-5)
    assert (ids[:, 0] == logits.argmax(1)).all()
    broken = token_logprobs(jnp.asarray(logits).at[2, 3].set(jnp.nan), jnp.asarray(targets))
    assert (np.asarray(broken[2][2]) == np.float32(LOGPROB_FLOOR)).all()


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-24, 1.0])
def test_inverse_cdf_never_takes_a_weightless_position(uniform):
    rng = np.random.default_rng(8)
    weight = np.where(rng.random((200, 50)) < 0.3, rng.random((200, 50)) ** 20, 0.0).astype(np.float32)
    weight[:, :3] = weight[:, -3:] = 0
    weight[:, 25] = 1e-30
    index = np.asarray(_inverse_cdf(jnp.asarray(weight), jnp.full(200, uniform, jnp.float32)))
    assert (weight[np.arange(200), index] > 0).all()


def test_random_numbers_are_threefry():
    rows = [Row(seed=s, step=t) for s, t in ((0, 0), (1, 5), (2**32 - 1, 7), (123456789, 2**30))]
    first, second = _uniforms(batch_of(rows).seed, batch_of(rows).step)
    for i, row in enumerate(rows):
        assert (float(first[i]), float(second[i])) == uniforms(row)


def test_no_option_compiles_anything():
    run(random_logits(2), [Row(), Row()])
    compiled = jit_sample._cache_size()
    for row in SINGLE.values():
        run(random_logits(2), [row, Row()])
    assert jit_sample._cache_size() == compiled
