"""Bundles: an engine that loads one compiles nothing and answers alike; whatever does not fit is refused by name."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jhybrid import Engine, EngineConfig, Request, SamplingParams, programs
from jhybrid.bundle import MANIFEST, BundleWriter, Manifest
from jhybrid.cache.arrays import MemoryPlan
from jhybrid.errors import ConfigError, OutOfMemoryError
from jhybrid.executables import Executables
from jhybrid.fit import Fit, Site
from tests.conftest import GOLDEN

CONFIG = EngineConfig(
    str(GOLDEN / "nemotron_h_dense"),
    dtype="float32",
    max_model_len=64,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    chunk_size=16,
)
SAMPLING = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=5, prompt_logprobs=2, logit_bias={5: 2.0})
REQUESTS = [Request(prompt_token_ids=list(range(1, n)), sampling=SAMPLING) for n in (5, 30)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "new"
    fit = Fit(CONFIG, Site.here(CONFIG))
    report = fit.write(folder)
    assert report["fits"] == {"sequences": 1, "tokens": 64}
    assert {step["bucket"] for step in report["steps"]} == {"decode[T=1,S=1]", "ragged[T=16,S=1]"}
    assert all(step["updated_in_place"] >= report["memory"]["kv"] for step in report["steps"])
    return folder


def test_an_engine_with_a_bundle_compiles_nothing_and_answers_alike(made: Path, monkeypatch):
    with Engine(CONFIG) as engine:
        expected = engine.generate(REQUESTS)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(programs, "step", refuse)
    monkeypatch.setattr(Executables, "_make", refuse)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with Engine(dataclasses.replace(CONFIG, bundle=str(made), compilation_cache_dir="")) as engine:
        assert (engine.runner.executables.traced, engine.runner.executables.compiled) == (0, 0)
        assert engine.generate(REQUESTS) == expected
        assert engine.compilations_after_ready == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"page_size": 32}, "page_size: 16 there, 32 here"),
        (
            {"max_num_seqs": 2, "ssm_impl": "xla"},
            "max_num_seqs: 1 there, 2 here; ssm_impl: 'auto' there, 'xla' here",
        ),
        ({"host_cache_bytes": 1 << 20, "enable_prefix_caching": True}, "host_cache: False there, True here"),
        ({"model": str(GOLDEN / "nemotron_h_moe")}, "; model_config.moe: None there, MoeSpec here);"),
        ({"model": str(GOLDEN / "llama")}, "(model_config: NemotronHConfig there, LlamaConfig here);"),
    ],
)
def test_a_mismatch_is_refused_with_the_fields_that_differ(made: Path, changes: dict, named: str):
    with pytest.raises(ConfigError, match=r"bundle: .*was made for something else") as refusal:
        Engine(dataclasses.replace(CONFIG, bundle=str(made), **changes))
    assert named in str(refusal.value)


def test_another_version_is_a_mismatch_and_so_is_a_part_of_the_model(made: Path, tmp_path: Path):
    manifest = json.loads((made / MANIFEST).read_text())
    manifest["identity"] |= {"jaxlib": "'0.1'", "model_config.mamba.num_heads": "8"}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        ConfigError, match=r"\(model_config.mamba.num_heads: 8 there, 6 here; jaxlib: '0.1' there, .*\);"
    ):
        Engine(dataclasses.replace(CONFIG, bundle=str(tmp_path)))


def test_a_file_that_is_damaged_is_refused_by_name(made: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    [file] = broken.glob("*ragged*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        ConfigError, match=rf"{file.name} cannot be loaded: it is cut short or changed; compile it anew"
    ):
        Engine(dataclasses.replace(CONFIG, bundle=str(broken)))


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ((), None, "No such file or directory"),
        ((), b"", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ((), b"\xff", "Invalid JSON: "),
        ((), b"[]", "Input should be an object"),
        (("form",), 1, "form: Input should be 2"),
        (("programs",), ["allocate"], "programs: Input should be an object"),
        (("programs", "allocate"), {}, "programs.allocate.made_for: Field required"),
        (
            ("programs", "allocate", "file"),
            "../b1/allocate.bin",
            "programs.allocate.file: Extra inputs are not permitted",
        ),
        (("memory", "kv"), "lots", "memory.kv: Input should be a valid integer"),
        (("memory", "pages"), 1, "memory.pages: Unexpected keyword argument"),
        (("identity", "python"), None, "identity.python: Input should be a valid string"),
    ],
)
def test_a_manifest_that_is_missing_or_damaged_is_refused(made: Path, tmp_path: Path, path, value, why: str):
    if path:
        part = manifest = json.loads((made / MANIFEST).read_text())
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        value = json.dumps(manifest).encode()
    if value is not None:
        (tmp_path / MANIFEST).write_bytes(value)
    with pytest.raises(ConfigError) as refusal:
        Manifest.read(tmp_path)
    assert str(refusal.value).startswith(
        f"bundle: {tmp_path} is no bundle that this version can load ({MANIFEST}: {why}"
    )
    assert str(refusal.value).endswith("; compile it anew with `jhybrid compile --output`")


def test_the_rows_of_the_sampler_are_the_engines_whatever_the_manifest_says(made: Path, tmp_path: Path):
    shutil.copytree(made, tmp_path / "changed")
    manifest = json.loads((made / MANIFEST).read_text())
    manifest["memory"]["num_rows"] = -7
    (tmp_path / "changed" / MANIFEST).write_text(json.dumps(manifest))
    with Engine(dataclasses.replace(CONFIG, bundle=str(tmp_path / "changed"))) as engine:
        assert len(engine.generate(REQUESTS)) == len(REQUESTS)


def test_a_plan_that_is_too_much_here_is_refused_with_numbers(made: Path):
    with pytest.raises(OutOfMemoryError, match=r"made for \d+ B .*weights \d+ B.*, \d+ B are available"):
        Engine(dataclasses.replace(CONFIG, bundle=str(made), memory_fraction=1e-6))


def test_what_does_not_fit_is_refused_before_anything_is_compiled_and_leaves_nothing(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(programs.Programs, "compile", lambda *_: pytest.fail("compiled"))
    site = dataclasses.replace(Site.here(CONFIG), memory=1_000_000)
    with pytest.raises(OutOfMemoryError, match=r"\d+ B are available"):
        Fit(CONFIG, site).write(tmp_path / "new" / "bundle")
    assert not any(tmp_path.iterdir())


def _program(writer: BundleWriter) -> None:
    writer.get("one", lambda: jnp.ones(1), (), result=0)


PLAN = MemoryPlan(*range(9))


def test_a_full_disk_is_an_error_of_the_output_and_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write_bytes", "write_text"):
        with (
            pytest.raises(ConfigError, match=r"output: .*/bundle cannot be written: .*No space left on device"),
            BundleWriter(tmp_path / "bundle", None) as writer,
            monkeypatch.context() as patched,
        ):
            patched.setattr(Path, name, full)
            _program(writer)
            writer.close({}, PLAN)
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("after_the_check", [False, True])
def test_of_two_writers_at_once_the_second_is_refused(tmp_path: Path, monkeypatch, after_the_check: bool):
    into = tmp_path / "bundle"
    with (
        pytest.raises(ConfigError, match=r"output: .* (is not empty|cannot be written: .*Directory not empty)"),
        BundleWriter(into, None) as first,
        BundleWriter(into, None) as second,
    ):
        _program(second)
        assert not into.exists()
        first.close({"by": "first"}, PLAN)
        if after_the_check:
            monkeypatch.setattr(second, "_refuse_content", lambda: None)
        second.close({"by": "second"}, PLAN)
    assert Manifest.read(into) == Manifest(form=2, identity={"by": "first"}, memory=PLAN, programs={})
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", MANIFEST]


def test_what_a_killed_writer_leaves_hinders_no_other(tmp_path: Path):
    into, link = tmp_path / "bundle", tmp_path / "link"
    into.mkdir()  # an empty folder will do, and a link to one
    link.symlink_to(into)
    _program(BundleWriter(into, None).__enter__())
    with BundleWriter(link, None) as writer:
        writer.close({}, PLAN)
    assert Manifest.read(into) == Manifest.read(link)
    [left] = tmp_path.glob("bundle.partial-*")
    assert [file.name for file in left.iterdir()] == ["one.bin"]


def test_a_folder_that_is_not_new_is_not_written_to(made: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mount")
    monkeypatch.chdir(tmp_path)
    for folder, why in [
        (made, f"{made} is not empty; name a new folder"),
        (Path(""), ". is the working directory; name a new folder"),
        (Path("mount"), "mount is a mount point; name a new folder in it"),
        (Path("file"), "file cannot be written: [Errno 20] Not a directory: "),
        (Path("file/bundle"), "file/bundle cannot be written: [Errno 20] Not a directory: "),
    ]:
        with pytest.raises(ConfigError) as refusal, BundleWriter(folder, None):
            pass
        assert str(refusal.value).startswith(f"output: {why}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_bundle_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="bundle: '' names no folder"):
        dataclasses.replace(CONFIG, bundle="")
