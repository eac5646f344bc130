"""gated_delta on TPU: the kernel for single tokens, beside the one for chunks (tpu_chunk.py)."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import block_sizes, largest_divisor
from kernels_pallas.decays import STRONGEST
from kernels_pallas.gated_delta.tpu_chunk import chunks
from kernels_pallas.pieces import Singles, pieces_of, singles_of
from kernels_pallas.spans import Spans
from kernels_pallas.target import Target
from kernels_pallas.tpu_rows import SUBLANES, Loads, Stores, begin_step, first_tokens, in_hbm, put_singles, start_slots

LANES = 128


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
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.gated_delta.gated_delta`, for `spans.target.chip`. With bfloat16 v, products of chunks are
    bfloat16."""
    chip = spans.target.chip
    if chip is None:
        raise NotImplementedError("the TPU kernels of gated_delta are for TPUs, which this device is not")
    if state is None:
        raise NotImplementedError("the TPU kernels of gated_delta need a state; dense spans have none")
    check_shapes(k, v, state)
    sizes = block_sizes(chip, "gated_delta")
    T, H, _ = v.shape
    g, beta = g.astype(jnp.float32).reshape(T, H, -1), beta.astype(jnp.float32)
    if spans.kind == "decode":
        singles = singles_of(spans, spans.read_slot, base)
        return _step(q, k, v, g, beta, state, singles, spans.target, sizes["step_heads"])
    state, slots = start_slots(state, spans, base)
    tile = min(sizes["chunk_tokens"], max(16, 1 << (T - 1).bit_length()))
    pieces = pieces_of(spans, slots, base, tile)
    heads = sizes["chunk_heads" if g.shape[2] == 1 else "chunk_heads_channels"]
    o, state = chunks(q, k, v, g, beta, state, pieces, spans.target, tile, heads)
    singles = singles_of(spans, slots, base)
    q, k, v, g, beta = (a[first_tokens(spans)] for a in (q, k, v, g, beta))
    rows, state = _step(q, k, v, g, beta, state, singles, spans.target, sizes["step_heads"])
    return put_singles(o, rows, singles, spans), state


def check_shapes(k: Array, v: Array, state: Array) -> None:
    """NotImplementedError for what the tiles of the TPU cannot hold."""
    for name, dtype in (("state", state.dtype.name), ("v", v.dtype.name)):
        if dtype not in SUBLANES:
            raise NotImplementedError(f"{name} {dtype}: the TPU kernels of gated_delta take float32 and bfloat16")
    for name, size in (("k", k.shape[2]), ("v", v.shape[2])):
        if size % LANES:
            raise NotImplementedError(f"heads of {name} of width {size} are no multiple of {LANES} lanes")


def _step(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, singles: Singles, target: Target, most_heads: int
) -> tuple[Array, Array]:
    """One token of each of S sequences: o [S,H,dv] of entries that `singles` names, else 0, and the state."""
    (S, H, dv), (_, Hk, dk), ratio = v.shape, k.shape, v.shape[1] // k.shape[1]
    keys = largest_divisor(Hk, max(1, most_heads // ratio))
    heads, blocks = keys * ratio, Hk // keys
    by_head = g.shape[2] == 1
    q, k = (a.astype(jnp.float32) for a in (q, k))
    overlap = jnp.repeat(jnp.sum(q * k, axis=2), ratio, axis=1)  # [S, H]
    decay = jnp.exp(jnp.maximum(g, STRONGEST))
    factors = jnp.stack([beta, overlap, *([decay[:, :, 0]] if by_head else [])], axis=1)
    factors = factors.reshape(S, -1, blocks, heads).swapaxes(1, 2)  # [S, blocks, 2 or 3, heads]
    arrays = [a.reshape(S, blocks, keys, dk) for a in (q, k)]
    arrays += [v.astype(jnp.float32).reshape(S, blocks, heads, dv), factors]
    arrays += [] if by_head else [decay.reshape(S, blocks, heads, dk)]

    def block(*shape):
        return pl.BlockSpec((None, None, *shape), lambda i, b, items, *_: (items[0, i], b, 0, 0))

    anywhere, rows = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((2, heads, dk, dv), state.dtype)
    o, state = pl.pallas_call(
        functools.partial(_step_kernel, by_head=by_head),
        name="gated_delta_step",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(singles.count, blocks),
            in_specs=[*(block(*a.shape[2:]) for a in arrays), anywhere],
            out_specs=[block(heads, dv), anywhere],
            scratch_shapes=[
                rows,
                rows,
                pltpu.SMEM((2, 2), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((S, blocks, heads, dv), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={1 + len(arrays): 1},
        cost_estimate=pl.CostEstimate(
            flops=7 * S * H * dk * dv, transcendentals=0, bytes_accessed=2 * S * H * dk * dv * state.dtype.itemsize
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=target.simulate or False,
    )(singles.table(), *arrays, in_hbm(state))
    done = jnp.zeros(S, bool).at[singles.seq].set(jnp.arange(S) < singles.count)
    return jnp.where(done[:, None, None], o.reshape(S, H, dv), 0).astype(v.dtype), state


def _step_kernel(items, q, k, v, factors, *rest, by_head):
    """One block of heads of one token. What the state holds after the token is not read again for its output:

    u = beta (v - (decay S)^T k)        o = (decay S)^T q + (q . k) u        S <- decay S + k u^T
    """
    decay, (_, o, state, loaded, stored, pending, load_done, store_done) = None if by_head else rest[0], rest[-8:]
    i, b = pl.program_id(0), pl.program_id(1)
    _, heads, dk, dv = loaded.shape
    ratio = heads // k.shape[0]

    def window(row, block):
        return state.at[row, pl.ds(block * heads, heads)]

    loads = Loads(loaded, load_done, window)
    stores = Stores(stored, store_done, pending, window)
    step, steps = begin_step(loads, stores, lambda item: items[1, item])
    stores.free(step, 0, 0)
    parity = step % 2
    loads.wait(step, items[1, i], b)

    @pl.when(items[1, i] < 0)
    def _():
        loaded[parity] = jnp.zeros(loaded.shape[1:], loaded.dtype)

    def column(rows, n):
        """[dk, LANES]: column n of rows [dk, n]."""
        return jnp.broadcast_to(rows[:, n : n + 1], (dk, LANES))

    q_T, k_T = (jnp.swapaxes(ref[...], 0, 1) for ref in (q, k))  # [dk, keys]
    decay_T = None if decay is None else jnp.swapaxes(decay[...], 0, 1)  # [dk, heads]
    of_head = jnp.swapaxes(factors[...], 0, 1)  # [heads, 2 or 3]
    beta, overlap, *whole = (jnp.broadcast_to(of_head[:, n : n + 1], (heads, LANES)) for n in range(of_head.shape[1]))
    for h in range(heads):
        q_h, k_h = (column(rows, h // ratio) for rows in (q_T, k_T))
        row = slice(h, h + 1)
        decay_h = whole[0][row] if decay_T is None else column(decay_T, h)
        for n in range(0, dv, LANES):
            at = slice(n, n + LANES)
            S = loaded[parity, h, :, at].astype(jnp.float32) * decay_h
            known = jnp.sum(S * k_h, axis=0, keepdims=True)
            read = jnp.sum(S * q_h, axis=0, keepdims=True)
            u = beta[row] * (v[row, at] - known)
            o[row, at] = read + overlap[row] * u
            stored[parity, h, :, at] = (S + k_h * u).astype(stored.dtype)
    stores.start(step, (items[2, i], items[3, i]), b)

    @pl.when(step + 1 == steps)
    def _():
        stores.end(0, 0)
