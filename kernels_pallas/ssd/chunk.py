"""The update of one state by one token, and by one chunk of tokens (the quadratic form of state-space duality)."""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.ssd.decay import STRONGEST, decay_between, split_cumsum

HIGHEST = lax.Precision.HIGHEST


def token_update(h: Array, xdt: Array, log_decay: Array, B: Array, C: Array) -> tuple[Array, Array]:
    """y [H*P] and the new state of h [N, H*P] after one token: xdt [H*P], log_decay [H], B, C [G,N]."""
    (N, width), (H,), G = h.shape, log_decay.shape, B.shape[0]
    decay = jnp.repeat(jnp.exp(jnp.maximum(log_decay, STRONGEST)), width // H)
    if G == 1:
        h = h * decay + B[0][:, None] * xdt
        return jnp.dot(C, h, precision=HIGHEST)[0], h
    added = B.T[:, :, None] * xdt.reshape(1, G, width // G)  # [N, G, H*P/G]
    h = h * decay + added.reshape(N, width)
    y = jnp.einsum("gn,ngw->gw", C, h.reshape(N, G, width // G), precision=HIGHEST)
    return y.reshape(width), h


def within_chunk(xdt: Array, log_decay: Array, B: Array, C: Array) -> tuple[Array, Array, Array, Array]:
    """What the tokens of a chunk do among themselves, and how they meet the state before it.

    xdt [Q,H*P], log_decay [Q,H], B, C [Q,G,N]; a token with xdt, log_decay and B zero does nothing. Gives
    y [Q,H*P] from zero state, from_start [Q,H*P] (decay since the chunk's start), over_all [1,H*P] (decay over
    the chunk) and added [N,H*P] (the state after the chunk from zero state).
    """
    (Q, width), H, (_, G, N) = xdt.shape, log_decay.shape[1], B.shape
    P = width // H
    cumulative = split_cumsum(log_decay)  # [Q, H]
    total = tuple(c[-1:] for c in cumulative)
    zero = (jnp.zeros((1, H)), jnp.zeros((1, H)))

    # y_i = sum_{j<=i} (C_i B_j) decay(i, j) xdt_j
    later, earlier = (tuple(c.T[at] for c in cumulative) for at in (jnp.s_[:, :, None], jnp.s_[:, None, :]))
    between = decay_between(later, earlier, jnp.tril(jnp.ones((Q, Q), bool)))  # [H, Q, Q]
    scores = jnp.einsum("ign,jgn->gij", C, B, precision=HIGHEST)
    mixed = (between.reshape(G, H // G, Q, Q) * scores[:, None]).reshape(H, Q, Q)
    y = jnp.einsum("hij,jhp->ihp", mixed, xdt.reshape(Q, H, P), precision=HIGHEST).reshape(Q, width)

    from_start, to_end, over_all = (
        jnp.repeat(decay_between(to, since), P, axis=1)
        for to, since in ((cumulative, zero), (total, cumulative), (total, zero))
    )
    added = jnp.einsum("jgn,jgr->ngr", B, (xdt * to_end).reshape(Q, G, width // G), precision=HIGHEST)
    return y, from_start, over_all, added.reshape(N, width)


def from_state(h: Array, C: Array, from_start: Array) -> Array:
    """y [Q,H*P] that tokens with C [Q,G,N] read from the state h [N,H*P] before their chunk."""
    (Q, G, N), width = C.shape, h.shape[1]
    read = jnp.einsum("ign,ngr->igr", C, h.reshape(N, G, width // G), precision=HIGHEST)
    return read.reshape(Q, width) * from_start


def chunk_update(h: Array, xdt: Array, log_decay: Array, B: Array, C: Array, length: Array) -> tuple[Array, Array]:
    """y [Q, H*P] and the new state of h [N, H*P] after the first `length` of Q tokens.

    xdt [Q,H*P], log_decay [Q,H], B, C [Q,G,N]. Rows at or past `length` may hold another sequence's tokens,
    NaN among them, and are cut off here.
    """
    valid = jnp.arange(xdt.shape[0]) < length
    xdt, log_decay = (jnp.where(valid[:, None], a, 0.0) for a in (xdt, log_decay))
    B, C = (jnp.where(valid[:, None, None], a, 0.0) for a in (B, C))
    y, from_start, over_all, added = within_chunk(xdt, log_decay, B, C)
    return y + from_state(h, C, from_start), h * over_all + added
