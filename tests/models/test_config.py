"""Strict reading of config.json: old and new spellings give the same model, and what is not understood is refused."""

import copy
import json
from pathlib import Path

import pytest

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError
from jhybrid.models import FAMILIES, family_of, read_config
from jhybrid.models.nemotron_h import NemotronHConfig
from jhybrid.weights.load import read_model

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
NEEDED = {
    "nemotron_h": "vocab_size hidden_size layer_norm_epsilon mlp_hidden_act max_position_embeddings intermediate_size "
    "num_attention_heads num_key_value_heads head_dim mamba_num_heads mamba_head_dim ssm_state_size n_groups "
    "conv_kernel use_conv_bias n_routed_experts num_experts_per_tok moe_intermediate_size n_group topk_group "
    "moe_shared_expert_intermediate_size norm_topk_prob routed_scaling_factor",
    "granitemoehybrid": "vocab_size hidden_size rms_norm_eps layer_types num_hidden_layers hidden_act "
    "shared_intermediate_size num_local_experts num_experts_per_tok intermediate_size embedding_multiplier "
    "residual_multiplier attention_multiplier logits_scaling max_position_embeddings num_attention_heads mamba_n_heads "
    "mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias",
    "bamba": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act intermediate_size rope_parameters "
    "max_position_embeddings num_attention_heads mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv",
    "qwen3_moe": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act intermediate_size rope_parameters "
    "max_position_embeddings num_attention_heads num_experts_per_tok moe_intermediate_size norm_topk_prob",
    "mamba2": "vocab_size hidden_size layer_norm_epsilon num_hidden_layers num_heads head_dim state_size n_groups "
    "expand conv_kernel use_conv_bias use_bias hidden_act residual_in_fp32",
    "lfm2": "vocab_size hidden_size norm_eps num_hidden_layers layer_types conv_L_cache conv_bias num_attention_heads "
    "max_position_embeddings intermediate_size block_auto_adjust_ff_dim block_multiple_of",
    "lfm2_moe": "num_dense_layers num_experts num_experts_per_tok moe_intermediate_size use_expert_bias norm_topk_prob "
    "routed_scaling_factor layer_types intermediate_size",
    "lfm3": "vocab_size hidden_size norm_eps num_hidden_layers layer_types conv_L_cache conv_bias intermediate_size "
    "use_sandwich_norm use_attention_gate num_attention_heads head_dim sliding_window "
    "max_position_embeddings",
    "falcon_h1": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act intermediate_size rope_parameters "
    "max_position_embeddings num_attention_heads mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv "
    "mamba_conv_bias mamba_proj_bias mamba_rms_norm mamba_norm_before_gate embedding_multiplier lm_head_multiplier "
    "key_multiplier attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier",
    "qwen3_next": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act rope_parameters intermediate_size "
    "max_position_embeddings num_attention_heads num_experts num_experts_per_tok moe_intermediate_size "
    "shared_expert_intermediate_size linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim",
    "qwen3_5_text": "num_hidden_layers intermediate_size linear_num_key_heads",
    "qwen3_5_moe_text": "num_hidden_layers num_experts shared_expert_intermediate_size",
    "kimi_linear": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act intermediate_size "
    "model_max_length linear_num_heads linear_head_dim linear_conv_kernel_dim num_attention_heads kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_token moe_intermediate_size "
    "num_shared_experts moe_renormalize routed_scaling_factor",
    "bailing_hybrid": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act intermediate_size kv_lora_rank "
    "model_max_length num_attention_heads qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "num_experts num_experts_per_token moe_intermediate_size num_expert_group topk_group num_shared_experts "
    "moe_renormalize routed_scaling_factor",
    "jamba": "vocab_size hidden_size rms_norm_eps num_hidden_layers hidden_act intermediate_size num_attention_heads "
    "attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset num_experts num_experts_per_tok "
    "mamba_expand mamba_d_state mamba_dt_rank mamba_d_conv mamba_conv_bias mamba_proj_bias max_position_embeddings",
    "zamba2": "vocab_size hidden_size rms_norm_eps num_hidden_layers layers_block_type mamba_ngroups mamba_expand "
    "n_mamba_heads mamba_d_state mamba_d_conv num_attention_heads hidden_act add_bias_linear num_mem_blocks "
    "adapter_rank use_shared_attention_adapter use_mem_rope max_position_embeddings",
    "mamba": "vocab_size hidden_size layer_norm_epsilon num_hidden_layers state_size time_step_rank conv_kernel "
    "use_conv_bias use_bias hidden_act residual_in_fp32",
    "falcon_mamba": "vocab_size hidden_size state_size time_step_rank",
    "olmo_hybrid": "vocab_size hidden_size rms_norm_eps layer_types num_hidden_layers hidden_act intermediate_size "
    "max_position_embeddings num_attention_heads linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim",
    "llama": "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size rms_norm_eps hidden_act "
    "max_position_embeddings",
    "qwen3": "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size rms_norm_eps hidden_act "
    "max_position_embeddings rope_parameters",
}
EXAMPLE = {model_type: model_type for model_type in NEEDED} | {
    "nemotron_h": "nemotron_h_moe",
    "granitemoehybrid": "granite_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
KIND_OF_ALL_LAYERS = dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), "mamba") | {"falcon_h1": "parallel"}


