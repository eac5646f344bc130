"""Every family's names, on checkpoints that transformers wrote: loading and exporting gives the same file back."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jhybrid.config import EngineConfig
from jhybrid.errors import WeightsError
from jhybrid.models import abstract_params, family_for, read_config
from jhybrid.weights.export import export_huggingface
from jhybrid.weights.load import IGNORED, load_model
from jhybrid.weights.safetensors import load_safetensors

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))


def test_the_goldens_are_there():
    assert len(MODELS) >= 10


def load(directory: Path, model: str) -> dict:
    config = read_config(GOLDEN / model)
    family = family_for(config)
    shapes = abstract_params(family.module(config, jnp.dtype("float32")))
    ignored = (*IGNORED, *family.left_alone(config))
    return load_safetensors(directory, shapes, family.weight_names(config), ignored=ignored)


@pytest.mark.parametrize("model", MODELS)
def test_round_trip_of_a_transformers_checkpoint(tmp_path, model):
    config = read_config(GOLDEN / model)
    names, params = family_for(config).weight_names(config), load(GOLDEN / model, model)
    export_huggingface(tmp_path, json.loads((GOLDEN / model / "config.json").read_text()), params, names)
    original, exported = (load_file(d / "model.safetensors") for d in (GOLDEN / model, tmp_path))
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)


def test_qwen_as_published(tmp_path):
    """Under `model.language_model.`, beside a vision tower and a draft head, with all experts in one tensor."""
    stored = load_file(GOLDEN / "qwen3_5_moe" / "model.safetensors")
    published = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for hub in sorted({name.split(".experts.")[0] for name in stored if ".experts." in name}):
        one = {p: [stored[f"{hub}.experts.{e}.{p}_proj.weight"] for e in range(6)] for p in ("gate", "up", "down")}
        gate_up = [np.concatenate(pair) for pair in zip(one["gate"], one["up"], strict=True)]
        published |= {
            f"{hub}.experts.gate_up_proj": np.stack(gate_up),
            f"{hub}.experts.down_proj": np.stack(one["down"]),
        }
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in published.items()}
    published |= {"mtp.norm.weight": np.zeros(3, np.float32), "model.visual.pos_embed.weight": np.zeros(3, np.float32)}
    save_file(published, tmp_path / "model.safetensors")
    got, want = (load(directory, "qwen3_5_moe") for directory in (tmp_path, GOLDEN / "qwen3_5_moe"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_kimi_as_published(tmp_path):
    """The MLP of a layer without experts has a name of its own."""
    stored = load_file(GOLDEN / "kimi_linear" / "model.safetensors")
    published = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor for name, tensor in stored.items()}
    assert published.keys() != stored.keys()
    save_file(published, tmp_path / "model.safetensors")
    got, want = (load(directory, "kimi_linear") for directory in (tmp_path, GOLDEN / "kimi_linear"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_ling_as_published(tmp_path):
    """One name of output projections in latent attention, and another elsewhere; a draft layer behind the others."""
    stored = load_file(GOLDEN / "bailing_hybrid" / "model.safetensors")
    published = {name.replace("layers.0.attention.dense", "layers.0.attention.o_proj"): a for name, a in stored.items()}
    assert published.keys() != stored.keys()
    draft = {"model.layers.5.eh_proj.weight": np.zeros(3, np.float32)}
    save_file(published | draft, tmp_path / "model.safetensors")
    got, want = (load(directory, "bailing_hybrid") for directory in (tmp_path, GOLDEN / "bailing_hybrid"))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    save_file(published | {"model.layers.6.eh_proj.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layers\.6\.eh_proj"):
        load(tmp_path, "bailing_hybrid")


def test_lfm3_beside_a_vision_tower(tmp_path):
    stored = load_file(GOLDEN / "lfm3" / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    towers = ("model.vision_tower.patchifier.weight", "model.multi_modal_projector.linear_1.weight")
    save_file(wrapped | dict.fromkeys(towers, np.zeros(3, np.float32)), tmp_path / "model.safetensors")
    got, want = (load(directory, "lfm3") for directory in (tmp_path, GOLDEN / "lfm3"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_text_model_of_an_omni_checkpoint(tmp_path):
    """Nemotron 3 Omni wraps a Nemotron-H; its towers and multi-token prediction are left alone."""
    raw = json.loads((GOLDEN / "nemotron_h_latent" / "config.json").read_text())
    tensors = load_file(GOLDEN / "nemotron_h_latent" / "model.safetensors")
    extra = ["language_model.mtp.layers.0.mixer.q_proj.weight", "vision_model.blocks.0.weight", "mlp1.1.weight"]
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped | dict.fromkeys(extra, np.zeros((2, 2), np.float32)), tmp_path / "model.safetensors")
    for key in ("llm_config", "text_config"):
        whole = {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni", key: raw}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert read_config(tmp_path) == read_config(GOLDEN / "nemotron_h_latent")
    params = load_model(EngineConfig(model=str(tmp_path), dtype="float32")).params
    assert params["vocabulary"]["lm_head"].shape == (263, 48)
    np.testing.assert_array_equal(params["final_norm"]["weight"], tensors["backbone.norm_f.weight"])
