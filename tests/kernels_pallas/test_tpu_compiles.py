"""Every TPU kernel compiles for every chip, and updates a donated cache in place. `make tpu-compile` runs it.

It needs libtpu, which holds the compiler, and no TPU.
The compiler reports what the simulator cannot see: vector memory that overflows, misaligned tiles, missing operations.
"""

import re

import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it and runs this")

from kernels_pallas.chips import CHIPS
from kernels_pallas.deviceless import compile_for
from kernels_pallas.schedule import CASES

pytestmark = pytest.mark.slow
OWN = [name for name in CASES if not name.endswith("_jax")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", OWN)
def test_compiles_in_place(case: str, chip: str) -> None:
    function, arguments, donated = CASES[case].build(CHIPS[chip])
    compiled = compile_for(CHIPS[chip], function, *arguments, donate=donated)
    [cache] = donated
    held = arguments[cache]
    shape = re.escape(",".join(map(str, held.shape)))
    copies = re.findall(rf"= \S+\[{shape}\]\S* copy\(", compiled.as_text())
    assert not copies, f"the whole cache is copied {len(copies)} times"
    assert compiled.memory_analysis().alias_size_in_bytes >= held.size * held.dtype.itemsize
