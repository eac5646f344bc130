"""The update of one state by one token, and by one chunk of tokens (the quadratic form of state-space duality)."""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.decays import STRONGEST, SplitSum, decay_between, split_cumsum

HIGHEST = lax.Precision.HIGHEST


def token_decay(log_decay: Array, width: int) -> Array:
    """[T, H*P] from log_decay [T, H]: how much of the state remains after each token."""
    return jnp.repeat(jnp.exp(jnp.maximum(log_decay, STRONGEST)), width // log_decay.shape[1], axis=1)


def token_update(h: Array, xdt: Array, decay: Array, B: Array) -> Array:
    """The rows h [n, H*P] of a state after one token: xdt, decay [H*P], B [G,n]."""
    (n, width), G = h.shape, B.shape[0]
    added = B.T[:, :, None] * xdt.reshape(G, width // G)  # [n, G, H*P/G]
    return h * decay + added.reshape(n, width)


def read_state(C: Array, h: Array) -> Array:
    """[Q, H*P]: what Q tokens with C [Q,G,n] read from the rows h [n, H*P] of a state."""
    (Q, G, n), width = C.shape, h.shape[1]
    if G == 1:  # a plain product: XLA's general form would transpose the state
        return jnp.dot(C[:, 0], h, precision=HIGHEST)
    return jnp.einsum("qgn,ngr->qgr", C, h.reshape(n, G, width // G), precision=HIGHEST).reshape(Q, width)


def sum_into_state(B: Array, xdt: Array) -> Array:
    """[N, H*P]: the sum over Q tokens of B [G,N,Q] times xdt [Q,H*P]."""
    (G, N, Q), width = B.shape, xdt.shape[1]
    if G == 1:
        return jnp.dot(B[0], xdt, precision=HIGHEST)
    return jnp.einsum("gnq,qgr->ngr", B, xdt.reshape(Q, G, width // G), precision=HIGHEST).reshape(N, width)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def for_heads(scores: Array, heads: int) -> Array:
    """[G, heads, Q, Q]: scores [G, Q, Q], the same for each head of a group.

    The gradient sums over heads by a product with ones: as a sum it takes longer on CPU than all the rest.
    """
    return jnp.broadcast_to(scores[:, None], (scores.shape[0], heads, *scores.shape[1:]))


def _for_heads_gradient(heads: int, _: None, gradient: Array) -> tuple[Array]:
    return (jnp.einsum("h,ghij->gij", jnp.ones(heads), gradient, precision=HIGHEST),)


for_heads.defvjp(lambda scores, heads: (for_heads(scores, heads), None), _for_heads_gradient)


def within_chunk(xdt: Array, log_decay: Array, B: Array, C: Array) -> tuple[Array, Array, Array, Array]:
    """What the tokens of a chunk do among themselves, and how they meet the state before it.

    xdt [Q,H*P], log_decay [Q,H], B [G,N,Q], C [Q,G,N]; a token with xdt, log_decay and B zero does nothing. Gives
    y [Q,H*P] from zero state, from_start [Q,H*P] (decay since the chunk's start), over_all [1,H*P] (decay over
    the chunk) and added [N,H*P] (the state after the chunk from zero state).
    """
    (Q, width), H, G = xdt.shape, log_decay.shape[1], B.shape[0]
    P = width // H
    cumulative = split_cumsum(log_decay)  # [Q, H]
    total: SplitSum = (cumulative[0][-1:], cumulative[1][-1:])
    zero = (jnp.zeros((1, H)), jnp.zeros((1, H)))

    # y_i = sum_{j<=i} (C_i B_j) decay(i, j) xdt_j
    exact, small = (c.T for c in cumulative)  # [H, Q]
    later, earlier = ((exact[at], small[at]) for at in (jnp.s_[:, :, None], jnp.s_[:, None, :]))
    between = decay_between(later, earlier, jnp.tril(jnp.ones((Q, Q), bool)))  # [H, Q, Q]
    scores = jnp.einsum("ign,gnj->gij", C, B, precision=HIGHEST)
    scores = cast(Array, for_heads(scores, H // G))  # [G, H/G, Q, Q]
    mixed = (between.reshape(scores.shape) * scores).reshape(H, Q, Q)
    by_head = xdt.reshape(Q, H, P).swapaxes(0, 1)  # [H, Q, P]
    y = jnp.einsum("hij,hjp->hip", mixed, by_head, precision=HIGHEST).swapaxes(0, 1).reshape(Q, width)

    from_start, to_end, over_all = (
        jnp.repeat(decay_between(to, since), P, axis=1)
        for to, since in ((cumulative, zero), (total, cumulative), (total, zero))
    )
    return y, from_start, over_all, sum_into_state(B, xdt * to_end)


def chunk_update(h: Array, xdt: Array, log_decay: Array, B: Array, C: Array, length: Array) -> tuple[Array, Array]:
    """y [Q, H*P] and the new state of h [N, H*P] after the first `length` of Q tokens.

    xdt [Q,H*P], log_decay [Q,H], B [G,N,Q], C [Q,G,N]. Tokens at or past `length` may be another sequence's,
    NaN among them, and are cut off here.
    """
    valid = jnp.arange(xdt.shape[0]) < length
    xdt, log_decay = (jnp.where(valid[:, None], a, 0.0) for a in (xdt, log_decay))
    B, C = jnp.where(valid, B, 0.0), jnp.where(valid[:, None, None], C, 0.0)
    y, from_start, over_all, added = within_chunk(xdt, log_decay, B, C)
    return y + read_state(C, h) * from_start, h * over_all + added
