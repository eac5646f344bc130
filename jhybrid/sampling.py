"""Sampling: the next token of every sequence of a step, chosen on the device. Called inside the runner's step.

One code serves every mix of requests: options are arrays with one entry per sequence, and parts that cost
time are skipped at run time when no sequence of the batch needs them. Nothing compiles per option.

Logits are changed in this order: repetition, presence and frequency penalties, logit bias, bans and the mask of a
grammar, temperature, top-k, top-p (of the distribution that top-k leaves), min-p. Tokens tied with the last one kept
by top-k or top-p are kept too. Log-probabilities are always of the model's own distribution, before all of that.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jhybrid.request import MAX_LOGPROBS
from jhybrid.shapes import Logits, PerSeqInt

PROMPT_BIT = 1 << 24
"""Added to a token's count when it occurs in the prompt; the bits below count its occurrences in the output."""
MAX_BANNED = 16
"""Most token ids that may be forbidden to one sequence in one step."""
LOGPROB_FLOOR = -1e30
"""Reported in place of an infinitely small log-probability, which JSON cannot hold. Nothing else is this small:
where a row's logits are not finite, all its log-probabilities are the floor, the highest one included."""

_BLOCK = 128  # divides the vocabularies in use, so that blocking needs no padded copy of the logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """What sampling keeps between steps; a row per running sequence, the last row is scratch."""

    last_token: Array  # [rows] int32: the last token sampled for a row; feeds the next step
    counts: Array  # [rows, V] int32: occurrences in the output, plus PROMPT_BIT if in the prompt
    bias: Array  # [rows, V] float32: added to the logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """How each sequence of a step is to be sampled. Padding has `sample` False and the scratch row."""

    row: Array  # [S] int32: row of SamplerState
    sample: Array  # [S] bool: this sequence yields a token in this step
    temperature: Array  # [S] float32: 0 is greedy
    top_k: Array  # [S] int32: <= 0 is off
    top_p: Array  # [S] float32: 1 is off
    min_p: Array  # [S] float32: 0 is off
    repetition_penalty: Array  # [S] float32: over prompt and output, 1 is off
    presence_penalty: Array  # [S] float32: over the output, 0 is off
    frequency_penalty: Array  # [S] float32: over the output, 0 is off
    seed: Array  # [S] uint32
    step: Array  # [S] int32: index, in its output, of the token to be sampled
    banned: Array  # [S, MAX_BANNED] int32: ids that may not be sampled now, padded with -1
    num_logprobs: Array  # [S] int32: top log-probabilities wanted; -1 for none
    adjust: Array  # [S] bool: the row's counts and bias were set by `set_row` and apply
    masked: Array  # [S] bool: `mask` applies
    mask: Array  # [S, ceil(V / 32)] uint32: bit i of word w allows token 32 w + i


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleResult:
    """Tokens of a step. Entries of sequences that do not sample mean nothing."""

    tokens: Array  # [S] int32; 0 where not finite
    logprob: Array  # [S] float32: of the token, at least LOGPROB_FLOOR, never NaN
    top_ids: Array  # [S, MAX_LOGPROBS] int32, likeliest first; -1 past the vocabulary and where nobody asked
    top_logprobs: Array  # [S, MAX_LOGPROBS] float32
    finite: Array  # [S] bool: False if the logits had NaN or +inf, or no token that may be sampled


def init_state(max_num_seqs: int, vocab_size: int) -> SamplerState:
    """State for `max_num_seqs` running sequences and the scratch row."""
    rows = max_num_seqs + 1
    return SamplerState(
        last_token=jnp.zeros(rows, jnp.int32),
        counts=jnp.zeros((rows, vocab_size), jnp.int32),
        bias=jnp.zeros((rows, vocab_size), jnp.float32),
    )


def set_row(state: SamplerState, row: Array, counts: Array, bias: Array) -> SamplerState:
    """Give a row the counts [V] int32 and bias [V] float32 of its new sequence; needed if that is to `adjust`."""
    return SamplerState(state.last_token, state.counts.at[row].set(counts), state.bias.at[row].set(bias))


