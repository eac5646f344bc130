"""Nemotron-H: Mamba2, attention, MLP and mixture-of-experts layers, one mixer per layer, without positions.

Source: Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3 model cards; numbers as in transformers 5.24.
Where that differs from itself we follow the published meaning: the step size is clamped to `time_step_limit` in
prefill and decode alike (transformers clamps to `time_step_min` in passes of several tokens only).
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
from jhybrid.layers.linear import Linear, out_std
from jhybrid.layers.mamba2 import Mamba2, Mamba2Spec, mamba2_names
from jhybrid.layers.mlp import Mlp, mlp_names
from jhybrid.layers.moe import Experts, ExpertsSpec, SigmoidRouter
from jhybrid.layers.norm import RMSNorm
from jhybrid.layers.vocabulary import vocabulary_names
from jhybrid.models.hf_config import TEXT_SECTIONS, HfConfig
from jhybrid.weights.names import TensorName
from kernels_pallas.spans import Spans

PATTERN_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
PATTERN_LETTERS = {kind: letter for letter, kind in PATTERN_KINDS.items()}


@dataclass(frozen=True)
class MoeSpec:
    """The `E` layers: routed experts, perhaps in a narrower latent space, beside a shared one at full width."""

    experts: ExpertsSpec
    shared_intermediate_size: int
    latent_size: int | None
    num_groups: int
    top_groups: int
    normalise: bool
    scaling: float


@dataclass(frozen=True)
class NemotronHConfig:
    """What a Nemotron-H is. `moe` and `mamba`, `attention` describe all layers of that kind alike."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]  # "mamba" | "attention" | "mlp" | "moe"
    mamba: Mamba2Spec
    attention: AttentionSpec
    intermediate_size: int
    moe: MoeSpec | None
    activation: str
    mlp_bias: bool
    norm_eps: float
    residual_in_fp32: bool
    max_position_embeddings: int | None

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def tie_word_embeddings(self) -> bool:
        """Never: transformers ties nothing in this family, whatever its config says."""
        return False

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "NemotronHConfig":
        """Read a config.json. Raises ConfigError naming the key that is missing, unknown or contradictory."""
        hf = HfConfig(raw)
        for wrapper in TEXT_SECTIONS:  # of Nemotron 3 Omni, now and as published
            hf = hf.section(wrapper) if hf.has(wrapper) else hf
        kinds = _layer_kinds(hf)
        hidden, eps = hf.integer("hidden_size"), hf.number("layer_norm_epsilon", "rms_norm_eps", least=0.0)
        activation = hf.activation("mlp_hidden_act")
        hf.one_of("mamba_hidden_act", "silu", default="silu")
        hf.one_of("attention_bias", False, default=False)
        hf.one_of("tie_word_embeddings", False, default=False)
        hf.one_of("sliding_window", None)
        return cls(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden,
            layer_kinds=kinds,
            mamba=_mamba_spec(hf, hidden, eps),
            attention=_attention_spec(hf, hidden),
            intermediate_size=hf.integer("intermediate_size") if "mlp" in kinds else 0,
            moe=_moe_spec(hf, hidden, activation) if "moe" in kinds else None,
            activation=activation,
            mlp_bias=hf.flag("mlp_bias", default=False),
            norm_eps=eps,
            residual_in_fp32=hf.flag("residual_in_fp32", default=False),
            max_position_embeddings=hf.integer("max_position_embeddings"),
        )

    def layer_parts(
        self, *, page_size: int, kv_dtype: str, state_dtype: str, conv_dtype: str
    ) -> list[tuple[Part, ...]]:
        """What each layer keeps in the cache."""
        parts = {
            "mamba": self.mamba.parts(state_dtype, conv_dtype),
            "attention": self.attention.parts(page_size, kv_dtype),
        }
        return [parts.get(kind, ()) for kind in self.layer_kinds]

    def to_hf(self) -> dict[str, Any]:
        """The config.json of an export; `from_hf` gives this config back."""
        raw: dict[str, Any] = {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "hybrid_override_pattern": "".join(PATTERN_LETTERS[kind] for kind in self.layer_kinds),
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.intermediate_size,
            "mlp_hidden_act": self.activation,
            "mlp_bias": self.mlp_bias,
            "layer_norm_epsilon": self.norm_eps,
            "residual_in_fp32": self.residual_in_fp32,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_attention_heads": self.attention.num_heads,
            "num_key_value_heads": self.attention.num_kv_heads,
            "head_dim": self.attention.head_dim,
            "attention_bias": False,
            "mamba_num_heads": self.mamba.num_heads,
            "mamba_head_dim": self.mamba.head_dim,
            "ssm_state_size": self.mamba.state_size,
            "n_groups": self.mamba.num_groups,
            "conv_kernel": self.mamba.conv_kernel,
            "use_conv_bias": self.mamba.conv_bias,
            "use_bias": self.mamba.proj_bias,
            "mamba_hidden_act": "silu",
            "time_step_limit": [_json_float(x) for x in self.mamba.dt_limit],
            "time_step_min": self.mamba.dt_init[0],
            "time_step_max": self.mamba.dt_init[1],
        }
        return raw | (_moe_to_hf(self.moe) if self.moe is not None else {})


