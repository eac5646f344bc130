"""Models spread over eight virtual CPU devices, in processes of their own, against one device and Hugging Face."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jhybrid import EngineConfig
from jhybrid.errors import ConfigError
from jhybrid.mesh import Layout, Piece, shards
from jhybrid.weights.load import mesh_of
from tests.conftest import GOLDEN

HERE = Path(__file__).parent
SHARDS = {  # of heads 6 (2 of K and V, 2 groups), 3 or 4; experts 6 or 8; channels 96 or 48
    "bailing_hybrid": (2, 3),
    "bamba": (3,),
    "falcon_h1": (2, 6),
    "falcon_h1_norm": (6,),
    "falcon_mamba": (8,),
    "granite_dense": (6,),
    "granite_moe": (3,),
    "granite_rope": (2, 3),
    "jamba": (6,),
    "kimi_linear": (2, 3),
    "lfm2": (6,),
    "lfm2_moe": (8,),
    "lfm3": (2, 6),
    "lfm3_plain": (6,),
    "llama": (6,),
    "mamba": (8,),
    "mamba2": (6,),
    "nemotron_h_dense": (2, 6),
    "nemotron_h_latent": (8,),
    "nemotron_h_moe": (2, 6),
    "olmo_hybrid": (2, 3, 4),
    "qwen3": (6,),
    "qwen3_5": (6,),
    "qwen3_5_moe": (3,),
    "qwen3_moe": (2, 6),
    "qwen3_next": (3, 6),
    "zamba2": (2,),
    "zamba2_rope": (6,),
}
QUICK = {("nemotron_h_moe", 2), ("nemotron_h_dense", 6)}


def on_eight_devices(script: str, *arguments: str) -> str:
    folders = [HERE.parent, HERE.parent / "server", HERE / "models"]
    more = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    more["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=[] if (name, count) in QUICK else pytest.mark.slow)
        for name, counts in SHARDS.items()
        for count in counts
    ],
)
def test_every_family_gives_hugging_faces_numbers(name: str, count: int):
    """Chunked prefill beside another sequence, decode, and the positive control."""
    said = on_eight_devices("models/on_mesh.py", name, str(count))
    assert not said.startswith("0 of"), said


def test_there_are_shards_for_every_golden():
    assert SHARDS.keys() == {path.parent.name for path in GOLDEN.glob("*/goldens.npz")}


def model_with_even_vocabulary(folder: Path, golden: str) -> str:
    """A directory of a golden's config, but with a vocabulary that divides evenly, for `load_format` dummy."""
    raw = json.loads((GOLDEN / golden / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"vocab_size": 264}))
    return str(folder)


PREFIXES, TIERS = {"enable_prefix_caching": True}, {"enable_prefix_caching": True, "host_cache_bytes": 1 << 22}
ENGINES = [
    ("llama", 2, {}),
    ("nemotron_h_moe", 2, PREFIXES),
    ("nemotron_h_moe", 4, {"quantization": "int8"}),
    ("granite_rope", 3, TIERS),
    ("llama", 2, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ("qwen3_next", 3, PREFIXES),
]


@pytest.mark.parametrize(
    ("golden", "count", "options"),
    [pytest.param(*engine, marks=[] if engine is ENGINES[0] else pytest.mark.slow) for engine in ENGINES],
)
@pytest.mark.timeout(900)
def test_an_engine_on_a_mesh_answers_as_one_on_a_device(
    tmp_path: Path, golden: str, count: int, options: dict[str, Any]
):
    options = {"load_format": "dummy"} | options
    model = model_with_even_vocabulary(tmp_path, golden)
    said = json.loads(on_eight_devices("engine_on_mesh.py", model, str(count), json.dumps(options)))
    if "enable_prefix_caching" in options:
        assert any(said["cached_tokens"])
    held = {kind: said["shared"][kind] / said["alone"][kind] for kind in ("weights", "kv")}
    raw = json.loads((GOLDEN / golden / "config.json").read_text())
    divides = raw["num_attention_heads"] % count == 0 and raw["num_key_value_heads"] > 1
    assert 1 / count <= held["weights"] < 1, held
    assert held["kv"] == (1 / min(count, raw["num_key_value_heads"]) if divides else 1), held
    width = raw["hidden_size"]
    assert "2,264" in said["gathered"], "scores are"
    assert f"264,{width}" not in said["gathered"], "and the head is not"


def test_rows_are_held_shard_by_shard_and_groups_more_than_once():
    layout = Layout(4, pieces=(Piece(4, 2), Piece(2, 3, copies=2), Piece(4)))
    rows = np.arange(8 + 6 + 4)
    first, second, third, last = layout.arranged(rows).reshape(4, -1).tolist()
    assert first == [0, 1, 8, 9, 10, 14]
    assert second == [2, 3, 8, 9, 10, 15]
    assert third == [4, 5, 11, 12, 13, 16]
    assert last == [6, 7, 11, 12, 13, 17]
    assert layout.held == 4 * 6
    assert Layout(1, pieces=layout.pieces).order is None


def test_without_a_mesh_nothing_is_shared_out():
    assert shards("heads", 8, 2) == 1


def test_more_shards_than_devices_are_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 4096 is more than the \d+ devices here"):
        mesh_of(EngineConfig(tensor_parallel_size=4096))
    with pytest.raises(ConfigError, match="tensor_parallel_size: must be a positive integer"):
        EngineConfig(tensor_parallel_size=0)
