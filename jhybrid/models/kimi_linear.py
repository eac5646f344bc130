"""Kimi Linear: Kimi Delta Attention or latent attention, then an MLP or experts; no positions anywhere.

Source: Kimi Team 2025, "Kimi Linear"; numbers as in transformers 5.24 (`kimi_linear`).
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.errors import ConfigError
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.gated_delta import GatedDelta, GatedDeltaSpec, gated_delta_names
from jhybrid.layers.latent_attention import LatentAttention, LatentAttentionSpec, latent_attention_names
from jhybrid.layers.linear import out_std
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.moe import Experts, ExpertsSpec, SigmoidRouter, gated_expert_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_delta_layer_kinds
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

PROJECTIONS = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "g_a_proj": ("gate",),
    "b_proj": ("beta",),
    "f_a_proj": ("decay",),
}
CONVOLUTIONS = {"q_conv1d": ("q",), "k_conv1d": ("k",), "v_conv1d": ("v",)}
RENAMED = {"norm": "o_norm", "out_proj": "o_proj", "gate_proj": "g_b_proj", "decay_proj": "f_b_proj"}


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts beside shared ones, which are one wider MLP."""

    experts: ExpertsSpec
    shared_intermediate_size: int
    num_groups: int
    top_groups: int
    normalise: bool
    scaling: float


@dataclass(frozen=True)
class KimiLinearConfig:
    """What a Kimi Linear is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "delta" | "attention"
    delta: GatedDeltaSpec
    attention: LatentAttentionSpec
    sparse_layers: tuple[bool, ...]  # which layers have experts
    moe: MoeSpec
    intermediate_size: int  # of the MLP in the other layers
    activation: str
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "KimiLinearConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hidden, eps, layers = hf.integer("hidden_size"), hf.number("rms_norm_eps"), hf.integer("num_hidden_layers")
        activation = hf.activation("hidden_act")
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=_layer_kinds(hf, layers),
            delta=_delta_spec(hf, hidden, eps),
            attention=_attention_spec(hf, hidden),
            sparse_layers=_sparse_layers(hf, layers),
            moe=_moe_spec(hf, hidden, activation),
            intermediate_size=hf.integer("intermediate_size"),
            activation=activation,
            norm_eps=eps,
            max_position_embeddings=hf.integer("model_max_length", "max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache."""
        parts = {
            "delta": self.delta.parts(state_dtype, conv_dtype),
            "attention": self.attention.parts(page_size, kv_dtype),
        }
        return [parts[kind] for kind in self.layer_kinds]


class Moe(nn.Module):
    """Routed experts plus the shared ones."""

    spec: MoeSpec
    dtype: jnp.dtype
    out_std: float

    @nn.compact
    def __call__(self, x: Array, spans: Spans) -> Array:
        """x [T, M] -> [T, M]."""
        spec, experts = self.spec, self.spec.experts
        groups = (spec.num_groups, spec.top_groups)
        sizes = (experts.num_experts, experts.top_k, experts.input_size)
        router = SigmoidRouter(*sizes, *groups, spec.normalise, spec.scaling, name="router")
        routed = Experts(experts, self.dtype, self.out_std, name="experts")(x, *router(x), spans)
        widths = (experts.input_size, spec.shared_intermediate_size, experts.activation)
        return routed + Mlp(*widths, gated=True, dtype=self.dtype, out_std=self.out_std, name="shared_experts")(x)


class Layer(nn.Module):
    """Norm, mixer, residual; norm, MLP or experts, residual."""

    config: KimiLinearConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="input_norm")(x)
        if config.layer_kinds[self.layer_id] == "delta":
            h, cache = GatedDelta(config.delta, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = LatentAttention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + h
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="feed_forward_norm")(x)
        if config.sparse_layers[self.layer_id]:
            return x + Moe(config.moe, self.dtype, std, name="feed_forward")(h, spans), cache
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        return x + Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="feed_forward")(h), cache


