"""Sums of log decays in the TPU kernels of chunks: logarithms are to base 2, which the chip raises to a power of."""

import math

import jax.numpy as jnp
from jax import Array

from kernels_pallas.decays import COARSE_STEP, STRONGEST

LARGEST = 126.0  # exponent of what is masked by a zero factor
STRONGEST_WHOLE = -30.0  # exp(-30) is far below what a sum of bfloat16 products resolves


def log_decay_parts(log_decay: Array, parts: int) -> list[Array]:
    """log_decay [Q,H], as a logarithm to base 2, cut into an exact and a small part (see decays.py), or whole.

    Whole is enough for bfloat16 products: sums of at most 128 * 30 keep the exponents right to three digits after the
    point beside strong decays, and to more without.
    """
    if parts == 1:
        return [jnp.maximum(log_decay, STRONGEST_WHOLE) * math.log2(math.e)]
    log_decay = jnp.maximum(log_decay, STRONGEST) * math.log2(math.e)
    coarse = jnp.round(log_decay / COARSE_STEP) * COARSE_STEP
    return [coarse, log_decay - coarse]
