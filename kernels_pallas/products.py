"""Products with a weight stored [out, in], formulated for where they run. Layers and ops with weights call them.

XLA's CPU library packs the second operand of a product before it multiplies. With few rows of x that takes longer than
the product, so there the weight goes first, y^T = W x^T. Without the barrier XLA exchanges the operands again. Sixteen
products of 4096 x 768 and back, float32, two AVX-512 cores (JAX 0.10.2), milliseconds:

| rows of x | x first | weight first |
|---|---|---|
| 1 | 12 | 13 |
| 2 | 44 | 14 |
| 16 | 45 | 20 |
| 32 | 69 | 36 |
| 64 | 86 | 73 |
| 128 | 143 | 108 |
| 256 | 192 | 223 |
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

WEIGHT_FIRST = range(2, 129)  # rows of x


def times_weight(x: Array, weight: Array, dtype: jnp.dtype) -> Array:
    """x [..., I] times weight [O, I] -> [..., O] in `dtype`."""
    forms = [partial(form, dtype=dtype) for form in (on_cpu, x_first)]
    return lax.platform_dependent(x, weight, cpu=forms[0], default=forms[1])


def on_cpu(x: Array, weight: Array, dtype: jnp.dtype) -> Array:
    """The same where the platform is known to be CPU."""
    if x.ndim != 2 or len(x) not in WEIGHT_FIRST:
        return x_first(x, weight, dtype)
    y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=dtype)  # [O, T]
    return lax.optimization_barrier(y).T


def by_head(equation: str, x: Array, weight: Array) -> Array:
    """An einsum with a batch of weights, in float32. XLA's CPU code has no such products of bfloat16 numbers."""

    def as_they_are(x: Array, weight: Array) -> Array:
        return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)

    def widened(x: Array, weight: Array) -> Array:
        return jnp.einsum(equation, x.astype(jnp.float32), weight.astype(jnp.float32))

    return lax.platform_dependent(x, weight, cpu=widened, default=as_they_are)


def x_first(x: Array, weight: Array, dtype: jnp.dtype) -> Array:
    """The same, as it is written."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
