"""Quantised checkpoints: 8 bits and their scales are held as they are or expanded, other schemes are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from synthetic_checkpoint import NAMES, abstract, expected, tensors, write

from jhybrid import EngineConfig
from jhybrid.cache.arrays import tree_bytes
from jhybrid.cache.router import NoCache
from jhybrid.errors import ConfigError, WeightsError
from jhybrid.weights.load import load_model, read_model
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import dotted, leaves
from jhybrid.weights.quantised import Numbers, Scheme, read_quantisation
from jhybrid.weights.safetensors import load_safetensors
from kernels_pallas.spans import dense_spans

GOLDEN = Path(__file__).parent.parent / "golden"
COMPRESSED = sorted((Path(__file__).parent / "compressed").glob("*.safetensors"))
BLOCKS = Scheme("fp8", (4, 3))  # neither divides the tensors' sides
PLAIN = ("norm.weight", "scale", "conv1d.weight")


def quantise(tensor: np.ndarray, block: tuple[int, int] = (4, 3)) -> tuple[np.ndarray, np.ndarray]:
    """8-bit floats and scales of a matrix, block by block as the paper has it."""
    rows, columns = block
    scales = np.zeros([-(-n // b) for n, b in zip(tensor.shape, block, strict=True)], np.float32)
    values = np.zeros(tensor.shape, ml_dtypes.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[rows * i : rows * (i + 1), columns * j : columns * (j + 1)]
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
    found = dict(leaves(load_safetensors(tmp_path, abstract(), NAMES, scheme=BLOCKS)))
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
    params = load_safetensors(tmp_path, abstract(), NAMES, scheme=BLOCKS)
    write(tmp_path, made)
    for file in ("model.safetensors.index.json", *shards):
        (tmp_path / file).unlink()
    again = load_safetensors(tmp_path, abstract(), NAMES, scheme=BLOCKS)
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
        load_safetensors(tmp_path, abstract(), NAMES, scheme=BLOCKS)
    message = str(caught.value)
    assert "1 tensor(s) missing from the checkpoint:\n  q.weight_scale_inv or q.weight_scale" in message
    assert "k.weight_scale_inv: [1, 1], k.weight needs [1, 2]" in message
    assert "v.weight_scale_inv: I32" in message
    assert "scale: F8_E4M3 of shape [1], which has no rows" in message
    assert "model does not have:\n  norm.weight_scale_inv" in message


def test_eight_bits_without_a_word_in_the_config(tmp_path, made):
    write(tmp_path, made)
    with pytest.raises(WeightsError, match=r"q\.weight: F8_E4M3, but config\.json has no quantization_config"):
        load_safetensors(tmp_path, abstract(), NAMES)


@pytest.mark.parametrize("path", COMPRESSED, ids=lambda path: path.stem)
def test_as_compressed_tensors_wrote_it(tmp_path, path):
    """Held as it is, and expanded, bit for bit what the library that wrote it says."""
    with safe_open(path, framework="numpy") as file:
        raw = {"quantization_config": json.loads(file.metadata()["quantization_config"])}
        want, head = file.get_tensor("whole.up"), file.get_tensor("head.weight")
        (tmp_path / "config.json").write_text(json.dumps(raw))
        shutil.copy(path, tmp_path / "model.safetensors")
    names = [TensorName(("up.weight",), ("up",)), TensorName(("head.weight",), ("head",))]
    shapes = {name: jax.ShapeDtypeStruct(a.shape, "float32") for name, a in (("up", want), ("head", head))}
    scheme = read_quantisation(tmp_path)
    options = {"scheme": scheme, "ignored": [r"whole\.up"]}
    np.testing.assert_array_equal(load_safetensors(tmp_path, shapes, names, **options)["up"], want)
    held = load_safetensors(tmp_path, shapes, names, quantisable={("up",), ("head",)}, **options)
    assert held["up"].dtype.itemsize == 1 and held["head"].dtype == np.float32 and "head_scale" not in held
    np.testing.assert_array_equal(Numbers(*map(np.asarray, (held["up"], held["up_scale"]))).whole(want.dtype), want)


def stored_as(tensor: np.ndarray, layout: str) -> dict[str, np.ndarray]:
    """A matrix as checkpoints of other tools store it: suffixes of its name -> tensors."""
    if layout == "modelopt":
        values, scale = quantise(tensor, tensor.shape)
        inputs = np.ones((), np.float32)
        return {"": values, "_scale": scale.reshape(()), ".input_scale": inputs, ".k_scale": inputs}
    block = {"fp8": (32, 32), "fp8_tensor": tensor.shape, "modelopt_rows": (1, tensor.shape[1])}[layout]
    values, scale = quantise(tensor, block)
    if layout == "modelopt_rows":
        return {"": values, "_scale": scale[:, 0]}
    return {"": values, "_scale_inv": scale if layout == "fp8" else scale.reshape(())}


LAYOUTS = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "modelopt_rows": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
}


def quantised_golden(directory: Path, model: str, layout: str) -> EngineConfig:
    """A tiny golden model whose linear layers and experts are stored in a layout, other tensors as they were."""
    raw = json.loads((GOLDEN / model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": LAYOUTS[layout]}))
    stored = {}
    for name, tensor in load_file(GOLDEN / model / "model.safetensors").items():
        linear = name.endswith("proj.weight") and tensor.ndim == 2
        if linear and not any(part in name for part in ("in_proj_a", "in_proj_b", "x_proj", "dt_proj", "kv_b_proj")):
            module = name.removesuffix(".weight")
            for suffix, part in stored_as(tensor, layout).items():
                stored[module + suffix if suffix.startswith(".") else name + suffix] = part
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors")
    return EngineConfig(model=str(directory), dtype="float32")


def logits(config: EngineConfig, params: dict) -> np.ndarray:
    """[40, V] of a prompt, every token of which may reach the last."""
    model, module, _, _ = read_model(config)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 40).astype(np.int32)

    def run(params):
        hidden, _ = module.apply({"params": params}, tokens, NoCache(), dense_spans(1, 40))
        return module.apply({"params": params}, hidden, method="logits")

    return np.asarray(jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(params))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("nemotron_h_moe", "modelopt"),
        ("qwen3_5_moe", "fp8"),
        pytest.param("qwen3_next", "fp8_tensor", marks=pytest.mark.slow),
        pytest.param("jamba", "modelopt_rows", marks=pytest.mark.slow),
        pytest.param("kimi_linear", "fp8", marks=pytest.mark.slow),
        pytest.param("lfm2_moe", "modelopt", marks=pytest.mark.slow),
    ],
)
def test_held_in_eight_bits_is_the_expanded_model(tmp_path, model, layout):
    """The same numbers to rounding, in less than half the memory of the weights."""
    config = quantised_golden(tmp_path, model, layout)
    expanded = replace(config, quantization="none")
    held, whole = load_model(config), load_model(expanded)
    eight = {dotted(path) for path, leaf in leaves(held.params) if leaf.dtype.itemsize == 1}
    assert len(eight) > 8 and held.num_parameters == whole.num_parameters
    for path, leaf in leaves(whole.params):
        assert leaf.dtype.itemsize >= 2
        if dotted(path) in eight:
            assert leaf.ndim >= 2
    was = sum(leaf.nbytes for path, leaf in leaves(whole.params) if dotted(path) in eight)
    assert tree_bytes(held.params) < tree_bytes(whole.params) - 0.6 * was
    np.testing.assert_allclose(logits(config, held.params), logits(config, whole.params), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.006), ("fp8", 0.025)])
def test_quantise_while_loading(kind, worst):
    """Every row within half a step of its largest number; logits of a trained model near the unquantised ones."""
    config = EngineConfig(model="demo", dtype="float32")
    rounded = replace(config, quantization=kind)
    plain, held = load_model(config), load_model(rounded)
    flat = dict(leaves(held.params))
    count = 0
    for path, leaf in leaves(plain.params):
        if flat[path].dtype == leaf.dtype:
            np.testing.assert_array_equal(flat[path], leaf)
            continue
        count += 1
        scale = np.asarray(flat[(*path[:-1], path[-1] + "_scale")])
        whole = Numbers(np.asarray(flat[path]), scale).whole(np.dtype("float32"))
        step = scale / 2 if kind == "int8" else np.maximum(np.abs(leaf) / 16, scale * 2**-10)
        assert (np.abs(whole - leaf) <= step * 1.001).all(), dotted(path)
    assert count > 8
    want = logits(config, plain.params)
    error = np.sqrt(np.mean((logits(config, held.params) - want) ** 2)) / want.std()
    assert worst / 10 < error < worst
    assert tree_bytes(held.params) < tree_bytes(plain.params) / 2


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"gptq \(bits=4\)"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes \(load_in_8bit=True\)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt \(quant_algo=NVFP4\)"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, r"modelopt \(quant_algo=MIXED"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, r"unnamed \(bits=4\)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "not of e4m3"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors with groups of several kinds, or none"),
    ],
)
def test_other_schemes_are_refused_before_any_weight_is_read(tmp_path, scheme, said):
    with pytest.raises(ConfigError, match=rf"quant_method: weights quantised by .*{said}.*are not read.*dequantize"):
        read_model(with_scheme(tmp_path, scheme))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_bits": 4}, "compressed-tensors of 4-bit int"),
        ({"symmetric": False}, "8-bit int with zero points"),
        ({"strategy": "tensor_group"}, "8-bit int with scales by tensor_group"),
        ({"type": "float"}, r"8-bit float \(format=pack-quantized\)"),
    ],
)
def test_other_kinds_of_compressed_tensors_are_refused(tmp_path, change, said):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    assert read_quantisation(written(tmp_path, scheme | {"config_groups": {"a": {"weights": weights}}})).kind == "int8"
    scheme |= {"config_groups": {"a": {"weights": weights | change}}}
    with pytest.raises(ConfigError, match=said):
        read_quantisation(written(tmp_path, scheme))
    scheme["config_groups"]["b"] = {"weights": weights}
    with pytest.raises(ConfigError, match="groups of several kinds"):
        read_quantisation(written(tmp_path, scheme))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ([1], r"config_groups\.a: must be an object"),
        ({"weights": [1]}, r"config_groups\.a\.weights: must be an object, got \[1\]"),
        ({"weights": "W8"}, r"config_groups\.a\.weights: must be an object, got 'W8'"),
        ({"weights": {"type": "int"}}, r"config_groups\.a\.weights\.num_bits: .*lacks this key"),
        (
            {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 0}},
            r"config_groups\.a\.weights\.group_size: must be at least 1",
        ),
        (
            {"weights": {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [8]}},
            r"config_groups\.a\.weights\.block_structure: must be \[rows, columns\]",
        ),
    ],
)
def test_faults_of_compressed_tensors_are_named_by_their_path(tmp_path, group, said):
    scheme = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group}}
    with pytest.raises(ConfigError, match=rf"^quantization_config\.{said}"):
        read_quantisation(written(tmp_path, scheme))


def written(directory: Path, scheme: dict, **config: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"quantization_config": scheme, **config}))
    return directory


def with_scheme(directory: Path, scheme: dict) -> EngineConfig:
    raw = json.loads((GOLDEN / "llama" / "config.json").read_text())
    written(directory, scheme, **raw)
    return EngineConfig(model=str(directory), dtype="float32")


def test_one_kind_cannot_be_asked_of_the_other(tmp_path):
    with pytest.raises(ConfigError, match="quantization: int8 of a checkpoint that is fp8 already"):
        read_model(replace(with_scheme(tmp_path, {"quant_method": "fp8"}), quantization="int8"))


def test_schemes_of_wrapped_models_are_seen(tmp_path):
    scheme = {"quant_method": "awq"}
    for raw in ({"text_config": {"quantization_config": scheme}}, {"compression_config": scheme}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match="awq"):
            read_quantisation(tmp_path)
    with pytest.raises(ConfigError, match=r"weight_block_size: must be \[rows, columns\]"):
        read_quantisation(written(tmp_path, {"quant_method": "fp8", "weight_block_size": [128]}))


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_quantisation(tmp_path) is None
    said = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mixer.conv1d"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    scheme = read_quantisation(tmp_path)
    assert scheme == Scheme("fp8", None, ("lm_head", "*.mixer.conv1d"))
    assert scheme.excludes("lm_head.weight") and scheme.excludes("layers.3.mixer.conv1d.weight")
    assert not scheme.excludes("layers.3.mixer.in_proj.weight")


def test_gguf_is_refused_by_name(tmp_path):
    file = tmp_path / "model.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path):
        with pytest.raises(ConfigError, match=r"model: .* is GGUF, .* use the Hugging Face directory"):
            read_model(EngineConfig(model=str(model)))
