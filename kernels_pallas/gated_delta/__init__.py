"""gated_delta: the gated delta rule (Yang et al. 2024, "Gated Delta Networks", eq. 10), its decay per head or channel.

S <- diag(exp g_t) S     S <- S + k_t beta_t (v_t - S^T k_t)^T     o_t = S^T q_t        (per head; S is [dk, dv])

A decay per channel of k is Kimi Delta Attention (Kimi Team 2025, "Kimi Linear", eq. 1).
"""

from functools import partial

import jax
from jax import Array

from kernels_pallas.gated_delta import parallel, reference, tpu, xla
from kernels_pallas.implementations import imported_when_run, run
from kernels_pallas.spans import Spans

IMPLEMENTATIONS = {
    "gpu": imported_when_run("kernels_pallas.gated_delta.gpu", "gated_delta"),
    "parallel": parallel.gated_delta,
    "reference": reference.gated_delta,
    "tpu": tpu.gated_delta,
    "xla": xla.gated_delta,
    "xla_wy": partial(xla.gated_delta, always_wy=True),  # what "xla" is on other platforms than CPU
}


@partial(jax.jit, static_argnames=("implementation",))
def gated_delta(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | None,
    spans: Spans,
    *,
    base: int | Array = 0,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Outputs of every token, and the state array with the rows of this step's sequences renewed.

    q, k [T,Hk,dk], normalised and scaled already; v [T,H,dv], whose head h reads key head h // (H // Hk); g, the
    logarithm of the decay, <= 0: [T,H] for a decay of whole heads or [T,H,dk] for one of each channel; beta [T,H];
    state [R, H, dk, dv] float32 or bfloat16, or None for dense spans; row of slot s is `base + s`. Gives o [T,H,dv]
    in v's dtype (padding tokens: unspecified but finite for finite input).

    Rows are updated in place when the caller donates `state`. Several sequences may read one slot, also one that
    one of them writes; but the slot that a fork writes (read_slot != write_slot) no other sequence may read.
    Decays are computed in float32 as exponentials of differences of cumulative sums.

    Raises NotImplementedError for an implementation, or an input to it, that is not supported.
    """
    forced = implementation or spans.target.ssm
    return run(
        "gated_delta", IMPLEMENTATIONS, forced, spans.target, lambda f: f(q, k, v, g, beta, state, spans, base=base)
    )
