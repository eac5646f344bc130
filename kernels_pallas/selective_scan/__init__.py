"""selective_scan: the selective state-space recurrence of Mamba1 (Gu and Dao 2023, "Mamba", eq. 2 and algorithm 2).

h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t        y_t = C_t h_t + D x_t        (per channel, dt too; h is [N])
"""

from functools import partial

import jax
from jax import Array

from kernels_pallas.implementations import imported_when_run, run
from kernels_pallas.selective_scan import parallel, reference, tpu, xla
from kernels_pallas.spans import Spans

IMPLEMENTATIONS = {
    "gpu": imported_when_run("kernels_pallas.selective_scan.gpu", "selective_scan"),
    "parallel": parallel.selective_scan,
    "reference": reference.selective_scan,
    "tpu": tpu.selective_scan,
    "xla": xla.selective_scan,
}


@partial(jax.jit, static_argnames=("implementation",))
def selective_scan(
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

    x [T,D]; dt [T,D] >= 0 after softplus and bias; A [D,N], negative; B, C [T,N]; D [D]; state [R, N, D] float32 or
    bfloat16, or None for dense spans; row of slot s is `base + s`. Gives y [T,D] in x's dtype (padding tokens:
    unspecified but finite for finite input).

    Rows are updated in place when the caller donates `state`. Several sequences may read one slot, also one that
    one of them writes; but the slot that a fork writes (read_slot != write_slot) no other sequence may read.
    All is computed in float32.

    Raises NotImplementedError for an implementation, or an input to it, that is not supported.
    """
    forced = implementation or spans.target.ssm
    return run(
        "selective_scan", IMPLEMENTATIONS, forced, spans.target, lambda f: f(x, dt, A, B, C, D, state, spans, base=base)
    )
