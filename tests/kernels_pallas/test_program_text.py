"""What is read in the text of compiled programs, on lines as the compilers of GPUs and CPUs write them."""

import jax
import jax.numpy as jnp

from kernels_pallas.program_text import kernel_names, kernels_in, whole_copies

CALLS = """
  %mpmd_map.27 = (bf16[4,384]{1,0}, bf16[15,4,384]{2,1,0}) custom-call(%a, %b), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/layers_0/mixer._convolve/shard_map/jit(causal_conv)/step/mpmd_map" scheduling_name="m"}
  %mpmd_map.30 = f32[15,64,256]{2,1,0} custom-call(%c), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/layers_0/mixer._scan/jit(ssd)/move_rows/mpmd_map" scheduling_name="m"}
  %gemm = f32[4,8]{1,0} custom-call(%d), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/jit(f)/dot"}
  %mpmd_map.31 = f32[15,64,256]{2,1,0} custom-call(%c), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/layers_0/mixer._scan/jit(ssd)/step_rows/mpmd_map" scheduling_name="m"}
"""
COPIES = """
  %copy.77 = bf16[15,4,384]{2,1,0} copy(%a), metadata={}
  %copy-start.3 = (bf16[15,4,384]{2,1,0}, bf16[15,4,384]{2,1,0}, u32[]) copy-start(%a)
  %scatter.1 = bf16[15,4,384]{2,1,0} scatter(%a, %b, %c), metadata={op_name="copy("}
  %copy.78 = bf16[15,4,38]{2,1,0} copy(%a)
"""


def test_kernels_are_told_by_op_and_name() -> None:
    assert kernel_names(CALLS) == [("causal_conv", "step"), ("ssd", "move_rows"), ("ssd", "step_rows")]
    assert kernels_in(CALLS) == {"causal_conv": 1, "ssd": 2}


def test_copies_are_of_whole_arrays_alone() -> None:
    assert whole_copies(COPIES, (15, 4, 384)) == 2
    assert whole_copies(COPIES, (15, 4, 38)) == 1


def test_a_compiled_transposition_is_seen() -> None:
    compiled = jax.jit(lambda a: (a.T + 0.0, a.sum())).lower(jnp.ones((40, 30))).compile()
    assert whole_copies(compiled.as_text(), (30, 40)) == 1
