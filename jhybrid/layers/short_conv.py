"""ShortConv: a gated convolution over the last few tokens, and no other memory (LFM2, arXiv:2511.23404)."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.linear import INIT_STD, Linear
from jhybrid.layers.mamba2 import CHANNELS
from jhybrid.layers.parameter import parameter, uniform
from jhybrid.mesh import Layout, Piece, over_shards, shards, split
from jhybrid.weights.names import TensorName
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class ShortConvSpec:
    """Sizes of a short convolution; all such layers of a model share one."""

    hidden_size: int  # M
    conv_kernel: int  # K
    bias: bool

    @property
    def shards(self) -> int:
        """Among how many the channels are shared out."""
        return shards("channels", self.hidden_size)

    def parts(self, conv_dtype: str) -> tuple[Part, ...]:
        """What one layer keeps per slot."""
        return (Part("conv", "slot", (self.conv_kernel, self.hidden_size), conv_dtype, shards=self.shards),)


class ShortConv(nn.Module):
    """y = out(C * conv(B * x)), where B, C and x are the thirds of `in_proj`'s output.

    Parameters: `in_proj` (rows B | C | x), `conv_weight` [M, K], `conv_bias`, `out_proj`. Cache part: `conv`.
    """

    spec: ShortConvSpec
    layer_id: int
    dtype: jnp.dtype
    out_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        spec, size = self.spec, self.spec.hidden_size
        layout = Layout(spec.shards)
        thirds = Layout(spec.shards, pieces=(Piece(size),) * 3)
        projected = Linear(3 * size, size, self.dtype, spec.bias, layout=thirds, name="in_proj")(x)
        B, C, x = split(projected, (size,) * 3, spec.shards)
        init = uniform(spec.conv_kernel**-0.5)  # depthwise: the fan-in is the kernel alone
        weight = parameter(self, "conv_weight", init, (size, spec.conv_kernel), self.dtype, layout)
        bias = None
        if spec.bias:
            bias = parameter(self, "conv_bias", nn.initializers.zeros, (size,), self.dtype, layout)
        window, base = cache.open(self.layer_id, "conv")
        convolve = over_shards(partial(causal_conv, activation=None, base=base), spec.shards, *CHANNELS)
        y, window = convolve(B * x, weight, bias, window, spans)
        cache = cache.put(self.layer_id, "conv", window)
        across = Layout(spec.shards, axis=1)
        out = Linear(size, size, self.dtype, spec.bias, init_std=self.out_std, layout=across, name="out_proj")
        return out(C * y), cache


def short_conv_names(hubs: tuple[str, ...], path: tuple[str, ...], spec: ShortConvSpec) -> list[TensorName]:
    """Tensors of one mixer; `hubs` are the spellings of its prefix in checkpoints."""
    places = {"conv.weight": ("conv_weight",)}
    places |= {f"{proj}.weight": (proj, "weight") for proj in ("in_proj", "out_proj")}
    if spec.bias:
        places |= {"conv.bias": ("conv_bias",)} | {f"{proj}.bias": (proj, "bias") for proj in ("in_proj", "out_proj")}
    in_file = {"conv.weight": (spec.hidden_size, 1, spec.conv_kernel)}
    return [
        TensorName(tuple(f"{hub}.{name}" for hub in hubs), (*path, *at), file_shape=in_file.get(name))
        for name, at in places.items()
    ]
