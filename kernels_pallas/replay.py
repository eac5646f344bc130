"""Replay: a recurrence run token by token through the slots of a step, as every op's reference does it."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.snapshots import chunk_has_snapshot
from kernels_pallas.spans import Spans


def replay(
    token: Callable[[Array, Array], tuple[Array, Array]],
    shape: tuple[int, ...],
    state: Array | None,
    spans: Spans,
    base: int | Array,
) -> tuple[Array, Array | None]:
    """`token(h, t)` gives the state after token t from h, float32 of `shape`, and the token's output.

    Returns the outputs [T, ...], 0 for padding, and `state` with what the step's sequences and snapshots leave.
    Keeps the state after every token, so memory grows with T.
    """
    starts = jnp.zeros((spans.num_seqs, *shape))
    if state is not None:
        kept = state[base + spans.read_slot].reshape(starts.shape).astype(jnp.float32)
        starts = jnp.where(_with_axes(spans.first_pos > 0, starts), kept, 0.0)

    def step(h: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
        seq = spans.token_seq[t]
        h, y = token(jnp.where(t == spans.query_start[seq], starts[seq], h), t)
        return h, (y, h)

    _, (y, after) = lax.scan(step, jnp.zeros(shape), jnp.arange(spans.token_seq.shape[0]))
    y = jnp.where(_with_axes(spans.token_valid(), y), y, 0.0)
    if state is None:
        return y, None
    after = after.reshape(-1, *state.shape[1:]).astype(state.dtype)
    last = spans.query_start[1:] - 1
    has_tokens = spans.query_start[1:] > spans.query_start[:-1]
    unused = state.shape[0]  # a row past the end, which the scatter drops
    state = state.at[jnp.where(has_tokens, base + spans.write_slot, unused)].set(after[last], mode="drop")
    boundary = spans.chunk_start + spans.chunk_len - 1
    rows = jnp.where(chunk_has_snapshot(spans), base + spans.chunk_snapshot, unused)
    return y, state.at[rows].set(after[boundary], mode="drop")


def _with_axes(mask: Array, like: Array) -> Array:
    """mask [n] with axes of length 1 behind, as many as `like` [n, ...] has."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))
