"""Native checkpoints: what is saved is what is loaded, and what does not fit is named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.errors import WeightsError
from jhybrid.weights.orbax import OWN_FILES, PARAMS_DIR, is_orbax, load_orbax, save_orbax

CONFIG = {"model_type": "nemotron_h", "hidden_size": 4}


def tree() -> dict:
    key = jax.random.key(0)
    return {
        "embed": {"weight": jax.random.normal(key, (6, 4), jnp.bfloat16)},
        "layers_0": {"A_log": jnp.arange(3, dtype=jnp.float32), "norm": {"weight": jnp.full((4,), 0.3, jnp.float32)}},
    }


def abstract(params: dict) -> dict:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)


def test_loaded_equals_saved_bit_for_bit(tmp_path):
    params = tree()
    save_orbax(tmp_path, CONFIG, params, {"steps": 7})
    assert is_orbax(tmp_path)
    loaded = load_orbax(tmp_path, abstract(params))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert json.loads((tmp_path / "metadata.json").read_text()) == {"steps": 7}


def test_dtype_is_the_targets(tmp_path):
    params = tree()
    save_orbax(tmp_path, CONFIG, params, {})
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), params)
    loaded = load_orbax(tmp_path, target)
    assert loaded["embed"]["weight"].dtype == jnp.float32
    np.testing.assert_array_equal(loaded["embed"]["weight"], params["embed"]["weight"].astype(jnp.float32))


def test_saving_again_replaces(tmp_path):
    params = tree()
    save_orbax(tmp_path, CONFIG, params, {})
    changed = jax.tree.map(lambda a: a + 1, params)
    save_orbax(tmp_path, CONFIG, changed, {})
    jax.tree.map(np.testing.assert_array_equal, load_orbax(tmp_path, abstract(params)), changed)


def test_every_misfit_is_named_at_once(tmp_path):
    params = tree()
    save_orbax(tmp_path, CONFIG, params, {})
    target = abstract(params)
    del target["layers_0"]["A_log"]
    target["layers_0"]["D"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    target["embed"]["weight"] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with pytest.raises(WeightsError) as caught:
        load_orbax(tmp_path, target)
    message = str(caught.value)
    assert "missing: layers_0.D (3,)" in message
    assert "unexpected: layers_0.A_log (3,)" in message
    assert "misshapen: embed.weight is (6, 4), the model has (8, 4)" in message


def test_a_damaged_tree_is_refused(tmp_path):
    params = tree()
    save_orbax(tmp_path, CONFIG, params, {})
    files = sorted((tmp_path / PARAMS_DIR).rglob("d/*"), key=lambda f: f.stat().st_size)
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(WeightsError, match="cannot be read"):
        load_orbax(tmp_path, abstract(params))


@pytest.mark.parametrize("file", OWN_FILES)
def test_an_incomplete_tree_says_what_is_missing(tmp_path, file):
    params = {"a": jnp.ones(2)}
    save_orbax(tmp_path, {}, params, {})
    (tmp_path / PARAMS_DIR / file).unlink()
    assert is_orbax(tmp_path)
    with pytest.raises(WeightsError, match=f"lacks {file}"):
        load_orbax(tmp_path, abstract(params))


def test_other_directories_are_not_native(tmp_path):
    assert not is_orbax(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_orbax(tmp_path)
