"""Golden numbers from Hugging Face transformers: one tiny random checkpoint and one goldens.npz per model.

Run in an environment of its own (`pip install torch==2.13.0 transformers==5.24.0 safetensors`), see README.md:

    python tests/golden/make_goldens.py            # every model
    python tests/golden/make_goldens.py llama      # some of them

The output depends on nothing but this file and those versions. Every golden is checked before it is written:
the reference must agree with itself (full pass, cached decode, chunks), the first token must still matter at the
end, no greedy choice and no expert choice may be near a tie.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent
PROMPT_LENGTH = 97
DECODE_STEPS = 16
CHUNKS = (31, 47, 19)  # odd, none a multiple of a kernel's chunk
BATCH_LENGTHS = (1, 2, 3, 7, 41)  # below, at and above the convolution's taps
TIME_STEP_LIMIT = (0.2, 0.35)  # binds on both sides: the softplus lies mostly in 0.1 to 0.5
SELF_TOLERANCE = 3e-5
MOST_ROUNDING = 3e-4  # no seed cures a larger disagreement
ROUTING_MARGIN = 1e-4
GREEDY_GAP = 0.01

NEMOTRON_H = {
    "model_type": "nemotron_h",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 32,
    "max_position_embeddings": 512,
}
NEMOTRON_H_MOE = {
    **NEMOTRON_H,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LFM2 = {
    "model_type": "lfm2",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
LFM3 = {
    "model_type": "lfm3",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "sliding_window": 13,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    "max_position_embeddings": 512,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.2,
    "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
    "mlp_multipliers": [0.8, 1.1],
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 512,
}
QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 40,
}
ZAMBA2 = {
    "model_type": "zamba2",
    "vocab_size": 263,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    "num_mem_blocks": 2,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "n_mamba_heads": 6,
    "chunk_size": 32,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "adapter_rank": 5,
    "max_position_embeddings": 512,
}
MAMBA1 = {"vocab_size": 263, "hidden_size": 48, "num_hidden_layers": 5, "state_size": 8, "time_step_rank": 5}
MODELS: dict[str, dict] = {
    "nemotron_h_moe": {**NEMOTRON_H_MOE, "hybrid_override_pattern": "ME*M-MEM"},
    "nemotron_h_latent": {**NEMOTRON_H_MOE, "hybrid_override_pattern": "EM*ME", "moe_latent_size": 32},
    "nemotron_h_dense": {**NEMOTRON_H, "hybrid_override_pattern": "-M*MM-*M"},
    "granite_dense": {**GRANITE, "num_hidden_layers": 6, "layer_types": list("mmammm"), "tie_word_embeddings": True},
    "granite_moe": {
        **GRANITE,
        "num_hidden_layers": 5,
        "layer_types": list("mammm"),
        "intermediate_size": 16,
        "shared_intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "granite_rope": {
        **GRANITE,
        "num_hidden_layers": 5,
        "layer_types": list("amamm"),
        "position_embedding_type": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "attention_bias": True,
    },
    "bamba": {
        "model_type": "bamba",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 6,
        "attn_layer_indices": [1, 4],
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 72,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "max_position_embeddings": 512,
    },
    "lfm2": {
        **LFM2,
        "num_hidden_layers": 6,
        "layer_types": list("ccacca"),
        "intermediate_size": 130,
        "block_multiple_of": 16,
    },
    "lfm2_moe": {
        **LFM2,
        "model_type": "lfm2_moe",
        "num_hidden_layers": 5,
        "layer_types": list("cacca"),
        "intermediate_size": 72,
        "num_dense_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "conv_L_cache": 4,
        "conv_bias": True,
        "tie_word_embeddings": False,
    },
    "lfm3": {
        **LFM3,
        "num_hidden_layers": 6,
        "layer_types": list("csacsa"),
        "norm_eps": 3e-5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.75},
        },
    },
    "lfm3_plain": {
        **LFM3,
        "num_hidden_layers": 5,
        "layer_types": list("scasc"),
        "conv_L_cache": 5,
        "conv_bias": True,
        "attention_bias": True,
        "use_attention_gate": False,
        "use_sandwich_norm": False,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
    "falcon_h1": FALCON_H1,
    "falcon_h1_norm": {
        **FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **QWEN3_NEXT,
        **QWEN_MOE,
        "num_hidden_layers": 5,
        "layer_types": list("mmamm"),
        "intermediate_size": 80,
        "mlp_only_layers": [1],
    },
    "qwen3_5": {
        **QWEN3_NEXT,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 5,
        "layer_types": list("mamma"),
        "intermediate_size": 80,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        **QWEN3_NEXT,
        **QWEN_MOE,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 3,
        "layer_types": list("mam"),
        "linear_num_value_heads": 3,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "layer_types": list("mamm"),
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "linear_num_heads": 3,
        "linear_head_dim": 16,
        "intermediate_size": 80,
        "moe_intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "layer_group_size": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "rope_theta": 30000.0,
        "kda_lower_bound": -3.0,
        "intermediate_size": 80,
        "moe_intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "max_position_embeddings": 512,
        "rms_norm_eps": 3e-6,
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "jamba": {
        "model_type": "jamba",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 5,
        "max_position_embeddings": 512,
    },
    "mamba": {**MAMBA1, "model_type": "mamba", "use_bias": True},
    "falcon_mamba": {**MAMBA1, "model_type": "falcon_mamba", "tie_word_embeddings": False},
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "layer_types": list("mamam"),
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 72,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 10,  # save_pretrained splits the convolution into three equal parts
        "rope_parameters": {"rope_type": "default", "rope_theta": 40000.0},
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "zamba2": ZAMBA2,
    "zamba2_rope": {
        **ZAMBA2,
        "num_hidden_layers": 4,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "add_bias_linear": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 6,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 32,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 104,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "max_position_embeddings": 512,
    },
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 104,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 263,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 104,
        "moe_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
}
CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")  # sway the choice of experts, not their weights
CENTRED_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")  # whose factor is 1 + weight
LAYER_LETTERS = {"m": "linear_attention", "a": "full_attention", "s": "sliding_attention", "c": "conv"}


class UnfitSeedError(Exception):
    """A seed whose numbers are too near a tie, too forgetful or too dull to be goldens; the next seed is tried."""


def build(spec: dict, seed: int) -> PreTrainedModel:
    """A float32 model on the plain torch path with every parameter and buffer drawn from `seed`."""
    spec = dict(spec)
    if "layer_types" in spec:
        spec["layer_types"] = [LAYER_LETTERS[letter] for letter in spec["layer_types"]]
    config = CONFIG_MAPPING[spec.pop("model_type")](
        **spec, attn_implementation="eager", experts_implementation="eager", dtype="float32"
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        named = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith(CHOICE_BIASES)}
        for name in sorted(named):
            named[name].copy_(draw(name, named[name].shape, generator))
        for module in model.modules():
            if type(module).__name__ in CENTRED_NORMS:
                module.weight.sub_(1.0)
        slow_down(model)
        limit_time_steps(model, getattr(model.config, "time_step_limit", (0.0, math.inf)))
        probe = torch.randint(3, config.vocab_size, (1, PROMPT_LENGTH), generator=generator)
        last, scale = final_norm(model), 1.0 / model(probe, use_cache=False).logits.std()
        offset = 1.0 if type(last).__name__ in CENTRED_NORMS else 0.0
        last.weight.copy_((last.weight + offset) * scale - offset)
    return model


def draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random values for one parameter, scaled so that activations keep unit scale and nothing is at its default."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    leaf = name.rsplit(".", 1)[-1]
    if name.endswith("forget_gate.A_log"):  # bailing_hybrid: decays are exp(lower bound * sigmoid(A (x + bias)))
        return uniform(1.0, 1.5).log()
    if name.endswith("forget_gate.dt_bias"):
        return uniform(-8.0, -5.5)
    if leaf == "A_log":
        return uniform(0.004, 0.02).log()
    if leaf == "dt_bias" or name.endswith("dt_proj.bias"):
        return uniform(-2.0, -0.5)
    if leaf == "D":
        return uniform(-0.5, 1.5)
    if leaf in CHOICE_BIASES:
        return uniform(-0.2, 0.2)
    if "norm" in name and len(shape) == 1:
        return uniform(0.5, 1.5)
    normal = torch.randn(shape, generator=generator)
    if leaf == "bias":
        return 0.2 * normal
    if "embed" in name:
        return 0.25 * normal  # small, or a tied head would only repeat the last token
    if "conv1d" in name:
        return 0.5 * normal
    if name.endswith(".linear.weight"):  # zamba2: a norm without residual behind averages amplifies rounding
        return normal * 0.05 / math.sqrt(shape[-1])
    return normal * 1.3 / math.sqrt(shape[-1])


def slow_down(model: PreTrainedModel) -> None:
    """Keep the input-dependent part of dt small, and give the last head or channels of each layer a faster decay."""
    for module in model.modules():
        if hasattr(module, "x_proj"):  # Mamba1
            module.dt_proj.weight.mul_(0.4)
            if not hasattr(module, "b_layernorm"):
                module.x_proj.weight.mul_(0.5)  # B and C: else what the state sums up dwarfs everything
            module.A_log[-16:] = math.log(0.3)
        elif hasattr(module, "A_log"):
            projection, rows = step_sizes(module)
            projection.weight[rows] *= 0.4
            module.A_log.view(-1)[-1] = math.log(0.3)


def step_sizes(mixer: torch.nn.Module) -> tuple[torch.nn.Linear, slice | torch.Tensor]:
    """The projection that a mixer's dt comes from, before bias and softplus, and dt's rows in it."""
    if hasattr(mixer, "in_proj_ba"):  # [b, a] of each key head in turn
        rows = torch.arange(2 * mixer.num_v_heads).view(mixer.num_k_heads, 2, -1)[:, 1].flatten()
        return mixer.in_proj_ba, rows
    for name in ("in_proj_a", "a_proj", "f_b_proj", "f_proj"):
        if hasattr(mixer, name):
            return getattr(mixer, name), slice(None)
    return mixer.in_proj, slice(-mixer.num_heads, None)


def limit_time_steps(model: PreTrainedModel, limit: tuple[float, float] | None) -> None:
    """Clamp dt to `limit` in every Mamba2 layer. nemotron_h and zamba2 clamp to time_step_min instead, which their own
    decode does not do; the published meaning is time_step_limit."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limit)


