"""causal_conv on Hopper GPUs: steps of one token per sequence. Each thread keeps a few channels in registers."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.gpu_rows import GOES_ON, LOAD, SINGLE, SNAPSHOT, SNAPSHOTS, STORE, move_vectors, table_of
from kernels_pallas.mosaic_gpu import for_hopper, launch, load, store, strided
from kernels_pallas.spans import Spans

MOST_CHANNELS = 512  # of a thread block: four for each thread


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    window: Array | None,
    spans: Spans,
    *,
    activation: Literal["silu"] | None = "silu",
    base: int | Array = 0,
) -> tuple[Array, Array | None]:
    """As `kernels_pallas.causal_conv.causal_conv`, for decode spans and channels a multiple of 128."""
    for_hopper(spans.target)
    if window is None or spans.kind != "decode":
        raise NotImplementedError(f"{spans.kind} spans: only decode has a kernel")
    if activation not in ("silu", None):
        raise NotImplementedError(f"activation {activation!r}: causal_conv knows 'silu' and None")
    (S, D), K = x.shape, weight.shape[1]
    channels = next((n for n in (MOST_CHANNELS, 256, 128) if D % n == 0), None)
    if channels is None:
        raise NotImplementedError(f"{D} channels: the kernel needs a multiple of 128")
    layout = strided(channels)
    grid = {"block": D // channels, "sequence": S}
    taps = jnp.concatenate([weight.T, jnp.zeros((1, D)) if bias is None else bias[None]])

    def place() -> tuple[Any, Any]:
        return lax.axis_index("sequence"), pl.ds(lax.axis_index("block") * channels, channels)

    def step(table: Any, held: Any, x: Any, taps: Any, y: Any) -> None:
        s, at = place()

        @pl.when(table[s, SINGLE] != 0)
        def _() -> None:
            goes_on = table[s, GOES_ON] != 0
            before = [load(held.at[table[s, LOAD], n, at], layout) for n in range(1, K)]
            inputs = [jnp.where(goes_on, a, jnp.zeros_like(a)) for a in before]
            inputs.append(load(x.at[s, at], layout))
            tap = lambda n: load(taps.at[n, at], layout).astype(jnp.float32)  # noqa: E731
            total = tap(K)
            for n, value in enumerate(inputs):
                total = total + value.astype(jnp.float32) * tap(n)
            if activation == "silu":
                total = total / (1.0 + jnp.exp(-total))
            store(y.at[s, at], total.astype(y.dtype))
            for n, value in enumerate(inputs):
                store(held.at[table[s, STORE], n, at], value.astype(held.dtype))

            @pl.when(table[s, SNAPSHOTS] != 0)
            def _() -> None:
                for n, value in enumerate(inputs):
                    store(held.at[table[s, SNAPSHOT], n, at], value.astype(held.dtype))

    held, table, interpret = jax.new_ref(window), table_of(spans, base), spans.target.simulate
    move_vectors(table, held, K, channels, interpret)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y = launch(step, (table, held, x, taps), grid=grid, out=out, scratch={}, interpret=interpret)
    used = jnp.arange(S) < spans.num_tokens  # nothing is written for padding
    return jnp.where(used[:, None], y, jnp.zeros_like(y)), jax.freeze(held)
