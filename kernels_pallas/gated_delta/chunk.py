"""The update of the states of all heads by one chunk of tokens: the WY form of the gated delta rule.

With c_i the sum of the log decays up to token i, S_0 the state before the chunk and u_i = beta_i (v_i - S_{i-1}^T k_i)
what token i adds along its key, the u of a chunk solve one triangular system (Yang et al. 2024, section 3.3):

(I + A) u = beta (v - (k exp c) S_0)        A_ij = beta_i sum_d k_id k_jd exp(c_id - c_jd) for j < i, else 0
"""

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.decays import SplitSum, decay_between, split_cumsum

HIGHEST = lax.Precision.HIGHEST
BLOCK = 16  # tokens of a block that is inverted row by row
PAIRS = 4  # tokens of a block in which decays per channel are formed pair by pair

Blocks = tuple[Array, ...]  # left, k, exact and small sums of tokens, each [H, n, size, ...] for n blocks of tokens


def chunk_update(
    S: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, length: Array | int
) -> tuple[Array, Array]:
    """o [H,Q,dv] and the new states of S [H,dk,dv] after the first `length` of Q tokens, float32.

    q, k [Hk,Q,dk], v [H,Q,dv], g [H,Q,1] or [H,Q,dk], beta [H,Q,1]. Tokens at or past `length` may be another
    sequence's, NaN among them, and are cut off here.
    """
    q, k, v, g, beta = _within(length, q, k, v, g, beta)
    mixed, queries, reading, keys, kept = _inside(q, k, g, v.shape[0])
    Q = q.shape[1]
    read = _product(jnp.concatenate([queries, reading], axis=1), S)  # [H, 2Q, dv]
    u = solve_unit_lower(beta * mixed[:, Q:], beta * (v - read[:, Q:]))
    return read[:, :Q] + _product(mixed[:, :Q], u), S * kept + _product(keys, u)


def affine_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, length: Array | int
) -> tuple[Array, Array, Array, Array]:
    """A chunk before its state is known: o + reads S are the outputs, passes S + adds the states after it.

    Arguments as of `chunk_update`; gives o [H,Q,dv], reads [H,Q,dk], passes [H,dk,dk], adds [H,dk,dv].
    """
    q, k, v, g, beta = _within(length, q, k, v, g, beta)
    mixed, queries, reading, keys, kept = _inside(q, k, g, v.shape[0])
    Q, dv = q.shape[1], v.shape[2]
    u = solve_unit_lower(beta * mixed[:, Q:], beta * jnp.concatenate([v, reading], axis=2))
    added, lost = u[:, :, :dv], u[:, :, dv:]  # the u of a chunk are added - lost S
    passes = jnp.eye(k.shape[2]) * kept - _product(keys, lost)
    return _product(mixed[:, :Q], added), queries - _product(mixed[:, :Q], lost), passes, _product(keys, added)


def _within(length: Array | int, *tokens: Array) -> tuple[Array, ...]:
    """Each of `tokens` [heads,Q,...] with zeros from token `length` on."""
    valid = (jnp.arange(tokens[0].shape[1]) < length)[:, None]
    return tuple(jnp.where(valid, a, 0.0) for a in tokens)


