"""The GPU kernels in the simulator: the ops' contract on every case that a kernel takes, and no races.

The simulator of JAX 0.10 does not know arrays that a kernel changes in place.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import pytest
import test_contract

from kernels_pallas import mosaic_gpu
from kernels_pallas.target import Target

OPS = [op for op in test_contract.OPS if "gpu" in import_module(f"kernels_pallas.{op}").IMPLEMENTATIONS]

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU simulator needs JAX 0.11 or later", allow_module_level=True)


def _cases() -> list[Any]:
    """The specs that a kernel does not refuse when it is traced."""
    cases = []
    for op in OPS:
        module, specs = test_contract._load(op)
        for spec in specs:
            (*args, spans), kwargs = spec.build(0)
            spans = replace(spans, target=Target(capability="9.0"))
            try:
                jax.eval_shape(partial(module.IMPLEMENTATIONS["gpu"], **kwargs), *args, spans)
            except NotImplementedError:
                continue
            cases.append(pytest.param(op, spec, id=f"{op}-{spec.name}"))
    return cases


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("op", "spec"), _cases())
def test_agrees_with_the_reference_and_has_no_races(op: str, spec: Any) -> None:
    test_contract.test_agrees_with_the_reference(op, spec, "gpu")
    assert not mosaic_gpu.races_seen()