def raw_of(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def read(raw: dict):
    return family_of(raw).config.from_hf(raw)


@pytest.mark.parametrize(
    ("model_type", "key"), [(model_type, key) for model_type, keys in NEEDED.items() for key in keys.split()]
)
def test_missing_key_is_named(model_type: str, key: str):
    raw = raw_of(EXAMPLE[model_type])
    assert raw.pop(key) is not None
    named = "rope_theta" if key == "rope_parameters" else key
    with pytest.raises(ConfigError, match=rf"^{named}: .*lacks this key"):
        read(raw)


@pytest.mark.parametrize(("name", "taps", "rows"), [("lfm2", 3, 4), ("lfm3", 7, 8), ("lfm2_moe", 4, 4)])
def test_windows_on_a_tpu_have_rows_that_need_no_padding(name: str, taps: int, rows: int):
    for platform, wanted in (("cpu", taps), ("gpu", taps), ("tpu", rows)):
        _, _, parts, _ = read_model(EngineConfig(model=str(GOLDEN / name)), platform)
        assert {part.shape[0] for layer in parts for part in layer if part.name == "conv"} == {wanted}, platform


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_every_layer(name: str):
    config = read_config(GOLDEN / name)
    parts = config.layer_parts(page_size=8, kv_dtype="bfloat16", state_dtype="float32", conv_dtype="bfloat16")
    model_type = raw_of(name)["model_type"]
    kinds = getattr(config, "layer_kinds", (KIND_OF_ALL_LAYERS.get(model_type, "attention"),) * config.num_layers)
    names = {"mamba": ["conv", "ssm"], "attention": ["kv"], "conv": ["conv"], "mlp": [], "moe": []}
    names["delta"], names["sliding"] = ["conv", "delta"], ["kv"]
    names["parallel"] = names["hybrid"] = names["mamba"] + names["attention"]
    assert [[p.name for p in layer] for layer in parts] == [names[kind] for kind in kinds]
    shapes = {p.name: (p.unit, p.shape, p.dtype) for layer in parts for p in layer}
    if model_type in ("jamba", "mamba", "falcon_mamba"):
        assert shapes["ssm"] == ("slot", (8, 96), "float32")
        assert shapes["conv"] == ("slot", (4, 96), "bfloat16")
    elif "ssm" in shapes:
        assert shapes["ssm"] == ("slot", (16, 96), "float32")
        assert shapes["conv"] == ("slot", (4, 96 + 2 * 2 * 16), "bfloat16")
    if name == "qwen3_next":
        assert shapes["conv"] == ("slot", (4, 2 * 3 * 16 + 6 * 12), "bfloat16")
        assert shapes["delta"] == ("slot", (6, 16, 12), "float32")
    if name == "kimi_linear":
        assert shapes["kv"] == ("page", (8, 20 + 4), "bfloat16")
    if name == "bailing_hybrid":
        assert shapes["kv"] == ("page", (8, 20 + 8), "bfloat16")
        assert shapes["delta"] == ("slot", (3, 16, 16), "float32")
    if name == "lfm2":
        assert shapes["conv"] == ("slot", (3, 48), "bfloat16")
    if name == "lfm3":
        assert shapes["conv"] == ("slot", (7, 48), "bfloat16")
        assert shapes["kv"] == ("page", (8, 4 * 16), "bfloat16")
    if name == "qwen3":
        assert shapes["kv"] == ("page", (8, 4 * 16), "bfloat16")


def test_nemotron_spellings_of_the_pattern_agree():
    raw = raw_of("nemotron_h_moe")
    config = read(raw)
    assert config.layer_kinds == ("mamba", "moe", "attention", "mamba", "mlp", "mamba", "moe", "mamba")
    new = raw.pop("layers_block_type")
    old = [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in new]
    for spelled in (
        {"hybrid_override_pattern": "ME*M-MEM"},
        {"layers_block_type": old},
        {"layer_types": new},
        {"layer_types": old},
    ):
        assert read(raw | spelled) == config


def test_older_spellings_of_other_keys_agree():
    raw = raw_of("nemotron_h_moe")
    older = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
    older |= {"time_step_limit": "mamba_dt_limit", "head_dim": "attention_head_dim"}
    assert read({older.get(key, key): value for key, value in raw.items()}) == read(raw)
    granite = raw_of("granite_rope")
    old = granite | {"rope_theta": granite["rope_parameters"]["rope_theta"], "mamba_d_head": "auto"}
    old["layer_types"] = [{"linear_attention": "mamba"}.get(k, "attention") for k in granite["layer_types"]]
    del old["rope_parameters"]
    assert read(old) == read(granite)
    bamba = raw_of("bamba")
    old = bamba | {"rope_theta": bamba["rope_parameters"]["rope_theta"], "rope_scaling": None}
    del old["rope_parameters"]  # and with it the only word on the rotated share of a head
    assert read(old) == read(bamba)


def test_older_spellings_of_lfm2_agree():
    raw = raw_of("lfm2")
    config = read(raw)
    old = raw | {"rope_theta": raw["rope_parameters"]["rope_theta"], "full_attn_idxs": [2, 5]}
    old |= {"block_ff_dim": raw["intermediate_size"], "tie_embedding": raw["tie_word_embeddings"]}
    for key in ("rope_parameters", "layer_types", "intermediate_size", "tie_word_embeddings"):
        del old[key]
    assert read(old) == config
    del old["tie_embedding"]  # older files leave out what is the default
    assert read(old) == config
    assert config.intermediate_size == 96  # 2/3 of 130, rounded up to a multiple of 16
    assert read(raw | {"block_auto_adjust_ff_dim": False}).intermediate_size == 130


def test_spellings_of_qwen_agree():
    raw = raw_of("qwen3_next")
    config = read(raw)
    old = raw | {"rope_theta": 30000.0, "rope_scaling": None, "partial_rotary_factor": 0.25, "rope_parameters": None}
    assert read(old) == config
    assert read(old | {"partial_rotary_factor": 0.5}) != config
    by_interval = read(raw | {"layer_types": None, "full_attention_interval": 2})
    assert by_interval.layer_kinds == ("delta", "attention", "delta", "attention", "delta")
    assert read(raw | {"decoder_sparse_step": 2}).sparse_layers == (False, False, False, True, False)
    assert read(raw).sparse_layers == (True, False, True, True, True)


def test_lfm3_has_positions_and_a_window_by_layer_type():
    config = read(raw_of("lfm3"))
    assert config.layer_kinds == ("conv", "sliding", "attention", "conv", "sliding", "attention")
    assert (config.attention.sliding_window, config.sliding.sliding_window) == (None, 13)
    assert config.attention.rope.frequencies[-2:] == (0.0, 0.0) and config.attention.rope.frequencies[5] > 0
    assert config.sliding.rope.frequencies[-1] == pytest.approx(3000.0 ** (-14 / 16), rel=1e-6)
    raw = raw_of("lfm3") | {"sliding_window": None}
    whole = read(raw | {"layer_types": ["conv", "full_attention"] * 3})
    assert whole.sliding is None
    del raw["tie_word_embeddings"]
    text = raw | {"sliding_window": 13}
    beside = {"architectures": ["Lfm3VlForConditionalGeneration"], "model_type": "lfm3_vl", "text_config": text}
    assert read(beside | {"tie_word_embeddings": True, "vision_config": {"hidden_size": 32}}) == config


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_beside_a_vision_tower(name: str):
    raw = raw_of(name)
    text = {key: value for key, value in raw.items() if key != "tie_word_embeddings"}
    architecture = raw["architectures"][0].replace("CausalLM", "ConditionalGeneration")
    whole = {"architectures": [architecture], "model_type": name, "text_config": text, "vision_config": {"depth": 2}}
    assert read(whole | {"tie_word_embeddings": raw["tie_word_embeddings"]}) == read(raw)
    del text["vocab_size"]
    with pytest.raises(ConfigError, match=r"^text_config\.vocab_size: .*lacks this key"):
        read(whole)


def test_kimi_as_published():
    """Layers counted from 1, sizes of the recurrent layers in a section, the first layers without experts."""
    raw = raw_of("kimi_linear")
    published = {k: v for k, v in raw.items() if not k.startswith("linear_") and not k.endswith("layer_types")}
    section = {"full_attn_layers": [2], "kda_layers": [1, 3, 4], "head_dim": 16, "num_heads": 3}
    published |= {"linear_attn_config": section | {"short_conv_kernel_size": 4}, "first_k_dense_replace": 1}
    assert read(published) == read(raw)
    assert read(raw).layer_kinds == ("delta", "attention", "delta", "delta")
    assert read(raw).sparse_layers == (False, True, True, True)
    for broken in ({"kda_layers": [0, 2, 3]}, {"kda_layers": [1, 3]}, {"full_attn_layers": [2, 4]}):
        with pytest.raises(ConfigError, match=r"^linear_attn_config.kda_layers: .*each of the layers 1 to 4 once"):
            read(published | {"linear_attn_config": section | broken})
    del published["first_k_dense_replace"]
    with pytest.raises(ConfigError, match=r"^first_k_dense_replace: .*lacks this key"):
        read(published)


def test_ling_as_published():
    """transformers spells keys as Kimi's, and writes the width of the rotated key over `head_dim`."""
    raw = raw_of("bailing_hybrid")
    spelled = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    }
    derived = ("rope_parameters", "layer_types", "mlp_layer_types", "qk_head_dim")
    published = {spelled.get(k, k): v for k, v in raw.items() if not k.startswith("linear_") and k not in derived}
    published |= {"head_dim": 16, "partial_rotary_factor": 0.5}
    config = read(raw)
    assert read(published) == config
    assert config.layer_kinds == ("delta", "attention", "delta", "attention", "delta")
    assert config.sparse_layers == (False, False, True, True, True)
    assert config.delta.least_log_decay == -3.0
    written = raw | {"rope_parameters": raw["rope_parameters"] | {"partial_rotary_factor": 0.5}}
    assert read(written) == config
    for key in ("head_dim", "layer_group_size", "first_k_dense_replace"):
        with pytest.raises(ConfigError, match=rf"^{key}: .*lacks this key"):
            read({k: v for k, v in published.items() if k != key})