def final_norm(model: PreTrainedModel) -> torch.nn.Module:
    """The norm before the head, whatever the family calls it."""
    body = model.base_model
    return next(getattr(body, n) for n in ("norm", "norm_f", "final_layernorm", "embedding_norm") if hasattr(body, n))


def watch_routing(model: PreTrainedModel, margins: list[float]) -> None:
    """Append the distance of every expert (and expert-group) choice from a tie to `margins`; pass over a seed at once
    where one is so near that rounding may flip it."""

    def gap(scores: torch.Tensor, k: int) -> None:
        if k < scores.shape[-1]:
            top = scores.topk(k + 1, dim=-1).values
            margins.append(float((top[:, k - 1] - top[:, k]).min()))
            if margins[-1] < ROUTING_MARGIN:
                raise UnfitSeedError(f"expert choice near a tie: {margins[-1]:.1e}")

    def hook(module: torch.nn.Module, args: tuple, output: tuple) -> None:
        logits = output[0].float()
        if len(args) == 2:  # lfm2_moe hands its gate the bias
            return gap(logits.sigmoid() + args[1], module.top_k)
        if not hasattr(module, "e_score_correction_bias"):
            return gap(logits, module.top_k)
        scores = logits.sigmoid() + module.e_score_correction_bias
        groups = scores.view(len(scores), module.num_group, -1)
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        gap(group_scores, module.topk_group)
        chosen = torch.zeros_like(group_scores).scatter_(1, group_scores.topk(module.topk_group).indices, 1).bool()
        gap(groups.masked_fill(~chosen[..., None], -math.inf).flatten(1), module.top_k)

    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(hook)


