"""The compiler's schedule of the TPU kernels, beside the roofline of their chip: `python -m kernels_pallas.schedule`.

Needs libtpu and no TPU. What the figures can tell, and what not, is in docs/tpu-kernels.md.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.bundles import CAPACITY_OF, read_kernel
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.chips import CHIPS, Chip
from kernels_pallas.deviceless import compile_for
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.spans import Spans, make_spans
from kernels_pallas.ssd import ssd
from kernels_pallas.target import Target

BF16, F32 = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class Work:
    """A kernel's share of a case: how often its loops turn, and what it must do at the least."""

    steps: int  # of its grid
    bytes: float  # of HBM, read and written
    flops: float  # of matrix products
    trips: list[float] = field(default_factory=list)  # of inner loops whose turns depend on data, in order, on average


@dataclass(frozen=True)
class Case:
    """A function at one shape, and the work of the kernels in it, by name."""

    name: str
    shape: str
    build: Callable[[Chip], tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]  # function, arguments, donated
    kernels: dict[str, Work]


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _spans(lens: list[int], first: int, *, page: int = 1, width: int = 1) -> Spans:
    seqs = len(lens)
    table = [list(range(s * width, (s + 1) * width)) for s in range(seqs)]
    kind = "decode" if max(lens) == 1 else "ragged"
    sizes: dict[str, Any] = {
        "num_tokens": sum(lens),
        "num_seqs": seqs,
        "scratch_slot": seqs,
        "scratch_page": seqs * width,
    }
    slots = list(range(seqs))
    return make_spans(lens, [first] * seqs, slots, slots, table, table_width=width, kind=kind, **sizes)


def _on(chip: Chip, spans: Spans) -> Spans:
    return replace(spans, target=Target(chip))


def _ssd(lens: list[int], work: dict[str, Work]) -> Case:
    T, S, H, P, G, N = sum(lens), len(lens), 64, 64, 8, 128
    spans = _spans(lens, 1)
    arrays = (
        _array(BF16, T, H, P), _array(F32, T, H), _array(F32, H), _array(BF16, T, G, N), _array(BF16, T, G, N),
        _array(F32, H), _array(F32, S + 1, N, H * P), spans,
    )  # fmt: skip

    def build(chip: Chip):
        return lambda *a: ssd(*a[:-1], _on(chip, a[-1]), implementation="tpu"), arrays, (6,)

    kind = "chunks" if "ssd_chunks" in work else "step"
    return Case(f"ssd_{kind}", f"{S} sequences of {lens[0]}, H={H} P={P} G={G} N={N}", build, work)


