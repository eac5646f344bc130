"""causal_conv: the depthwise causal convolution over time that precedes a recurrent mixer, with its window of inputs.

y_t = activation(bias + sum_k weight[:, k] x_{t-K+1+k})
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.causal_conv import parallel, reference, tpu, xla
from kernels_pallas.causal_conv.tpu import window_rows as window_rows
from kernels_pallas.implementations import imported_when_run, run
from kernels_pallas.spans import Spans

IMPLEMENTATIONS = {
    "gpu": imported_when_run("kernels_pallas.causal_conv.gpu", "causal_conv"),
    "parallel": parallel.causal_conv,
    "reference": reference.causal_conv,
    "tpu": tpu.causal_conv,
    "xla": xla.causal_conv,
}


@partial(jax.jit, static_argnames=("activation", "implementation"))
def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    window: Array | None,
    spans: Spans,
    *,
    activation: Literal["silu"] | None = "silu",
    base: int | Array = 0,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Outputs of every token, and the window array with the rows of this step's sequences renewed.

    x [T,D]; weight [D,K], the last tap is the current token; bias [D] or None; window [R, K or more, D], the last
    inputs of a sequence, oldest first, the current one last, zeros before its start, or None for dense spans;
    row of slot s is `base + s`. Gives y [T,D] in x's dtype (padding tokens: unspecified but finite for finite
    input); sums are taken in float32.

    Rows are updated in place when the caller donates `window`. Several sequences may read one slot, also one that
    one of them writes; but the slot that a fork writes (read_slot != write_slot) no other sequence may read.

    Raises NotImplementedError for an implementation, or an input to it, that is not supported.
    """
    if window is not None:  # inputs that are older than the taps count for nothing
        weight = jnp.pad(weight, [(0, 0), (window.shape[1] - weight.shape[1], 0)])
    forced = implementation or spans.target.ssm
    call = lambda f: f(x, weight, bias, window, spans, activation=activation, base=base)  # noqa: E731
    return run("causal_conv", IMPLEMENTATIONS, forced, spans.target, call)
