"""Granite 4 H: Mamba2 or attention, then a shared MLP, with or without routed experts; four scalar multipliers.

Source: the Granite 4.0 model cards; numbers as in transformers 5.24 (`granitemoehybrid`).
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
from jhybrid.layers.mlp import Mlp
from jhybrid.layers.moe import Experts, ExpertsSpec, SoftmaxRouter
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention, read_head_dim, read_mamba2
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class GraniteHybridConfig:
    """What a Granite 4 H is. `attention_multiplier` is the attention's scale."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "mamba" | "attention"
    mamba: Mamba2Spec | None  # None where no layer is of that kind
    attention: AttentionSpec | None
    shared_intermediate_size: int
    experts: ExpertsSpec | None  # None: the shared MLP alone
    activation: str
    norm_eps: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "GraniteHybridConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        layers, allowed = hf.integer("num_hidden_layers"), ("mamba", "attention")
        kinds = hf.layer_kinds("layer_types", "layers_block_type", allowed=allowed, layers=layers)
        activation = hf.activation("hidden_act")
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=kinds,
            mamba=read_mamba2(hf, hidden, eps) if "mamba" in kinds else None,
            attention=_attention_spec(hf, hidden) if "attention" in kinds else None,
            shared_intermediate_size=hf.integer("shared_intermediate_size"),
            experts=_experts_spec(hf, hidden, activation),
            activation=activation,
            norm_eps=eps,
            embedding_multiplier=hf.number("embedding_multiplier"),
            residual_multiplier=hf.number("residual_multiplier"),
            logits_scaling=hf.number("logits_scaling", above=0.0),
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache."""
        parts = {}
        if self.mamba is not None:
            parts["mamba"] = self.mamba.parts(state_dtype, conv_dtype)
        if self.attention is not None:
            parts["attention"] = self.attention.parts(page_size, kv_dtype)
        return [parts[kind] for kind in self.layer_kinds]


class FeedForward(nn.Module):
    """The shared MLP, plus routed experts where the model has them."""

    config: GraniteHybridConfig
    dtype: jnp.dtype
    out_std: float

    @nn.compact
    def __call__(self, x: Array, spans: Spans) -> Array:
        """x [T, M] -> [T, M]."""
        config, experts = self.config, self.config.experts
        sizes = (config.hidden_size, config.shared_intermediate_size, config.activation)
        shared = Mlp(*sizes, gated=True, dtype=self.dtype, out_std=self.out_std, name="shared_mlp")(x)
        if experts is None:
            return shared
        chosen, weights = SoftmaxRouter(experts.num_experts, experts.top_k, config.hidden_size, name="router")(x)
        return shared + Experts(experts, self.dtype, self.out_std, name="experts")(x, chosen, weights, spans)


class Layer(nn.Module):
    """Norm, mixer, residual; norm, feed-forward, residual. Both branches are scaled before they are added."""

    config: GraniteHybridConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="input_norm")(x)
        if config.layer_kinds[self.layer_id] == "mamba":
            assert config.mamba is not None
            h, cache = Mamba2(config.mamba, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            assert config.attention is not None
            h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + h * config.residual_multiplier
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="feed_forward_norm")(x)
        h = FeedForward(config, self.dtype, std, name="feed_forward")(h, spans)
        return x + h * config.residual_multiplier, cache


def decoder(config: GraniteHybridConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(
        Layer,
        config,
        dtype,
        embedding_multiplier=config.embedding_multiplier,
        logits_multiplier=1 / config.logits_scaling,
    )


def weight_names(config: GraniteHybridConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "input_norm", "weight")))
        names.append(TensorName((f"{hub}.post_attention_layernorm.weight",), (*path, "feed_forward_norm", "weight")))
        if kind == "mamba":
            assert config.mamba is not None
            names += mamba2_names((f"{hub}.mamba",), (*path, "mixer"), config.mamba)
        else:
            assert config.attention is not None
            names += attention_names((f"{hub}.self_attn",), (*path, "mixer"), config.attention)
        names += _feed_forward_names(hub, (*path, "feed_forward"), config.experts is not None)
    names.append(TensorName(("model.norm.weight",), ("final_norm", "weight")))
    return names


def _feed_forward_names(hub: str, path: tuple[str, ...], experts: bool) -> list[TensorName]:
    """Gate and up projections are one tensor in the file already; so are all experts."""
    names = [
        TensorName((f"{hub}.shared_mlp.input_linear.weight",), (*path, "shared_mlp", "gate_up_proj", "weight")),
        TensorName((f"{hub}.shared_mlp.output_linear.weight",), (*path, "shared_mlp", "down_proj", "weight")),
    ]
    if experts:
        moe = f"{hub}.block_sparse_moe"
        spelled = {
            ("router", "weight"): (f"{moe}.router.layer.weight", f"{moe}.router.weight"),
            ("experts", "gate_up_proj"): (f"{moe}.input_linear.weight", f"{moe}.experts.gate_up_proj"),
            ("experts", "down_proj"): (f"{moe}.output_linear.weight", f"{moe}.experts.down_proj"),
        }
        names += [TensorName(spellings, (*path, *at)) for at, spellings in spelled.items()]
    return names


def _attention_spec(hf: HfConfig, hidden: int) -> AttentionSpec:
    positions = hf.one_of("position_embedding_type", None, "nope", "rope")
    rope = read_rope(hf, read_head_dim(hf, hidden)) if positions == "rope" else None
    return read_attention(hf, hidden, scale=hf.number("attention_multiplier"), rope=rope)


def _experts_spec(hf: HfConfig, hidden: int, activation: str) -> ExpertsSpec | None:
    count = hf.integer("num_local_experts", least=0)
    if count == 0:
        return None
    top_k = hf.integer("num_experts_per_tok", most=count)
    return ExpertsSpec(count, top_k, hidden, hf.integer("intermediate_size"), activation, gated=True)
