"""Decays between tokens of a chunk, as exponentials of differences of cumulative sums."""

import jax.numpy as jnp
from jax import Array, lax

# exp(-100) is 0 in float32, so a stronger decay changes nothing; the bound keeps sums of 256 tokens exact below.
STRONGEST = -100.0
STRONGEST_IN_BFLOAT16 = -30.0  # exp(-30) is nothing beside what bfloat16 products lose
COARSE_STEP = 2.0**-8

SplitSum = tuple[Array, Array]  # the exact part of a sum and the small rest


def split_cumsum(log_decay: Array) -> SplitSum:
    """Inclusive cumulative sums over axis -2 of log_decay [..., Q, H] <= 0, as an exact and a small part.

    One token with a strong decay makes a plain float32 cumulative sum so large that the differences after it
    lose digits (an error of 1e-4 at a sum of 1000). Multiples of 1/256 are summed without error; what is left
    of each term is below 1/512, so that its sum stays small.
    """
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), STRONGEST)
    coarse = jnp.round(log_decay / COARSE_STEP) * COARSE_STEP
    Q = log_decay.shape[-2]
    ones = jnp.tril(jnp.ones((Q, Q), jnp.float32))
    parts = (lax.stop_gradient(coarse), log_decay - lax.stop_gradient(coarse))
    exact, small = (jnp.einsum("qk,...kh->...qh", ones, part, precision=lax.Precision.HIGHEST) for part in parts)
    return exact, small


def decay_between(later: SplitSum, earlier: SplitSum, mask: Array | None = None) -> Array:
    """exp(later - earlier) of two split cumulative sums, computed part by part; 0 where `mask` is False.

    Masked before the exponential: where "later" is earlier the difference is positive and overflows, which
    would make gradients NaN even if the value were discarded.
    """
    difference = (later[0] - earlier[0]) + (later[1] - earlier[1])
    return jnp.exp(difference if mask is None else jnp.where(mask, difference, -jnp.inf))
