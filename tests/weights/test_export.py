"""Exporting is the inverse of loading: same tensors, same shapes, same spelling."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from synthetic_checkpoint import NAMES, abstract, tensors, write

from jhybrid.errors import WeightsError
from jhybrid.weights.export import export_huggingface
from jhybrid.weights.names import TensorName
from jhybrid.weights.safetensors import load_safetensors

CONFIG = {"model_type": "synthetic", "time_step_limit": [0.0, float("inf")]}


@pytest.fixture
def params(tmp_path_factory) -> dict:
    source = tmp_path_factory.mktemp("source")
    write(source, tensors())
    return load_safetensors(source, abstract(), NAMES)


def same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_export_gives_the_checkpoint_back(tmp_path, params):
    """Also the convolution's axis of length 1, and infinity in the configuration."""
    export_huggingface(tmp_path, CONFIG, params, NAMES)
    same(load_file(tmp_path / "model.safetensors"), tensors())
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_bfloat16_is_kept(tmp_path, params):
    export_huggingface(tmp_path, CONFIG, jax.tree.map(lambda a: a.astype("bfloat16"), params), NAMES)
    same(load_file(tmp_path / "model.safetensors"), tensors("bfloat16"))


def test_memory_order_does_not_show(tmp_path, params):
    export_huggingface(tmp_path, CONFIG, jax.tree.map(np.asfortranarray, params), NAMES)
    same(load_file(tmp_path / "model.safetensors"), tensors())


def test_shards_load_back(tmp_path, params):
    export_huggingface(tmp_path, CONFIG, params, NAMES, shard_bytes=200)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(a.nbytes for a in load_file(f).values()) <= 200 for f in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors().values())
    again = load_safetensors(tmp_path, abstract(), NAMES)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_first_of_alternative_names_is_written(tmp_path, params):
    fused = TensorName(("experts.up",), ("experts", "up"), required=False)
    export_huggingface(tmp_path / "each", CONFIG, params, [*NAMES, fused])
    assert "experts.up" not in load_file(tmp_path / "each" / "model.safetensors")
    export_huggingface(tmp_path / "fused", CONFIG, params, [fused, *NAMES])
    written = load_file(tmp_path / "fused" / "model.safetensors")
    assert written["experts.up"].shape == (2, 5, 4)
    assert "experts.0.up.weight" not in written


def test_parameter_without_a_name_is_not_dropped(tmp_path, params):
    with pytest.raises(AssertionError, match="exports all of norm"):
        export_huggingface(tmp_path, CONFIG, params, [n for n in NAMES if n.path != ("norm",)])


def test_directory_with_weights_is_refused(tmp_path, params):
    export_huggingface(tmp_path, CONFIG, params, NAMES)
    with pytest.raises(WeightsError, match=r"already has model\.safetensors"):
        export_huggingface(tmp_path, CONFIG, params, NAMES)
