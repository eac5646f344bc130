"""Quantised checkpoints: 8-bit floats with block scales are expanded while loading, every other scheme is refused."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from synthetic_checkpoint import NAMES, abstract, expected, tensors, write

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError, WeightsError
from jhybrid.weights.load import load_model, read_model
from jhybrid.weights.places import dotted, leaves
from jhybrid.weights.quantised import BlockScales, read_quantisation
from jhybrid.weights.safetensors import load_safetensors

GOLDEN = Path(__file__).parent.parent / "golden"
BLOCKS = BlockScales(4, 3)  # neither divides the tensors' sides
PLAIN = ("norm.weight", "scale", "conv1d.weight")


def quantise(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8-bit values and scales of a matrix, block by block as the paper has it."""
    scales = np.zeros(BLOCKS.scale_shape(tensor.shape), np.float32)
    values = np.zeros(tensor.shape, ml_dtypes.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[4 * i : 4 * i + 4, 3 * j : 3 * j + 3]
            scales[i, j] = max(np.abs(tensor[at]).max(), 1e-6) / 448
            values[at] = (tensor[at] / scales[i, j]).astype(values.dtype)
    return values, scales


@pytest.fixture
def made() -> dict[str, np.ndarray]:
    stored = {}
    for name, tensor in tensors().items():
        if name in PLAIN:
            stored[name] = tensor
        else:
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor)
    return stored


def test_every_tensor_is_expanded_into_its_place(tmp_path, made):
    """Fused rows, experts and both; an 8-bit float keeps 4 bits, so what comes out is within a sixteenth."""
    write(tmp_path, made)
    found = dict(leaves(load_safetensors(tmp_path, abstract(), NAMES, quantised=BLOCKS)))
    for path, leaf in found.items():
        want = expected()[dotted(path)]
        np.testing.assert_allclose(leaf, want, rtol=1 / 16, atol=want.max() / 448, err_msg=dotted(path))
    values, scales = made["q.weight"].astype(np.float32), made["q.weight_scale_inv"]
    by_hand = [[values[i, j] * scales[i // 4, j // 3] for j in range(4)] for i in range(6)]
    np.testing.assert_array_equal(found["qkv", "weight"][:6], by_hand)


def test_scales_in_another_shard(tmp_path, made):
    shards = {"model-a.safetensors": {}, "model-b.safetensors": {}}
    for name, tensor in made.items():
        shards["model-b.safetensors" if name.endswith("_inv") else "model-a.safetensors"][name] = tensor
    for file, held in shards.items():
        save_file(held, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    params = load_safetensors(tmp_path, abstract(), NAMES, quantised=BLOCKS)
    write(tmp_path, made)
    for file in ("model.safetensors.index.json", *shards):
        (tmp_path / file).unlink()
    again = load_safetensors(tmp_path, abstract(), NAMES, quantised=BLOCKS)
    for (path, left), (_, right) in zip(leaves(params), leaves(again), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=dotted(path))


def test_wrong_scales_are_named_together(tmp_path, made):
    del made["q.weight_scale_inv"]
    made["k.weight_scale_inv"] = np.zeros((1, 1), np.float32)
    made["v.weight_scale_inv"] = made["v.weight_scale_inv"].astype(np.int32)
    made["norm.weight_scale_inv"] = np.zeros((1, 1), np.float32)
    made["scale"] = made["scale"].astype(ml_dtypes.float8_e4m3fn)
    write(tmp_path, made)
    with pytest.raises(WeightsError) as caught:
        load_safetensors(tmp_path, abstract(), NAMES, quantised=BLOCKS)
    message = str(caught.value)
    assert "1 tensor(s) missing from the checkpoint:\n  q.weight_scale_inv" in message
    assert "k.weight_scale_inv: [1, 1], k.weight needs [1, 2]" in message
    assert "v.weight_scale_inv: I32" in message
    assert "scale: F8_E4M3 of shape [1], which has no blocks" in message
    assert "model does not have:\n  norm.weight_scale_inv" in message


def test_eight_bits_without_a_word_in_the_config(tmp_path, made):
    write(tmp_path, made)
    with pytest.raises(WeightsError, match=r"q\.weight: F8_E4M3, but config\.json has no quantization_config"):
        load_safetensors(tmp_path, abstract(), NAMES)


def with_scheme(directory: Path, scheme: dict) -> EngineConfig:
    """The tiny Llama with a quantization_config, and its weights in 8 bits but for norms and tables."""
    raw = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": scheme}))
    stored = {}
    for name, tensor in load_file(GOLDEN / "llama" / "model.safetensors").items():
        if "proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor)
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors")
    return EngineConfig(model=str(directory), dtype="float32")


def test_a_model_is_loaded_by_its_config(tmp_path):
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 3]}
    params = load_model(with_scheme(tmp_path, scheme)).params
    plain = load_model(EngineConfig(model=str(GOLDEN / "llama"), dtype="float32")).params
    for (path, left), (_, right) in zip(leaves(params), leaves(plain), strict=True):
        worst = float(np.abs(np.asarray(left) - np.asarray(right)).max())
        assert (worst > 0) == ("proj" in dotted(path)), dotted(path)
        assert worst < np.abs(right).max() / 16, dotted(path)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"gptq \(bits=4\)"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes \(load_in_8bit=True\)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors \(format=pack"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, r"compressed-tensors \(format=int"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"modelopt \(quant_algo=FP8\)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, r"unnamed \(bits=4\)"),
        ({"quant_method": "fp8"}, "fp8 without weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "not of e4m3"),
    ],
)
def test_other_schemes_are_refused_before_any_weight_is_read(tmp_path, scheme, said):
    with pytest.raises(ConfigError, match=rf"quant_method: weights quantised by .*{said}.*are not read.*dequantize"):
        read_model(with_scheme(tmp_path, scheme))


def test_schemes_of_wrapped_models_are_seen():
    scheme = {"quant_method": "awq"}
    assert read_quantisation({}) is None
    for raw in ({"text_config": {"quantization_config": scheme}}, {"compression_config": scheme}):
        with pytest.raises(ConfigError, match="awq"):
            read_quantisation(raw)
    with pytest.raises(ConfigError, match=r"weight_block_size: must be \[rows, columns\]"):
        read_quantisation({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
