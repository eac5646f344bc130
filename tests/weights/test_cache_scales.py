"""Scales of 8-bit keys and values in checkpoints: found under each spelling, neutral but for rounding, else refused."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jhybrid import ConfigError, EngineConfig
from jhybrid.cache.router import NoCache
from jhybrid.errors import WeightsError
from jhybrid.layers.attention import Attention, AttentionSpec
from jhybrid.models import abstract_params
from jhybrid.weights.load import load_params, read_model
from jhybrid.weights.places import leaves
from kernels_pallas.spans import dense_spans
from tests.conftest import GOLDEN

SCHEME = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}


def checkpoint(folder: Path, scales: dict[str, float | list[float]]) -> EngineConfig:
    """The tiny Llama with these tensors beside its own; `{}` in a name is its first layer's mixer."""
    raw = json.loads((GOLDEN / "llama" / "config.json").read_text()) | {"quantization_config": SCHEME}
    (folder / "config.json").write_text(json.dumps(raw))
    more = {name.format("model.layers.0.self_attn"): np.array(value, np.float32) for name, value in scales.items()}
    save_file(load_file(GOLDEN / "llama" / "model.safetensors") | more, folder / "model.safetensors")
    return EngineConfig(model=str(folder), dtype="float32", kv_cache_dtype="fp8")


def scales_of(config: EngineConfig) -> dict[str, list[float]]:
    model_config, module, _, _ = read_model(config)
    params = load_params(config, model_config, module, abstract_params(module))
    return {path[0]: np.asarray(leaf).tolist() for path, leaf in leaves(params) if path[-1] == "kv_scale"}


@pytest.mark.parametrize(
    "names",
    [
        ("{}.k_scale", "{}.v_scale"),
        ("{}.attn.k_scale", "{}.attn.v_scale"),
        ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
        ("{}.k_proj.output_scale", "{}.v_proj.output_scale"),
        ("{}.kv_scale",),
    ],
)
def test_scales_are_found(tmp_path, names):
    config = checkpoint(tmp_path, dict(zip(names, ([0.5], 0.25), strict=False)))
    assert scales_of(config) == {"layers_0": [0.5, 0.25 if len(names) == 2 else 0.5]}
    assert scales_of(replace(config, kv_cache_dtype="auto")) == {}
    with pytest.raises(ConfigError, match=r"bundle: 'b' was made from a config\.json, without the scales"):
        scales_of(replace(config, bundle="b"))


def test_what_is_no_scale_is_refused(tmp_path):
    config = checkpoint(tmp_path, {"{}.k_scale": 0.5, "{}.v_scale": 0.0})
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.v_scale is 0\.0, and no scale"):
        scales_of(config)
    config = checkpoint(tmp_path, {"{}.k_scale": [0.5, 0.5], "{}.v_scale": 1.0})
    with pytest.raises(WeightsError, match=r"k_scale has the shape \[2\].*one for all heads"):
        scales_of(config)
    assert scales_of(checkpoint(tmp_path, {"{}.k_scale": 0.5})) == {}


def test_scales_change_nothing_but_the_rounding():
    attention = Attention(AttentionSpec(16, 4, 2, 8, scale=0.3), 0, jnp.dtype("float32"))
    x, spans = jax.random.normal(jax.random.key(1), (6, 16)) * 3, dense_spans(1, 6)
    params = attention.init(jax.random.key(0), x, NoCache(), spans)["params"]
    plain, _ = attention.apply({"params": params}, x, NoCache(), spans)
    scaled, _ = attention.apply({"params": {**params, "kv_scale": jnp.array([0.3, 7.0])}}, x, NoCache(), spans)
    np.testing.assert_allclose(scaled, plain, atol=1e-6)
    assert not np.array_equal(scaled, plain), "they were used"
