"""The GPU kernels in the simulator: the ops' contract on every case that a kernel takes, and no races.

The simulator of JAX 0.10 does not know arrays that a kernel changes in place.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_contract

from kernels_pallas import mosaic_gpu
from kernels_pallas.spans import Spans
from kernels_pallas.target import Target
from tests.kernels_pallas.simulator import simulated_gpu

OPS = [op for op in test_contract.OPS if "gpu" in import_module(f"kernels_pallas.{op}").IMPLEMENTATIONS]

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU simulator needs JAX 0.11 or later", allow_module_level=True)


def _cases() -> list[Any]:
    """The specs that a kernel does not refuse when it is traced."""
    cases = []
    for op in OPS:
        module, specs = test_contract._load(op)
        for spec in specs:
            args, kwargs = spec.build(0)
            target = Target(capability="9.0")
            if isinstance(args[-1], Spans):
                args = (*args[:-1], replace(args[-1], target=target))
            else:
                kwargs |= {"target": target}
            try:
                jax.eval_shape(partial(getattr(module, op), **kwargs, implementation="gpu"), *args)
            except NotImplementedError:
                continue
            cases.append(pytest.param(op, spec, id=f"{op}-{spec.name}"))
    return cases


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("op", "spec"), _cases())
def test_agrees_with_the_reference_and_has_no_races(op: str, spec: Any) -> None:
    test_contract.test_agrees_with_the_reference(op, spec, "gpu")
    assert not mosaic_gpu.races_seen()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("op", "name"), [("ssd", "gpu-mixed"), ("gated_delta", "gpu-chunks"), ("gated_delta", "gpu-chunks-channels")]
)
def test_a_sequence_of_nan_spoils_no_other(op: str, name: str) -> None:
    """Its tokens lie in the last chunk of the one before it, past its end."""
    module, specs = test_contract._load(op)
    (*inputs, state, spans), kwargs = next(spec for spec in specs if spec.name == name).build(0)
    spans, seq = replace(spans, target=simulated_gpu()), 2
    first, end = (int(spans.query_start[n]) for n in (seq, seq + 1))
    T = spans.token_seq.shape[0]
    bad = [a.at[first:end].set(jnp.nan) if a.shape[0] == T else a for a in inputs]
    outputs, states = zip(
        *(getattr(module, op)(*some, state, spans, **kwargs, implementation="gpu") for some in (inputs, bad)),
        strict=True,
    )
    assert np.all(np.isnan(outputs[1][first:end]))
    others = np.delete(np.arange(T), np.arange(first, end))
    np.testing.assert_array_equal(*(np.asarray(o, np.float32)[others] for o in outputs))
    row = kwargs["base"] + int(spans.write_slot[seq])
    snapshots = [kwargs["base"] + int(n) for n in np.asarray(spans.chunk_snapshot)[np.asarray(spans.chunk_seq) == seq]]
    rows = np.delete(np.arange(len(state)), [row, *snapshots])
    np.testing.assert_array_equal(*(np.asarray(h)[rows] for h in states))
