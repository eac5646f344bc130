"""Mamba, Falcon-Mamba and Mamba2: norm, mixer, residual in every layer; no attention, no MLP, no limit to the context.

Sources: Gu and Dao 2023 (arXiv:2312.00752), Falcon Mamba (arXiv:2410.05355), Dao and Gu 2024 (arXiv:2405.21060);
numbers as in transformers 5.24. There the first two start a prompt's second part from zero state and keep the state
in the activations' type; here chunks give what the whole does, and the state is float32.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jhybrid.cache.router import AnyCache, Part
from jhybrid.layers.decoder import Decoder
from jhybrid.layers.linear import out_std
from jhybrid.layers.mamba1 import Mamba1, Mamba1Spec, mamba1_names
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, mamba2_names
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import HfConfig
from jhybrid.models.hf_mixers import check_inner_size, read_dt_rank
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans


@dataclass(frozen=True)
class PureConfig:
    """What a model of Mamba layers alone is."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mamba: Mamba1Spec | Mamba2Spec
    norm_eps: float
    residual_in_fp32: bool
    tie_word_embeddings: bool

    @property
    def max_position_embeddings(self) -> int | None:
        """None: nothing in the model depends on the position."""
        return None

    @classmethod
    def _read(cls, hf: HfConfig, mamba: Mamba1Spec | Mamba2Spec, *, tied: bool) -> "PureConfig":
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=mamba.hidden_size,
            num_layers=hf.integer("num_hidden_layers"),
            mamba=mamba,
            norm_eps=hf.number("layer_norm_epsilon", least=0.0),
            residual_in_fp32=hf.flag("residual_in_fp32"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", default=tied),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache; there are no pages."""
        del page_size, kv_dtype
        return [self.mamba.parts(state_dtype, conv_dtype)] * self.num_layers


class MambaConfig(PureConfig):
    """What a Mamba is."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> PureConfig:
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        return cls._read(hf, _mamba1_spec(hf), tied=True)


class FalconMambaConfig(PureConfig):
    """What a Falcon-Mamba is: dt, B and C are normalised, without weights."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> PureConfig:
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        spec = _mamba1_spec(hf, norm="unit", norm_eps=hf.number("mixer_rms_eps", default=1e-6, least=0.0))
        return cls._read(hf, spec, tied=True)


class Mamba2Config(PureConfig):
    """What a Mamba2 is."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> PureConfig:
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        return cls._read(hf, _mamba2_spec(hf), tied=False)


class Layer(nn.Module):
    """Norm, mixer, residual."""

    config: PureConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, spec, std = self.config, self.config.mamba, out_std(self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="norm")(x)
        if isinstance(spec, Mamba1Spec):
            h, cache = Mamba1(spec, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        else:
            h, cache = Mamba2(spec, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        return x + h, cache


def decoder(config: PureConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype, residual_in_fp32=config.residual_in_fp32)


def weight_names(config: PureConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes; older files say `embedding`, as the paper's code does."""
    embedding = ("backbone.embeddings.weight", "backbone.embedding.weight")
    names = vocabulary_names(embedding, ("vocabulary",), tied=config.tie_word_embeddings)
    for i in range(config.num_layers):
        hub, path = f"backbone.layers.{i}", (f"layers_{i}",)
        names.append(TensorName((f"{hub}.norm.weight",), (*path, "norm", "weight")))
        if isinstance(config.mamba, Mamba1Spec):
            names += mamba1_names((f"{hub}.mixer",), (*path, "mixer"), config.mamba)
        else:
            names += mamba2_names((f"{hub}.mixer",), (*path, "mixer"), config.mamba)
    names.append(TensorName(("backbone.norm_f.weight",), ("final_norm", "weight")))
    return names


def _mamba1_spec(hf: HfConfig, **norm: Any) -> Mamba1Spec:
    hidden = hf.integer("hidden_size")
    hf.one_of("hidden_act", "silu")
    return Mamba1Spec(
        hidden_size=hidden,
        # falcon-mamba-7b has an `expand` that is not true
        inner_size=hf.integer("intermediate_size" if hf.has("intermediate_size") else "expand")
        * (1 if hf.has("intermediate_size") else hidden),
        state_size=hf.integer("state_size"),
        dt_rank=read_dt_rank(hf, "time_step_rank", hidden),
        conv_kernel=hf.integer("conv_kernel", least=2),
        conv_bias=hf.flag("use_conv_bias"),
        proj_bias=hf.flag("use_bias"),
        dt_init=_dt_init(hf),
        **norm,
    )


def _mamba2_spec(hf: HfConfig) -> Mamba2Spec:
    hidden = hf.integer("hidden_size")
    groups, head_dim = hf.integer("n_groups"), hf.integer("head_dim")
    heads = hf.multiple("num_heads", of=("n_groups", groups))
    inner = hf.integer("expand") * hidden
    check_inner_size(("num_heads", heads), ("head_dim", head_dim), ("expand * hidden_size", inner))
    hf.one_of("hidden_act", "silu")
    return Mamba2Spec(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        state_size=hf.integer("state_size"),
        num_groups=groups,
        conv_kernel=hf.integer("conv_kernel", least=2),
        norm_groups=groups,
        norm_eps=hf.number("layer_norm_epsilon", least=0.0),
        conv_bias=hf.flag("use_conv_bias"),
        proj_bias=hf.flag("use_bias"),
        dt_limit=hf.dt_limit("time_step_limit"),
        dt_init=_dt_init(hf),
    )


def _dt_init(hf: HfConfig) -> tuple[float, float]:
    return hf.number("time_step_min", default=0.001), hf.number("time_step_max", default=0.1)
