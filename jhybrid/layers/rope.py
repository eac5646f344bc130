"""Rope: rotary position embedding (Su et al. 2021), whole or partial, with the rescalings that checkpoints ask for."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Rope:
    """Angular frequency of each rotated pair; pair i is dimensions i and i + len(frequencies) of a head.

    Interleaved, it is 2i and 2i + 1, and comes out as the others: the products of queries and keys are the same.
    """

    frequencies: tuple[float, ...]  # radians per position; twice as many dimensions are rotated, the rest pass
    magnitude: float = 1.0  # factor on the rotated dimensions (YaRN's attention factor)
    interleaved: bool = False

    def __call__(self, x: Array, positions: Array) -> Array:
        """x [T, H, Dh] rotated to positions [T], in x's dtype; the angles are float32."""
        pairs = len(self.frequencies)
        angles = positions[:, None].astype(jnp.float32) * jnp.asarray(self.frequencies, jnp.float32)  # [T, pairs]
        cos = (jnp.cos(angles) * self.magnitude)[:, None]  # [T, 1, pairs]
        sin = (jnp.sin(angles) * self.magnitude)[:, None]
        turned = x[..., : 2 * pairs].astype(jnp.float32)
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else jnp.split(turned, 2, axis=-1)
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate([*(r.astype(x.dtype) for r in rotated), x[..., 2 * pairs :]], axis=-1)


def plain_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """[rotary_dim / 2] float32: theta^(-2i / rotary_dim)."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def proportional_frequencies(theta: float, head_dim: int, share: float) -> np.ndarray:
    """[head_dim / 2] float32: of a whole head, but only the fastest `share` of the pairs turn (transformers' name)."""
    frequencies = plain_frequencies(theta, head_dim)
    frequencies[int(share * head_dim // 2) :] = 0.0
    return frequencies


def llama3_frequencies(
    plain: np.ndarray, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> np.ndarray:
    """Slow pairs divided by `factor`, fast ones kept, a linear blend between (Llama 3.1's model card)."""
    turns = original_length * plain / (2 * math.pi)  # of each pair over the original context
    blend = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return ((1 - blend) * plain / factor + blend * plain).astype(np.float32)


def yarn_frequencies(
    plain: np.ndarray, theta: float, factor: float, beta_fast: float, beta_slow: float, original_length: int
) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn rarely are divided by `factor`, fast ones kept."""
    dim = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32)
