"""Bamba: Mamba2 or attention with half-rotated heads, then a SwiGLU MLP, in every layer.

Source: the Bamba model cards; numbers as in transformers 5.24. Positions count on through decode (transformers
repeats them there unless it is given `position_ids`).
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.attention import Attention, AttentionSpec, attention_names
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.linear import out_std
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, mamba2_names
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention, read_head_dim, read_mamba2
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

ROTATED_SHARE = 0.5  # of each head; no key of the published configs says so


@dataclass(frozen=True)
class BambaConfig:
    """What a Bamba is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "mamba" | "attention"
    mamba: Mamba2Spec
    attention: AttentionSpec
    intermediate_size: int
    activation: str
    mlp_bias: bool
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "BambaConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        head_dim = read_head_dim(hf, hidden)
        rope = read_rope(hf, head_dim, partial=ROTATED_SHARE)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=_layer_kinds(hf),
            mamba=read_mamba2(hf, hidden, eps),
            attention=read_attention(hf, hidden, scale=head_dim**-0.5, rope=rope),
            intermediate_size=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act"),
            mlp_bias=hf.flag("mlp_bias", default=False),
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache."""
        parts = {
            "mamba": self.mamba.parts(state_dtype, conv_dtype),
            "attention": self.attention.parts(page_size, kv_dtype),
        }
        return [parts[kind] for kind in self.layer_kinds]


class Layer(nn.Module):
    """Norm, mixer, residual; norm, MLP, residual."""

    config: BambaConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="input_norm")(x)
        if config.layer_kinds[self.layer_id] == "mamba":
            h, cache = Mamba2(config.mamba, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + h
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="feed_forward_norm")(x)
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        mlp = Mlp(*sizes, gated=True, dtype=self.dtype, bias=config.mlp_bias, out_std=std, name="feed_forward")
        return x + mlp(h), cache


def decoder(config: BambaConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: BambaConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "input_norm", "weight")))
        names.append(TensorName((f"{hub}.pre_ff_layernorm.weight",), (*path, "feed_forward_norm", "weight")))
        if kind == "mamba":
            names += mamba2_names((f"{hub}.mamba",), (*path, "mixer"), config.mamba)
        else:
            names += attention_names((f"{hub}.self_attn",), (*path, "mixer"), config.attention)
        mlp = (*path, "feed_forward")
        names += gated_mlp_names((f"{hub}.feed_forward",), mlp, config.intermediate_size, bias=config.mlp_bias)
    names.append(TensorName(("model.final_layernorm.weight",), ("final_norm", "weight")))
    return names


def _layer_kinds(hf: HfConfig) -> tuple[str, ...]:
    """Attention at `attn_layer_indices`, Mamba2 elsewhere."""
    layers = hf.integer("num_hidden_layers")
    indices = hf.layer_indices("attn_layer_indices", layers, default=[])
    return tuple("attention" if i in indices else "mamba" for i in range(layers))
