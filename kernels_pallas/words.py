"""Words: bfloat16 pages held as their bits, for backends that have no bfloat16 data movement.

XLA's CPU backend turns every update of a bfloat16 array into float32 and back, the whole array each time, also
when the array is donated. The same bits as uint16 are updated in place. So pages may be `uint16`, meaning bfloat16.
"""

import jax.numpy as jnp
from jax import Array, lax


def to_words(x: Array, dtype: jnp.dtype) -> Array:
    """`x` as an array of `dtype` pages holds it."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_words(held: Array) -> Array:
    """Float32 values of what was read from pages."""
    if held.dtype == jnp.uint16:
        # bfloat16 is the upper half of a float32
        return lax.bitcast_convert_type(held.astype(jnp.uint32) << 16, jnp.float32)
    return held.astype(jnp.float32)
