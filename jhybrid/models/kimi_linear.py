"""Kimi Linear and Ling 3 (`bailing_hybrid`): Kimi Delta Attention or latent attention, then an MLP or experts.

Kimi Linear has no positions anywhere; Ling 3's latent attention has. Source: Kimi Team 2025, "Kimi Linear"; numbers as
in transformers 5.24.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.errors import ConfigError
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.gated_delta import GatedDelta, GatedDeltaSpec, gated_delta_names
from jhybrid.layers.latent_attention import LatentAttention, LatentAttentionSpec, latent_attention_names
from jhybrid.layers.linear import out_std
from jhybrid.layers.mlp import GATE_UP_DOWN, Mlp, gated_mlp_names
from jhybrid.layers.moe import Experts, ExpertsSpec, SigmoidRouter, gated_expert_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.rope import Rope, plain_frequencies
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_delta_layer_kinds
from jhybrid.models.hf_rope import rope_section
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
LING_PROJECTIONS = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "g_proj": ("gate",),
    "b_proj": ("beta",),
    "f_proj": ("decay",),
}
CONVOLUTIONS = {"q_conv1d": ("q",), "k_conv1d": ("k",), "v_conv1d": ("v",)}
RENAMED = {"norm": "o_norm", "out_proj": "o_proj", "gate_proj": "g_b_proj", "decay_proj": "f_b_proj"}
LING_RENAMED = {"norm": "o_norm", "out_proj": "dense", "o_proj": "dense", "gate_proj": "g_proj"}


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
        hf.one_of("mla_use_nope", True, default=True)
        return cls._read(hf, _layer_kinds(hf), _delta_spec(hf), _attention_spec(hf), _moe_spec(hf, groups=1))

    @classmethod
    def _read(
        cls,
        hf: HfConfig,
        layer_kinds: tuple[str, ...],
        delta: GatedDeltaSpec,
        attention: LatentAttentionSpec,
        moe: MoeSpec,
        **more: Any,
    ) -> Self:
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hf.integer("hidden_size"),
            layer_kinds=layer_kinds,
            delta=delta,
            attention=attention,
            sparse_layers=_sparse_layers(hf),
            moe=moe,
            intermediate_size=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act"),
            norm_eps=hf.number("rms_norm_eps", least=0.0),
            max_position_embeddings=hf.integer("model_max_length", "max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
            **more,
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


@dataclass(frozen=True)
class LingHybridConfig(KimiLinearConfig):
    """What a hybrid Ling 3 is."""

    num_draft_layers: int  # behind the others in a checkpoint; not served

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "LingHybridConfig":
        """Read a config.json. Raises ConfigError as its parent."""
        hf = HfConfig(raw)
        heads = hf.integer("num_attention_heads")
        hf.one_of("num_key_value_heads", heads, default=heads)
        attention = replace(_attention_spec(hf), rope=_rope(hf), head_gated=True)
        draft = hf.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
        specs = _ling_layer_kinds(hf), _ling_delta_spec(hf), attention, _moe_spec(hf, groups=None)
        return cls._read(hf, *specs, num_draft_layers=draft)


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
    tensors = {"projections": PROJECTIONS, "convolutions": CONVOLUTIONS, "renamed": RENAMED}
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names += _norm_names(hub, path)
        if kind == "delta":
            names += gated_delta_names((f"{hub}.self_attn",), (*path, "mixer"), config.delta, **tensors)
        else:
            names += latent_attention_names(f"{hub}.self_attn", (*path, "mixer"), config.attention)
        feed_forward = (*path, "feed_forward")
        if config.sparse_layers[i]:
            moe = f"{hub}.block_sparse_moe"
            names += _moe_names(moe, feed_forward, config.moe, "e_score_correction_bias", ("w1", "w3", "w2"))
        else:
            spelled = (f"{hub}.block_sparse_moe", f"{hub}.mlp")
            names += gated_mlp_names(spelled, feed_forward, config.intermediate_size, bias=False)
    return [*names, TensorName(("model.norm.weight",), ("final_norm", "weight"))]


def ling_weight_names(config: LingHybridConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    tensors = {"projections": LING_PROJECTIONS, "convolutions": CONVOLUTIONS, "renamed": LING_RENAMED}
    names = vocabulary_names(("model.word_embeddings.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names += _norm_names(hub, path)
        if kind == "delta":
            mixer = gated_delta_names((f"{hub}.attention",), (*path, "mixer"), config.delta, **tensors)
        else:
            mixer = latent_attention_names(f"{hub}.attention", (*path, "mixer"), config.attention, LING_RENAMED)
        dense, other = f"{hub}.attention.dense.weight", f"{hub}.attention.o_proj.weight"
        names += [replace(name, names=(dense, other)) if name.names == (dense,) else name for name in mixer]
        mlp, feed_forward = f"{hub}.mlp", (*path, "feed_forward")
        if config.sparse_layers[i]:
            names += _moe_names(mlp, feed_forward, config.moe, "expert_bias", GATE_UP_DOWN)
        else:
            names += gated_mlp_names((mlp,), feed_forward, config.intermediate_size, bias=False)
    return [*names, TensorName(("model.norm.weight",), ("final_norm", "weight"))]


def ling_left_alone(config: LingHybridConfig) -> list[str]:
    """Tensors of the draft layers, which are numbered on from the others."""
    draft = range(config.num_layers, config.num_layers + config.num_draft_layers)
    return [rf"model\.layers\.{i}\..*" for i in draft]


def _norm_names(hub: str, path: tuple[str, ...]) -> list[TensorName]:
    norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "feed_forward_norm"}
    return [TensorName((f"{hub}.{tensor}.weight",), (*path, norm, "weight")) for tensor, norm in norms.items()]


def _moe_names(
    hub: str, path: tuple[str, ...], moe: MoeSpec, bias: str, spelled: tuple[str, str, str]
) -> list[TensorName]:
    names = [
        TensorName((f"{hub}.gate.weight",), (*path, "router", "weight")),
        TensorName((f"{hub}.gate.{bias}",), (*path, "router", "correction_bias")),
    ]
    names += gated_expert_names((f"{hub}.experts",), (*path, "experts"), moe.experts, spelled)
    shared = (*path, "shared_experts")
    return names + gated_mlp_names((f"{hub}.shared_experts",), shared, moe.shared_intermediate_size, bias=False)


def _layer_kinds(hf: HfConfig) -> tuple[str, ...]:
    """From the layers numbered from 1 under `linear_attn_config`, or from `layer_types`."""
    layers = hf.integer("num_hidden_layers")
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


def _ling_layer_kinds(hf: HfConfig) -> tuple[str, ...]:
    """From `layer_types`, else the last of every `layer_group_size` layers is attention."""
    layers = hf.integer("num_hidden_layers")
    if hf.has("layer_types"):
        return read_delta_layer_kinds(hf, layers)
    size = hf.integer("layer_group_size")
    return tuple("delta" if (i + 1) % size else "attention" for i in range(layers))


def _sparse_layers(hf: HfConfig) -> tuple[bool, ...]:
    """From `mlp_layer_types`, or all but the first `first_k_dense_replace`."""
    layers = hf.integer("num_hidden_layers")
    hf.one_of("moe_layer_freq", 1, default=1)
    if not hf.has("mlp_layer_types"):
        dense = hf.integer("first_k_dense_replace", least=0)
        return tuple(i >= dense for i in range(layers))
    kinds = hf.items("mlp_layer_types")
    unknown = [kind for kind in kinds if kind not in ("dense", "sparse")]
    if unknown or len(kinds) != layers:
        raise ConfigError("mlp_layer_types", f"must be `dense` or `sparse` for each of {layers} layers, got {kinds!r}")
    return tuple(kind == "sparse" for kind in kinds)


def _delta_spec(hf: HfConfig) -> GatedDeltaSpec:
    nested = hf.section("linear_attn_config")
    heads, head_dim, taps = (
        nested.integer(there, least=least) if nested.has(there) else hf.integer(here, least=least)
        for there, here, least in (
            ("num_heads", "linear_num_heads", 1),
            ("head_dim", "linear_head_dim", 1),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 2),
        )
    )
    return _kimi_delta(hf, heads, head_dim, taps, bottleneck=head_dim)


def _ling_delta_spec(hf: HfConfig) -> GatedDeltaSpec:
    """transformers writes the width of a shared key as `head_dim`, and what that was as `linear_head_dim`."""
    heads = hf.integer("linear_num_heads" if hf.has("linear_num_heads") else "num_attention_heads")
    head_dim = hf.integer("linear_head_dim" if hf.has("linear_head_dim") else "head_dim")
    taps = hf.integer("short_conv_kernel_size", "linear_conv_kernel_dim", least=2)
    hf.one_of("kda_safe_gate", True, default=True)
    least = hf.number("kda_lower_bound", default=-5.0)
    if least >= 0:
        raise ConfigError("kda_lower_bound", f"must be below 0: it is the logarithm of the fastest decay, got {least}")
    return _kimi_delta(hf, heads, head_dim, taps, least_log_decay=least)


def _kimi_delta(hf: HfConfig, heads: int, head_dim: int, taps: int, **more: Any) -> GatedDeltaSpec:
    hf.one_of("hidden_act", "silu")  # it is also the activation after the convolution
    return GatedDeltaSpec(
        hidden_size=hf.integer("hidden_size"),
        num_k_heads=heads,
        num_v_heads=heads,
        k_dim=head_dim,
        v_dim=head_dim,
        conv_kernel=taps,
        norm_eps=hf.number("rms_norm_eps", least=0.0),
        channel_decay=True,
        gate_activation="sigmoid",
        **more,
    )


def _rope(hf: HfConfig) -> Rope:
    """Of all of the shared key: a `partial_rotary_factor` means nothing here, as in transformers."""
    nested = rope_section(hf)
    nested.one_of("rope_type", "default", default="default")
    hf.one_of("rope_scaling", None)
    theta = (nested if nested.has("rope_theta") else hf).number("rope_theta", above=1.0)
    frequencies = plain_frequencies(theta, hf.multiple("qk_rope_head_dim", of=("2 dimensions of a pair", 2)))
    return Rope(tuple(frequencies.tolist()), interleaved=True)


def _attention_spec(hf: HfConfig) -> LatentAttentionSpec:
    hf.one_of("q_lora_rank", None)
    hf.one_of("attention_bias", False, default=False)
    return LatentAttentionSpec(
        hidden_size=hf.integer("hidden_size"),
        num_heads=hf.integer("num_attention_heads"),
        latent_size=hf.integer("kv_lora_rank"),
        own_key_dim=hf.integer("qk_nope_head_dim"),
        shared_key_dim=hf.integer("qk_rope_head_dim"),
        value_dim=hf.integer("v_head_dim"),
    )


def _moe_spec(hf: HfConfig, groups: int | None) -> MoeSpec:
    """`groups` of experts and of the best of them where a config does not say; None: it must."""
    hf.one_of("moe_router_activation_func", "sigmoid", default="sigmoid")
    num_groups = hf.integer("num_expert_group", "n_group", default=groups)
    top_groups = hf.integer("topk_group", default=groups, most=num_groups)
    count = hf.multiple("num_experts", "num_local_experts", of=("num_expert_group", num_groups))
    if num_groups > 1 and count // num_groups < 2:
        raise ConfigError("num_expert_group", f"{num_groups} groups of {count} experts: a group needs two to be ranked")
    width = hf.integer("moe_intermediate_size")
    top_k = hf.integer("num_experts_per_token", "num_experts_per_tok", most=top_groups * (count // num_groups))
    return MoeSpec(
        experts=ExpertsSpec(count, top_k, hf.integer("hidden_size"), width, hf.activation("hidden_act"), gated=True),
        shared_intermediate_size=width * hf.integer("num_shared_experts", "n_shared_experts"),
        num_groups=num_groups,
        top_groups=top_groups,
        normalise=hf.flag("moe_renormalize", "norm_topk_prob"),
        scaling=hf.number("routed_scaling_factor"),
    )
