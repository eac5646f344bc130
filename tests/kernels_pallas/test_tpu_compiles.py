"""Every TPU kernel compiles for every chip, and updates a donated cache in place. `make tpu-compile` runs it.

It needs libtpu, which holds the compiler, and no TPU.
The compiler reports what the simulator cannot see: vector memory that overflows, misaligned tiles, missing operations.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed; `make tpu-compile` installs it and runs this")

from kernels_pallas.causal_conv import window_rows
from kernels_pallas.chips import CHIPS
from kernels_pallas.deviceless import compile_for
from kernels_pallas.experts import experts
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.program_text import kernel_names, whole_copies
from kernels_pallas.schedule import PUBLIC, cases
from kernels_pallas.target import Target

pytestmark = pytest.mark.slow
OWN = [name for name in cases(CHIPS["v5e"]) if not name.endswith(PUBLIC)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", OWN)
def test_compiles_in_place(case: str, chip: str) -> None:
    work = cases(CHIPS[chip])[case]
    compiled = compile_for(CHIPS[chip], work.function, *work.arguments, donate=work.donated)
    held = [work.arguments[at] for at in work.donated]
    assert not any(whole_copies(compiled.as_text(), cache.shape) for cache in held)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(c.size * c.dtype.itemsize for c in held)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize(("dtype", "inner", "width", "parts"), [
    ("bfloat16", 1856, 2688, 1), ("bfloat16", 512, 1536, 2), ("bfloat16", 768, 4096, 2), ("int8", 512, 2048, 2),
    ("float8_e4m3fn", 1856, 2688, 1), ("float32", 512, 2048, 2),
])  # fmt: skip
def test_experts_are_read_where_they_lie(chip: str, tokens: int, dtype: str, inner: int, width: int, parts: int):
    """No weight is rearranged; few tokens need no memory that grows with the weights."""
    count, k, scaled = 16, 6, jnp.dtype(dtype).itemsize == 1
    x = jnp.float32 if dtype == "float32" else jnp.bfloat16
    up, down = (count, parts * inner, width), (count, width, inner)
    shapes = [((tokens, width), x), ((tokens, k), jnp.int32), ((tokens, k), jnp.float32), (up, dtype), (down, dtype)]
    if scaled:
        shapes += [((count, parts * inner, 1), jnp.float32), ((count, width, 1), jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    run = functools.partial(experts, activation="silu", target=Target(CHIPS[chip]), implementation="tpu")
    compiled = compile_for(CHIPS[chip], run, *arguments)
    text = compiled.as_text()
    kernels = [name for _, name in kernel_names(text)]
    assert kernels == (["experts"] if tokens < 1024 else ["jit(gmm)"] * 2)
    if tokens == 1024:
        if scaled:
            return  # these are made whole first
        # Every expert is read, and may come into vector memory, as it is, while the product before runs.
        text = re.sub(r"\n[^\n]*copy-start[^\n]*", "", text)
    for shape in (up, down, (up[0], up[2], up[1]), (down[0], down[2], down[1])):
        assert whole_copies(text, shape) == 0
    if tokens < 1024:
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["step", "pieces"])
@pytest.mark.parametrize("taps", [3, 7])
def test_convolutions_of_any_taps_run_in_place(taps: int, kind: str, chip: str) -> None:
    work = cases(CHIPS[chip])[f"causal_conv_{kind}"]
    x, weight, bias, window, spans = work.arguments
    weight = jax.ShapeDtypeStruct((weight.shape[0], taps), weight.dtype)
    window = jax.ShapeDtypeStruct((window.shape[0], window_rows(taps), window.shape[2]), window.dtype)
    compiled = compile_for(CHIPS[chip], work.function, x, weight, bias, window, spans, donate=work.donated)
    assert whole_copies(compiled.as_text(), window.shape) == 0
    assert compiled.memory_analysis().alias_size_in_bytes >= window.size * window.dtype.itemsize


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
