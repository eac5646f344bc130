"""Mlp: up, activation, down; gated (SwiGLU) or not."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.mesh import Layout, Piece, shards, split
from jhybrid.weights.names import TensorName
from kernels_pallas.activations import activate

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


class Mlp(nn.Module):
    """Parameters: `up_proj` [I, M] or, gated, `gate_up_proj` [2I, M] with the gate's rows first; `down_proj` [M, I]."""

    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool
    dtype: jnp.dtype
    bias: bool = False
    out_std: float = INIT_STD
    gate_multiplier: float = 1.0

    @nn.compact
    def __call__(self, x: Array, added: Array | None = None) -> Array:
        """x [T, M] -> [T, M]; `added` [T, 2I] is, to gate and up."""
        name, count = ("gate_up_proj", 2) if self.gated else ("up_proj", 1)
        size = self.intermediate_size
        over = shards("intermediate", size)
        layout = Layout(over, pieces=(Piece(size),) * count)
        up = Linear(count * size, self.hidden_size, self.dtype, self.bias, layout=layout, name=name)
        down = Linear(
            self.hidden_size,
            size,
            self.dtype,
            self.bias,
            init_std=self.out_std,
            layout=Layout(over, axis=1),
            name="down_proj",
        )
        h = split(up(x), [size] * count, over)
        if added is not None:
            h = [part + more for part, more in zip(h, jnp.split(added, count, axis=1), strict=True)]
        return down(activate(h, self.activation, self.gate_multiplier))


def mlp_names(hubs: tuple[str, ...], path: tuple[str, ...], *, bias: bool) -> list[TensorName]:
    """Tensors of an Mlp without a gate; `hubs` are the spellings of its prefix in checkpoints."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [
        TensorName(tuple(f"{hub}.{proj}.{kind}" for hub in hubs), (*path, proj, kind))
        for proj in ("up_proj", "down_proj")
        for kind in kinds
    ]


def gated_mlp_names(
    hubs: tuple[str, ...],
    path: tuple[str, ...],
    intermediate_size: int,
    *,
    bias: bool,
    spelled: tuple[str, str, str] = GATE_UP_DOWN,
) -> list[TensorName]:
    """Tensors of a gated Mlp that checkpoints store as gate, up and down projections, `spelled` so."""
    gate, up, down = spelled
    halves = {gate: (0, intermediate_size), up: (intermediate_size, 2 * intermediate_size)}
    names = []
    for kind in ("weight", "bias") if bias else ("weight",):
        for proj, rows in halves.items():
            tensors = tuple(f"{hub}.{proj}.{kind}" for hub in hubs)
            names.append(TensorName(tensors, (*path, "gate_up_proj", kind), rows=rows))
        names.append(TensorName(tuple(f"{hub}.{down}.{kind}" for hub in hubs), (*path, "down_proj", kind)))
    return names