def sample(logits: Logits, state: SamplerState, batch: SamplingBatch) -> tuple[SamplerState, SampleResult]:
    """Choose a token for each sequence that samples, and count it.

    A row whose logits hold NaN or +inf, or leave no token to choose, gets `finite` False and changes no state.
    The token of a random row depends on its logits, options, `seed` and `step` alone, not on the rest of the batch.
    """
    top = jnp.max(logits, axis=1)
    normaliser = _normaliser(logits, top)
    random = batch.sample & (batch.temperature > 0)
    changed = batch.sample & (batch.adjust | batch.masked | jnp.any(batch.banned >= 0, axis=1))
    tokens, eligible = lax.cond(
        jnp.any(random | changed),
        lambda: _choose(logits, state, batch, random, changed),
        lambda: (_first_at(logits, top), jnp.ones_like(random)),
    )
    # The sum and not the maximum decides: XLA's vectorised maximum on CPU passes over a NaN.
    finite = jnp.isfinite(normaliser) & eligible
    tokens = jnp.where(finite & batch.sample, tokens, 0)

    scratch = state.last_token.shape[0] - 1
    row = jnp.where(finite & batch.sample, batch.row, scratch)
    state = SamplerState(
        last_token=state.last_token.at[row].set(tokens),
        counts=state.counts.at[row, tokens].add(1),
        bias=state.bias,
    )
    wanted = jnp.any(batch.sample & (batch.num_logprobs > 0))
    top_ids, top_logprobs = lax.cond(wanted, lambda: _top(logits, normaliser), lambda: _no_top(logits.shape[0]))
    return state, SampleResult(tokens, _logprob(logits, normaliser, tokens), top_ids, top_logprobs, finite)


def token_logprobs(logits: Logits, targets: PerSeqInt) -> tuple[Array, Array, Array]:
    """Log-probability of each given token under its row of logits, and the likeliest tokens. This scores prompts.

    logits [n, V] float32, targets [n] int32 -> ([n] float32, [n, MAX_LOGPROBS] int32, [n, MAX_LOGPROBS] float32).
    Never NaN, see LOGPROB_FLOOR.
    """
    normaliser = _normaliser(logits, jnp.max(logits, axis=1))
    top_ids, top_logprobs = _top(logits, normaliser)
    return _logprob(logits, normaliser, targets), top_ids, top_logprobs


def _choose(
    logits: Array, state: SamplerState, batch: SamplingBatch, random: Array, changed: Array
) -> tuple[Array, Array]:
    """Tokens [S] by any rule, and whether each row had one to choose [S]."""
    logits = lax.cond(jnp.any(changed), lambda: _adjust(logits, state, batch), lambda: logits)
    logits = lax.cond(jnp.any(batch.masked), lambda: _allow(logits, batch), lambda: logits)
    top = jnp.max(logits, axis=1)
    greedy = _first_at(logits, top)
    drawn = lax.cond(jnp.any(random), lambda: _draw(logits, top, batch, random), lambda: greedy)
    return jnp.where(random, drawn, greedy), jnp.isfinite(top)


