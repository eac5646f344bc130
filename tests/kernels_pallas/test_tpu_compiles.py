"""Every TPU kernel compiles for every chip, and updates a donated cache in place. `make tpu-compile` runs it.

It needs libtpu, which holds the compiler, and no TPU.
The compiler reports what the simulator cannot see: vector memory that overflows, misaligned tiles, missing operations.
"""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it and runs this")

from kernels_pallas.chips import CHIPS
from kernels_pallas.deviceless import compile_for
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.program_text import whole_copies
from kernels_pallas.schedule import PUBLIC, cases

pytestmark = pytest.mark.slow
OWN = [name for name in cases(CHIPS["v5e"]) if not name.endswith(PUBLIC)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", OWN)
def test_compiles_in_place(case: str, chip: str) -> None:
    work = cases(CHIPS[chip])[case]
    compiled = compile_for(CHIPS[chip], work.function, *work.arguments, donate=work.donated)
    [cache] = work.donated
    held = work.arguments[cache]
    assert whole_copies(compiled.as_text(), held.shape) == 0
    assert compiled.memory_analysis().alias_size_in_bytes >= held.size * held.dtype.itemsize


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("rows", [8, 768])
@pytest.mark.parametrize(("out", "width"), [(1856, 2688), (2688, 1856), (4096, 768)])
def test_weights_of_experts_are_not_rearranged(chip: str, rows: int, out: int, width: int) -> None:
    experts = 16
    shapes = [((rows, width), jnp.bfloat16), ((experts, out, width), jnp.bfloat16), ((experts,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    compiled = compile_for(CHIPS[chip], grouped_matmul, *arguments)
    for shape in ((experts, out, width), (experts, width, out)):
        assert whole_copies(compiled.as_text(), shape) == 0
    assert compiled.memory_analysis().temp_size_in_bytes < experts * out * width / 4
    assert compiled.cost_analysis()["flops"] < 1.1 * 2 * max(rows, 16) * out * width
