"""Bundles: an engine that loads one compiles nothing and answers alike; whatever does not fit is refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from jhybrid import Engine, EngineConfig, Request, SamplingParams, programs
from jhybrid.bundle import MANIFEST, BundleWriter
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
    report = fit.write(BundleWriter(folder, fit.mesh))
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
        ({"model": str(GOLDEN / "nemotron_h_moe")}, "model_config: "),
    ],
)
def test_a_mismatch_is_refused_with_the_fields_that_differ(made: Path, changes: dict, named: str):
    with pytest.raises(ConfigError, match=r"bundle: .*was made for something else") as refusal:
        Engine(dataclasses.replace(CONFIG, bundle=str(made), **changes))
    assert named in str(refusal.value)


def test_another_version_is_a_mismatch(made: Path, tmp_path: Path):
    shutil.copytree(made, tmp_path / "old")
    manifest = json.loads((made / MANIFEST).read_text())
    manifest["identity"]["jaxlib"] = "0.1"
    (tmp_path / "old" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"jaxlib: '0.1' there"):
        Engine(dataclasses.replace(CONFIG, bundle=str(tmp_path / "old")))


def test_what_is_damaged_is_refused_by_name(made: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="is no bundle"):
        Engine(dataclasses.replace(CONFIG, bundle=str(tmp_path)))
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    [file] = broken.glob("*ragged*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{file.name} cannot be loaded: it is cut short or changed"):
        Engine(dataclasses.replace(CONFIG, bundle=str(broken)))


def test_a_plan_that_is_too_much_here_is_refused_with_numbers(made: Path):
    with pytest.raises(OutOfMemoryError, match=r"made for \d+ B .*weights \d+ B.*, \d+ B are available"):
        Engine(dataclasses.replace(CONFIG, bundle=str(made), memory_fraction=1e-6))


def test_what_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(programs.Programs, "compile", lambda *_: pytest.fail("compiled"))
    site = dataclasses.replace(Site.here(CONFIG), memory=1_000_000)
    with pytest.raises(OutOfMemoryError, match=r"\d+ B are available"):
        Fit(CONFIG, site).report()


def test_a_folder_with_something_in_it_is_not_written_to(made: Path):
    with pytest.raises(ConfigError, match=r"output: .* is not empty"):
        BundleWriter(made, None)