def _adjust(logits: Array, state: SamplerState, batch: SamplingBatch) -> Array:
    """[S, V] logits with penalties, bias and bans."""
    seen = state.counts[batch.row]  # [S, V]
    output = (seen & (PROMPT_BIT - 1)).astype(jnp.float32)
    penalty = batch.repetition_penalty[:, None]
    adjusted = jnp.where(seen > 0, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    adjusted -= batch.presence_penalty[:, None] * (output > 0) + batch.frequency_penalty[:, None] * output
    adjusted += state.bias[batch.row]
    adjusted = jnp.where(batch.adjust[:, None], adjusted, logits)
    size = logits.shape[1]
    banned = jnp.where(batch.banned >= 0, batch.banned, size)  # a negative index would count from the end
    return adjusted.at[jnp.arange(logits.shape[0])[:, None], banned].set(-jnp.inf, mode="drop")


def _allow(logits: Array, batch: SamplingBatch) -> Array:
    """[S, V] logits with those of tokens that a grammar does not allow at -inf."""
    size = logits.shape[1]
    words = jnp.repeat(batch.mask, 32, axis=1)[:, :size]
    allowed = (words >> (jnp.arange(size, dtype=jnp.uint32) % 32)) & 1
    return jnp.where(batch.masked[:, None] & (allowed == 0), -jnp.inf, logits)


def _draw(logits: Array, top: Array, batch: SamplingBatch, random: Array) -> Array:
    """[S] tokens drawn from softmax(logits / temperature) after top-k, top-p and min-p. `top` is the row maximum."""
    # A divisor below the least normal number may be flushed to 0, and 0 / 0 is NaN.
    temperature = jnp.where(random, jnp.maximum(batch.temperature, jnp.finfo(jnp.float32).tiny), 1.0)
    # Distance from the maximum first: it is finite at any temperature, and the likeliest token weighs 1.
    weight = jnp.exp((logits - top[:, None]) / temperature[:, None])
    eligible = random & jnp.isfinite(top)
    cut_k = eligible & (batch.top_k > 0) & (batch.top_k < logits.shape[1])
    cut_p = eligible & (batch.top_p < 1)
    threshold = lax.cond(
        jnp.any(cut_k | cut_p),
        lambda: _threshold(logits, weight, top, batch, cut_k, cut_p),
        lambda: jnp.full_like(top, -jnp.inf),
    )
    weight = jnp.where((logits >= threshold[:, None]) & (weight >= batch.min_p[:, None]), weight, 0.0)

    blocks = _blocks(weight)  # [S, V / block, block]
    first, second = _uniforms(batch.seed, batch.step)
    block = _inverse_cdf(jnp.sum(blocks, axis=2), first)
    inside = _inverse_cdf(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], second)
    return block * _BLOCK + inside


def _threshold(logits: Array, weight: Array, top: Array, batch: SamplingBatch, cut_k: Array, cut_p: Array) -> Array:
    """[S] the least logit that top-k (of rows `cut_k`) and then top-p (of rows `cut_p`) keep.

    Both ask for the highest threshold at which what is kept reaches a target: a count, or a share of the weight.
    The scan over the two makes them one piece of compiled code.
    """

    def narrow(threshold: Array, by_weight: Array) -> tuple[Array, None]:
        share = jnp.where(logits >= threshold[:, None], jnp.where(by_weight, weight, 1.0), 0.0)  # [S, V]
        target = jnp.where(by_weight, batch.top_p * jnp.sum(share, axis=1), batch.top_k.astype(jnp.float32))
        found = _largest_reaching(target, logits, share, top, jnp.where(by_weight, cut_p, cut_k))
        return jnp.maximum(threshold, found), None

    threshold, _ = lax.scan(narrow, jnp.full_like(top, -jnp.inf), jnp.array([False, True]))
    return threshold


def _largest_reaching(target: Array, logits: Array, share: Array, top: Array, active: Array) -> Array:
    """[S] the largest t <= top at which shares of logits >= t sum to the target; -inf for inactive rows.

    Bisects the integers that order as floats do, so it is exact, and takes at most 32 passes over the data;
    a sort takes several times as long on a CPU. Counts in float32 are exact up to 2^24 tokens.
    """
    low = jnp.full(top.shape, _order(jnp.float32(-jnp.inf)))
    high = jnp.where(active, _order(top) + 1, low + 1)

    def middle(low: Array, high: Array) -> Array:
        return (low & high) + ((low ^ high) >> 1)  # the mean, without overflow

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        mid = middle(low, high)
        reached = jnp.sum(jnp.where(logits >= _float_of(mid)[:, None], share, 0.0), axis=1)
        high = jnp.where(reached > target, high, jnp.where(reached == target, mid + 1, mid))
        return jnp.where(reached >= target, mid, low), high

    low, _ = lax.while_loop(lambda bounds: jnp.any(middle(*bounds) > bounds[0]), halve, (low, high))
    return _float_of(low)


