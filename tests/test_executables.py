"""Executables on disk: found again they are the same, and whatever else is found there is made anew."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from jhybrid import Engine, EngineConfig, Request, SamplingParams, compilations, executables, programs
from jhybrid.executables import Compiled, Executables
from tests.conftest import GOLDEN

X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
VALUE = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)


def scaled(factor: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * factor, jnp.zeros((3,)) + x.sum()


def get(directory: Path | None, factor: float = 2.0) -> tuple[Compiled, int, int]:
    """The function as a new process would get it, and how many were traced and compiled for that."""
    store = Executables(directory)
    found = store.get("scaled", partial(scaled, factor), (X,), donate=(0,), result=(0, 0), facts=(factor,))
    return found, store.traced, store.compiled


def check(found: Compiled, factor: float = 2.0) -> None:
    x = jnp.array(VALUE)
    y, total = found(x)
    np.testing.assert_array_equal(y, VALUE * factor)
    assert total[0] == VALUE.sum()
    assert x.is_deleted(), "no longer donated"


def test_a_second_start_traces_and_compiles_nothing(tmp_path: Path):
    first, *made = get(tmp_path)
    assert made == [1, 1]
    second, *made = get(tmp_path)
    assert made == [0, 0]
    for found in (first, second):
        check(found)
    assert first.memory_analysis().temp_size_in_bytes == second.memory_analysis().temp_size_in_bytes
    check(get(tmp_path)[0])


def test_other_facts_are_another_function(tmp_path: Path):
    get(tmp_path)
    found, *made = get(tmp_path, 3.0)
    assert made == [1, 1]
    check(found, 3.0)


def test_other_source_is_traced_and_compiled_only_if_the_program_changed(tmp_path: Path, monkeypatch):
    get(tmp_path)
    monkeypatch.setattr(executables, "source_digest", lambda: "edited")
    found, *made = get(tmp_path)
    assert made == [1, 0]
    check(found)
    assert get(tmp_path)[1:] == (0, 0)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (executables.jax, "__version__", "9.9"),
        (executables, "compiler_flags", lambda: {"XLA_FLAGS": "--some"}),
        (executables, "processor", lambda: ("other", [])),
    ],
)
def test_another_compiler_or_machine_compiles_anew(tmp_path: Path, monkeypatch, owner, name: str, value):
    get(tmp_path)
    monkeypatch.setattr(owner, name, value)
    assert get(tmp_path)[1:] == (1, 1)


def test_the_digest_covers_the_kernels(tmp_path: Path, monkeypatch):
    (tmp_path / "op.py").write_text("a = 1")
    monkeypatch.setattr(kernels_pallas, "__path__", [str(tmp_path)])
    digests = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "op.py").write_text(text)
        executables.source_digest.cache_clear()
        digests.add(executables.source_digest())
    executables.source_digest.cache_clear()
    assert len(digests) == 2


@pytest.mark.parametrize("suffix", [".bin", ".key"])
@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "another's"])
def test_a_damaged_file_is_a_warning_and_made_anew(tmp_path: Path, caplog, suffix: str, damage: str):
    get(tmp_path)
    [path] = (tmp_path / "executables").glob(f"*{suffix}")
    content = path.read_bytes()
    if damage == "another's":
        get(tmp_path, 3.0)
        [other] = (p for p in (tmp_path / "executables").glob(f"*{suffix}") if p != path)
        path.write_bytes(other.read_bytes())
    else:
        changed = bytes((content[-1] ^ 1,))
        path.write_bytes({"cut": content[:-5], "empty": b"", "changed": content[:-1] + changed}[damage])
    with caplog.at_level(logging.WARNING, "jhybrid"):
        found, traced, _ = get(tmp_path)
    assert traced == 1
    assert path.name in caplog.text
    check(found)
    caplog.clear()
    assert get(tmp_path)[1:] == (0, 0)
    assert not caplog.records


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    found, *made = get(tmp_path / "file")
    assert made == [1, 1]
    assert "every start compiles anew" in caplog.text
    check(found)
    check(get(None)[0])


def test_many_writers_at_once(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        for found, *_ in pool.map(lambda _: get(tmp_path), range(8)):
            check(found)
    assert sorted(p.suffix for p in (tmp_path / "executables").iterdir()) == [".bin", ".key"]
    assert get(tmp_path)[1:] == (0, 0)


def test_jax_keeps_nothing_itself_while_an_engine_starts(tmp_path: Path):
    """On CPU, what JAX reads from its own cache cannot be written a second time."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, (str(tmp_path / "jax"), 0.0), strict=True):
            jax.config.update(name, value)
        with compilations.starting():
            jax.jit(partial(scaled, 5.0)).lower(X).compile()
        assert not (tmp_path / "jax").exists() or not list((tmp_path / "jax").iterdir())
        assert jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_warm_engine_traces_nothing_and_gives_the_same_bits(tmp_path: Path, monkeypatch):
    config = EngineConfig(
        str(GOLDEN / "nemotron_h_dense"),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        chunk_size=16,
        compilation_cache_dir=str(tmp_path),
    )
    sampling = SamplingParams(
        max_tokens=12, temperature=0.8, seed=3, logprobs=5, prompt_logprobs=2, logit_bias={5: 2.0}
    )
    requests = [Request(prompt_token_ids=list(range(1, n)), sampling=sampling) for n in (5, 30)]
    with Engine(config) as cold:
        expected = cold.generate(requests)
        memory = cold.runner.memory

    def traced(*_: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(programs, "step", traced)
    with Engine(config) as warm:
        before = jax.tree.leaves((warm.runner.cache, warm.runner.sampler))
        assert warm.generate(requests) == expected
        assert all(array.is_deleted() for array in before)
        assert warm.runner.memory == dataclasses.replace(memory, available=warm.runner.memory.available)
        assert warm.compilations_after_ready == 0
