"""`jhybrid convert`: there and back gives the same numbers, quantised or not; both forms load to the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError
from jhybrid.inspection import inspect_model
from jhybrid.weights.convert import convert
from jhybrid.weights.load import load_model
from jhybrid.weights.orbax import is_orbax
from jhybrid.weights.places import leaves
from jhybrid.weights.quantised import read_quantisation

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = (
    "nemotron_h_moe",
    "qwen3_next",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("kimi_linear", "zamba2", "olmo_hybrid")),
)


def params_of(directory: Path, **options: str) -> dict:
    return load_model(EngineConfig(model=str(directory), dtype="float32", **options)).params


def equal(left: dict, right: dict) -> None:
    assert dict(leaves(left)).keys() == dict(leaves(right)).keys()
    for path, a in leaves(left):
        assert a.dtype == dict(leaves(right))[path].dtype, path
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(tmp_path, model):
    source, native, back = tmp_path / "source", tmp_path / "native", tmp_path / "back"
    shutil.copytree(GOLDEN / model, source, copy_function=shutil.copyfile)
    named = Path("additional_chat_templates", "tool_use.jinja")
    (source / named).parent.mkdir()
    (source / named).write_text("{{ tools }}")
    facts = convert(str(source), native)
    assert facts["form"] == "orbax" and facts["quantization"] is None and is_orbax(native)
    equal(params_of(native), params_of(source))
    assert convert(str(native), back)["form"] == "huggingface"
    original, written = (load_file(d / "model.safetensors") for d in (source, back))
    assert original.keys() == written.keys()
    assert (native / named).read_text() == (back / named).read_text() == "{{ tools }}"
    for name, tensor in original.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    with pytest.raises(ConfigError, match="has weights already"):
        convert(str(native), back)


def test_a_destination_that_is_no_directory_is_refused(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("")
    link.symlink_to("gone")
    for destination in (file, file / "sub", link):
        with pytest.raises(ConfigError, match=r"^destination: .*is no directory and cannot be made one"):
            convert(str(GOLDEN / "llama"), destination)


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_quantised_stays_so(tmp_path, model, kind):
    """Rounded once, on the way to the first form; the config says so, and inspection counts the bytes by it alone."""
    native, back = tmp_path / "native", tmp_path / "back"
    assert (
        convert(str(GOLDEN / model), native, quantization=kind)["quantization"]
        == {"int8": "int", "fp8": "float"}[kind] + "-quantized"
    )
    rounded = params_of(GOLDEN / model, quantization=kind)
    equal(params_of(native), rounded)
    convert(str(native), back)
    scheme = read_quantisation(back)
    assert scheme is not None and scheme.kind == kind and scheme.block is None
    equal(params_of(back), rounded)
    equal(params_of(back, quantization="none"), params_of(native, quantization="none"))
    held = sum(leaf.nbytes for _, leaf in leaves(rounded))
    for directory in (native, back):
        facts = inspect_model(EngineConfig(model=str(directory), dtype="float32", max_model_len=64))
        assert facts["memory"]["weights"] == held
        with pytest.raises(ConfigError, match="already"):
            params_of(directory, quantization={"int8": "fp8", "fp8": "int8"}[kind])


def test_rounded_from_a_native_checkpoint(tmp_path):
    convert(str(GOLDEN / "nemotron_h_moe"), tmp_path)
    equal(params_of(tmp_path, quantization="int8"), params_of(GOLDEN / "nemotron_h_moe", quantization="int8"))


SHARDED = """
import json, sys
from pathlib import Path
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jhybrid.config import EngineConfig
from jhybrid.models import abstract_params, quantisable_params
from jhybrid.weights.convert import convert
from jhybrid.weights.load import load_params, read_model
from jhybrid.weights.orbax import save_orbax
from jhybrid.weights.places import leaves

source, out = sys.argv[1], Path(sys.argv[2])
mesh = Mesh(jax.devices(), ("x",))
assert len(jax.devices()) == 4

def load(directory):
    config = EngineConfig(model=str(directory), dtype="float32", quantization="int8")
    model, module, _, _ = read_model(config)
    may = quantisable_params(module)
    def placed(path, leaf):
        cut = path in may and leaf.shape[-2] % 4 == 0
        spec = P(*[None] * (len(leaf.shape) - 2), "x", None) if cut else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    from jhybrid.weights.places import nest
    shapes = nest({path: placed(path, leaf) for path, leaf in leaves(abstract_params(module))})
    return load_params(config, model, module, shapes)

whole = load(source)
convert(source, out / "plain")
save_orbax(out / "sharded", json.loads((Path(source) / "config.json").read_text()), whole, {})
for directory in (out / "plain", out / "sharded"):
    again = load(directory)
    assert dict(leaves(whole)).keys() == dict(leaves(again)).keys()
    for path, a in leaves(whole):
        b = dict(leaves(again))[path]
        assert a.dtype == b.dtype and (a == b).all(), path
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (path, a.sharding, b.sharding)
shards = {len({str(s.index) for s in a.addressable_shards}) for path, a in leaves(whole) if path[-1].endswith("_scale")}
print(sorted(shards))
"""


def test_sharding_is_restored(tmp_path):
    """Four devices: rows of weights, and of their scales, lie where they are asked for, from either kind of file."""
    source = str(GOLDEN / "qwen3_5_moe")
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, source, str(tmp_path)],
        capture_output=True,
        text=True,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PATH": ""}
        | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert 4 in json.loads(run.stdout)
