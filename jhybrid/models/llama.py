"""Llama and Qwen3: attention with rotary positions and SwiGLU in every layer; the control with no recurrent state.

Sources: Llama (arXiv:2302.13971), Qwen3 (arXiv:2505.09388); numbers as in transformers 5.24. Qwen3 differs by an
RMSNorm on each query and key head.
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
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import check_all_attention, read_attention, read_head_dim
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class LlamaConfig:
    """What a Llama, or a Qwen3, is."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionSpec
    intermediate_size: int
    activation: str
    mlp_bias: bool
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "LlamaConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        return cls._read(hf, mlp_bias=hf.flag("mlp_bias", default=False), qk_norm=False, default_theta=10000.0)

    @classmethod
    def _read(cls, hf: HfConfig, *, mlp_bias: bool, qk_norm: bool, default_theta: float | None = None) -> "LlamaConfig":
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        head_dim, layers = read_head_dim(hf, hidden), hf.integer("num_hidden_layers")
        check_all_attention(hf, layers)
        rope = read_rope(hf, head_dim, default_theta=default_theta)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            attention=read_attention(hf, hidden, scale=head_dim**-0.5, rope=rope, qk_norm_eps=eps if qk_norm else None),
            intermediate_size=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act"),
            mlp_bias=mlp_bias,
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache; there are no slots."""
        del state_dtype, conv_dtype
        return [self.attention.parts(page_size, kv_dtype)] * self.num_layers


@dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """What a Qwen3 is."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Qwen3Config":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hf.one_of("use_sliding_window", False, default=False)
        config = cls._read(hf, mlp_bias=False, qk_norm=True)
        assert isinstance(config, cls)
        return config


class Layer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    config: LlamaConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="attention_norm")(x)
        h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="attention")(h, cache, spans)
        x = x + h
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="mlp_norm")(x)
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        mlp = Mlp(*sizes, gated=True, dtype=self.dtype, bias=config.mlp_bias, out_std=std, name="mlp")
        return x + mlp(h), cache


def decoder(config: LlamaConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: LlamaConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i in range(config.num_layers):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "attention_norm", "weight")))
        names.append(TensorName((f"{hub}.post_attention_layernorm.weight",), (*path, "mlp_norm", "weight")))
        names += attention_names((f"{hub}.self_attn",), (*path, "attention"), config.attention)
        names += gated_mlp_names((f"{hub}.mlp",), (*path, "mlp"), config.intermediate_size, bias=config.mlp_bias)
    names.append(TensorName(("model.norm.weight",), ("final_norm", "weight")))
    return names
