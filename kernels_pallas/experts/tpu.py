"""experts on TPU. Few tokens go through one kernel, many are sorted by expert (`xla.py`).

Up to some hundred tokens it takes longer to read an expert than to multiply all tokens with it. The kernel reads the
experts that any token chose, one after another, multiplies every token with each, and adds what the token's choice
weighs. That takes no sorting and no gathering, which around two grouped products are dozens of small operations of a
microsecond each. Weights of 8 bits are made whole as they come out of vector memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.activations import activate
from kernels_pallas.blocks import block_sizes
from kernels_pallas.experts import xla
from kernels_pallas.experts.hits import hits
from kernels_pallas.grouped_matmul.tpu import LANES, outputs_on_lanes, rows_of_groups
from kernels_pallas.target import Target

ACTIVATIONS = ("silu", "relu2", "sigmoid")
VMEM_BYTES = 60 << 20


def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    up: Array,
    down: Array,
    up_scale: Array | None,
    down_scale: Array | None,
    activation: str,
    target: Target,
) -> Array:
    """See the package; for `target.chip`."""
    if target.chip is None:
        raise NotImplementedError("the TPU kernel of experts is for TPUs, which this device is not")
    sizes, (T, D) = block_sizes(target.chip, "experts"), x.shape
    if sizes["tokens"] < T:
        multiply = functools.partial(rows_of_groups, interpret=target.simulate is not None)
        return xla.experts(x, chosen, weights, up, down, up_scale, down_scale, activation, target, multiply=multiply)
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"x {x.dtype}: the TPU kernel of experts takes float32 and bfloat16")
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"activation {activation!r}: the TPU kernel of experts knows {', '.join(ACTIVATIONS)}"
        )
    if D % LANES:
        raise NotImplementedError(f"x {x.shape}: the TPU kernel of experts takes a multiple of {LANES} channels")
    scales: list[Array] = []
    if up_scale is not None or down_scale is not None:  # of which one may be plain
        held = (up, up_scale), (down, down_scale)
        scales = [jnp.ones((*values.shape[:2], 1)) if scale is None else scale for values, scale in held]
    if any(scale.shape[2] > 1 for scale in scales):
        raise NotImplementedError("several scales in a row of a weight: the TPU kernel of experts takes one")
    (E, rows, _), I = up.shape, down.shape[2]
    turned = outputs_on_lanes(D, I)  # which those of `up` never are, where D is a multiple of the lanes
    b = inner_block(up, down, bool(scales), sizes["bytes"])

    def of_inner(array: Array, on_lanes: bool, part: int = 0) -> tuple[Array, pl.BlockSpec]:
        """An operand [E, ., I], or with I before the last axis, by blocks of I; `part` 1 begins at I."""
        first = part * (I // b)
        if on_lanes:
            return array, pl.BlockSpec((None, array.shape[1], b), lambda i, j, e: (e[i], 0, first + j))
        return array, pl.BlockSpec((None, b, array.shape[2]), lambda i, j, e: (e[i], first + j, 0))

    parts = range(rows // I)  # the gate's rows, and the others
    operands = [of_inner(up, False, part) for part in parts]
    operands.append(of_inner(down.swapaxes(1, 2) if turned else down, not turned))
    if scales:
        of_up, of_down = (scale.swapaxes(1, 2) for scale in scales)
        operands += [of_inner(of_up, True, part) for part in parts]
        operands.append((of_down, pl.BlockSpec((None, 1, D), lambda i, j, e: (e[i], 0, 0))))
    listed, count = hits(chosen, E)
    count = jnp.maximum(count, 1)  # where nobody chose any, the kernel has to begin for its result to be 0
    room = -T % 16  # of a tile of bfloat16
    pad = lambda a, value: jnp.pad(a, [(0, room), (0, 0)], constant_values=value)  # noqa: E731
    tokens = [pad(x, 0), pad(chosen, -1), pad(weights.astype(jnp.float32), 0)]
    out = jax.ShapeDtypeStruct((T + room, D), jnp.float32)
    most = min(E, chosen.size)
    return pl.pallas_call(
        functools.partial(_kernel, parts=len(parts), turned=turned, activation=activation),
        name="experts",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count, I // b),
            in_specs=[*(pl.BlockSpec(a.shape, lambda *_: (0, 0)) for a in tokens), *(spec for _, spec in operands)],
            out_specs=pl.BlockSpec(out.shape, lambda *_: (0, 0)),
        ),
        out_shape=out,
        cost_estimate=pl.CostEstimate(
            flops=2 * T * most * (rows + I) * D,
            transcendentals=T * most * I,
            bytes_accessed=most * D * (rows * up.dtype.itemsize + I * down.dtype.itemsize),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=target.simulate or False,
    )(listed, *tokens, *(array for array, _ in operands))[:T]


def inner_block(
    up: Array | jax.ShapeDtypeStruct, down: Array | jax.ShapeDtypeStruct, scaled: bool, most_bytes: int
) -> int:
    """How much of the inner width I the blocks of both weights have: of tiles, which I lies along the lanes of in some
    operand or along the sublanes of in all, or all of it."""
    (_, D, I), parts = down.shape, up.shape[1] // down.shape[2]
    unit = LANES if scaled or not outputs_on_lanes(D, I) else 32 // up.dtype.itemsize
    bytes_each = D * (parts * up.dtype.itemsize + down.dtype.itemsize)
    fits = [b for b in range(1, I + 1) if I % b == 0 and (b % unit == 0 or (b == I and parts == 1))]
    best = max((b for b in fits if b * bytes_each <= most_bytes), default=min(fits, default=0))
    if not best or best * bytes_each > 2 * most_bytes:
        raise NotImplementedError(f"up {up.shape}, down {down.shape}: no block of the inner width is small enough")
    return best


def _kernel(listed, x, chosen, weights, *refs, parts: int, turned: bool, activation: str):
    *operands, y = refs
    held, scales = operands[: parts + 1], operands[parts + 1 :] or [None] * (parts + 1)

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _start():
        y[...] = jnp.zeros_like(y)

    def product(a: Array, weight, scale, turned: bool) -> Array:
        over = (((1,), (0 if turned else 1,)), ((), ()))
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        new = lax.dot_general(a, weight[...].astype(a.dtype), over, precision, preferred_element_type=jnp.float32)
        return new if scale is None else new * scale[...]

    h = [product(x[...], weight, scale, False) for weight, scale in zip(held[:-1], scales[:-1], strict=True)]
    new = product(activate(h, activation).astype(x.dtype), held[-1], scales[-1], turned)
    mine = chosen[...] == listed[pl.program_id(0)]
    share = jnp.sum(jnp.where(mine, weights[...], 0.0), axis=1, keepdims=True)
    # What other tokens make of this expert may be infinite, and 0 times that is NaN.
    y[...] += jnp.where(jnp.any(mine, axis=1, keepdims=True), share * new, 0.0)
