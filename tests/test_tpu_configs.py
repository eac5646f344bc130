"""The settings for slices of TPUs: they load, name what exists, and go together."""

import math
from pathlib import Path

import pytest

from jhybrid.batch import make_buckets
from jhybrid.cli import Compile, Serve
from jhybrid.errors import ConfigError
from jhybrid.settings import Settings
from jhybrid.slices import FOLDER, Slice, read_slice
from kernels_pallas.chips import CHIPS
from kernels_pallas.deviceless import devices_of

CONFIGS = sorted(FOLDER.glob("*.toml"))
DEVICES_OF_A_CHIP = {"tpu7x": 2}
SCALAR_MEMORY = 0.9 * 2**20  # that a kernel's page table may take


def test_there_is_one_for_each_slice_that_people_rent():
    wanted = {"v5e-1", "v5e-4", "v5e-8", "v5p-8", "v6e-1", "v6e-4", "v6e-8", "tpu7x-8"}
    assert {path.stem for path in CONFIGS} == wanted
    assert {read_slice(path).chip.name for path in CONFIGS} == CHIPS.keys()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_loads_and_its_sizes_go_together(path: Path):
    engine = Compile.of(["--config", str(path)]).engine
    slice_ = read_slice(path)
    assert slice_ is not None
    kind, shape = slice_.topology.split(":")
    assert kind == path.stem.split("-")[0]
    chips = math.prod(map(int, shape.split("x")))
    assert engine.tensor_parallel_size == chips * DEVICES_OF_A_CHIP.get(kind, 1)
    buckets = make_buckets(engine.max_num_seqs, engine.max_num_batched_tokens)
    assert max(b.seqs for b in buckets if b.kind == "decode") == engine.max_num_seqs <= engine.max_num_batched_tokens
    assert engine.max_model_len is not None
    assert 4 * engine.max_num_seqs * engine.max_model_len // engine.page_size < SCALAR_MEMORY
    settings = Settings(Serve, flags_only=("config", "print_config", "json"), secret=("api_key",))
    settings.read_file(path)  # as `jhybrid serve --config` reads it
    assert settings.defaults().engine == engine


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_compiler_knows_its_devices(path: Path):
    pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it")
    slice_ = read_slice(path)
    assert slice_ is not None
    devices = devices_of(slice_.topology)
    assert len(devices) == Compile.of(["--config", str(path)]).engine.tensor_parallel_size
    assert devices[0].device_kind in slice_.chip.kinds


def test_a_slice_that_is_not_understood_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="topology: 'v9:2x2' begins with none of v5e, v5p, v6e, tpu7x"):
        _ = Slice("v9:2x2").chip
    (tmp_path / "a.toml").write_text('[slice]\nchips = "v5e"\n')
    with pytest.raises(ConfigError, match=r"slice: \{'chips': 'v5e'\}"):
        read_slice(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text("page_size = 8\n")
    assert read_slice(tmp_path / "b.toml") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_slice(tmp_path / "missing.toml")
