"""Mamba2 alone: norm, mixer, residual in every layer; no attention, no MLP, no limit to the context.

Source: Dao and Gu 2024 (arXiv:2405.21060); numbers as in transformers 5.24 (`mamba2`).
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.linear import out_std
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, mamba2_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import check_inner_size
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class Mamba2ModelConfig:
    """What a pure Mamba2 is."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mamba: Mamba2Spec
    norm_eps: float
    residual_in_fp32: bool
    tie_word_embeddings: bool

    @property
    def max_position_embeddings(self) -> int | None:
        """None: nothing in the model depends on the position."""
        return None

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Mamba2ModelConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hidden, eps = hf.integer("hidden_size"), hf.number("layer_norm_epsilon")
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=hf.integer("num_hidden_layers"),
            mamba=_mamba_spec(hf, hidden, eps),
            norm_eps=eps,
            residual_in_fp32=hf.flag("residual_in_fp32"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache; there are no pages."""
        del page_size, kv_dtype
        return [self.mamba.parts(state_dtype, conv_dtype)] * self.num_layers


class Layer(nn.Module):
    """Norm, mixer, residual."""

    config: Mamba2ModelConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config = self.config
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="norm")(x)
        mixer = Mamba2(config.mamba, self.layer_id, self.dtype, out_std(config.num_layers), name="mixer")
        h, cache = mixer(h, cache, spans)
        return x + h, cache


def decoder(config: Mamba2ModelConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype, residual_in_fp32=config.residual_in_fp32)


def weight_names(config: Mamba2ModelConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes; older files say `embedding`, as the paper's code does."""
    embedding = ("backbone.embeddings.weight", "backbone.embedding.weight")
    names = vocabulary_names(embedding, ("vocabulary",), tied=config.tie_word_embeddings)
    for i in range(config.num_layers):
        hub, path = f"backbone.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.norm.weight",), (*path, "norm", "weight")))
        names += mamba2_names((f"{hub}.mixer",), (*path, "mixer"), config.mamba)
    names.append(TensorName(("backbone.norm_f.weight",), ("final_norm", "weight")))
    return names


def _mamba_spec(hf: HfConfig, hidden: int, eps: float) -> Mamba2Spec:
    groups, head_dim = hf.integer("n_groups"), hf.integer("head_dim")
    heads = hf.multiple("num_heads", of=("n_groups", groups))
    inner = hf.integer("expand") * hidden
    check_inner_size(("num_heads", heads), ("head_dim", head_dim), ("expand * hidden_size", inner))
    hf.one_of("hidden_act", "silu")
    return Mamba2Spec(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        state_size=hf.integer("state_size"),
        num_groups=groups,
        conv_kernel=hf.integer("conv_kernel", least=2),
        norm_groups=groups,
        norm_eps=eps,
        conv_bias=hf.flag("use_conv_bias"),
        proj_bias=hf.flag("use_bias"),
        dt_limit=hf.dt_limit("time_step_limit"),
        dt_init=(hf.number("time_step_min", default=0.001), hf.number("time_step_max", default=0.1)),
    )
