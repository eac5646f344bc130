"""Ten minutes on a machine with an NVIDIA GPU: kernels checked, ops timed beside their floors, two models served.

    python benchmarks/gpu.py [--minutes 10] [--output benchmarks/results/gpu.json]

Sections run one after the other; what fails or no longer fits into the time is written down with its reason, and the
rest goes on. `--small` shrinks all sizes, so that the script itself can be tried on a CPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jhybrid.bench import measure
from jhybrid.config import EngineConfig
from jhybrid.machine import machine
from kernels_pallas.gpus import GPUS, Gpu
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.spans import Spans, make_spans
from kernels_pallas.ssd import gpu as ssd_gpu
from kernels_pallas.ssd import reference as ssd_reference
from kernels_pallas.ssd import ssd

HERE = Path(__file__).parent
LAYERS = 4  # of an op in one program, so that starting it counts little
REPEATS = 7


@dataclass
class Run:
    """The clock, the sizes and what was found so far."""

    seconds: float
    small: bool
    gpu: Gpu
    started: float = field(default_factory=time.perf_counter)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.started)

    def attempt(self, name: str, needs: float, work: Callable[[], Any]) -> dict[str, Any]:
        """What `work` gives, with its seconds; or why there is nothing: it failed, or `needs` more than is left."""
        if self.left < needs:
            return {"name": name, "skipped": f"needs {needs:.0f} s, {self.left:.0f} s are left"}
        started = time.perf_counter()
        try:
            result = {"name": name} | work()
        except Exception as error:  # noqa: BLE001 - the rest of the run must go on, whatever this was
            result = {"name": name, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
        return result | {"seconds": round(time.perf_counter() - started, 2)}


def timed(program: Any, cache: Any, *inputs: Any) -> float:
    """Median seconds of `program(cache, *inputs) -> (cache, ...)`, whose cache is passed on."""
    cache, *rest = program(cache, *inputs)
    jax.block_until_ready((cache, rest))
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        cache, *rest = program(cache, *inputs)
        jax.block_until_ready((cache, rest))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def spans(lens: list[int], first_pos: list[int], pages_per_seq: int = 1) -> Spans:
    """Sequence i has slot i and pages of its own."""
    count = len(lens)
    table = np.arange(count * pages_per_seq).reshape(count, pages_per_seq).tolist()
    kind = "decode" if set(lens) == {1} else "ragged"
    sizes = {"num_tokens": sum(lens), "num_seqs": count, "scratch_slot": count, "scratch_page": count * pages_per_seq}
    slots = list(range(count))
    return make_spans(lens, first_pos, slots, slots, table, table_width=pages_per_seq, kind=kind, **sizes)


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def ssd_inputs(tokens: int, heads: int, width: int) -> Any:
    head_dim, state = width
    bc = normal(tokens, 8, state)
    dt = jax.nn.softplus(normal(tokens, heads, dtype=jnp.float32) - 3)
    return normal(tokens, heads, head_dim), dt, -jnp.ones(heads), bc, bc, jnp.ones(heads)


SSD_FORMS: dict[str, Any] = {
    "kernel": ssd_gpu.ssd,
    "parallel": partial(ssd, implementation="parallel"),
    "loops": partial(ssd, implementation="xla"),
}


def check_ssd(run: Run, name: str) -> dict[str, Any]:
    """The greatest difference from the reference, on a step with a fork, a fresh sequence, padding and a snapshot."""
    step = make_spans(
        [1, 1, 1],
        [3, 0, 5],
        [0, 1, 0],
        [0, 1, 2],
        num_tokens=4,
        num_seqs=4,
        scratch_slot=6,
        kind="decode",
        snapshots={(1, 1): 4},
    )
    inputs, state = ssd_inputs(4, 8, (64, 128)), normal(14, 128, 512, dtype=jnp.float32)
    run_it = jax.jit(partial(SSD_FORMS[name], base=7))
    got, want = run_it(*inputs, state, step), ssd_reference.ssd(*inputs, state, step, base=7)
    worst = max(
        float(jnp.abs(got[0][:3] - want[0][:3]).astype(jnp.float32).max()),
        float(jnp.abs(got[1][:13] - want[1][:13]).max()),
    )
    if not worst < 0.05:
        raise AssertionError(f"differs from the reference by {worst}")
    return {"worst": worst}


def time_ssd(run: Run, name: str, batch: int) -> dict[str, Any]:
    heads, head_dim, state = (8, 16, 64) if run.small else (64, 64, 128)
    rows, step = batch + 1, spans([1] * batch, [5] * batch)

    def layers(held: Any, inputs: Any, step: Spans) -> Any:
        x, *others = inputs
        for layer in range(LAYERS):
            x, held = SSD_FORMS[name](x, *others, held, step, base=layer * rows)
        return held, x

    held = jnp.zeros((LAYERS * rows, state, heads * head_dim))
    inputs = ssd_inputs(batch, heads, (head_dim, state))
    seconds = timed(jax.jit(layers, donate_argnums=0), held, inputs, step) / LAYERS
    return floors(run, seconds, 2 * batch * state * heads * head_dim * 4)


def time_attention(run: Run, name: str, batch: int) -> dict[str, Any]:
    context, heads, kv_heads, dim = (64, 4, 2, 16) if run.small else (4096, 32, 8, 128)
    per_seq = context // 16
    step, rows = spans([1] * batch, [context - 1] * batch, per_seq), batch * per_seq + 1
    q, kv = normal(batch, heads, dim), normal(batch, kv_heads, dim)

    def once(pages: Any, q: Any, kv: Any, step: Spans) -> Any:
        o, pages = paged_attention(q, kv, kv, pages, step, scale=0.1, implementation=name)
        return pages, o

    pages = jnp.zeros((rows, 16, 2 * kv_heads * dim), jnp.bfloat16)
    seconds = timed(jax.jit(once, donate_argnums=0), pages, q, kv, step)
    return floors(run, seconds, batch * context * 2 * kv_heads * dim * 2)


def time_experts(run: Run, tokens: int) -> dict[str, Any]:
    experts, out, width = (8, 32, 64) if run.small else (128, 1856, 2688)
    rows = tokens * 6
    sizes = np.bincount(np.random.default_rng(0).integers(0, experts, rows), minlength=experts).astype(np.int32)

    def once(weight: Any, x: Any, sizes: Any) -> Any:
        return weight, grouped_matmul(x, weight, sizes)

    seconds = timed(jax.jit(once, donate_argnums=0), normal(experts, out, width), normal(rows, width), sizes)
    hit = int((sizes > 0).sum())
    return floors(run, seconds, 2.0 * (hit * out * width + rows * (out + width)), 2.0 * rows * out * width)


def floors(run: Run, seconds: float, moved: float, flops: float = 0.0) -> dict[str, Any]:
    floor = run.gpu.floor_seconds(moved, flops)
    return {"us": seconds * 1e6, "floor_us": floor * 1e6, "of_floor": floor / seconds}


def time_torch(run: Run) -> dict[str, Any]:
    """PyTorch beside us: the bytes of the states of 128 sequences, and attention over as many contexts."""
    import torch
    import torch.nn.functional as F

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch is installed without CUDA")

    def seconds(work: Callable[[], Any]) -> float:
        taken = []
        for _ in range(REPEATS + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])

    state = torch.zeros(128, 128 * 4096, device="cuda")
    q = torch.zeros(128, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    kv = torch.zeros(128, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
    return {
        "version": torch.__version__,
        "state_scaled_us": seconds(lambda: state.mul_(1.0)) * 1e6,
        "attention_us": seconds(lambda: F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)) * 1e6,
    }


def serve(run: Run, config: dict[str, Any], batches: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        lengths = (32, 8, 4) if run.small else (2048, 128, 64)
        engine = EngineConfig(
            model=folder,
            load_format="dummy",
            max_num_seqs=max(batches),
            max_num_batched_tokens=lengths[0],
            max_model_len=lengths[0] + 16,
            compilation_cache_dir="",
        )
        prefill, prompt, output = lengths
        figures = measure(
            engine,
            batch_sizes=batches,
            prefill_tokens=prefill,
            prompt_tokens=prompt,
            output_tokens=output,
            repeats=1 if run.small else 3,
        )
    return {key: figures[key] for key in ("num_parameters", "ready_seconds", "prefill", "decode")}


def two_billion() -> dict[str, Any]:
    """A dense Nemotron-H of half the width and half the depth: about 1.5 billion parameters."""
    config = json.loads((HERE / "models" / "nemotron_h_8b" / "config.json").read_text())
    pattern = config["hybrid_override_pattern"][: 26 if config["num_hidden_layers"] == 52 else None]
    halved = {name: config[name] // 2 for name in ("hidden_size", "intermediate_size", "mamba_num_heads")}
    halved |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    return config | halved | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


def sections(run: Run) -> Iterator[tuple[str, list[tuple[str, float, Callable[[], Any]]]]]:
    """Title -> pieces: name, least seconds, work. The most telling ones first."""
    batches = [1, 2] if run.small else [1, 32, 64, 128, 256]
    served = [1, 2] if run.small else [1, 32, 128, 256]
    yield "checks", [(f"ssd {name}", 15, partial(check_ssd, run, name)) for name in SSD_FORMS]
    fast = [name for name in SSD_FORMS if name != "loops"]
    yield (
        "ssd decode",
        [(f"{name}, batch {b}", 15, partial(time_ssd, run, name, b)) for b in batches for name in fast]
        + [(f"loops, batch {batches[1]}", 20, partial(time_ssd, run, "loops", batches[1]))],
    )
    yield (
        "attention decode, 4096 positions",
        [(f"{n}, batch {b}", 15, partial(time_attention, run, n, b)) for b in batches[1:] for n in ("parallel", "xla")],
    )
    tokens = [1, 4] if run.small else [1, 64, 2048]
    yield "experts, 128 of which 6", [(f"{t} tokens", 15, partial(time_experts, run, t)) for t in tokens]
    small = json.loads((HERE / "models" / "granite_h_156m" / "config.json").read_text())
    if run.small:
        small |= {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "vocab_size": 256}
    yield "156 million parameters, served", [("", 90, partial(serve, run, small, served))]
    if not run.small:
        yield "1.5 billion parameters, served", [("", 120, partial(serve, run, two_billion(), served))]
    yield "PyTorch on the same card", [("", 20, partial(time_torch, run))]


def table_of(run: Run) -> Table:
    table = Table("section", "what", "figures", title=f"{run.found['machine']['device']}, jax {jax.__version__}")
    for title, results in run.found["sections"].items():
        for result in results:
            told = {k: v for k, v in result.items() if k not in ("name", "seconds")}
            if "decode" in told:
                told = {f"decode {row['batch_size']}": f"{row['tokens_per_second']:.0f}/s" for row in told["decode"]}
                told["prefill"] = f"{result['prefill']['tokens_per_second']:.0f}/s"
            words = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items()]
            table.add_row(title, result["name"], ", ".join(words))
    return table


def run_all(run: Run, output: Path | None = None) -> dict[str, Any]:
    """Every section; what is known is written after each, lest a run that is cut off leave nothing."""
    run.found |= {
        "command": "python benchmarks/gpu.py",
        "machine": machine(),
        "floors_of": run.gpu.name,
        "sections": {},
    }
    for title, pieces in sections(run):
        run.found["sections"][title] = [
            run.attempt(name, needs * (not run.small), work) for name, needs, work in pieces
        ]
        if output is not None:
            output.write_text(json.dumps(run.found, indent=1) + "\n")
    return run.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it may take")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a trial of the script, on any device")
    arguments = parser.parse_args()
    kind = jax.devices()[0].device_kind
    gpu = next((g for g in GPUS.values() if g.kind == kind), GPUS["h200"])
    run = Run(arguments.minutes * 60 - 15, arguments.small, gpu)
    run_all(run, arguments.output)
    Console(width=160).print(table_of(run))


if __name__ == "__main__":
    main()
