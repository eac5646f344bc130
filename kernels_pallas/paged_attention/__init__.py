"""paged_attention: append this step's keys and values to their pages, then attend causally over them."""

from functools import partial

import jax
from jax import Array

from kernels_pallas.implementations import imported_when_run, run
from kernels_pallas.paged_attention import parallel, reference, tpu, xla
from kernels_pallas.spans import Spans

IMPLEMENTATIONS = {
    "gpu": imported_when_run("kernels_pallas.paged_attention.gpu", "paged_attention"),
    "parallel": parallel.paged_attention,
    "reference": reference.paged_attention,
    "tpu": tpu.paged_attention,
    "xla": xla.paged_attention,
}


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "implementation"))
def paged_attention(
    q: Array,
    k: Array,
    v: Array | None,
    pages: Array | None,
    spans: Spans,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    base: int | Array = 0,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Each token attends to the positions up to its own of its sequence; softmax in float32.

    Args:
      q: [T, Hq, Dh]; query head h reads key/value head h // (Hq // Hkv). Positions are applied already.
      k, v: [T, Hkv, Dh], this step's tokens; v None: the values are the keys, and are kept once.
      pages: [R, page, 2*Hkv*Dh], a token's row is key and value of head 0, then those of head 1, and so on;
        [R, page, Hkv*Dh] without v; None if `spans` is dense.
        dtype uint16 means the bits of bfloat16, uint8 those of float8_e4m3fn (see `words.py`).
      scale: factor of the scores.
      sliding_window: attend to the last so many positions only, the token's own included.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      base: row of the layer's page 0 in `pages`.

    Returns `(o [T, Hq, Dh] in q's dtype, pages)`; `o` of padding is 0. Nothing but the positions attended to
    is read into `o`: free and scratch pages may hold NaN. NotImplementedError if pages and spans do not go together.
    """
    if (pages is None) != (spans.kind == "dense"):
        raise NotImplementedError(
            f"pages are {'None' if pages is None else 'given'} with {spans.kind!r} spans: dense spans have no pages, "
            "the other kinds need them"
        )
    forced = implementation or spans.target.attention
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap, "base": base}
    call = lambda f: f(q, k, v, pages, spans, **options)  # noqa: E731
    return run("paged_attention", IMPLEMENTATIONS, forced, spans.target, call)