def _ssd_cases() -> list[Case]:
    H, P, G, N, Q = 64, 64, 8, 128, 128
    state, tokens = 4 * N * H * P, 2048
    step = Work(64 * 2, 64 * (2 * state + 4 * (3 * H * P + 2 * G * N)), 0)
    per_token = 2 * (2 * H * P + 2 * G * N) + 4 * H
    flops = tokens * (2 * H * P * (Q / 2 + 2 * N) + 2 * G * N * Q / 2)
    chunks = Work(tokens // Q * 4, tokens * per_token + 2 * 2 * state, flops)
    return [_ssd([1] * 64, {"ssd_step": step}), _ssd([tokens // 2] * 2, {"ssd_chunks": chunks})]


def _conv(lens: list[int], work: dict[str, Work]) -> Case:
    T, S, D, K = sum(lens), len(lens), 6144, 4
    arrays = (_array(BF16, T, D), _array(BF16, D, K), _array(BF16, D), _array(BF16, S + 1, K, D), _spans(lens, 9))

    def build(chip: Chip):
        return lambda *a: causal_conv(*a[:-1], _on(chip, a[-1]), implementation="tpu"), arrays, (3,)

    kind = "pieces" if "causal_conv_pieces" in work else "step"
    return Case(f"causal_conv_{kind}", f"{S} sequences of {lens[0]}, D={D} K={K}", build, work)


def _conv_cases() -> list[Case]:
    D, K, tokens = 6144, 4, 2048
    step = Work(8, 64 * 2 * (2 * K * D + 4 * D), 0)
    pieces = Work(6 * tokens // 256, tokens * 2 * 2 * D, 0)
    return [
        _conv([1] * 64, {"causal_conv_step": step}),
        _conv([tokens // 2] * 2, {"causal_conv_pieces": pieces}),
    ]


HEADS = (32, 8, 128)
CONTEXT, PAGE = 4096, 64


def _attention(name: str, lens: list[int], first: int, work: dict[str, Work], own: bool) -> Case:
    (Hq, Hkv, Dh), T, S, width = HEADS, sum(lens), len(lens), CONTEXT // PAGE
    spans = _spans(lens, first, page=PAGE, width=width)
    pages = S * width + 1
    new = (_array(BF16, T, Hq, Dh), _array(BF16, T, Hkv, Dh), _array(BF16, T, Hkv, Dh))

    def build(chip: Chip):
        if own:
            run = lambda *a: paged_attention(*a[:-1], _on(chip, a[-1]), scale=Dh**-0.5, implementation="tpu")  # noqa: E731
            return run, (*new, _array(BF16, pages, PAGE, 2 * Hkv * Dh), spans), (3,)
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        def public(q, pages, spans):
            lengths = spans.first_pos + spans.query_start[1:] - spans.query_start[:-1]
            count = jnp.full((1,), S, jnp.int32)
            options = {"sm_scale": Dh**-0.5, "vmem_limit_bytes": 60 << 20}
            return ragged_paged_attention(q, pages, lengths, spans.page_table, spans.query_start, count, **options)

        return public, (new[0], _array(BF16, pages, PAGE, 2 * Hkv, Dh), spans), ()

    shape = f"{S} sequences of {lens[0]} after {first}, {Hq}/{Hkv} heads of {Dh}, pages of {PAGE}"
    return Case(name, shape, build, work)


def _attention_cases() -> list[Case]:
    Hq, Hkv, Dh = HEADS
    seqs, first, tokens = 16, CONTEXT - 96, 2048
    row = 2 * 2 * Hkv * Dh  # bytes of a token's keys and values
    reads, around = seqs * first * row, 2 * 2 * Hq * Dh
    decode = (reads + seqs * around, 4 * seqs * first * Hq * Dh)
    prefill = (tokens * (row + around), 2 * tokens * tokens * Hq * Dh)
    single = Work(seqs, *decode, trips=[7, 1])
    tile = Work(tokens // 128, *prefill, trips=[1.5, 1])
    return [
        _attention("attention_decode", [1] * seqs, first, {"paged_attention_single": single}, own=True),
        _attention("attention_prefill", [tokens], 0, {"paged_attention_tile": tile}, own=True),
    ]


CASES = {case.name: case for case in [*_ssd_cases(), *_conv_cases(), *_attention_cases()]}


def measure(case: Case, chip: Chip, folder: Path) -> list[dict[str, Any]]:
    """A row for each kernel of the case: cycles by the schedule, and the floors of bandwidth and matrix unit."""
    for file in folder.iterdir():
        file.unlink()
    function, arguments, donated = case.build(chip)
    compile_for(chip, function, *arguments, donate=donated)
    rows = []
    for name, work in case.kernels.items():
        kernel = read_kernel(folder, name)
        most, used = kernel.cycles(work.steps, work.trips, conditional=True)
        least, _ = kernel.cycles(work.steps, work.trips, conditional=False)
        hbm, matrix = work.bytes / chip.bandwidth * chip.clock, work.flops / chip.matrix_flops * chip.clock
        floor = max(hbm, matrix)
        busy = {
            unit: round(slots / kernel.capacity[CAPACITY_OF.get(unit, unit)] / most, 2) for unit, slots in used.items()
        }
        rows.append(
            {
                "case": case.name,
                "shape": case.shape,
                "chip": chip.name,
                "kernel": name,
                "bundles_least": round(least),
                "bundles_most": round(most),
                "hbm_floor_cycles": round(hbm),
                "matrix_floor_cycles": round(matrix),
                "ratio_least": round(max(least, hbm) / floor, 2),
                "ratio_most": round(max(most, hbm) / floor, 2),
                "busy": busy,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.schedule", description=__doc__)
    parser.add_argument("--chips", default="v5e,v6e", help="of " + ", ".join(CHIPS))
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
        os.putenv("LIBTPU_INIT_ARGS", dump)
        for chip in options.chips.split(","):
            for case in options.cases.split(","):
                for row in measure(CASES[case], CHIPS[chip], Path(folder)):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if options.output:
        versions = {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}
        result = {"command": "python -m kernels_pallas.schedule " + " ".join(sys.argv[1:]), **versions, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
