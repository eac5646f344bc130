"""ssd: the selective state-space recurrence of Mamba2 (Dao and Gu 2024, "Transformers are SSMs", eq. 1 and section 6).

h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t        y_t = C_t h_t + D x_t        (per head; h is [N, P])
"""

from functools import partial

import jax
from jax import Array

from kernels_pallas.implementations import imported_when_run, run
from kernels_pallas.spans import Spans
from kernels_pallas.ssd import parallel, reference, tpu, xla

IMPLEMENTATIONS = {
    "gpu": imported_when_run("kernels_pallas.ssd.gpu", "ssd"),
    "parallel": parallel.ssd,
    "reference": reference.ssd,
    "tpu": tpu.ssd,
    "xla": xla.ssd,
}


@partial(jax.jit, static_argnames=("implementation",))
def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    state: Array | None,
    spans: Spans,
    *,
    base: int | Array = 0,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Outputs of every token, and the state array with the rows of this step's sequences renewed.

    x [T,H,P]; dt [T,H] >= 0 after softplus, bias and clamp; A [H], negative; B, C [T,G,N] with head h in
    group h // (H // G); D [H]; state [R, N, H*P] float32 or bfloat16, or None for dense spans; row of slot s
    is `base + s`. Gives y [T,H,P] in x's dtype (padding tokens: unspecified but finite for finite input).

    Rows are updated in place when the caller donates `state`. Several sequences may read one slot, also one that
    one of them writes; but the slot that a fork writes (read_slot != write_slot) no other sequence may read.
    Decays are computed in float32 as exponentials of differences of cumulative sums.

    Raises NotImplementedError for an implementation, or an input to it, that is not supported.
    """
    forced = implementation or spans.target.ssm
    call = lambda f: f(x, dt, A, B, C, D, state, spans, base=base)  # noqa: E731
    return run("ssd", IMPLEMENTATIONS, forced, spans.target, call)
