"""Qwen3-MoE: attention with normalised heads, then an MLP or a mixture of experts; numbers as in transformers 5.24."""

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
from jhybrid.layers.moe import Experts, ExpertsSpec, SoftmaxRouter, gated_expert_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import check_all_attention, read_attention, read_head_dim
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """What a Qwen3-MoE is."""

    vocab_size: int
    hidden_size: int
    attention: AttentionSpec
    intermediate_size: int  # of layers without experts
    experts: ExpertsSpec
    normalise: bool  # whether the chosen experts' weights add up to 1
    sparse_layers: tuple[bool, ...]
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.sparse_layers)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Qwen3MoeConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hf.one_of("use_sliding_window", False, default=False)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        head_dim, count = read_head_dim(hf, hidden), hf.integer("num_experts", "num_local_experts")
        layers, step = hf.integer("num_hidden_layers"), hf.integer("decoder_sparse_step", default=1)
        check_all_attention(hf, layers)
        dense = hf.layer_indices("mlp_only_layers", layers, default=[])
        attention = {"scale": head_dim**-0.5, "rope": read_rope(hf, head_dim), "qk_norm_eps": eps}
        top_k, width = hf.integer("num_experts_per_tok", most=count), hf.integer("moe_intermediate_size")
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            attention=read_attention(hf, hidden, **attention),
            intermediate_size=hf.integer("intermediate_size"),
            experts=ExpertsSpec(count, top_k, hidden, width, hf.activation("hidden_act"), gated=True),
            normalise=hf.flag("norm_topk_prob"),
            sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
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


class Layer(nn.Module):
    """Norm, attention, residual; norm, MLP or experts, residual."""

    config: Qwen3MoeConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, spec, std = self.config, self.config.experts, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="attention_norm")(x)
        h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="attention")(h, cache, spans)
        x = x + h
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="mlp_norm")(x)
        if not config.sparse_layers[self.layer_id]:
            sizes = (config.hidden_size, config.intermediate_size, spec.activation)
            return x + Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="mlp")(h), cache
        router = SoftmaxRouter(spec.num_experts, spec.top_k, config.hidden_size, config.normalise, name="router")
        return x + Experts(spec, self.dtype, std, name="experts")(h, *router(h), spans), cache


def decoder(config: Qwen3MoeConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: Qwen3MoeConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, sparse in enumerate(config.sparse_layers):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "attention_norm", "weight")))
        names.append(TensorName((f"{hub}.post_attention_layernorm.weight",), (*path, "mlp_norm", "weight")))
        names += attention_names((f"{hub}.self_attn",), (*path, "attention"), config.attention)
        if sparse:
            names.append(TensorName((f"{hub}.mlp.gate.weight",), (*path, "router", "weight")))
            names += gated_expert_names((f"{hub}.mlp.experts",), (*path, "experts"), config.experts)
        else:
            names += gated_mlp_names((f"{hub}.mlp",), (*path, "mlp"), config.intermediate_size, bias=False)
    return [*names, TensorName(("model.norm.weight",), ("final_norm", "weight"))]
