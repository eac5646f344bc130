"""The families of models: from an architecture's name to its config reader, module and weight names."""

from pathlib import Path
from typing import Any

from jhybrid.errors import ConfigError
from jhybrid.models import (
    bamba,
    falcon_h1,
    granite_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    lfm3,
    llama,
    mamba,
    nemotron_h,
    olmo_hybrid,
    qwen3_moe,
    qwen3_next,
    zamba2,
)
from jhybrid.models.family import Family, ModelConfig, abstract_params, init_params, layouts_of, quantisable_params
from jhybrid.models.hf_config import HfConfig, load_json

_ALL = (
    Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        nemotron_h.NemotronHConfig,
        nemotron_h.decoder,
        nemotron_h.weight_names,
        also=("NemotronH_Omni_Reasoning_V3", "nemotron_h_omni"),
    ),
    Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        granite_hybrid.GraniteHybridConfig,
        granite_hybrid.decoder,
        granite_hybrid.weight_names,
    ),
    Family("BambaForCausalLM", "bamba", bamba.BambaConfig, bamba.decoder, bamba.weight_names),
    Family("JambaForCausalLM", "jamba", jamba.JambaConfig, jamba.decoder, jamba.weight_names),
    Family("MambaForCausalLM", "mamba", mamba.MambaConfig, mamba.decoder, mamba.weight_names),
    Family("FalconMambaForCausalLM", "falcon_mamba", mamba.FalconMambaConfig, mamba.decoder, mamba.weight_names),
    Family("Mamba2ForCausalLM", "mamba2", mamba.Mamba2Config, mamba.decoder, mamba.weight_names),
    Family("Lfm2ForCausalLM", "lfm2", lfm2.Lfm2Config, lfm2.decoder, lfm2.weight_names),
    Family("Lfm2MoeForCausalLM", "lfm2_moe", lfm2.Lfm2MoeConfig, lfm2.decoder, lfm2.weight_names),
    Family(
        "Lfm3ForCausalLM",
        "lfm3",
        lfm3.Lfm3Config,
        lfm3.decoder,
        lfm3.weight_names,
        also=("Lfm3VlForConditionalGeneration", "lfm3_vl"),
    ),
    Family("FalconH1ForCausalLM", "falcon_h1", falcon_h1.FalconH1Config, falcon_h1.decoder, falcon_h1.weight_names),
    Family(
        "Qwen3NextForCausalLM", "qwen3_next", qwen3_next.Qwen3NextConfig, qwen3_next.decoder, qwen3_next.weight_names
    ),
    Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        qwen3_next.Qwen35Config,
        qwen3_next.decoder,
        qwen3_next.weight_names,
        also=("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    ),
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        qwen3_next.Qwen35MoeConfig,
        qwen3_next.decoder,
        qwen3_next.weight_names,
        also=("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ),
    Family(
        "KimiLinearForCausalLM",
        "kimi_linear",
        kimi_linear.KimiLinearConfig,
        kimi_linear.decoder,
        kimi_linear.weight_names,
    ),
    Family(
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        kimi_linear.LingHybridConfig,
        kimi_linear.decoder,
        kimi_linear.ling_weight_names,
        left_alone=kimi_linear.ling_left_alone,
    ),
    Family(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        olmo_hybrid.OlmoHybridConfig,
        olmo_hybrid.decoder,
        olmo_hybrid.weight_names,
    ),
    Family("Zamba2ForCausalLM", "zamba2", zamba2.Zamba2Config, zamba2.decoder, zamba2.weight_names),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe.Qwen3MoeConfig, qwen3_moe.decoder, qwen3_moe.weight_names),
    Family("Qwen3ForCausalLM", "qwen3", llama.Qwen3Config, llama.decoder, llama.weight_names),
    Family("LlamaForCausalLM", "llama", llama.LlamaConfig, llama.decoder, llama.weight_names),
)

FAMILIES: dict[str, Family] = {name: f for f in _ALL for name in (f.architecture, f.model_type, *f.also)}
"""By architecture name ("NemotronHForCausalLM") and by model_type ("nemotron_h")."""


def family_of(raw: dict[str, Any]) -> Family:
    """The family that a config.json names. Raises ConfigError when it names none, or one that is not here."""
    hf = HfConfig(raw)
    known = ", ".join(name for f in _ALL for name in (f.model_type, *f.also) if name.islower())
    if not hf.has("model_type"):
        raise ConfigError("model_type", f"config.json lacks this key; supported: {known}")
    model_type = hf.text("model_type")
    if model_type not in FAMILIES:
        raise ConfigError("model_type", f"{model_type!r} is not implemented; supported: {known}")
    family = FAMILIES[model_type]
    for name in hf.items("architectures", default=[]):
        if not isinstance(name, str):
            raise ConfigError("architectures", f"must be a list of names, got {name!r} in it")
        if FAMILIES.get(name) is not family:
            here = ", ".join(own for own, of in FAMILIES.items() if of is family and not own.islower())
            raise ConfigError("architectures", f"{name!r} is not implemented; supported here: {here}")
    return family


def family_for(config: ModelConfig) -> Family:
    """The family whose config this is."""
    return next(f for f in _ALL if type(config) is f.config)


def read_config(directory: str | Path) -> ModelConfig:
    """The config of the model in a Hugging Face directory.

    Raises ConfigError naming the culprit: an unknown model_type or layer kind, a missing key, a value of the wrong
    type or one that is not implemented. No weight is looked at.
    """
    raw = load_json(Path(directory) / "config.json")
    return family_of(raw).config.from_hf(raw)


__all__ = [
    "FAMILIES",
    "Family",
    "ModelConfig",
    "abstract_params",
    "family_for",
    "family_of",
    "init_params",
    "layouts_of",
    "quantisable_params",
    "read_config",
]
