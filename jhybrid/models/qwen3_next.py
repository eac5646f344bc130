"""Qwen3-Next, Qwen3.5 and Qwen3.6: Gated DeltaNet or gated attention, then an MLP or experts, in every layer.

Sources: the models' cards; numbers as in transformers 5.24 (`qwen3_next`, `qwen3_5`, `qwen3_5_moe`). Only text is
served: for it the three position axes of Qwen3.5 are equal, which is plain rotary embedding.
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.attention import Attention, AttentionSpec, attention_names
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.gated_delta import GatedDelta, GatedDeltaSpec, gated_delta_names
from jhybrid.layers.linear import Linear, out_std
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.moe import Experts, ExpertsSpec, SoftmaxRouter, gated_expert_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention, read_delta_layer_kinds, read_gated_delta, read_head_dim
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

ROTATED_SHARE = 0.25  # of each head, where the config is silent
INTERLEAVED = {"in_proj_qkvz": ("q", "k", "v", "gate"), "in_proj_ba": ("beta", "decay")}  # Qwen3-Next
IN_TURN = {"in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("gate",), "in_proj_b": ("beta",), "in_proj_a": ("decay",)}


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts beside a shared one, whose output is multiplied by a gate of its own."""

    experts: ExpertsSpec
    shared_intermediate_size: int


@dataclass(frozen=True)
class Qwen3NextConfig:
    """What a Qwen3-Next is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "delta" | "attention"
    delta: GatedDeltaSpec
    attention: AttentionSpec
    sparse_layers: tuple[bool, ...]  # which layers have experts
    moe: MoeSpec | None
    intermediate_size: int | None  # of the MLP in the other layers
    activation: str
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def interleaved(self) -> bool:
        """Whether checkpoints hold the projections of Gated DeltaNet key head by key head."""
        return True

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Qwen3NextConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        layers, step = hf.integer("num_hidden_layers"), hf.integer("decoder_sparse_step", default=1)
        dense = hf.layer_indices("mlp_only_layers", layers, default=[])
        hf.one_of("norm_topk_prob", True, default=True)
        sparse = tuple((i + 1) % step == 0 and i not in dense for i in range(layers))
        return cls._read(hf, sparse, hf.flag("tie_word_embeddings", default=False))

    @classmethod
    def _read(cls, hf: HfConfig, sparse: tuple[bool, ...], tied: bool) -> "Qwen3NextConfig":
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        head_dim, activation = read_head_dim(hf, hidden), hf.activation("hidden_act")
        share = hf.number("partial_rotary_factor", default=ROTATED_SHARE, above=0.0, most=1.0)
        rope = read_rope(hf, head_dim, partial=share)
        hf.one_of("attn_output_gate", True, default=True)
        hf.one_of("use_sliding_window", False, default=False)
        attention = read_attention(hf, hidden, scale=head_dim**-0.5, rope=rope, qk_norm_eps=eps)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=_layer_kinds(hf, len(sparse)),
            delta=read_gated_delta(hf, hidden, eps),
            attention=replace(attention, qk_norm_offset=1.0, gated=True),
            sparse_layers=sparse,
            moe=_moe_spec(hf, hidden, activation) if any(sparse) else None,
            intermediate_size=None if all(sparse) else hf.integer("intermediate_size"),
            activation=activation,
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=tied,
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
class Qwen35Config(Qwen3NextConfig):
    """What a dense Qwen3.5 or 3.6 is."""

    @property
    def interleaved(self) -> bool:
        """Never."""
        return False

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Qwen35Config":
        """Read a config.json, of the text model or with it under `text_config`. Raises ConfigError as its parent."""
        return cls._read_text(raw, sparse=False)

    @classmethod
    def _read_text(cls, raw: dict[str, Any], sparse: bool) -> "Qwen35Config":
        hf = HfConfig(raw)
        text = hf.section("text_config") if hf.has("text_config") else hf
        tied = (hf if hf.has("tie_word_embeddings") else text).flag("tie_word_embeddings", default=False)
        config = cls._read(text, (sparse,) * text.integer("num_hidden_layers"), tied)
        assert isinstance(config, cls)
        return config


@dataclass(frozen=True)
class Qwen35MoeConfig(Qwen35Config):
    """What a Qwen3.5 or 3.6 with experts is."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Qwen35MoeConfig":
        """Read a config.json, of the text model or with it under `text_config`. Raises ConfigError as its parent."""
        config = cls._read_text(raw, sparse=True)
        assert isinstance(config, cls)
        return config


