"""What is read in the text of compiled programs, on lines as the compilers of GPUs and CPUs write them."""

import jax
import jax.numpy as jnp

from kernels_pallas.chips import CHIPS
from kernels_pallas.program_text import Cycles, cycles, kernel_names, kernels_in, whole_copies

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
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (a: f32[8]) -> f32[8] {
  ROOT %add.1 = f32[8]{0} add(%a, %a), backend_config={"window_config":{"estimated_cycles":"7000"}}
}

%body (b: (s32[])) -> (s32[]) {
  %fusion.9 = s32[]{:T(128)} fusion(%b), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"40"}
}

%cheap (c: f32[8]) -> f32[8] {
  ROOT %copy.2 = f32[8]{0} copy(%c), backend_config={"window_config":{"estimated_cycles":"5"}}
}

%dear (d: f32[8]) -> f32[8] {
  %while.1 = (s32[]) while(%t), condition=%until, body=%body, metadata={op_name="jit(step)/while"}
  ROOT %copy.3 = f32[8]{0} copy(%d), backend_config={"window_config":{"estimated_cycles":"300"}}
}

ENTRY %main.1_spmd (p: f32[8]) -> f32[8] {
  %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1000"}
  %offload.1 = s32[17]{0} fusion(%p), kind=kCustom, backend_config={"estimated_cycles":"9223372036854775807"}
  %gmm.1 = bf16[1024,1640]{1,0:T(8,128)(2,1)S(1)} custom-call(%s, %w), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[], bf16[1000,1640]{1,0}}, frontend_attributes={kernel_metadata={}}, \
backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"1000",\
"transcendentals":"0","bytes_accessed":"999999999"}}}
  %step.1 = (bf16[128]{0}, bf16[2967,4,768]{2,1,0}) custom-call(%w), custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[2967,4,768]{2,1,0}}, output_to_operand_aliasing={{1}: (0, {})}, \
backend_config={"cost_estimate":{"flops":"918000000000","transcendentals":"0","bytes_accessed":"16400"}}
  ROOT %conditional.1 = f32[8]{0} conditional(%i, %a, %b), branch_computations={%cheap, %dear}, metadata={}
}
"""


def test_cycles_are_of_what_runs_and_kernels_move_no_more_than_they_are_given() -> None:
    chip = CHIPS["v6e"]
    given = 2 * 1640 * (1000 + 1024) + 4
    kernels = chip.clock * given / chip.bandwidth + chip.clock * 1e-3
    assert cycles(PROGRAM, chip) == Cycles(1000 + 5, 1000 + 300 + 40, round(kernels))


def test_kernels_are_told_by_op_and_name() -> None:
    assert kernel_names(CALLS) == [("causal_conv", "step"), ("ssd", "move_rows"), ("ssd", "step_rows")]
    assert kernels_in(CALLS) == {"causal_conv": 1, "ssd": 2}


def test_copies_are_of_whole_arrays_alone() -> None:
    assert whole_copies(COPIES, (15, 4, 384)) == 2
    assert whole_copies(COPIES, (15, 4, 38)) == 1


def test_a_compiled_transposition_is_seen() -> None:
    compiled = jax.jit(lambda a: (a.T + 0.0, a.sum())).lower(jnp.ones((40, 30))).compile()
    assert whole_copies(compiled.as_text(), (30, 40)) == 1
