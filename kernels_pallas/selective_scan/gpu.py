"""selective_scan on Hopper GPUs: each thread keeps the states of one channel in registers over a sequence.

A token costs N exponentials in each channel whatever the form, so the loop over tokens is the fastest one; channels and
sequences are what runs in parallel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.gpu_rows import GOES_ON, LOAD, STORE, chunks_of, move_vectors, table_of
from kernels_pallas.mosaic_gpu import for_hopper, launch, load, store, strided
from kernels_pallas.spans import Spans

CHANNELS = 128  # of a thread block
MOST_STATES = 64  # of a channel, in registers


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
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.selective_scan.selective_scan`, for spans with a state and channels a multiple of 128."""
    for_hopper(spans.target)
    if state is None:
        raise NotImplementedError("dense spans")
    width, N = A.shape
    if width % CHANNELS:
        raise NotImplementedError(f"{width} channels: the kernel needs a multiple of {CHANNELS}")
    if N > MOST_STATES:
        raise NotImplementedError(f"{N} states of a channel: the kernel takes at most {MOST_STATES}")
    layout, interpret = strided(CHANNELS), spans.target.simulate
    table, (work, chunks) = table_of(spans, base), chunks_of(spans, base)
    xf, dt, B, C = (a.astype(jnp.float32) for a in (x, dt, B, C))
    held = jax.new_ref(state)

    def scan(table: Any, work: Any, chunks: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, held: Any, y: Any) -> None:
        s, at = lax.axis_index("sequence"), pl.ds(lax.axis_index("block") * CHANNELS, CHANNELS)
        first, count = work[s, 0], work[s, 1]

        def save(h: tuple[Array, ...], row: Any) -> None:
            for n, h_n in enumerate(h):
                store(held.at[row, n, at], h_n.astype(held.dtype))

        @pl.when(count > 0)
        def _() -> None:
            goes_on = table[s, GOES_ON] != 0
            before = [load(held.at[table[s, LOAD], n, at], layout).astype(jnp.float32) for n in range(N)]
            rates = [load(A.at[n, at], layout) for n in range(N)]

            def token(t: Any, h: tuple[Array, ...]) -> tuple[Array, ...]:
                dt_t, x_t = load(dt.at[t, at], layout), load(x.at[t, at], layout)
                added = dt_t * x_t
                h = tuple(h[n] * jnp.exp(dt_t * rates[n]) + added * B[t, n] for n in range(N))
                total = h[0] * C[t, 0]
                for n in range(1, N):
                    total = total + h[n] * C[t, n]
                store(y.at[t, at], total)
                return h

            def chunk(i: Any, h: tuple[Array, ...]) -> tuple[Array, ...]:
                start, length, snapshot = (chunks[first + i, n] for n in range(3))
                h = lax.fori_loop(start, start + length, token, h)
                pl.when(snapshot >= 0)(lambda: save(h, snapshot))
                return h

            h = tuple(jnp.where(goes_on, a, jnp.zeros_like(a)) for a in before)
            save(lax.fori_loop(0, count, chunk, h), table[s, STORE])

    move_vectors(table, held, N, CHANNELS, interpret)
    y = launch(
        scan,
        (table, work, chunks, xf, dt, A.astype(jnp.float32).T, B, C, held),
        grid={"block": width // CHANNELS, "sequence": spans.num_seqs},
        out=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch={},
        interpret=interpret,
        approximate=True,
    )
    # nothing is written for padding
    answer = jnp.where(spans.token_valid()[:, None], y + D.astype(jnp.float32) * xf, 0.0)
    return answer.astype(x.dtype), jax.freeze(held)
