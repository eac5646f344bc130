"""paged_attention as it is defined: token by token, float32, over the whole context at once. NumPy, on the host."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas.spans import Spans


def paged_attention(
    q: Array,
    k: Array,
    v: Array,
    pages: Array | None,
    spans: Spans,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """See the package. Cannot be traced."""
    group = q.shape[1] // k.shape[1]
    queries, new_keys, new_values = (np.asarray(x, np.float32) for x in (q, k, v))
    position, sequence = np.asarray(spans.positions()), np.asarray(spans.token_seq)
    starts, table = np.asarray(spans.query_start), np.asarray(spans.page_table) + int(base)
    tokens = int(spans.num_tokens)

    cache = None if pages is None else np.array(pages)
    if cache is not None:
        page_size = cache.shape[1]
        for t in range(tokens):
            page, offset = table[sequence[t], position[t] // page_size], position[t] % page_size
            cache[page, offset, 0::2] = np.asarray(k[t], cache.dtype)
            cache[page, offset, 1::2] = np.asarray(v[t], cache.dtype)

    o = np.zeros(q.shape, np.float32)
    for t in range(tokens):
        at = np.arange(position[t] + 1)
        if sliding_window is not None:
            at = at[-sliding_window:]
        if cache is None:
            start = starts[sequence[t]]
            keys, values = new_keys[start + at], new_values[start + at]
        else:
            held = cache[table[sequence[t], at // page_size], at % page_size].astype(np.float32)
            keys, values = held[:, 0::2], held[:, 1::2]  # [context, Hkv, Dh]
        for h in range(q.shape[1]):
            scores = keys[:, h // group] @ queries[t, h] * scale  # [context]
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            o[t, h] = weights / weights.sum() @ values[:, h // group]
    return jnp.asarray(o, q.dtype), None if cache is None else jnp.asarray(cache)
