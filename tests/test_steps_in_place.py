"""Whole steps of each kind of mixer, at widths that people run, update the caches in place: no copy of a whole array.

The tests of single ops (kernels_pallas/test_in_place.py) do not see what XLA makes of an op and what is around it. A
copy in the loop over sequences changes no result, and makes a step a hundred times slower.
"""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jhybrid import Engine, EngineConfig
from kernels_pallas.program_text import whole_copies

MODELS = Path(__file__).parent.parent / "benchmarks" / "models"
KINDS = (
    "mamba1_156m",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("attention_150m", "granite_h_156m", "gated_delta_144m", "kda_150m", "short_conv_151m")
    ),
)


def shortened(config: dict[str, Any], layers: int = 4) -> dict[str, Any]:
    """A config of a few layers, of every kind that the model has, and of few tokens."""
    kinds = config.get("layer_types", [])
    first = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 2) - 2  # with two of the first kind
    cut = {key: value[first : first + layers] for key, value in config.items() if key.endswith("layer_types")}
    return config | cut | {"num_hidden_layers": layers, "vocab_size": 512}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_copy_no_cache(kind: str, tmp_path: Path) -> None:
    config = json.loads((MODELS / kind / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shortened(config)))
    limits = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16, "dtype": "float32"}
    settings = EngineConfig(model=str(tmp_path), load_format="dummy", **limits)  # pyright: ignore[reportArgumentType]
    with Engine(settings) as engine:
        shapes = {array.shape for array in jax.tree.leaves(engine.runner.cache)}
        texts = {str(bucket): step.as_text() for bucket, step in engine.runner._programs.steps.items()}
    dims = [",".join(map(str, shape)) for shape in shapes]
    assert dims and any(f"[{each}]" in text for each in dims for text in texts.values())
    copies = {bucket: sum(whole_copies(text, shape) for shape in shapes) for bucket, text in texts.items()}
    assert not any(copies.values()), copies
