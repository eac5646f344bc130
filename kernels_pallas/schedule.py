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
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.blocks import block_sizes
from kernels_pallas.bundles import CAPACITY_OF, read_kernel
from kernels_pallas.causal_conv import causal_conv
from kernels_pallas.chips import CHIPS, Chip
from kernels_pallas.deviceless import compile_for
from kernels_pallas.experts import experts
from kernels_pallas.experts.tpu import inner_block
from kernels_pallas.gated_delta import gated_delta
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.selective_scan import selective_scan
from kernels_pallas.spans import Spans, make_spans
from kernels_pallas.ssd import ssd
from kernels_pallas.target import Target

BF16, F32, FP8 = jnp.bfloat16, jnp.float32, jnp.uint8  # the bits of float8_e4m3fn
ROWS = 200  # of a cache
PAGES = 3000  # of a cache: so many that XLA, which writes to them, does not move them into vector memory
PUBLIC = "_jax"  # ends the name of a case that is of a kernel of JAX


@dataclass(frozen=True)
class Work:
    """A kernel's share of a case: how often its loops turn, and what it must do at the least."""

    steps: int  # of its grid
    bytes: float  # of HBM, read and written
    flops: float  # of matrix products
    trips: list[float] = field(default_factory=list)  # of inner loops whose turns depend on data, in order, on average
    shares: tuple[float, ...] = (1.0,)  # of steps that run what is conditional: the longest, ..., all others


@dataclass(frozen=True)
class Case:
    """A function at one shape, for one chip, and the work of the kernels in it, by name."""

    name: str
    shape: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
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


def _ssd(chip: Chip, lens: list[int], work: dict[str, Work]) -> Case:
    T, S, H, P, G, N = sum(lens), len(lens), 64, 64, 8, 128
    spans = _spans(lens, 1)
    arrays = (
        _array(BF16, T, H, P), _array(F32, T, H), _array(F32, H), _array(BF16, T, G, N), _array(BF16, T, G, N),
        _array(F32, H), _array(F32, ROWS, N, H * P), spans,
    )  # fmt: skip

    function = lambda *a: ssd(*a[:-1], _on(chip, a[-1]), implementation="tpu")  # noqa: E731
    kind = "chunks" if "ssd_chunks" in work else "step"
    return Case(f"ssd_{kind}", f"{S} sequences of {lens[0]}, H={H} P={P} G={G} N={N}", function, arrays, (6,), work)


