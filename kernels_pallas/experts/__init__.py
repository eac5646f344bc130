"""experts: the MLPs of a mixture of experts, each on the tokens that chose it, weighed and added up."""

from functools import partial

import jax
from jax import Array

from kernels_pallas.experts import reference, tpu, xla
from kernels_pallas.implementations import imported_when_run, run
from kernels_pallas.target import NO_ACCELERATOR, Target

IMPLEMENTATIONS = {
    "gpu": imported_when_run("kernels_pallas.experts.gpu", "experts"),
    "reference": reference.experts,
    "tpu": tpu.experts,
    "xla": xla.experts,
}


@partial(jax.jit, static_argnames=("activation", "target", "implementation"))
def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    up: Array,
    down: Array,
    up_scale: Array | None = None,
    down_scale: Array | None = None,
    *,
    activation: str,
    target: Target = NO_ACCELERATOR,
    implementation: str | None = None,
) -> Array:
    """`y[t] = sum over j of weights[t, j] * down[e] @ act(up[e] @ x[t])` with `e = chosen[t, j]`.

    Args:
      x: [T, D].
      chosen: [T, k] int32; an expert outside 0..E-1 is none, and adds 0. No token chooses one twice.
      weights: [T, k] float32.
      up: [E, I, D], (out, in) as checkpoints store it; or gated [E, 2I, D], the gate's rows first:
        `act(gate @ x) * (up @ x)`.
      down: [E, D, I].
      up_scale, down_scale: of weights of 8 bits per number, as in `grouped_matmul`.
      activation: of `kernels_pallas.activations`.

    Returns [T, D] float32. Tokens that choose nothing give exactly 0, whatever they hold. Differentiable in x, weights,
    up and down, but not with scales, and not by kernels.
    Raises NotImplementedError for an implementation, or an input to it, that is not supported.
    """
    call = lambda f: f(x, chosen, weights, up, down, up_scale, down_scale, activation, target)  # noqa: E731
    return run("experts", IMPLEMENTATIONS, implementation or target.moe, target, call)
