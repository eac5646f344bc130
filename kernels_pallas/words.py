"""Words: pages of floats below 32 bits held as their bits, for backends that cannot move such numbers in place.

XLA's CPU backend turns every update of an array of bfloat16 or 8-bit floats into wider ones and back, the whole array
each time, also when the array is donated. The same bits as integers are updated in place, on every device. So pages may
be `uint16`, which means bfloat16, and those of 8-bit floats are always `uint8`, which means float8_e4m3fn.
"""

import jax.numpy as jnp
from jax import Array, lax

EIGHT_BITS = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(EIGHT_BITS).max)  # 448


def to_words(x: Array, dtype: jnp.dtype) -> Array:
    """`x` as an array of `dtype` pages holds it. What is beyond the largest 8-bit float becomes that; infinities and
    NaN become NaN."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if dtype == jnp.uint8:
        held = jnp.where(jnp.isfinite(x), jnp.clip(x, -LARGEST, LARGEST), jnp.nan)
        return lax.bitcast_convert_type(held.astype(EIGHT_BITS), jnp.uint8)
    return x.astype(dtype)


def from_words(held: Array) -> Array:
    """Float32 values of what was read from pages."""
    if held.dtype == jnp.uint16:
        # bfloat16 is the upper half of a float32
        return lax.bitcast_convert_type(held.astype(jnp.uint32) << 16, jnp.float32)
    if held.dtype == jnp.uint8:
        return lax.bitcast_convert_type(held, EIGHT_BITS).astype(jnp.float32)
    return held.astype(jnp.float32)
