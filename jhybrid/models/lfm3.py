"""LFM3: short convolutions, attention to the last few tokens, or attention to all, then a SwiGLU MLP, in every layer.

Source: transformers 5.24 (`lfm3`; the text model of `lfm3_vl`).
"""

from dataclasses import dataclass, replace
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
from jhybrid.layers.short_conv import ShortConv, ShortConvSpec, short_conv_names
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import read_attention
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

LAYER_TYPES = {"attention": "full_attention", "sliding": "sliding_attention"}  # as sections of `rope_parameters`
ROOTS = ("model", "model.language_model")  # the latter beside a vision tower


@dataclass(frozen=True)
class Lfm3Config:
    """What an LFM3 is."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "conv" | "attention" | "sliding"
    conv: ShortConvSpec
    attention: AttentionSpec | None  # None: no layer has it
    sliding: AttentionSpec | None
    intermediate_size: int
    sandwich_norm: bool  # a norm behind each branch too
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Lfm3Config":
        """Read a config.json, of the text model or with it under `text_config`.

        Raises ConfigError naming the key that is missing, unknown or contradictory.
        """
        whole = HfConfig(raw)
        hf = whole.section("text_config") if whole.has("text_config") else whole
        hidden, layers = hf.integer("hidden_size"), hf.integer("num_hidden_layers")
        kinds = hf.layer_kinds("layer_types", allowed=("conv", "attention", "sliding"), layers=layers)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=kinds,
            conv=ShortConvSpec(hidden, hf.integer("conv_L_cache", least=2), hf.flag("conv_bias")),
            attention=_attention_spec(hf, hidden, "attention") if "attention" in kinds else None,
            sliding=_attention_spec(hf, hidden, "sliding") if "sliding" in kinds else None,
            intermediate_size=hf.integer("intermediate_size"),
            sandwich_norm=hf.flag("use_sandwich_norm"),
            norm_eps=hf.number("norm_eps", least=0.0),
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=(whole if whole.has("tie_word_embeddings") else hf).flag(
                "tie_word_embeddings", default=True
            ),
        )

    def mixer(self, layer_id: int) -> ShortConvSpec | AttentionSpec:
        """Of one layer."""
        spec = {"conv": self.conv, "attention": self.attention, "sliding": self.sliding}[self.layer_kinds[layer_id]]
        assert spec is not None, layer_id
        return spec

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache. Sliding attention keeps all positions: pages are shared by all layers."""
        del state_dtype
        mixers = (self.mixer(i) for i in range(self.num_layers))
        return [m.parts(conv_dtype) if isinstance(m, ShortConvSpec) else m.parts(page_size, kv_dtype) for m in mixers]


class Layer(nn.Module):
    """Norm, mixer, norm, residual; norm, MLP, norm, residual."""

    config: Lfm3Config
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std, mixer = self.config, out_std(2 * self.config.num_layers), self.config.mixer(self.layer_id)
        h = self._norm("operator_norm")(x)
        if isinstance(mixer, ShortConvSpec):
            h, cache = ShortConv(mixer, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = Attention(mixer, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        x = x + (self._norm("post_operator_norm")(h) if config.sandwich_norm else h)
        h = self._norm("feed_forward_norm")(x)
        sizes = (config.hidden_size, config.intermediate_size, "silu")
        h = Mlp(*sizes, gated=True, dtype=self.dtype, out_std=std, name="feed_forward")(h)
        return x + (self._norm("post_feed_forward_norm")(h) if config.sandwich_norm else h), cache

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.norm_eps, self.dtype, name=name)


def decoder(config: Lfm3Config, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype)


def weight_names(config: Lfm3Config) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    embedding = tuple(f"{root}.embed_tokens.weight" for root in ROOTS)
    names = vocabulary_names(embedding, ("vocabulary",), tied=config.tie_word_embeddings)
    norms = {"operator_norm": "operator_norm", "ffn_norm": "feed_forward_norm"}
    if config.sandwich_norm:
        norms |= {"post_operator_norm": "post_operator_norm", "post_ffn_norm": "post_feed_forward_norm"}
    for i in range(config.num_layers):
        mixer, path = config.mixer(i), (f"layers_{i}",)

        def spell(tensor: str, layer: int = i) -> tuple[str, ...]:
            return tuple(f"{root}.layers.{layer}.{tensor}" for root in ROOTS)

        names += [TensorName(spell(f"{tensor}.weight"), (*path, norm, "weight")) for tensor, norm in norms.items()]
        if isinstance(mixer, ShortConvSpec):
            names += short_conv_names(spell("conv"), (*path, "mixer"), mixer)
        else:
            names += attention_names(spell("self_attn"), (*path, "mixer"), mixer)
        feed_forward = spell("feed_forward"), (*path, "feed_forward"), config.intermediate_size
        names += gated_mlp_names(*feed_forward, bias=False, spelled=("w1", "w3", "w2"))
    final = tuple(f"{root}.embedding_norm.weight" for root in ROOTS)
    return [*names, TensorName(final, ("final_norm", "weight"))]


def _attention_spec(hf: HfConfig, hidden: int, kind: str) -> AttentionSpec:
    head_dim = hf.integer("head_dim")
    rope = read_rope(hf, head_dim, layer_type=LAYER_TYPES[kind], layer_types=tuple(LAYER_TYPES.values()))
    eps = hf.number("norm_eps", least=0.0)
    spec = read_attention(hf, hidden, scale=head_dim**-0.5, rope=rope, qk_norm_eps=eps)
    window = hf.integer("sliding_window") if kind == "sliding" else None
    return replace(spec, head_gated=hf.flag("use_attention_gate"), sliding_window=window)
