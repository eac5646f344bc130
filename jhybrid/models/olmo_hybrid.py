"""OLMo Hybrid: Gated DeltaNet or attention, then an MLP, in every layer.

Source: the model cards of Ai2; numbers as in transformers 5.24 (`olmo_hybrid`). Recurrent layers normalise what enters
a branch, attention layers what leaves it (as OLMo 2, arXiv:2501.00656, section 3.2).
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.attention import Attention, AttentionSpec, attention_names
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.gated_delta import GatedDelta, GatedDeltaSpec, gated_delta_names
from jhybrid.layers.linear import out_std
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention, read_delta_layer_kinds, read_gated_delta, read_head_dim
from jhybrid.models.hf_rope import has_positions, read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

DELTA_NORM_EPS = 1e-5  # whatever rms_norm_eps says
PROJECTIONS = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "g_proj": ("gate",),
    "b_proj": ("beta",),
    "a_proj": ("decay",),
}
CONVOLUTIONS = {"q_conv1d": ("q",), "k_conv1d": ("k",), "v_conv1d": ("v",)}
RENAMED = {"norm": "o_norm", "out_proj": "o_proj"}
# Of each kind of layer: our norm, and its spellings on the hub and in transformers' files, which differ both ways.
NORMS = {
    "delta": {
        "input_norm": ("attention_layer_norm", "input_layernorm"),
        "feed_forward_norm": ("feedforward_layer_norm", "post_attention_layernorm"),
    },
    "attention": {
        "mixer_out_norm": ("feedforward_layer_norm", "post_attention_layernorm"),
        "feed_forward_out_norm": ("post_feedforward_layernorm",),
    },
}


@dataclass(frozen=True)
class OlmoHybridConfig:
    """What an OLMo Hybrid is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "delta" | "attention"
    delta: GatedDeltaSpec
    attention: AttentionSpec
    intermediate_size: int
    activation: str
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "OlmoHybridConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        delta = read_gated_delta(hf, hidden, DELTA_NORM_EPS)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=read_delta_layer_kinds(hf, hf.integer("num_hidden_layers")),
            delta=replace(delta, beta_scale=2.0 if hf.flag("linear_allow_neg_eigval", default=True) else 1.0),
            attention=_attention_spec(hf, hidden, eps),
            intermediate_size=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act"),
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
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


class Layer(nn.Module):
    """Mixer, residual, MLP, residual; norms before each branch in recurrent layers, after it in attention layers."""

    config: OlmoHybridConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(2 * self.config.num_layers)
        sizes = (config.hidden_size, config.intermediate_size, config.activation)
        mlp = Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="feed_forward")
        norm = {
            name: RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name=name)
            for name in NORMS[config.layer_kinds[self.layer_id]]
        }
        if config.layer_kinds[self.layer_id] == "delta":
            mixer = GatedDelta(config.delta, self.layer_id, self.dtype, std, name="mixer")
            h, cache = mixer(norm["input_norm"](x), cache, spans)
            x = x + h
            return x + mlp(norm["feed_forward_norm"](x)), cache
        h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(x, cache, spans)
        x = x + norm["mixer_out_norm"](h)
        return x + norm["feed_forward_out_norm"](mlp(x)), cache


def decoder(config: OlmoHybridConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: OlmoHybridConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        for norm, spelled in NORMS[kind].items():
            names.append(TensorName(tuple(f"{hub}.{s}.weight" for s in spelled), (*path, norm, "weight")))
        mixer = (*path, "mixer")
        if kind == "delta":
            tensors = {"projections": PROJECTIONS, "convolutions": CONVOLUTIONS, "renamed": RENAMED}
            names += gated_delta_names((f"{hub}.linear_attn",), mixer, config.delta, **tensors)
        else:
            names += attention_names((f"{hub}.self_attn",), mixer, config.attention)
        mlp = (*path, "feed_forward")
        names += gated_mlp_names((f"{hub}.mlp",), mlp, config.intermediate_size, bias=False)
    return [*names, TensorName(("model.norm.weight",), ("final_norm", "weight"))]


def _attention_spec(hf: HfConfig, hidden: int, eps: float) -> AttentionSpec:
    """Without positions where the config gives no `rope_theta`, as in the published models.

    transformers 5.24 makes a theta of 10000 of `rope_parameters` that are null or absent, against its own comment.
    """
    head_dim = read_head_dim(hf, hidden)
    rope = read_rope(hf, head_dim) if has_positions(hf) else None
    spec = read_attention(hf, hidden, scale=head_dim**-0.5, rope=rope, qk_norm_eps=eps)
    return replace(spec, qk_norm_whole=True)
