"""Falcon-H1: Mamba2 and attention side by side on the same input, then a SwiGLU MLP, in every layer.

Source: Falcon-H1 (arXiv:2507.22448), whose maximal-update multipliers scale nearly every projection; numbers as in
transformers 5.24.
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.errors import ConfigError
from jhybrid.layers.attention import Attention, AttentionSpec, attention_names
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.linear import out_std
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, mamba2_names
from jhybrid.layers.mlp import Mlp, gated_mlp_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import LARGEST_FLOAT, HfConfig
from jhybrid.models.hf_mixers import read_attention, read_head_dim, read_mamba2
from jhybrid.models.hf_rope import read_rope
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class Multipliers:
    """Factors on activations. That on keys is part of the attention's scale, those on z, x, B, C, dt of the mixer."""

    embedding: float
    logits: float
    ssm_in: float
    ssm_out: float
    attention_in: float
    attention_out: float
    mlp_gate: float
    mlp_down: float


@dataclass(frozen=True)
class FalconH1Config:
    """What a Falcon-H1 is."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mamba: Mamba2Spec
    attention: AttentionSpec
    intermediate_size: int
    activation: str
    mlp_bias: bool
    multipliers: Multipliers
    norm_eps: float
    max_position_embeddings: int | None
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "FalconH1Config":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        hf.one_of("mamba_use_mlp", True, default=True)
        hidden, eps = hf.integer("hidden_size"), hf.number("rms_norm_eps", least=0.0)
        head_dim = read_head_dim(hf, hidden)
        scale = head_dim**-0.5 * hf.number("key_multiplier")
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=hf.integer("num_hidden_layers"),
            mamba=_mamba_spec(hf, hidden, eps),
            attention=read_attention(hf, hidden, scale=scale, rope=read_rope(hf, head_dim)),
            intermediate_size=hf.integer("intermediate_size"),
            activation=hf.activation("hidden_act"),
            mlp_bias=hf.flag("mlp_bias", default=False),
            multipliers=_multipliers(hf),
            norm_eps=eps,
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=False),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache: both a slot and pages."""
        return [self.mamba.parts(state_dtype, conv_dtype) + self.attention.parts(page_size, kv_dtype)] * self.num_layers


class Layer(nn.Module):
    """Norm, both mixers, residual; norm, MLP, residual."""

    config: FalconH1Config
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, by, std = self.config, self.config.multipliers, out_std(3 * self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="input_norm")(x)
        mamba = Mamba2(config.mamba, self.layer_id, self.dtype, std, name="mamba")
        attention = Attention(config.attention, self.layer_id, self.dtype, std, name="attention")
        recurrent, cache = mamba(h * by.ssm_in, cache, spans)
        attended, cache = attention(h * by.attention_in, cache, spans)
        x = x + (recurrent * by.ssm_out + attended * by.attention_out)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="feed_forward_norm")(x)
        mlp = Mlp(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            gated=True,
            dtype=self.dtype,
            bias=config.mlp_bias,
            out_std=std,
            gate_multiplier=by.mlp_gate,
            name="feed_forward",
        )
        return x + mlp(h) * by.mlp_down, cache


def decoder(config: FalconH1Config, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    by = config.multipliers
    return Decoder(Layer, config, dtype, embedding_multiplier=by.embedding, logits_multiplier=by.logits)


def weight_names(config: FalconH1Config) -> list[TensorName]:
    """Where each tensor of a checkpoint goes."""
    names = vocabulary_names(("model.embed_tokens.weight",), ("vocabulary",), tied=config.tie_word_embeddings)
    for i in range(config.num_layers):
        hub, path = f"model.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.input_layernorm.weight",), (*path, "input_norm", "weight")))
        names.append(TensorName((f"{hub}.pre_ff_layernorm.weight",), (*path, "feed_forward_norm", "weight")))
        names += mamba2_names((f"{hub}.mamba",), (*path, "mamba"), config.mamba)
        names += attention_names((f"{hub}.self_attn",), (*path, "attention"), config.attention)
        mlp = (*path, "feed_forward")
        names += gated_mlp_names((f"{hub}.feed_forward",), mlp, config.intermediate_size, bias=config.mlp_bias)
    names.append(TensorName(("model.final_layernorm.weight",), ("final_norm", "weight")))
    return names


def _mamba_spec(hf: HfConfig, hidden: int, eps: float) -> Mamba2Spec:
    inner = ("mamba_d_ssm", hf.integer("mamba_d_ssm")) if hf.has("mamba_d_ssm") else None
    spec = read_mamba2(hf, hidden, eps, inner)
    hf.one_of("projectors_bias", spec.proj_bias, default=False)  # `out_proj`'s; `mamba_proj_bias` is `in_proj`'s
    return replace(
        spec,
        norm_groups=spec.norm_groups if hf.flag("mamba_rms_norm") else None,
        norm_before_gate=hf.flag("mamba_norm_before_gate"),
        projected_multipliers=_factors(hf, "ssm_multipliers", 5),
    )


def _multipliers(hf: HfConfig) -> Multipliers:
    gate, down = _factors(hf, "mlp_multipliers", 2)
    return Multipliers(
        embedding=hf.number("embedding_multiplier"),
        logits=hf.number("lm_head_multiplier"),
        ssm_in=hf.number("ssm_in_multiplier"),
        ssm_out=hf.number("ssm_out_multiplier"),
        attention_in=hf.number("attention_in_multiplier"),
        attention_out=hf.number("attention_out_multiplier"),
        mlp_gate=gate,
        mlp_down=down,
    )


def _factors(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers; ones where it is absent."""
    factors = hf.items(key, default=[1.0] * count)
    if len(factors) != count or not all(isinstance(x, int | float) and abs(x) <= LARGEST_FLOAT for x in factors):
        raise ConfigError(key, f"must be {count} finite numbers, got {factors!r}")
    return tuple(float(x) for x in factors)
