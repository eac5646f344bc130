"""Which chunks leave a snapshot: the one rule, shared by the ops that keep recurrent state."""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.spans import Spans


def chunk_has_snapshot(spans: Spans) -> Array:
    """[C] bool: whether the state after each chunk is to be written to `chunk_snapshot`.

    The scratch row is a layer's last, so wherever an entry of the table is scratch, scratch is the largest;
    only a table whose every entry asks for a snapshot has none.
    """
    chunks = spans.chunk_len.shape[0]
    below_scratch = spans.chunk_snapshot < jnp.max(spans.chunk_snapshot)
    return (spans.chunk_len > 0) & (below_scratch | (spans.num_snapshots == chunks))