def _order(x: Array) -> Array:
    """int32 that compare as the float32 do."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _float_of(order: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def _inverse_cdf(weight: Array, uniform: Array) -> Array:
    """[S] index drawn in proportion to weight [S, n]; never one of weight 0 unless all are."""
    size = weight.shape[1]
    position = jnp.arange(size, dtype=jnp.float32)  # float extrema are vectorised on CPU
    # Running sums, each in the same order of additions: rounding keeps them monotone, and it compiles in no time.
    upto = position[:, None] <= position  # [n, n]: position i counts towards sum j
    sums = jnp.sum(jnp.where(upto, weight[:, :, None], 0.0), axis=1)
    past = sums > (uniform * sums[:, -1])[:, None]
    # The first position past the mark or, should the product above have rounded up to the whole sum, the last one.
    rank = jnp.max(jnp.where(weight > 0, jnp.where(past, 2 * size - position, position), 0.0), axis=1)
    return jnp.where(rank > size, 2 * size - rank, rank).astype(jnp.int32)


def _uniforms(seed: Array, step: Array) -> tuple[Array, Array]:
    """Two numbers in [0, 1) per row, a function of (seed, step) alone.

    Threefry-2x32 with 20 rounds (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), written out:
    JAX's own takes a second to compile over a batch of keys, and its stream may change with its version.
    """
    keys = (seed, jnp.zeros_like(seed), seed ^ np.uint32(0x1BD11BDA))
    a, b = step.astype(jnp.uint32) + keys[0], keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = ((b << turn) | (b >> (32 - turn))) ^ a
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.uint32(group + 1)
    scale = np.float32(2.0**-24)
    return (a >> 8).astype(jnp.float32) * scale, (b >> 8).astype(jnp.float32) * scale


def _blocks(x: Array) -> Array:
    """[S, V] -> [S, V / block, block], the last block filled up with 0."""
    short = -x.shape[1] % _BLOCK
    if short:
        x = jnp.pad(x, ((0, 0), (0, short)))
    return x.reshape(x.shape[0], -1, _BLOCK)


def _first_at(x: Array, top: Array) -> Array:
    """[S] int32: the lowest index at which a row of x [S, V] has its maximum. Ten times as fast on CPU as argmax."""
    index = lax.broadcasted_iota(jnp.float32, x.shape, 1)  # exact up to 2^24; float minima are vectorised
    return jnp.min(jnp.where(x == top[:, None], index, x.shape[1]), axis=1).astype(jnp.int32)


def _normaliser(logits: Array, top: Array) -> Array:
    """[S] log of the sum of exponentials; NaN where the logits are not finite."""
    return top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=1))


def _reported(logprob: Array) -> Array:
    return jnp.where(logprob > LOGPROB_FLOOR, logprob, LOGPROB_FLOOR)  # the comparison is False for NaN


def _logprob(logits: Array, normaliser: Array, tokens: Array) -> Array:
    return _reported(jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - normaliser)


def _top(logits: Array, normaliser: Array) -> tuple[Array, Array]:
    """([S, MAX_LOGPROBS] ids, log-probabilities), likeliest first, lower id first among equals."""
    values, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    pad = ((0, 0), (0, MAX_LOGPROBS - ids.shape[1]))
    ids = jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1)
    return ids, jnp.pad(_reported(values - normaliser[:, None]), pad, constant_values=LOGPROB_FLOOR)


def _no_top(rows: int) -> tuple[Array, Array]:
    shape = (rows, MAX_LOGPROBS)
    return jnp.full(shape, -1, jnp.int32), jnp.full(shape, LOGPROB_FLOOR, jnp.float32)
