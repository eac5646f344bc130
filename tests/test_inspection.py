"""Inspection tells every family's layers, sizes and what is left out, from its config.json alone."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jhybrid.config import EngineConfig
from jhybrid.inspection import inspect_model, print_fit, print_inspection
from jhybrid.models import FAMILIES

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
PATTERNS = {
    "jamba": [["Mamba1", "Mlp"], ["Attention", "Experts"]],
    "falcon_h1": [["Mamba2", "Attention", "Mlp"]],
    "kimi_linear": [["GatedDelta", "Mlp"], ["LatentAttention", "Experts", "Mlp"]],
    "lfm2": [["ShortConv", "Mlp"]],
    "nemotron_h_latent": [["Experts", "Mlp"], ["Mamba2"]],
    "qwen3_next": [["GatedDelta", "Experts", "Mlp"]],
    "zamba2": [["Mamba2"], ["Attention", "Mlp", "Mamba2"]],
}


@pytest.mark.parametrize(
    "name", [name if name in PATTERNS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_family(tmp_path, name):
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = inspect_model(EngineConfig(model=str(tmp_path), dtype="float32", page_size=8, max_model_len=64))
    stored = load_file(GOLDEN / name / "model.safetensors")
    tied = raw.get("tie_word_embeddings") and "lm_head.weight" in stored
    assert facts["num_parameters"] == sum(a.size for n, a in stored.items() if not (tied and n == "lm_head.weight"))
    assert facts["memory"]["weights"] == 4 * facts["num_parameters"]
    patterns = [layer["blocks"] for layer in facts["layers"]]
    assert all(patterns), patterns
    for pattern in PATTERNS.get(name, []):
        assert pattern in patterns, patterns
    for layer in facts["layers"]:
        kept = {part["part"] for part in layer["parts"]}
        assert ("kv" in kept) == bool({"Attention", "LatentAttention"} & set(layer["blocks"]))
        assert ("conv" in kept) == bool({"Mamba1", "Mamba2", "GatedDelta", "ShortConv"} & set(layer["blocks"]))
    parts = [part for layer in facts["layers"] for part in layer["parts"]]
    sizes = {unit: sum(4 * _size(p["shape"]) for p in parts if p["unit"] == unit) for unit in ("slot", "page")}
    assert (facts["bytes_per_slot"], facts["bytes_per_page"]) == (sizes["slot"], sizes["page"])
    assert facts["bytes_per_token"] * 8 == sizes["page"]
    draft = raw.get("num_nextn_predict_layers")
    assert facts["not_served"] == (["the draft head (mtp) is not loaded"] if draft else [])
    console = Console(record=True, width=200)
    print_inspection(facts, console)
    assert " + ".join(patterns[0]) in console.export_text()


def test_all_families_are_covered():
    found = {json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert found == {family.model_type for family in FAMILIES.values()}


def test_what_is_not_served_is_said(tmp_path):
    raw = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": raw | {"mtp_num_hidden_layers": 1}, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    facts = inspect_model(EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=64))
    assert facts["not_served"] == ["images: the tower for them is not loaded", "the draft head (mtp) is not loaded"]


def _size(shape: list[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


@pytest.mark.parametrize("chip", ["v6e", None])
def test_a_fit_shows_the_cycles_of_each_step_where_they_are_known(chip: str | None):
    step = {
        "bucket": "decode[T=4,S=4]",
        "scratch": 1000,
        "updated_in_place": 2000,
        "seconds": 3.2,
        "kernels": {"ssd": 6},
    }
    if chip is not None:
        cycles = {"least": 12345, "most": 67890, "kernels": 1111}
        step |= {"cycles": cycles, "milliseconds_at_least": 0.0077}
    fit = {"site": "v6e:1x1", "steps": [step], "memory": {"weights": 9}, "fits": {"sequences": 4, "tokens": 64}}
    console = Console(width=80, record=True)
    print_fit(fit, console)
    shown = console.export_text()
    assert "6 ssd" in shown
    assert tuple(figure in shown for figure in ("12,345", "67,890", "1,111", "0.01")) == (chip is not None,) * 4