class MoeMixer(nn.Module):
    """Routed experts plus a shared one. The router and the shared expert see the full width."""

    spec: MoeSpec
    hidden_size: int
    bias: bool
    dtype: jnp.dtype
    out_std: float

    @nn.compact
    def __call__(self, x: Array, spans: Spans) -> Array:
        """x [T, M] -> [T, M]."""
        spec, experts = self.spec, self.spec.experts
        router = SigmoidRouter(
            experts.num_experts,
            experts.top_k,
            self.hidden_size,
            spec.num_groups,
            spec.top_groups,
            spec.normalise,
            spec.scaling,
            name="router",
        )
        chosen, weights = router(x)
        routed = x
        if spec.latent_size is not None:
            routed = Linear(spec.latent_size, self.hidden_size, self.dtype, self.bias, name="fc1_latent_proj")(x)
        routed = Experts(experts, self.dtype, self.out_std, name="experts")(routed, chosen, weights, spans)
        if spec.latent_size is not None:
            back = Linear(
                self.hidden_size, spec.latent_size, self.dtype, self.bias, self.out_std, name="fc2_latent_proj"
            )
            routed = back(routed)
        shared = Mlp(
            self.hidden_size,
            spec.shared_intermediate_size,
            experts.activation,
            gated=False,
            dtype=self.dtype,
            bias=self.bias,
            out_std=self.out_std,
            name="shared_experts",
        )
        return routed + shared(x)