def _ssd_cases(chip: Chip) -> list[Case]:
    H, P, G, N, Q = 64, 64, 8, 128, 128
    state, tokens = 4 * N * H * P, 2048
    step = Work(64 * 2, 64 * (2 * state + 4 * (3 * H * P + 2 * G * N)), 0)
    per_token = 2 * (2 * H * P + 2 * G * N) + 4 * H
    flops = tokens * (2 * H * P * (Q / 2 + 2 * N) + 2 * G * N * Q / 2)
    blocks, pieces = H * P // block_sizes(chip, "ssd")["chunk_lanes"], tokens // Q
    # The first block of a piece prepares the others; a state comes or goes with one piece of eight.
    moved = tokens * per_token + 2 * 2 * state
    chunks = Work(pieces * blocks, moved, flops, shares=(1 / blocks, 1 / 8))
    return [_ssd(chip, [1] * 64, {"ssd_step": step}), _ssd(chip, [tokens // 2] * 2, {"ssd_chunks": chunks})]


def _conv(chip: Chip, lens: list[int], work: dict[str, Work]) -> Case:
    T, S, D, K = sum(lens), len(lens), 6144, 4
    arrays = (_array(BF16, T, D), _array(BF16, D, K), _array(BF16, D), _array(BF16, ROWS, K, D), _spans(lens, 9))
    function = lambda *a: causal_conv(*a[:-1], _on(chip, a[-1]), implementation="tpu")  # noqa: E731
    kind = "pieces" if "causal_conv_pieces" in work else "step"
    return Case(f"causal_conv_{kind}", f"{S} sequences of {lens[0]}, D={D} K={K}", function, arrays, (3,), work)


def _conv_cases(chip: Chip) -> list[Case]:
    D, K, tokens = 6144, 4, 2048
    step = Work(8, 64 * 2 * (2 * K * D + 4 * D), 0, shares=(0, 1))  # all go on: none is given zeros to start from
    pieces = Work(6 * tokens // 256, tokens * 2 * 2 * D, 0)
    return [
        _conv(chip, [1] * 64, {"causal_conv_step": step}),
        _conv(chip, [tokens // 2] * 2, {"causal_conv_pieces": pieces}),
    ]


def _delta(chip: Chip, lens: list[int], by_channel: bool, work: dict[str, Work]) -> Case:
    T, S, H, D = sum(lens), len(lens), 32, 128
    Hk = H if by_channel else H // 2
    spans = _spans(lens, 1)
    key, g = _array(BF16, T, Hk, D), _array(F32, T, H, D) if by_channel else _array(F32, T, H)
    arrays = (key, key, _array(BF16, T, H, D), g, _array(F32, T, H), _array(F32, ROWS, H, D, D), spans)
    function = lambda *a: gated_delta(*a[:-1], _on(chip, a[-1]), implementation="tpu")  # noqa: E731
    kind = "chunks" if "gated_delta_chunks" in work else "step"
    name = f"gated_delta_{kind}" + "_channels" * by_channel
    return Case(name, f"{S} sequences of {lens[0]}, Hk={Hk} H={H} dk=dv={D}", function, arrays, (5,), work)


def _delta_cases(chip: Chip) -> list[Case]:
    """The floor of products is of chunks of 64 tokens, half of what is within a chunk being masked."""
    H, D, Q, tokens, cases = 32, 128, 64, 2048, []
    state = 4 * H * D * D
    for by_channel, Hk in ((False, H // 2), (True, H)):
        decay = 4 * H * (D if by_channel else 1)
        step = Work(64 * 2, 64 * (2 * state + 4 * (2 * Hk * D + 2 * H * D + 2 * H) + decay), 0)
        per_token = 2 * (2 * Hk * D + 2 * H * D) + 4 * H + decay
        flops = 2 * tokens * (H * (3 * D * D + Q * D) + Hk * Q * D)
        blocks = H // block_sizes(chip, "gated_delta")["chunk_heads" if not by_channel else "chunk_heads_channels"]
        # The first block of a piece prepares the others, as in `_ssd_cases`.
        moved, shares = tokens * per_token + 2 * 2 * state, (1 / blocks, 1 / 8)
        chunks = Work(tokens // 128 * blocks, moved, flops, shares=shares)
        cases.append(_delta(chip, [1] * 64, by_channel, {"gated_delta_step": step}))
        cases.append(_delta(chip, [tokens // 2] * 2, by_channel, {"gated_delta_chunks": chunks}))
    return cases


def _scan(chip: Chip, lens: list[int], work: dict[str, Work]) -> Case:
    T, S, D, N = sum(lens), len(lens), 8192, 16
    arrays = (
        _array(BF16, T, D), _array(F32, T, D), _array(F32, D, N), _array(BF16, T, N), _array(BF16, T, N),
        _array(F32, D), _array(F32, ROWS, N, D), _spans(lens, 1),
    )  # fmt: skip
    function = lambda *a: selective_scan(*a[:-1], _on(chip, a[-1]), implementation="tpu")  # noqa: E731
    kind = "chunks" if "selective_scan_chunks" in work else "step"
    return Case(f"selective_scan_{kind}", f"{S} sequences of {lens[0]}, D={D} N={N}", function, arrays, (6,), work)


def _scan_cases(chip: Chip) -> list[Case]:
    D, N, tokens = 8192, 16, 2048
    state = 4 * N * D
    step = Work(64 * 2, 64 * (2 * state + 3 * 4 * D) + state, 0, trips=[8])
    chunks = Work(tokens // 128 * 4, tokens * D * (2 + 4 + 2) + 4 * state, 0, trips=[4, 8])
    return [
        _scan(chip, [1] * 64, {"selective_scan_step": step}),
        _scan(chip, [tokens // 2] * 2, {"selective_scan_chunks": chunks}),
    ]


def _expert_cases(chip: Chip) -> list[Case]:
    """Experts of 1856 x 2688 without a gate, all of them chosen by some token."""
    T, D, E, I, k, cases = 64, 2688, 16, 1856, 6, []
    for name, held in (("experts", BF16), ("experts_int8", jnp.int8)):
        up, down = _array(held, E, I, D), _array(held, E, D, I)
        scales = () if held is BF16 else (_array(F32, E, I, 1), _array(F32, E, D, 1))
        arrays = (_array(BF16, T, D), _array(jnp.int32, T, k), _array(F32, T, k), up, down, *scales)
        steps = E * I // inner_block(up, down, bool(scales), block_sizes(chip, "experts")["bytes"])
        work = Work(steps, 2 * E * I * D * up.dtype.itemsize, 4 * T * E * I * D)
        function = partial(experts, activation="relu2", target=Target(chip), implementation="tpu")
        shape = f"{T} tokens of {D}, {E} experts of {I}, all chosen"
        cases.append(Case(name, shape, function, arrays, (), {"experts": work}))
    return cases


HEADS = (32, 8, 128)
JAX_PREFILL = {"v5e": (16, 64)}
"""Pages and queries of a block with which JAX's kernel has the fewest bundles for a prompt, of those tried; on other
chips 8 and 128."""
CONTEXT, PAGE = 4096, 64


def _attention(
    chip: Chip,
    name: str,
    lens: list[int],
    first: int,
    work: dict[str, Work],
    public: tuple[int, int] | None = None,
    held: Any = BF16,
) -> Case:
    """Ours, or JAX's kernel with `public` pages and queries of a block, which does not write the new tokens."""
    (Hq, Hkv, Dh), T, S, width = HEADS, sum(lens), len(lens), CONTEXT // PAGE
    spans = _spans(lens, first, page=PAGE, width=width)
    pages = max(PAGES, S * width + 1)
    new = (_array(BF16, T, Hq, Dh), _array(BF16, T, Hkv, Dh), _array(BF16, T, Hkv, Dh))
    shape = f"{S} sequences of {lens[0]} after {first}, {Hq}/{Hkv} heads of {Dh}, pages of {PAGE}"

    def ours(*a):
        return paged_attention(*a[:-1], _on(chip, a[-1]), scale=Dh**-0.5, implementation="tpu")

    if public is None:
        return Case(name, shape, ours, (*new, _array(held, pages, PAGE, 2 * Hkv * Dh), spans), (3,), work)
    pages_of_block, queries_of_block = public

    def theirs(q, pages, spans):
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        lengths = spans.first_pos + spans.query_start[1:] - spans.query_start[:-1]
        count = jnp.full((1,), S, jnp.int32)
        options = {"sm_scale": Dh**-0.5, "vmem_limit_bytes": 60 << 20}
        options |= {"num_kv_pages_per_block": pages_of_block, "num_queries_per_block": queries_of_block}
        return ragged_paged_attention(q, pages, lengths, spans.page_table, spans.query_start, count, **options)

    return Case(name, shape, theirs, (new[0], _array(BF16, pages, PAGE, 2 * Hkv, Dh), spans), (), work)


def _attention_cases(chip: Chip) -> list[Case]:
    """Beside each of ours JAX's, at the sizes of blocks that its count is lowest with."""
    Hq, Hkv, Dh = HEADS
    seqs, first, tokens = 32, CONTEXT - 96, 2048
    around, cases = 2 * 2 * Hq * Dh, []
    for ends, held in (("_fp8", FP8), ("", BF16)):
        row = 2 * Hkv * Dh * jnp.dtype(held).itemsize  # bytes of a token's keys and values
        decode = (seqs * (first * row + around), 4 * seqs * first * Hq * Dh)
        prefill = (tokens * (row + around), 2 * tokens * tokens * Hq * Dh)
        single = {"paged_attention_single": Work(seqs, *decode, trips=[7, 1])}
        tile = {"paged_attention_tile": Work(tokens // 128, *prefill, trips=[1.5, 1])}
        cases.append(_attention(chip, "attention_decode" + ends, [1] * seqs, first, single, held=held))
        cases.append(_attention(chip, "attention_prefill" + ends, [tokens], 0, tile, held=held))
    for name, lens, at, floor, (pages, queries) in (
        ("attention_decode" + PUBLIC, [1] * seqs, first, decode, (16, 16)),
        ("attention_prefill" + PUBLIC, [tokens], 0, prefill, JAX_PREFILL.get(chip.name, (8, 128))),
    ):
        blocks = -(-(at + lens[0]) // (pages * PAGE))  # all of a sequence's, masked or not
        work = Work(sum(lens) // queries, *floor, trips=[min(len(lens), queries), blocks])
        cases.append(_attention(chip, name, lens, at, {"ragged_paged_attention_kernel": work}, (pages, queries)))
    return cases


def cases(chip: Chip) -> dict[str, Case]:
    """All of them, by name."""
    kinds = (_ssd_cases, _conv_cases, _delta_cases, _scan_cases, _expert_cases, _attention_cases)
    return {case.name: case for kind in kinds for case in kind(chip)}


def measure(case: Case, chip: Chip, folder: Path) -> list[dict[str, Any]]:
    """A row for each kernel of the case: cycles by the schedule, and the floors of bandwidth and matrix unit."""
    for file in folder.iterdir():
        file.unlink()
    compile_for(chip, case.function, *case.arguments, donate=case.donated)
    rows = []
    for name, work in case.kernels.items():
        kernel = read_kernel(folder, name)
        (least, _), (bundles, used), (most, _) = (
            kernel.cycles(work.steps, work.trips, shares) for shares in ((0.0,), work.shares, (1.0,))
        )
        hbm, matrix = work.bytes / chip.bandwidth * chip.clock, work.flops / chip.matrix_flops * chip.clock
        busy = {
            unit: round(slots / kernel.capacity[CAPACITY_OF.get(unit, unit)] / bundles, 2)
            for unit, slots in used.items()
        }
        rows.append(
            {
                "case": case.name,
                "shape": case.shape,
                "chip": chip.name,
                "kernel": name,
                "bundles": round(bundles),
                "bundles_least": round(least),
                "bundles_most": round(most),
                "hbm_floor_cycles": round(hbm),
                "matrix_floor_cycles": round(matrix),
                "ratio": round(max(bundles, hbm) / max(hbm, matrix), 2),
                "busy": busy,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of `measure` as a table of Markdown: a line for each kernel, and for each chip cycles over the floor."""
    chips = list(dict.fromkeys(row["chip"] for row in rows))
    found = {(row["case"], row["chip"]): row for row in rows}
    lines = ["| | " + " | ".join(chips) + " |", "|---" * (len(chips) + 1) + "|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        if case.endswith(PUBLIC):
            continue
        values = []
        for chip in chips:
            row, other = found.get((case, chip)), found.get((case + PUBLIC, chip))
            text = "" if row is None else f"{row['ratio']:.2f}, {_bound(row)}"
            if row is not None and other is not None:
                text += f"; {row['bundles'] / other['bundles']:.2f} of JAX's bundles"
            values.append(text)
        shape = next(row["shape"] for row in rows if row["case"] == case)
        lines.append(f"| `{case}`: {shape} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _bound(row: dict[str, Any]) -> str:
    """What a kernel waits for, by its schedule."""
    if row["bundles"] <= row["hbm_floor_cycles"]:
        return "bandwidth"
    unit = max(row["busy"], key=lambda unit: row["busy"][unit])
    return f"{unit.replace('_', '-')} unit {row['busy'][unit]:.0%}"


def main() -> None:
    names = list(cases(CHIPS["v5e"]))
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.schedule", description=__doc__)
    parser.add_argument("--chips", default="v5e,v6e", help="of " + ", ".join(CHIPS))
    parser.add_argument("--cases", default=",".join(names), help="of " + ", ".join(names))
    parser.add_argument("--output", type=Path, help="a JSON file for the rows; those of other chips and cases stay")
    parser.add_argument("--table", type=Path, help="print such a file as a table, and do nothing else")
    options = parser.parse_args()
    for name, known in (("chips", CHIPS), ("cases", names)):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]), end="")
        return
    rows: dict[tuple[str, str, str], Any] = {}
    if options.output and options.output.exists():
        rows = {(r["chip"], r["case"], r["kernel"]): r for r in json.loads(options.output.read_text())["rows"]}
    versions = {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
        os.putenv("LIBTPU_INIT_ARGS", dump)
        for name in options.chips.split(","):
            chip = CHIPS[name]
            of_chip = cases(chip)
            for case in options.cases.split(","):
                for row in measure(of_chip[case], chip, Path(folder)):
                    rows[name, case, row["kernel"]] = row
                    print(json.dumps(row), flush=True)
                if options.output:
                    command = "python -m kernels_pallas.schedule " + " ".join(sys.argv[1:])
                    result = {"command": command, **versions, "rows": list(rows.values())}
                    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
