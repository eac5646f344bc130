"""The GPU kernels in the simulator: the ops' contract on every case that a kernel takes, and no races.

The simulator of JAX 0.10 does not know arrays that a kernel changes in place.
"""

from functools import partial
from typing import Any

import jax
import pytest
import test_contract

from kernels_pallas import mosaic_gpu
from kernels_pallas import ssd as ssd_op
from kernels_pallas.ssd import gpu as ssd_gpu
from kernels_pallas.ssd.specs import SPECS

KERNELS: dict[str, tuple[Any, Any, Any]] = {"ssd": (ssd_op, ssd_gpu.ssd, SPECS)}

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU simulator needs JAX 0.11 or later", allow_module_level=True)


def _cases() -> list[Any]:
    """The specs that a kernel does not refuse when it is traced."""
    cases = []
    for op, (_, kernel, specs) in KERNELS.items():
        for spec in specs:
            args, kwargs = spec.build(0)
            try:
                jax.eval_shape(partial(kernel, **kwargs), *args)
            except NotImplementedError:
                continue
            cases.append(pytest.param(op, spec, id=f"{op}-{spec.name}"))
    return cases


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("op", "spec"), _cases())
def test_agrees_with_the_reference_and_has_no_races(op: str, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel, _ = KERNELS[op]
    simulated = partial(kernel, interpret=mosaic_gpu.simulator())
    monkeypatch.setitem(module.IMPLEMENTATIONS, "simulated", simulated)
    test_contract.test_agrees_with_the_reference(op, spec, "simulated")
    assert not mosaic_gpu.races_seen()