class Layer(nn.Module):
    """Norm, one mixer, residual."""

    config: NemotronHConfig
    layer_id: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, cache: AnyCache, spans: Spans) -> tuple[Array, AnyCache]:
        """x [T, M] -> [T, M]."""
        config, std = self.config, out_std(self.config.num_layers)
        h = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, name="norm")(x)
        kind = config.layer_kinds[self.layer_id]
        if kind == "mamba":
            h, cache = Mamba2(config.mamba, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        elif kind == "attention":
            h, cache = Attention(config.attention, self.layer_id, self.dtype, std, name="mixer")(h, cache, spans)
        elif kind == "moe":
            assert config.moe is not None
            h = MoeMixer(config.moe, config.hidden_size, config.mlp_bias, self.dtype, std, name="mixer")(h, spans)
        else:
            sizes = (config.hidden_size, config.intermediate_size, config.activation)
            h = Mlp(*sizes, gated=False, dtype=self.dtype, bias=config.mlp_bias, out_std=std, name="mixer")(h)
        return x + h, cache


def decoder(config: NemotronHConfig, dtype: jnp.dtype) -> Decoder:
    """The model: token ids to hidden states and scores."""
    return Decoder(Layer, config, dtype, residual_in_fp32=config.residual_in_fp32)


def weight_names(config: NemotronHConfig) -> list[TensorName]:
    """Where each tensor of a checkpoint goes: `backbone.` on the hub, `model.` in memory of transformers 5; beside
    towers for images and sound all have `language_model.` before that.
    """
    embedding = ("backbone.embeddings.weight", "model.embeddings.weight")
    names = vocabulary_names(embedding, ("vocabulary",), tied=config.tie_word_embeddings)
    for i, kind in enumerate(config.layer_kinds):
        hubs = (f"backbone.layers.{i}", f"model.layers.{i}")
        path = (f"layers_{i}",)
        mixer_hubs, mixer_path = tuple(f"{hub}.mixer" for hub in hubs), (*path, "mixer")
        names.append(TensorName(tuple(f"{hub}.norm.weight" for hub in hubs), (*path, "norm", "weight")))
        if kind == "mamba":
            names += mamba2_names(mixer_hubs, mixer_path, config.mamba)
        elif kind == "attention":
            names += attention_names(mixer_hubs, mixer_path, config.attention)
        elif kind == "moe":
            assert config.moe is not None
            names += _moe_names(mixer_hubs, mixer_path, config.moe, config.mlp_bias)
        else:
            names += mlp_names(mixer_hubs, mixer_path, bias=config.mlp_bias)
    names.append(TensorName(("backbone.norm_f.weight", "model.norm_f.weight"), ("final_norm", "weight")))
    return [replace(n, names=(*n.names, *(f"language_model.{name}" for name in n.names))) for n in names]


def _moe_names(hubs: tuple[str, ...], path: tuple[str, ...], spec: MoeSpec, bias: bool) -> list[TensorName]:
    def name(tensor: str, *at: str, index: int | None = None) -> TensorName:
        return TensorName(tuple(f"{hub}.{tensor}" for hub in hubs), (*path, *at), index)

    names = [
        name("gate.weight", "router", "weight"),
        name("gate.e_score_correction_bias", "router", "correction_bias"),
    ]
    for e in range(spec.experts.num_experts):
        names += [name(f"experts.{e}.{p}.weight", "experts", p, index=e) for p in ("up_proj", "down_proj")]
    shared = tuple(f"{hub}.shared_experts" for hub in hubs)
    names += mlp_names(shared, (*path, "shared_experts"), bias=bias)
    if spec.latent_size is not None:
        for proj in ("fc1_latent_proj", "fc2_latent_proj"):
            names += [name(f"{proj}.{kind}", proj, kind) for kind in (("weight", "bias") if bias else ("weight",))]
    return names


def _layer_kinds(hf: HfConfig) -> tuple[str, ...]:
    """From `layers_block_type` (or `layer_types`), else from the letters of `hybrid_override_pattern`."""
    allowed = tuple(PATTERN_KINDS.values())
    if hf.has("layers_block_type") or hf.has("layer_types"):
        kinds = hf.layer_kinds("layers_block_type", "layer_types", allowed=allowed)
    else:
        pattern = hf.text("hybrid_override_pattern", "layers_block_type", "layer_types")
        for i, letter in enumerate(pattern):
            if letter not in PATTERN_KINDS:
                known = ", ".join(f"{k} ({v})" for k, v in PATTERN_KINDS.items())
                raise ConfigError(
                    "hybrid_override_pattern", f"letter {letter!r} at position {i} is no known layer; known: {known}"
                )
        kinds = tuple(PATTERN_KINDS[letter] for letter in pattern)
    if not kinds:
        raise ConfigError("hybrid_override_pattern", "names no layer")
    if hf.has("num_hidden_layers") and hf.integer("num_hidden_layers") != len(kinds):
        raise ConfigError(
            "num_hidden_layers", f"{hf.raw['num_hidden_layers']}, but the pattern has {len(kinds)} layers"
        )
    return kinds


def _mamba_spec(hf: HfConfig, hidden: int, eps: float) -> Mamba2Spec:
    groups = hf.integer("n_groups", "mamba_n_groups")
    return Mamba2Spec(
        hidden_size=hidden,
        num_heads=hf.multiple("mamba_num_heads", of=("n_groups", groups)),
        head_dim=hf.integer("mamba_head_dim"),
        state_size=hf.integer("ssm_state_size"),
        num_groups=groups,
        conv_kernel=hf.integer("conv_kernel", "mamba_d_conv", least=2),
        norm_groups=groups,
        norm_eps=eps,
        conv_bias=hf.flag("use_conv_bias", "mamba_conv_bias"),
        proj_bias=hf.flag("use_bias", default=False),
        dt_limit=hf.dt_limit("time_step_limit", "mamba_dt_limit"),
        dt_init=(
            hf.number("time_step_min", "mamba_dt_min", default=0.001),
            hf.number("time_step_max", "mamba_dt_max", default=0.1),
        ),
    )


def _attention_spec(hf: HfConfig, hidden: int) -> AttentionSpec:
    head_dim, kv_heads = hf.integer("head_dim", "attention_head_dim"), hf.integer("num_key_value_heads")
    heads = hf.multiple("num_attention_heads", of=("num_key_value_heads", kv_heads))
    return AttentionSpec(hidden, heads, kv_heads, head_dim, scale=head_dim**-0.5)


def _moe_spec(hf: HfConfig, hidden: int, activation: str) -> MoeSpec:
    latent = hf.integer("moe_latent_size") if hf.has("moe_latent_size") else None
    groups = hf.integer("n_group")
    num_experts = hf.multiple("n_routed_experts", "num_local_experts", of=("n_group", groups))
    experts = ExpertsSpec(
        num_experts=num_experts,
        top_k=hf.integer("num_experts_per_tok", most=num_experts),
        input_size=latent or hidden,
        intermediate_size=hf.integer("moe_intermediate_size"),
        activation=activation,
        gated=False,
    )
    if num_experts // groups < 2:
        raise ConfigError("n_group", f"{groups} groups of {num_experts} experts: a group needs two to be ranked")
    top_groups = hf.integer("topk_group", most=groups)
    if experts.top_k > top_groups * (num_experts // groups):
        raise ConfigError("num_experts_per_tok", f"{experts.top_k} is more than topk_group={top_groups} groups hold")
    hf.one_of("n_shared_experts", 1, default=1)
    return MoeSpec(
        experts=experts,
        shared_intermediate_size=hf.integer("moe_shared_expert_intermediate_size"),
        latent_size=latent,
        num_groups=groups,
        top_groups=top_groups,
        normalise=hf.flag("norm_topk_prob"),
        scaling=hf.number("routed_scaling_factor"),
    )


def _moe_to_hf(moe: MoeSpec) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.experts.num_experts,
        "num_experts_per_tok": moe.experts.top_k,
        "moe_intermediate_size": moe.experts.intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_intermediate_size,
        "moe_latent_size": moe.latent_size,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.scaling,
    }


def _json_float(x: float) -> float | dict[str, str]:
    return {"__float__": "Infinity"} if x == float("inf") else x
