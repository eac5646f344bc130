"""LFM2 and LFM2-MoE: short convolutions or attention, then a SwiGLU MLP or a mixture of experts, in every layer.

Sources: LFM2 technical report (arXiv:2511.23404), the LFM2 model cards; numbers as in transformers 5.24.
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
from jhybrid.layers.moe import Experts, ExpertsSpec, SigmoidRouter, gated_expert_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.short_conv import ShortConv, ShortConvSpec, short_conv_names
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention, read_head_dim
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

MOST_WIDENING = 1024.0  # of `block_ffn_dim_multiplier`, which is about 1
DEFAULT_THETA = 1e6
NORMALISER_EPS = 1e-6  # added to the sum of the chosen experts' scores
GATE_UP_DOWN = ("w1", "w3", "w2")


@dataclass(frozen=True)
class MoeSpec:
    """The feed-forward layers from `num_dense_layers` on."""

    experts: ExpertsSpec
    biased: bool
    normalise: bool
    scaling: float


@dataclass(frozen=True)
class Lfm2Config:
    """What an LFM2 is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "conv" | "attention"
    conv: ShortConvSpec
    attention: AttentionSpec
    intermediate_size: int
    num_dense_layers: int  # the first ones have an MLP, the others `moe`
    moe: MoeSpec | None
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Lfm2Config":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        layers = hf.integer("num_hidden_layers")
        return cls._read(hf, layers, intermediate_size=_mlp_width(hf), num_dense_layers=layers, moe=None)

    @classmethod
    def _read(cls, hf: HfConfig, layers: int, **feed_forward: Any) -> "Lfm2Config":
        hidden, eps = hf.integer("hidden_size"), hf.number("norm_eps", least=0.0)
        head_dim = read_head_dim(hf, hidden)
        rope = read_rope(hf, head_dim, default_theta=DEFAULT_THETA)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=_layer_kinds(hf, layers),
            conv=ShortConvSpec(hidden, hf.integer("conv_L_cache", least=2), hf.flag("conv_bias")),
            attention=read_attention(hf, hidden, scale=head_dim**-0.5, rope=rope, qk_norm_eps=eps),
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
            # the older key counts where both are there, as in transformers
            tie_word_embeddings=hf.flag(
                "tie_embedding" if hf.has("tie_embedding") else "tie_word_embeddings", default=True
            ),
            **feed_forward,
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache."""
        del state_dtype
        parts = {"conv": self.conv.parts(conv_dtype), "attention": self.attention.parts(page_size, kv_dtype)}
        return [parts[kind] for kind in self.layer_kinds]


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config):
    """What an LFM2-MoE is."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Lfm2MoeConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        layers = hf.integer("num_hidden_layers")
        config = cls._read(
            hf,
            layers,
            intermediate_size=hf.integer("intermediate_size"),
            num_dense_layers=hf.integer("num_dense_layers", least=0, most=layers),
            moe=_moe_spec(hf),
        )
        assert isinstance(config, cls)
        return config


class Moe(nn.Module):
    """Routed experts."""

    spec: MoeSpec
    dtype: jnp.dtype
    out_std: float

    @nn.compact
    def __call__(self, x: Array, spans: Spans) -> Array:
        """x [T, M] -> [T, M]."""
        spec, experts = self.spec, self.spec.experts
        router = SigmoidRouter(
            experts.num_experts,
            experts.top_k,
            experts.input_size,
            num_groups=1,
            top_groups=1,
            normalise=spec.normalise,
            scaling=spec.scaling,
            biased=spec.biased,
            normaliser_eps=NORMALISER_EPS,
            name="router",
        )
        return Experts(experts, self.dtype, self.out_std, name="experts")(x, *router(x), spans)


class Layer(nn.Module):
    """Norm, mixer, residual; norm, feed-forward, residual."""

    config: Lfm2Config
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="operator_norm")(x)
        if config.layer_kinds[self.layer_id] == "conv":
            h, cache = ShortConv(config.conv, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + h
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="feed_forward_norm")(x)
        if self.layer_id < config.num_dense_layers:
            sizes = (config.hidden_size, config.intermediate_size, "silu")
            return x + Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="feed_forward")(h), cache
        assert config.moe is not None
        return x + Moe(config.moe, self.dtype, std, name="feed_forward")(h, spans), cache


def decoder(config: Lfm2Config, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: Lfm2Config) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    renamed = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.operator_norm.weight",), (*path, "operator_norm", "weight")))
        names.append(TensorName((f"{hub}.ffn_norm.weight",), (*path, "feed_forward_norm", "weight")))
        if kind == "conv":
            names += short_conv_names((f"{hub}.conv",), (*path, "mixer"), config.conv)
        else:
            names += attention_names((f"{hub}.self_attn",), (*path, "mixer"), config.attention, renamed)
        names += _feed_forward_names(config, i, f"{hub}.feed_forward", (*path, "feed_forward"))
    names.append(TensorName(("model.embedding_norm.weight",), ("final_norm", "weight")))
    return names


def _feed_forward_names(config: Lfm2Config, layer: int, hub: str, path: tuple[str, ...]) -> list[TensorName]:
    if layer < config.num_dense_layers:
        return gated_mlp_names((hub,), path, config.intermediate_size, bias=False, spelled=GATE_UP_DOWN)
    assert config.moe is not None
    names = [TensorName((f"{hub}.gate.weight",), (*path, "router", "weight"))]
    if config.moe.biased:
        names.append(TensorName((f"{hub}.expert_bias",), (*path, "router", "correction_bias")))
    return names + gated_expert_names((f"{hub}.experts",), (*path, "experts"), config.moe.experts, GATE_UP_DOWN)


def _layer_kinds(hf: HfConfig, layers: int) -> tuple[str, ...]:
    """From `layer_types`, else attention at `full_attn_idxs` and convolutions elsewhere."""
    if hf.has("full_attn_idxs") and not hf.has("layer_types"):
        indices = hf.layer_indices("full_attn_idxs", layers)
        return tuple("attention" if i in indices else "conv" for i in range(layers))
    return hf.layer_kinds("layer_types", "full_attn_idxs", allowed=("conv", "attention"), layers=layers)


def _mlp_width(hf: HfConfig) -> int:
    """What the checkpoint's MLP really has: two thirds of what the config says, rounded up, if it is adjusted."""
    width = hf.integer("block_ff_dim" if hf.has("block_ff_dim") else "intermediate_size")
    if not hf.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if hf.has("block_ffn_dim_multiplier"):
        multiple = hf.integer("block_multiple_of")
        widening = hf.number("block_ffn_dim_multiplier", above=0.0, most=MOST_WIDENING)
        width = -(-int(widening * width) // multiple) * multiple
    return width


def _moe_spec(hf: HfConfig) -> MoeSpec:
    count = hf.integer("num_experts")
    experts = ExpertsSpec(
        num_experts=count,
        top_k=hf.integer("num_experts_per_tok", most=count),
        input_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("moe_intermediate_size"),
        activation="silu",
        gated=True,
    )
    return MoeSpec(
        experts=experts,
        biased=hf.flag("use_expert_bias"),
        normalise=hf.flag("norm_topk_prob"),
        scaling=hf.number("routed_scaling_factor"),
    )