def _inside(q: Array, k: Array, g: Array, heads: int) -> tuple[Array, Array, Array, Array, Array]:
    """What does not depend on values and states.

    Products of queries and keys with the keys up to theirs [H,2Q,Q]; queries and keys as they read the state before the
    chunk [H,Q,dk]; keys as they are added to the state after it [H,dk,Q]; and what is kept of it [H,dk or 1,1].
    """
    Q = q.shape[1]
    sums = split_cumsum(g)
    total = _at(sums, Q - 1, Q)
    zero = (jnp.zeros_like(total[0]), jnp.zeros_like(total[1]))
    products = _decayed_products(jnp.concatenate([q, k], axis=1), k, sums)
    q, k = (jnp.repeat(a, heads // k.shape[0], axis=0) for a in (q, k))  # [H, Q, dk]
    from_start = decay_between(sums, zero)
    keys, kept = (jnp.swapaxes(a, 1, 2) for a in (k * decay_between(total, sums), decay_between(total, zero)))
    return products, q * from_start, k * from_start, keys, kept


def solve_unit_lower(A: Array, b: Array) -> Array:
    """u [H,Q,dv] with (I + L) u = b, where L is what A [H,Q,Q] holds below its diagonal; b [H,Q,dv].

    Blocks on the diagonal are inverted row by row, all at once; then block after block is substituted. On CPU this
    takes half as long as LAPACK's trsm, which XLA calls head by head.
    """
    H, Q, _ = A.shape
    starts = range(0, Q, BLOCK)
    room = len(starts) * BLOCK - Q
    padded = jnp.pad(A, [(0, 0), (0, room), (0, room)])
    blocks = jnp.stack([padded[:, at : at + BLOCK, at : at + BLOCK] for at in starts], axis=1)
    inverses = _inverse(blocks.reshape(-1, BLOCK, BLOCK)).reshape(H, len(starts), BLOCK, BLOCK)
    parts: list[Array] = []
    for n, at in enumerate(starts):
        rows = slice(at, min(at + BLOCK, Q))
        rest = b[:, rows]
        if parts:
            rest = rest - _product(A[:, rows, :at], jnp.concatenate(parts, axis=1))
        size = rows.stop - at
        parts.append(_product(inverses[:, n, :size, :size], rest))
    return jnp.concatenate(parts, axis=1)


def _inverse(A: Array) -> Array:
    """[n, B, B]: the inverses of I + L, with L the part of A below its diagonal, by forward substitution."""
    n, B, _ = A.shape
    L = jnp.where(jnp.tril(jnp.ones((B, B), bool), -1), A, 0.0)

    def row(i: Array, inverse: Array) -> Array:
        known = _product(lax.dynamic_slice_in_dim(L, i, 1, axis=1), inverse)  # rows from i on count for nothing
        return lax.dynamic_update_slice_in_dim(inverse, lax.dynamic_slice_in_dim(inverse, i, 1, axis=1) - known, i, 1)

    return lax.fori_loop(1, B, row, jnp.broadcast_to(jnp.eye(B), (n, B, B)))


def _product(a: Array, b: Array) -> Array:
    """[H, i, j]: a [H, i, d] times b [H, d, j]."""
    return jnp.einsum("hid,hdj->hij", a, b, precision=HIGHEST)


def _decayed_products(left: Array, k: Array, sums: SplitSum) -> Array:
    """[H, 2Q, Q]: sum_d left_id k_jd exp(c_id - c_jd) for j <= i, else 0, for both halves of left.

    left [Hk,2Q,dk], k [Hk,Q,dk]; sums c [H,Q,1] or [H,Q,dk].
    """
    (Hk, Q, dk), H = k.shape, sums[0].shape[0]
    if sums[0].shape[2] == 1:  # one decay per head
        causal = jnp.tril(jnp.ones((Q, Q), bool))
        between = decay_between(sums, (jnp.swapaxes(sums[0], 1, 2), jnp.swapaxes(sums[1], 1, 2)), causal)  # [H, Q, Q]
        products = jnp.repeat(_product(left, jnp.swapaxes(k, 1, 2)), H // Hk, axis=0)
        return (products.reshape(H, 2, Q, Q) * between[:, None]).reshape(H, 2 * Q, Q)
    left, k = (jnp.repeat(a, H // Hk, axis=0) for a in (left, k))
    left = left.reshape(H, 2, Q, dk).swapaxes(1, 2)  # [H, Q, 2, dk]
    return _by_channel((left, k, *sums)).swapaxes(1, 2).reshape(H, 2 * Q, Q)


def _by_channel(tokens: Blocks) -> Array:
    """[H, Q, 2, Q]: the products with decays per channel, for what each of Q tokens has to the left, 2 rows.

    `tokens` are left [H, Q, 2, dk], k and the exact and small sums [H, Q, dk]. They are cut to blocks, and blocks
    joined two by two.
    """
    H, Q = tokens[0].shape[:2]
    blocks = 1 << (-(-Q // PAIRS) - 1).bit_length()
    room = blocks * PAIRS - Q
    # what is added repeats the last token, so that no decay is above 1
    padded = (jnp.pad(a, [(0, 0), (0, room)] + [(0, 0)] * (a.ndim - 2), mode="edge") for a in tokens)
    cut = tuple(a.reshape(H, blocks, PAIRS, *a.shape[2:]) for a in padded)
    products = _pair_by_pair(cut)
    while products.shape[1] > 1:
        products, cut = _joined(products, cut)
    return products[:, 0, :Q, :, :Q]


def _pair_by_pair(tokens: Blocks) -> Array:
    """[H, n, size, 2, size]: products within blocks, the decay of each pair of tokens formed by itself."""
    left, k, *sums = tokens
    size = k.shape[2]
    later, earlier = ((sums[0][at], sums[1][at]) for at in (jnp.s_[:, :, :, None], jnp.s_[:, :, None]))
    between = decay_between(later, earlier, jnp.tril(jnp.ones((size, size), bool))[:, :, None])
    return jnp.einsum("hnixd,hnijd->hnixj", left, between * k[:, :, None], precision=HIGHEST)


def _joined(products: Array, tokens: Blocks) -> tuple[Array, Blocks]:
    """The products within blocks of twice the size, and those blocks.

    Tokens of two neighbours meet through the sums at their border: of both factors' decays none is above 1.
    """
    H, n, size = tokens[1].shape[:3]
    pairs = [a.reshape(H, n // 2, 2, *a.shape[2:]) for a in (*tokens, products)]
    (_, k, *first, upper), (left, _, *second, lower) = ([a[:, :, i] for a in pairs] for i in (0, 1))
    border = (first[0][:, :, -1:], first[1][:, :, -1:])
    near = left * decay_between((second[0], second[1]), border)[:, :, :, None]
    far = k * decay_between(border, (first[0], first[1]))
    across = jnp.einsum("hnixd,hnjd->hnixj", near, far, precision=HIGHEST)
    upper = jnp.concatenate([upper, jnp.zeros_like(across)], axis=4)
    lower = jnp.concatenate([across, lower], axis=4)
    joined = tuple(a.reshape(H, n // 2, 2 * size, *a.shape[3:]) for a in tokens)
    return jnp.concatenate([upper, lower], axis=2), joined


def _at(sums: SplitSum, start: int, stop: int) -> SplitSum:
    """The sums of tokens `start` up to `stop`."""
    return sums[0][:, start:stop], sums[1][:, start:stop]