def decays(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Per-token decays exp(dt A) of every head (or channel and state) on `prompt`, flat (empty for pure attention)."""
    seen = [torch.zeros(0)]

    def hook(mixer: torch.nn.Module):
        def record(_module: torch.nn.Module, _args: tuple, output: torch.Tensor) -> None:
            dt = (output * getattr(mixer, "mup_vector", 1.0))[..., rows]
            A = mixer.A_log.exp().view(-1, 1)
            by_head = (dt + mixer.dt_bias).view(*dt.shape[:-1], len(A), -1)
            if getattr(mixer, "safe_gate", False):
                log_decay = mixer.lower_bound * torch.sigmoid(A * by_head)
            else:
                log_decay = -A * torch.nn.functional.softplus(by_head)
            seen.append(log_decay.exp().flatten())

        def record_mamba1(_module: torch.nn.Module, _args: tuple, output: torch.Tensor) -> None:
            step = output[..., : mixer.time_step_rank]
            step = mixer.dt_layernorm(step) if hasattr(mixer, "dt_layernorm") else step
            dt = torch.nn.functional.softplus(mixer.dt_proj(step))
            seen.append(torch.exp(-dt[..., None] * mixer.A_log.exp()).flatten())

        if hasattr(mixer, "x_proj"):
            return mixer.x_proj.register_forward_hook(record_mamba1)
        projection, rows = step_sizes(mixer)
        return projection.register_forward_hook(record)

    handles = [hook(module) for module in model.modules() if hasattr(module, "A_log")]
    full(model, prompt)
    for handle in handles:
        handle.remove()
    return torch.cat(seen)


def full(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), V] of one pass without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def cached(model: PreTrainedModel, ids: list[int], cache: DynamicCache, start: int) -> torch.Tensor:
    """Logits [len(ids), V] of a pass that continues `cache`, whose length is `start`."""
    # bamba repeats positions unless it is told them; pure Mambas have none to be told
    positions = {"position_ids": torch.arange(start, start + len(ids))[None]}
    kwargs = {} if model.config.model_type in ("mamba", "falcon_mamba", "mamba2") else positions
    return model(torch.tensor([ids]), cache=cache, use_cache=True, **kwargs).logits[0]


def decode(model: PreTrainedModel, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids, and the logits [steps, V] that each was chosen from; checked against the pass without a cache."""
    cache = DynamicCache(config=model.config)
    logits = [cached(model, prompt, cache, 0)[-1]]
    ids = [int(logits[0].argmax())]
    for step in range(1, steps):
        logits.append(cached(model, ids[-1:], cache, len(prompt) + step - 1)[-1])
        ids.append(int(logits[-1].argmax()))
    stacked = torch.stack(logits)
    agree("cached decode", stacked, full(model, prompt + ids[:-1])[-steps:])
    top = stacked.topk(2, dim=-1).values
    gaps = top[:, 0] - top[:, 1]
    if gaps.min() < GREEDY_GAP or gaps.median() < 0.05:
        raise UnfitSeedError(f"greedy choice near a tie: least gap {gaps.min():.4f}, median {gaps.median():.4f}")
    return ids, stacked


def chunked(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Logits [len(CHUNKS), V] at the end of each chunk of a prefill in CHUNKS; checked against the whole pass."""
    whole = full(model, prompt)[: sum(CHUNKS)]
    if any(hasattr(module, "x_proj") for module in model.modules()):
        return whole[np.cumsum(CHUNKS) - 1]  # Mamba1 starts a second chunk from zero state
    cache = DynamicCache(config=model.config)
    start, rows = 0, []
    for length in CHUNKS:
        rows.append(cached(model, prompt[start : start + length], cache, start))
        start += length
    agree("chunked prefill", torch.cat(rows), whole)
    return torch.stack([chunk[-1] for chunk in rows])


def agree(what: str, left: torch.Tensor, right: torch.Tensor) -> None:
    """Pass over a seed whose rounding is amplified; fail loudly where the reference disagrees with itself by more."""
    worst = float((left - right).abs().max())
    if worst <= SELF_TOLERANCE:
        return
    message = f"{what} of the reference differs from its whole pass by {worst:.2e} > {SELF_TOLERANCE}"
    raise UnfitSeedError(message) if worst <= MOST_ROUNDING else SystemExit(message)


@torch.no_grad()
def goldens(model: PreTrainedModel, seed: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The arrays of goldens.npz (README.md lists them) and the figures that show them fit for use."""
    margins: list[float] = []
    watch_routing(model, margins)
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, model.config.vocab_size, PROMPT_LENGTH).tolist()
    whole = full(model, prompt)
    changed = full(model, [prompt[0] ^ 1, *prompt[1:]])[-1]
    ids, logits = decode(model, prompt, DECODE_STEPS)
    batch = [rng.integers(3, model.config.vocab_size, n).tolist() for n in BATCH_LENGTHS]
    answers = [decode(model, p, DECODE_STEPS // 2) for p in batch]
    decay = decays(model, prompt)
    figures = {
        "seed": seed,
        "logits_std": float(whole.std()),
        "token_0_moves_last_logits_by": float((changed - whole[-1]).abs().max()),
        "least_routing_margin": min(margins, default=math.inf),
        "share_of_decays_above_0.99": float((decay > 0.99).float().mean()) if len(decay) else 1.0,
    }
    arrays = {
        "prompt": np.array(prompt, np.int32),
        "full_logits": whole.numpy(),
        "changed_logits": changed.numpy(),
        "decode_ids": np.array(ids, np.int32),
        "decode_logits": logits.numpy(),
        "chunk_lengths": np.array(CHUNKS, np.int32),
        "chunk_logits": chunked(model, prompt).numpy(),
        "batch_lengths": np.array(BATCH_LENGTHS, np.int32),
        "batch_prompts": np.array([p + [-1] * (max(BATCH_LENGTHS) - len(p)) for p in batch], np.int32),
        "batch_ids": np.array([a[0] for a in answers], np.int32),
        "batch_logits": torch.stack([a[1] for a in answers]).numpy(),
    }
    if any(hasattr(module, "time_step_limit") for module in model.modules()):
        limit_time_steps(model, TIME_STEP_LIMIT)
        arrays["time_step_limit"] = np.array(TIME_STEP_LIMIT, np.float32)
        arrays["limited_logits"] = full(model, prompt)[-1].numpy()
        moved = float(np.abs(arrays["limited_logits"] - whole[-1].numpy()).max())
        if moved < 0.01:
            raise SystemExit(f"time_step_limit {TIME_STEP_LIMIT} moves the last logits by {moved:.3f} only")
    if len(set(ids)) < 6:
        raise UnfitSeedError(f"greedy decode repeats itself: {ids}")
    if figures["token_0_moves_last_logits_by"] < 0.01 or figures["share_of_decays_above_0.99"] < 0.6:
        raise UnfitSeedError(f"forgets too fast: {figures}")
    return arrays, figures


def make(name: str) -> None:
    """Write the folder of one model from the first seed whose numbers are far enough from ties."""
    for seed in range(200):
        model = build(MODELS[name], seed)
        try:
            arrays, figures = goldens(model, seed)
        except UnfitSeedError as reason:
            print(f"{name}: seed {seed} passed over: {reason}")
            continue
        folder = HERE / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "goldens.npz", **arrays)
        (folder / "model.safetensors").chmod(0o644)
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"{name}: {size / 1e3:.0f} kB, " + json.dumps({k: float(f"{v:.4g}") for k, v in figures.items()}))
        return
    raise SystemExit(f"{name}: no seed below 200 gives goldens far from ties")


if __name__ == "__main__":
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    for chosen in sys.argv[1:] or MODELS:
        make(chosen)
