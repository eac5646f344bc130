"""Fit: the demo model's steps compiled for GPUs that are not there. Needs the `gpu-compile` extra."""

import dataclasses
import re

import pytest

from jhybrid.config import EngineConfig
from jhybrid.errors import OutOfMemoryError
from jhybrid.fit import Fit, Site
from jhybrid.slices import Slice
from kernels_pallas.gpus import GPUS

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64)


def test_the_plan_is_the_engines_and_needs_no_compiler() -> None:
    h200 = Site.gpu(GPUS["h200"])
    plan = Fit(CONFIG, h200).plan(scratch=1000)
    assert plan.total <= plan.available == int(150e9 * 0.9)
    assert plan.scratch == 1000
    assert plan.num_pages == 4 * 256 // 16
    with pytest.raises(OutOfMemoryError, match=r"scratch \(134999999999 B\)"):
        Fit(CONFIG, h200).plan(scratch=int(150e9 * 0.9) - 1)


def test_without_the_compiler_it_says_what_to_install() -> None:
    try:
        GPUS["h100"].devices()
    except ModuleNotFoundError as error:
        assert "gpu-compile" in str(error)
    else:
        pytest.skip("the compiler is installed")


@pytest.mark.parametrize(("gpu", "size"), [("h100", 1), ("h200", 2)])
def test_every_kind_of_step_compiles_with_its_kernels_and_updates_its_caches_in_place(gpu: str, size: int) -> None:
    config = dataclasses.replace(CONFIG, tensor_parallel_size=size)
    fit = Fit(config, Site.gpu(GPUS[gpu], size))
    try:
        GPUS[gpu].devices()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    report = fit.report()
    memory, steps = report["memory"], {step["bucket"]: step for step in report["steps"]}
    assert steps["decode[T=4,S=4]"]["kernels"] == {"causal_conv": 6, "ssd": 6, "paged_attention": 2}
    assert steps["ragged[T=64,S=4]"]["kernels"] == {"ssd": 9, "paged_attention": 2}
    for step in steps.values():
        assert step["updated_in_place"] >= memory["kv"] + memory["state"]
        assert step["cache_copies"] == 0
        assert 0 < step["scratch"] <= memory["scratch"]
    for program in fit.compiled.steps.values():
        gathered = re.findall(r"= \(?(\w+)\[.* all-gather(?:-start)?\(", program.as_text())
        assert gathered == ["f32"] * 2 * (size > 1), "scores are gathered, in float32, and no weights"


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_a_step_compiles_for_a_tpu_slice_with_every_layer_shared_out(chip: str) -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it and runs this")
    topology = "2x2x1" if chip in ("v5p", "tpu7x") else "2x2"
    config = dataclasses.replace(CONFIG, tensor_parallel_size=4)
    spread = Fit(config, Site.slice(Slice(f"{chip}:{topology}"), config)).report()
    alone = Fit(CONFIG, Site.slice(Slice(f"{chip}:{topology}"), CONFIG)).report()
    for kind in ("weights", "kv", "state"):
        assert spread["memory"][kind] < 0.6 * alone["memory"][kind], kind
    for step in spread["steps"]:
        assert step["updated_in_place"] >= spread["memory"]["kv"] + spread["memory"]["state"]