class Moe(nn.Module):
    """Routed experts plus a shared one times the sigmoid of a projection."""

    config: Qwen3NextConfig
    dtype: jnp.dtype
    out_std: float

    @nn.compact
    def __call__(self, x: Array, spans: Spans) -> Array:
        """x [T, M] -> [T, M]."""
        config, moe = self.config, self.config.moe
        assert moe is not None
        router = SoftmaxRouter(moe.experts.num_experts, moe.experts.top_k, config.hidden_size, name="router")
        chosen, weights = router(x)
        routed = Experts(moe.experts, self.dtype, self.out_std, name="experts")(x, chosen, weights, spans)
        sizes = (config.hidden_size, moe.shared_intermediate_size, config.activation)
        shared = Mlp(*sizes, gated=True, dtype=self.dtype, out_std=self.out_std, name="shared_expert")(x)
        gate = Linear(1, config.hidden_size, self.dtype, name="shared_expert_gate", exact=True)(x)  # [T, 1]
        return routed + shared * jax.nn.sigmoid(gate)


class Layer(nn.Module):
    """Norm, mixer, residual; norm, MLP or experts, residual."""

    config: Qwen3NextConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        norm = (config.hidden_size, config.norm_eps, self.dtype, 1.0)
        h = RMSNorm(*norm, name="input_norm")(x)
        if config.layer_kinds[self.layer_id] == "delta":
            h, cache = GatedDelta(config.delta, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + h
        h = RMSNorm(*norm, name="feed_forward_norm")(x)
        if config.sparse_layers[self.layer_id]:
            return x + Moe(config, self.dtype, std, name="feed_forward")(h, spans), cache
        assert config.intermediate_size is not None
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        return x + Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="feed_forward")(h), cache


def decoder(config: Qwen3NextConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype, norm_offset=1.0)


def weight_names(config: Qwen3NextConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes: under `model.`, or `model.language_model.` beside a vision tower."""
    roots = ("model", "model.language_model")
    embedding = tuple(f"{root}.embed_tokens.weight" for root in roots)
    names = vocabulary_names(embedding, ("vocabulary",), tied=config.tie_word_embeddings)
    norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "feed_forward_norm"}
    for i, kind in enumerate(config.layer_kinds):
        hubs, path = tuple(f"{root}.layers.{i}" for root in roots), (f"layers_{i}",)
        for tensor, norm in norms.items():
            names.append(TensorName(tuple(f"{hub}.{tensor}.weight" for hub in hubs), (*path, norm, "weight")))
        if kind == "delta":
            names += gated_delta_names(
                tuple(f"{hub}.linear_attn" for hub in hubs),
                (*path, "mixer"),
                config.delta,
                projections=INTERLEAVED if config.interleaved else IN_TURN,
                convolutions={"conv1d": ("q", "k", "v")},
                renamed={},
                interleaved=config.interleaved,
            )
        else:
            mixer = tuple(f"{hub}.self_attn" for hub in hubs)
            names += attention_names(mixer, (*path, "mixer"), config.attention)
        mlp, place = tuple(f"{hub}.mlp" for hub in hubs), (*path, "feed_forward")
        if config.sparse_layers[i]:
            assert config.moe is not None
            names += _moe_names(mlp, place, config.moe)
        else:
            assert config.intermediate_size is not None
            names += gated_mlp_names(mlp, place, config.intermediate_size, bias=False)
    final = tuple(f"{root}.norm.weight" for root in roots)
    return [*names, TensorName(final, ("final_norm", "weight"))]


def _moe_names(hubs: tuple[str, ...], path: tuple[str, ...], moe: MoeSpec) -> list[TensorName]:
    """Experts are stored one by one (Qwen3-Next) or all in one tensor (Qwen3.5)."""

    def spell(tensor: str) -> tuple[str, ...]:
        return tuple(f"{hub}.{tensor}" for hub in hubs)

    names = [
        TensorName(spell("gate.weight"), (*path, "router", "weight")),
        TensorName(spell("shared_expert_gate.weight"), (*path, "shared_expert_gate", "weight")),
    ]
    shared = (*path, "shared_expert")
    names += gated_mlp_names(spell("shared_expert"), shared, moe.shared_intermediate_size, bias=False)
    one_by_one = gated_expert_names(spell("experts"), (*path, "experts"), moe.experts)
    names += [replace(name, required=False) for name in one_by_one]
    for parameter in ("gate_up_proj", "down_proj"):
        names.append(TensorName(spell(f"experts.{parameter}"), (*path, "experts", parameter), required=False))
    return names


def _layer_kinds(hf: HfConfig, layers: int) -> tuple[str, ...]:
    """From `layer_types`, else every `full_attention_interval`th layer is attention."""
    if hf.has("layer_types"):
        return read_delta_layer_kinds(hf, layers)
    interval = hf.integer("full_attention_interval", default=4)
    return tuple("delta" if (i + 1) % interval else "attention" for i in range(layers))


def _moe_spec(hf: HfConfig, hidden: int, activation: str) -> MoeSpec:
    count, width = hf.integer("num_experts"), hf.integer("moe_intermediate_size")
    top_k = hf.integer("num_experts_per_tok", most=count)
    experts = ExpertsSpec(count, top_k, hidden, width, activation, gated=True)
    return MoeSpec(experts, hf.integer("shared_expert_intermediate_size"))
