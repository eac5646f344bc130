"""Jamba: Mamba1 or attention without positions, then an MLP or a mixture of experts, in every layer.

Source: Jamba (arXiv:2403.19887); numbers as in transformers 5.24. There a prompt's second part starts from zero
state, and the state is kept in the activations' type; here chunks give what the whole does, and the state is float32.
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
from jhybrid.layers.mamba1 import Mamba1, Mamba1Spec, mamba1_names
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.moe import Experts, ExpertsSpec, SoftmaxRouter, gated_expert_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention, read_dt_rank, read_head_dim
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class JambaConfig:
    """What a Jamba is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "mamba" | "attention"
    mamba: Mamba1Spec
    attention: AttentionSpec
    intermediate_size: int  # of MLPs and of experts
    activation: str
    experts: ExpertsSpec | None
    expert_layers: tuple[int, ...]  # the others have an MLP
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "JambaConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hf.one_of("sliding_window", None)
        hf.one_of("mamba_inner_layernorms", True, default=True)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        layers, activation = hf.integer("num_hidden_layers"), hf.activation("hidden_act")
        attended = _every(hf, "attn_layer", layers)
        experts = _experts_spec(hf, hidden, activation)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=tuple("attention" if i in attended else "mamba" for i in range(layers)),
            mamba=_mamba_spec(hf, hidden, eps),
            attention=read_attention(hf, hidden, scale=read_head_dim(hf, hidden) ** -0.5, rope=None),
            intermediate_size=hf.integer("intermediate_size"),
            activation=activation,
            experts=experts,
            expert_layers=_every(hf, "expert_layer", layers) if experts else (),
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


class Moe(nn.Module):
    """Routed experts, weighted by their share of all experts' softmax."""

    spec: ExpertsSpec
    dtype: jnp.dtype
    out_std: float

    @nn.compact
    def __call__(self, x: Array, spans: Spans) -> Array:
        """x [T, M] -> [T, M]."""
        spec = self.spec
        router = SoftmaxRouter(spec.num_experts, spec.top_k, spec.input_size, normalise=False, name="router")
        return Experts(spec, self.dtype, self.out_std, name="experts")(x, *router(x), spans)


class Layer(nn.Module):
    """Norm, mixer, residual; norm, feed-forward, residual."""

    config: JambaConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="input_norm")(x)
        if config.layer_kinds[self.layer_id] == "mamba":
            h, cache = Mamba1(config.mamba, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + h
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="feed_forward_norm")(x)
        if self.layer_id in config.expert_layers:
            assert config.experts is not None
            return x + Moe(config.experts, self.dtype, std, name="feed_forward")(h, spans), cache
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        return x + Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="feed_forward")(h), cache


def decoder(config: JambaConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: JambaConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "input_norm", "weight")))
        names.append(TensorName((f"{hub}.pre_ff_layernorm.weight",), (*path, "feed_forward_norm", "weight")))
        if kind == "mamba":
            names += mamba1_names((f"{hub}.mamba",), (*path, "mixer"), config.mamba)
        else:
            names += attention_names((f"{hub}.self_attn",), (*path, "mixer"), config.attention)
        hub, path = f"{hub}.feed_forward", (*path, "feed_forward")
        if i in config.expert_layers:
            assert config.experts is not None
            names.append(TensorName((f"{hub}.router.weight",), (*path, "router", "weight")))
            names += gated_expert_names((f"{hub}.experts",), (*path, "experts"), config.experts)
        else:
            names += gated_mlp_names((hub,), path, config.intermediate_size, bias=False)
    names.append(TensorName(("model.final_layernorm.weight",), ("final_norm", "weight")))
    return names


def _every(hf: HfConfig, key: str, layers: int) -> tuple[int, ...]:
    """Layers `<key>_offset`, and from there every `<key>_period`."""
    period = hf.integer(f"{key}_period")
    offset = hf.integer(f"{key}_offset", least=0, most=period - 1)
    return tuple(range(offset, layers, period))


def _experts_spec(hf: HfConfig, hidden: int, activation: str) -> ExpertsSpec | None:
    count = hf.integer("num_experts")
    if count == 1:
        return None
    top_k = hf.integer("num_experts_per_tok", most=count)
    return ExpertsSpec(count, top_k, hidden, hf.integer("intermediate_size"), activation, gated=True)


def _mamba_spec(hf: HfConfig, hidden: int, eps: float) -> Mamba1Spec:
    hf.one_of("hidden_act", "silu")  # it is also the activation after the convolution
    return Mamba1Spec(
        hidden_size=hidden,
        inner_size=hf.integer("mamba_expand") * hidden,
        state_size=hf.integer("mamba_d_state"),
        dt_rank=read_dt_rank(hf, "mamba_dt_rank", hidden),
        conv_kernel=hf.integer("mamba_d_conv", least=2),
        conv_bias=hf.flag("mamba_conv_bias"),
        proj_bias=hf.flag("mamba_proj_bias"),
        norm="weighted",
        norm_eps=eps,
    )
