"""Every family's names, on checkpoints that transformers wrote: loading and exporting gives the same file back."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jhybrid.models import abstract_params, family_for, read_config
from jhybrid.weights.export import export_huggingface
from jhybrid.weights.safetensors import load_safetensors

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))


def test_the_goldens_are_there():
    assert len(MODELS) >= 10


@pytest.mark.parametrize("model", MODELS)
def test_round_trip_of_a_transformers_checkpoint(tmp_path, model):
    config = read_config(GOLDEN / model)
    family = family_for(config)
    names = family.weight_names(config)
    params = load_safetensors(GOLDEN / model, abstract_params(family.module(config, jnp.dtype("float32"))), names)
    export_huggingface(tmp_path, json.loads((GOLDEN / model / "config.json").read_text()), params, names)
    original, exported = (load_file(d / "model.safetensors") for d in (GOLDEN / model, tmp_path))
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)