def decoder(config: KimiLinearConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: KimiLinearConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes. The MLP of a layer without experts is `mlp` on the hub; transformers 5.24
    writes it as `block_sparse_moe`.
    """
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "input_norm", "weight")))
        names.append(TensorName((f"{hub}.post_attention_layernorm.weight",), (*path, "feed_forward_norm", "weight")))
        mixer = (*path, "mixer")
        if kind == "delta":
            tensors = {"projections": PROJECTIONS, "convolutions": CONVOLUTIONS, "renamed": RENAMED}
            names += gated_delta_names((f"{hub}.self_attn",), mixer, config.delta, **tensors)
        else:
            names += latent_attention_names(f"{hub}.self_attn", mixer, config.attention)
        feed_forward = (*path, "feed_forward")
        if config.sparse_layers[i]:
            names += _moe_names(f"{hub}.block_sparse_moe", feed_forward, config.moe)
        else:
            spelled = (f"{hub}.block_sparse_moe", f"{hub}.mlp")
            names += gated_mlp_names(spelled, feed_forward, config.intermediate_size, bias=False)
    return [*names, TensorName(("model.norm.weight",), ("final_norm", "weight"))]


def _moe_names(hub: str, path: tuple[str, ...], moe: MoeSpec) -> list[TensorName]:
    names = [
        TensorName((f"{hub}.gate.weight",), (*path, "router", "weight")),
        TensorName((f"{hub}.gate.e_score_correction_bias",), (*path, "router", "correction_bias")),
    ]
    names += gated_expert_names((f"{hub}.experts",), (*path, "experts"), moe.experts, ("w1", "w3", "w2"))
    shared = (*path, "shared_experts")
    return names + gated_mlp_names((f"{hub}.shared_experts",), shared, moe.shared_intermediate_size, bias=False)


def _layer_kinds(hf: HfConfig, layers: int) -> tuple[str, ...]:
    """From the layers numbered from 1 under `linear_attn_config`, or from `layer_types`."""
    if hf.has("layer_types"):
        return read_delta_layer_kinds(hf, layers)
    nested = hf.section("linear_attn_config")
    delta, full = nested.items("kda_layers"), nested.items("full_attn_layers")
    if sorted([*delta, *full]) != list(range(1, layers + 1)):
        raise ConfigError(
            "linear_attn_config.kda_layers",
            f"{delta} and full_attn_layers {full} are not together each of the layers 1 to {layers} once",
        )
    return tuple("delta" if i in delta else "attention" for i in range(1, layers + 1))


def _sparse_layers(hf: HfConfig, layers: int) -> tuple[bool, ...]:
    """From `mlp_layer_types`, or all but the first `first_k_dense_replace`."""
    hf.one_of("moe_layer_freq", 1, default=1)
    if not hf.has("mlp_layer_types"):
        dense = hf.integer("first_k_dense_replace", least=0)
        return tuple(i >= dense for i in range(layers))
    kinds = hf.items("mlp_layer_types")
    unknown = [kind for kind in kinds if kind not in ("dense", "sparse")]
    if unknown or len(kinds) != layers:
        raise ConfigError("mlp_layer_types", f"must be `dense` or `sparse` for each of {layers} layers, got {kinds!r}")
    return tuple(kind == "sparse" for kind in kinds)


def _delta_spec(hf: HfConfig, hidden: int, eps: float) -> GatedDeltaSpec:
    hf.one_of("hidden_act", "silu")  # it is also the activation after the convolution
    nested = hf.section("linear_attn_config")
    heads, head_dim, taps = (
        nested.integer(there, least=least) if nested.has(there) else hf.integer(here, least=least)
        for there, here, least in (
            ("num_heads", "linear_num_heads", 1),
            ("head_dim", "linear_head_dim", 1),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 2),
        )
    )
    return GatedDeltaSpec(
        hidden_size=hidden,
        num_k_heads=heads,
        num_v_heads=heads,
        k_dim=head_dim,
        v_dim=head_dim,
        conv_kernel=taps,
        norm_eps=eps,
        bottleneck=head_dim,
        gate_activation="sigmoid",
    )


def _attention_spec(hf: HfConfig, hidden: int) -> LatentAttentionSpec:
    hf.one_of("q_lora_rank", None)
    hf.one_of("mla_use_nope", True, default=True)
    hf.one_of("attention_bias", False, default=False)
    return LatentAttentionSpec(
        hidden_size=hidden,
        num_heads=hf.integer("num_attention_heads"),
        latent_size=hf.integer("kv_lora_rank"),
        own_key_dim=hf.integer("qk_nope_head_dim"),
        shared_key_dim=hf.integer("qk_rope_head_dim"),
        value_dim=hf.integer("v_head_dim"),
    )


def _moe_spec(hf: HfConfig, hidden: int, activation: str) -> MoeSpec:
    hf.one_of("moe_router_activation_func", "sigmoid", default="sigmoid")
    groups = hf.integer("num_expert_group", "n_group", default=1)
    top_groups = hf.integer("topk_group", default=1, most=groups)
    count = hf.multiple("num_experts", of=("num_expert_group", groups))
    if groups > 1 and count // groups < 2:
        raise ConfigError("num_expert_group", f"{groups} groups of {count} experts: a group needs two to be ranked")
    width = hf.integer("moe_intermediate_size")
    top_k = hf.integer("num_experts_per_token", "num_experts_per_tok", most=top_groups * (count // groups))
    return MoeSpec(
        experts=ExpertsSpec(count, top_k, hidden, width, activation, gated=True),
        shared_intermediate_size=width * hf.integer("num_shared_experts", "n_shared_experts"),
        num_groups=groups,
        top_groups=top_groups,
        normalise=hf.flag("moe_renormalize", "norm_topk_prob"),
        scaling=hf.number("routed_scaling_factor"),
    )
