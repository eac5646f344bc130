"""experts on Hopper GPUs: few tokens go through two kernels, which read each expert that any token chose once, or twice
for more than 128 tokens.

Plain JAX (`xla.py`, by which many tokens go) copies the weights that it multiplies, and asks the host before each turn
of its loop. Here a thread block of the first kernel takes 64 rows of an expert's `up` (and of its gate) and multiplies
them with all tokens; each token's share is in what it hands on. One of the second takes 64 rows of `down`, of some of
the experts one after another. Both wait for the weights: tensor cores multiply 64 rows with 64 tokens in a fraction of
the time that the rows take to come.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.activations import activate
from kernels_pallas.experts import xla
from kernels_pallas.experts.hits import hits
from kernels_pallas.mosaic_gpu import (
    ENOUGH_BLOCKS,
    OF_COLUMNS,
    for_hopper,
    launch,
    load,
    matrix,
    operand,
    product,
    store,
    transposed,
)
from kernels_pallas.target import Target

ROWS = 64  # of a weight, of one thread block
MOST_TOKENS = 128  # of one pass over the weights
STAGES = 3  # tiles of a weight in shared memory
ACTIVATIONS = ("silu", "relu2", "sigmoid")


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
    """See the package."""
    for_hopper(target)
    (T, D), (E, rows, _), I = x.shape, up.shape, down.shape[2]
    if T > 2 * MOST_TOKENS:
        return xla.experts(x, chosen, weights, up, down, up_scale, down_scale, activation, target)
    if T > MOST_TOKENS:  # to read every expert twice is still less than what plain JAX reads and writes
        halves = (slice(MOST_TOKENS), slice(MOST_TOKENS, T))
        others = up, down, up_scale, down_scale, activation, target
        return jnp.concatenate([experts(x[half], chosen[half], weights[half], *others) for half in halves])
    for name, array in (("x", x), ("up", up), ("down", down)):
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{name} {array.dtype}: the kernels need bfloat16")
    if activation not in ACTIVATIONS:
        raise NotImplementedError(f"activation {activation!r}: the kernels know {', '.join(ACTIVATIONS)}")
    if D % 128 or I % ROWS:
        raise NotImplementedError(f"experts of {D} x {I}: the kernels need multiples of 128 and {ROWS}")
    most, tokens = min(E, chosen.size), ROWS if T <= ROWS else MOST_TOKENS
    listed, count = hits(chosen, E)
    mine = chosen == listed[:most, None, None]  # [most, T, k]
    shares = jnp.sum(jnp.where(mine, weights.astype(jnp.float32), 0.0), axis=2)
    room = tokens - T
    kernel = Kernel(D, I, rows // I, most, tokens, activation)
    run = partial(launch, interpret=target.simulate, approximate=True)
    h = run(
        kernel.up_projection,
        (listed, count[None], jnp.pad(shares, [(0, 0), (0, room)]), jnp.pad(x, [(0, room), (0, 0)]), up),
        grid={"block": I // ROWS, "item": most},
        out=jax.ShapeDtypeStruct((most, I, tokens), jnp.bfloat16),
        scratch=kernel.scratch(kernel.parts, kernel.inputs, tokens, jnp.bfloat16, turned=True),
    )
    y = run(
        kernel.down_projection,
        (listed, count[None], h, down),
        grid={"block": D // ROWS, "split": kernel.splits},
        out=jax.ShapeDtypeStruct((kernel.splits, D, tokens), jnp.float32),
        scratch=kernel.scratch(1, kernel.inner, tokens, jnp.float32, turned=False),
    )
    return jnp.sum(y, axis=0).T[:T]


@dataclass(frozen=True)
class Kernel:
    """What is known of a call when it is compiled."""

    width: int  # D
    size: int  # I
    parts: int  # of `up`: 2 with a gate
    most: int  # experts that may be hit
    tokens: int
    activation: str

    @property
    def inputs(self) -> int:
        """Columns of `up` in a tile."""
        return 128 // self.parts

    @property
    def inner(self) -> int:
        """Columns of `down` in a tile."""
        return 128 if self.size % 128 == 0 else 64

    @property
    def splits(self) -> int:
        """Thread blocks that share the experts of some rows of `down`."""
        return max(1, min(self.most, ENOUGH_BLOCKS * ROWS // self.width))

    @staticmethod
    def scratch(parts: int, columns: int, tokens: int, dtype: Any, *, turned: bool) -> dict[str, Any]:
        return {
            "held": operand(STAGES, parts * ROWS, columns),
            "others": operand(STAGES, *((tokens, columns) if turned else (columns, tokens))),
            "answer": plgpu.SMEM((ROWS, tokens), dtype),
            "loaded": plgpu.Barrier(num_arrivals=parts + 1, num_barriers=STAGES),
        }

    def up_projection(
        self,
        listed: Any,
        count: Any,
        shares: Any,
        x: Any,
        up: Any,
        h: Any,
        *,
        held: Any,
        others: Any,
        answer: Any,
        loaded: Any,
    ) -> None:
        """Some rows of one expert: h = share * act(up x)."""
        block, item = lax.axis_index("block"), lax.axis_index("item")

        @pl.when(item < count[0])
        def _() -> None:
            expert = listed[item]

            def fetch(n: Any, slot: Any) -> None:
                columns = pl.ds(n * self.inputs, self.inputs)
                for part in range(self.parts):
                    rows = up.at[expert, pl.ds(part * self.size + block * ROWS, ROWS), columns]
                    plgpu.copy_gmem_to_smem(rows, held.at[slot, pl.ds(part * ROWS, ROWS)], loaded.at[slot])
                plgpu.copy_gmem_to_smem(x.at[:, columns], others.at[slot], loaded.at[slot])

            def multiply(slot: Any) -> list[jax.Array]:
                parts = [held.at[slot, pl.ds(part * ROWS, ROWS)] for part in range(self.parts)]
                return [product(part, transposed(others.at[slot])) for part in parts]

            h_parts = self._total(self.width // self.inputs, self.parts, fetch, multiply, loaded)
            value = activate(h_parts, self.activation)
            share = lax.broadcast_in_dim(load(shares.at[item], OF_COLUMNS), value.shape, (1,))
            # What other tokens make of this expert may be infinite, and 0 times that is NaN.
            store(answer, jnp.where(share != 0.0, value * share, 0.0).astype(answer.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(answer, h.at[item, pl.ds(block * ROWS, ROWS)])
            plgpu.wait_smem_to_gmem(0)

    def down_projection(
        self, listed: Any, count: Any, h: Any, down: Any, y: Any, *, held: Any, others: Any, answer: Any, loaded: Any
    ) -> None:
        """Some rows of the sum over a split of the experts of down h."""
        rows, split = pl.ds(lax.axis_index("block") * ROWS, ROWS), lax.axis_index("split")
        each, tiles = lax.div(count[0] + self.splits - 1, self.splits), self.size // self.inner
        begin = split * each
        turns = jnp.maximum(jnp.minimum(begin + each, count[0]) - begin, 0) * tiles

        def fetch(n: Any, slot: Any) -> None:
            item, columns = begin + lax.div(n, tiles), pl.ds(lax.rem(n, tiles) * self.inner, self.inner)
            plgpu.copy_gmem_to_smem(down.at[listed[item], rows, columns], held.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(h.at[item, columns], others.at[slot], loaded.at[slot])

        multiply = lambda slot: [product(held.at[slot], others.at[slot])]  # noqa: E731
        [total] = self._total(turns, 1, fetch, multiply, loaded)
        store(answer, total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(answer, y.at[split, rows])
        plgpu.wait_smem_to_gmem(0)

    def _total(self, turns: Any, parts: int, fetch: Any, multiply: Any, loaded: Any) -> tuple[jax.Array, ...]:
        """The sums of what `multiply(slot)` gives for each turn; `fetch(turn, slot)` starts the copies it waits for."""
        for n in range(STAGES):
            pl.when(n < turns)(partial(fetch, n, n))

        def turn(n: Any, totals: Any) -> Any:
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(loaded.at[slot])
            totals = tuple(total + new for total, new in zip(totals, multiply(slot), strict=True))
            pl.when(n + STAGES < turns)(partial(fetch, n + STAGES, slot))
            return totals

        return lax.fori_loop(0, turns, turn, (matrix(0.0, ROWS, self.tokens),) * parts)