def test_automatic_and_given_sizes_of_mamba_agree():
    raw = raw_of("mamba")
    config = read(raw | {"time_step_rank": 3})  # ceil(48 / 16)
    assert read(raw | {"time_step_rank": "auto"}) == config
    # falcon-mamba-7b: what `expand` says is not true
    assert read(raw | {"time_step_rank": 3, "expand": 16, "intermediate_size": 96}) == config
    del raw["intermediate_size"]
    assert read(raw | {"time_step_rank": 3}) == config


def test_switches_of_olmo_hybrid():
    raw = raw_of("olmo_hybrid")
    config = read(raw)
    assert config.attention.rope is not None
    # the last three as Ai2 has published them, and transformers writes them
    for absent in (None, {}, {"rope_theta": None}, {"rope_type": None}, {"rope_type": "default", "rope_theta": None}):
        assert read(raw | {"rope_parameters": absent}).attention.rope is None
    assert config.delta.beta_scale == 2.0
    assert read(raw | {"linear_allow_neg_eigval": False}).delta.beta_scale == 1.0


def test_rope_scaling_beside_rope_parameters():
    """It counts, as in transformers; so the two must say the same."""
    raw = raw_of("llama")
    theta = raw["rope_parameters"]["rope_theta"]
    del raw["rope_parameters"]
    linear = {"rope_type": "linear", "factor": 2.0}
    config = read(raw | {"rope_parameters": linear | {"rope_theta": theta}})
    assert read(raw | {"rope_theta": theta, "rope_scaling": {"type": "linear", "factor": 2}}) == config
    both = {"rope_theta": theta, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": linear}
    assert read(raw | both) == config
    assert read(raw | {"rope_scaling": {}, "rope_parameters": linear | {"rope_theta": theta}}) == config
    for other, named in [
        (linear | {"rope_theta": theta, "factor": 4.0}, "factor"),
        (linear | {"rope_theta": 2 * theta}, "rope_theta"),
        ({"rope_theta": theta}, "rope_type"),
    ]:
        message = rf"^rope_scaling\.{named}: .* contradicts rope_parameters\.{named}: .*keep one"
        with pytest.raises(ConfigError, match=message):
            read(raw | both | {"rope_parameters": other})


@pytest.mark.parametrize("text", ["Infinity", '{"__float__": "Infinity"}', "0.25"])
def test_spellings_of_infinity(text: str):
    raw = json.loads(json.dumps(raw_of("mamba2")).replace('{"__float__": "Infinity"}', text))
    assert read(raw).mamba.dt_limit == (0.0, 0.25 if text == "0.25" else float("inf"))


@pytest.mark.parametrize("name", ["nemotron_h_moe", "nemotron_h_latent", "nemotron_h_dense"])
def test_nemotron_config_survives_export(name: str):
    config = read_config(GOLDEN / name)
    assert isinstance(config, NemotronHConfig)
    assert read(json.loads(json.dumps(config.to_hf()))) == config


REFUSED = [
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
    ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers: 4 is no layer"),
    ("nemotron_h_moe", {"layers_block_type": None, "hybrid_override_pattern": "M-MX"}, "letter 'X' at position 3"),
    ("nemotron_h_moe", {"layers_block_type": ["mamba", "conv"]}, r"layers_block_type\[1\]: layer kind 'conv'"),
    ("nemotron_h_moe", {"num_hidden_layers": 9}, "num_hidden_layers: 9, but .* 8 layers"),
    ("nemotron_h_moe", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act: 'tanh'.*relu2"),
    ("nemotron_h_moe", {"mamba_num_heads": 5}, "mamba_num_heads: 5 is not a multiple of n_groups=2"),
    ("nemotron_h_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: must be between 1 and 8"),
    ("nemotron_h_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok: 5.*topk_group"),
    ("nemotron_h_moe", {"n_shared_experts": 2}, "n_shared_experts: 2 is not implemented"),
    ("nemotron_h_moe", {"attention_bias": True}, "attention_bias: True is not implemented"),
    ("nemotron_h_moe", {"tie_word_embeddings": True}, "tie_word_embeddings: True is not implemented"),
    ("nemotron_h_moe", {"sliding_window": 64}, "sliding_window: 64 is not implemented"),
    ("granite_moe", {"layer_types": ["mamba"]}, "layer_types: names 1 layers, but num_hidden_layers is 5"),
    ("granite_moe", {"layer_types": ["mamba", "attention", "moe", 3, "mamba"]}, r"layer_types\[2\]: layer kind 'moe'"),
    ("granite_moe", {"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi'"),
    ("granite_moe", {"mamba_d_head": 8}, "mamba_n_heads: 6 heads of mamba_d_head=8 are not mamba_expand"),
    ("bamba", {"attn_layer_indices": [6]}, "attn_layer_indices: 6 is no layer"),
    ("bamba", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "rope_parameters.rope_type: 'dynamic'"),
    ("lfm2", {"layer_types": ["conv"]}, "layer_types: names 1 layers, but num_hidden_layers is 6"),
    ("lfm2", {"layer_types": ["conv", "mamba"]}, r"layer_types\[1\]: layer kind 'mamba'"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [7]}, "full_attn_idxs: 7 is no layer"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache: must be at least 2"),
    ("lfm2_moe", {"num_dense_layers": 6}, "num_dense_layers: must be between 0 and 5"),
    ("lfm3", {"layer_types": ["conv"]}, "layer_types: names 1 layers, but num_hidden_layers is 6"),
    ("lfm3", {"sliding_window": 0}, "sliding_window: must be at least 1"),
    ("lfm3", {"rope_parameters": None}, r"rope_parameters\.full_attention\.rope_theta: .*lacks this key"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers: must be 5 finite numbers"),
    ("falcon_h1", {"mamba_d_ssm": 64}, "mamba_n_heads: 6 heads of mamba_d_head=16 are not mamba_d_ssm = 64"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias: True is not implemented"),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types: names 1 layers, but num_hidden_layers is 5"),
    (
        "qwen3_next",
        {"linear_num_value_heads": 4},
        "linear_num_value_heads: 4 is not a multiple of linear_num_key_heads=3",
    ),
    ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob: False is not implemented"),
    ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: False is not implemented"),
    ("kimi_linear", {"q_lora_rank": 8}, "q_lora_rank: 8 is not implemented"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope: False is not implemented"),
    ("kimi_linear", {"mlp_layer_types": ["dense"] * 3 + ["none"]}, "mlp_layer_types: must be `dense` or `sparse`"),
    ("kimi_linear", {"num_experts_per_token": 5}, "num_experts_per_token: must be between 1 and 4"),
    ("kimi_linear", {"num_expert_group": 8}, "num_expert_group: 8 groups of 8 experts"),
    ("bailing_hybrid", {"kda_lower_bound": 0.0}, "kda_lower_bound: must be below 0"),
    ("bailing_hybrid", {"kda_safe_gate": False}, "kda_safe_gate: False is not implemented"),
    ("bailing_hybrid", {"num_key_value_heads": 1}, "num_key_value_heads: 1 is not implemented"),
    ("bailing_hybrid", {"q_lora_rank": 8}, "q_lora_rank: 8 is not implemented"),
    ("bailing_hybrid", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is not a multiple of"),
    ("bailing_hybrid", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: 'yarn'"),
    ("zamba2", {"use_long_context": True}, "use_long_context: True is not implemented"),
    ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads: 2 is not implemented"),
    ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type: names 1 layers, but num_hidden_layers is 6"),
    ("zamba2", {"n_mamba_heads": 10}, "n_mamba_heads: 10 heads do not divide"),
    ("jamba", {"attn_layer_offset": 4}, "attn_layer_offset: must be between 0 and 3"),
    ("jamba", {"sliding_window": 64}, "sliding_window: 64 is not implemented"),
    ("jamba", {"mamba_dt_rank": "full"}, "mamba_dt_rank: must be an integer, got 'full'"),
    ("mamba", {"hidden_act": "relu2"}, "hidden_act: 'relu2' is not implemented"),
    ("olmo_hybrid", {"layer_types": ["conv"] * 5}, r"layer_types\[0\]: layer kind 'conv'"),
    ("mamba2", {"time_step_limit": [0.1, 0.01]}, r"time_step_limit: must be \[low, high\]"),
    ("llama", {"hidden_size": "48"}, "hidden_size: must be an integer, got '48'"),
    ("llama", {"num_key_value_heads": 4}, "num_attention_heads: 6 is not a multiple of num_key_value_heads=4"),
    ("llama", {"attention_bias": 1}, "attention_bias: must be true or false"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 5}, r"layer_types\[0\]: layer kind 'sliding_attention'"),
    ("llama", {"layer_types": ["sliding_attention"] * 5}, r"layer_types\[0\]: layer kind 'sliding_attention'"),
    ("qwen3_moe", {"layer_types": ["mamba"] * 4}, r"layer_types\[0\]: layer kind 'mamba'"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types: names 1 layers, but num_hidden_layers is"),
    (
        "llama",
        {"model_type": "rwkv"},
        "model_type: 'rwkv' is not implemented; supported: nemotron_h, nemotron_h_omni, ",
    ),
    ("llama", {"model_type": "rwkv"}, "supported: .*qwen3_5_text, qwen3_5, qwen3_5_moe_text, qwen3_5_moe, "),
    ("llama", {"model_type": ["llama"]}, r"model_type: must be a string, got \['llama'\]"),
    ("llama", {"model_type": {"a": 1}}, "model_type: must be a string"),
    ("llama", {"architectures": 5}, "architectures: must be a list, got 5"),
    ("llama", {"architectures": True}, "architectures: must be a list, got True"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures: must be a list, got 'Llama"),
    ("llama", {"architectures": [["x"]]}, r"architectures: must be a list of names, got \['x'\]"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures: 'LlamaForSequence"),
]

NAN, INF = float("nan"), float("inf")
REFUSED += [  # values out of range
    ("llama", {"rms_norm_eps": NAN}, "rms_norm_eps: must be finite, got nan"),
    ("llama", {"rms_norm_eps": INF}, "rms_norm_eps: must be finite, got inf"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps: must be at least 0.0, got -1e-06"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps: must be finite, got 1000"),
    ("llama", {"rms_norm_eps": {"__float__": "many"}}, "rms_norm_eps: must be a number, got {'__float__': 'many'}"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: must be between 1 and 4096, got 1000000000"),
    ("llama", {"num_hidden_layers": 10**5000}, "num_hidden_layers: must be between 1 and 4096, got a huge int"),
    ("llama", {"vocab_size": 10**30}, "vocab_size: must be between 1 and 2147483647, got 1000"),
    ("qwen3_moe", {"num_experts": 10**9, "num_local_experts": None}, "num_experts: must be between 1 and 65536"),
    ("granite_moe", {"logits_scaling": 0}, "logits_scaling: must be above 0.0, got 0"),
    ("granite_moe", {"embedding_multiplier": INF}, "embedding_multiplier: must be finite"),
    ("falcon_h1", {"key_multiplier": -INF}, "key_multiplier: must be finite"),
    ("falcon_h1", {"ssm_multipliers": [INF] * 5}, "ssm_multipliers: must be 5 finite numbers"),
    ("lfm2", {"block_ffn_dim_multiplier": {"__float__": "Infinity"}}, "block_ffn_dim_multiplier: must be finite"),
    ("qwen3_next", {"partial_rotary_factor": INF}, "partial_rotary_factor: must be finite"),
    ("qwen3_next", {"partial_rotary_factor": 2.0}, "partial_rotary_factor: must be above 0.0 and at most 1.0, got 2.0"),
    ("llama", {"partial_rotary_factor": 2.0}, "partial_rotary_factor: must be above 0.0 and at most 1.0, got 2.0"),
    ("llama", {"head_dim": 7}, "head_dim: 7, of which rotary positions turn a share of 1.0"),
    ("llama", {"rope_scaling": -1}, "rope_scaling: must be an object, got -1"),
    ("llama", {"rope_scaling": NAN}, "rope_scaling: must be an object, got nan"),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type: .*without a rope_theta"),
    ("olmo_hybrid", {"rope_parameters": None, "rope_scaling": {"factor": 2}}, "rope_scaling.factor: .*rope_theta"),
    (
        "olmo_hybrid",
        {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope_parameters.rope_type: .*without a rope_theta",
    ),
    ("lfm3", {"rope_parameters": {"conv": {}}}, "rope_parameters.conv: an object is not understood"),
]
SECTION = {"full_attention": {"rope_theta": 5e5}}
REFUSED += [
    (name, {"rope_parameters": SECTION}, r"rope_parameters\.full_attention: an object is not understood here")
    for name in ("llama", "qwen3", "lfm2", "zamba2_rope", "olmo_hybrid", "bamba")
]
SCALED = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
}
OUT_OF_RANGE = [
    ("default", "rope_theta", 0, "must be above 1.0, got 0"),
    ("yarn", "rope_theta", 1, "must be above 1.0, got 1"),
    ("linear", "factor", 0, "must be above 0.0, got 0"),
    ("linear", "factor", NAN, "must be finite"),
    ("llama3", "low_freq_factor", 0, "must be above 0.0"),
    ("llama3", "high_freq_factor", 1.0, "must be above 1.0, got 1.0"),
    ("llama3", "original_max_position_embeddings", 0, "must be at least 1"),
    ("yarn", "beta_slow", 0, "must be above 0.0"),
    ("yarn", "beta_fast", 0, "must be at least 1.0"),
    ("yarn", "beta_fast", INF, "must be finite"),
    ("yarn", "attention_factor", -1.0, "must be above 0.0"),
]
REFUSED += [
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind} | SCALED.get(kind, {}) | {key: value}},
        rf"rope_parameters\.{key}: {message}",
    )
    for kind, key, value, message in OUT_OF_RANGE
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{n}-{next(iter(c))}" for n, c, _ in REFUSED])
def test_refused(name: str, change: dict, message: str):
    raw = copy.deepcopy(raw_of(name)) | change
    with pytest.raises(ConfigError, match=message):
        read(raw)


def test_broken_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for text, message in [("{", "not valid JSON"), ("[]", "holds list"), ("{}", "model_type: .*lacks this key")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path)
    for text in ("[" * 200_000, '{"a": ' * 200_000, f'{{"vocab_size": {"9" * 5000}}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: .*must be a file"):
        read_config(tmp_path)


def test_families_by_both_names():
    assert FAMILIES["NemotronHForCausalLM"] is FAMILIES["nemotron_h"]
    assert set(EXAMPLE) <= set(FAMILIES)
