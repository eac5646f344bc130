"""Ten minutes on a machine with an NVIDIA GPU: kernels checked, ops timed beside their floors, two models served.

    python benchmarks/gpu.py [--minutes 10] [--output benchmarks/results/gpu.json]

Sections run one after the other; what fails or no longer fits into the time is written down with its reason, and the
rest goes on. `--small` shrinks all sizes, so that the script itself can be tried on a CPU.
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from kernels_pallas.spans import Spans, make_spans
from kernels_pallas.specs import Spec
from kernels_pallas.target import Target

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

    def on(self, step: Spans) -> Spans:
        """The spans of a step, to be run on the device at hand."""
        capability = getattr(jax.devices()[0], "compute_capability", None)
        return replace(step, target=Target(capability=capability))

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


def check(run: Run, op: str, spec: Spec, name: str) -> dict[str, Any]:
    """The greatest difference from the reference: of what valid tokens get, and of the cache but its scratch row."""
    module = importlib.import_module(f"kernels_pallas.{op}")
    (*inputs, cache, step), options = spec.build(0)
    answers = []
    for which in ("reference", name):
        held = jnp.array(cache)  # not to be given away twice
        answers.append(getattr(module, op)(*inputs, held, run.on(step), **options, implementation=which))
    valid, scratch = int(step.num_tokens), options.get("base", 0) + (spec.rows or len(cache)) - 1
    (want, want_cache), (got, got_cache) = answers
    pairs = [(got[:valid], want[:valid]), (got_cache.at[scratch].set(0), want_cache.at[scratch].set(0))]
    worst = 0.0
    for ours, theirs in pairs:
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
            raise AssertionError("NaN where the reference has none, or none where it has")
        worst = max(worst, float(np.nanmax(np.abs(ours - theirs), initial=0.0)))
    if not worst <= spec.atol:
        raise AssertionError(f"differs from the reference by {worst}, which may be {spec.atol}")
    return {"worst": worst}


def checks(run: Run) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Every kernel, and every form in plain JAX for GPUs, on all cases of its op that it takes."""
    for op in OPS:
        module = importlib.import_module(f"kernels_pallas.{op}")
        specs = importlib.import_module(f"kernels_pallas.{op}.specs").SPECS
        for name in ("gpu", "parallel"):
            if name not in module.IMPLEMENTATIONS:
                continue
            for spec in specs[:: 20 if run.small else 1]:
                (*inputs, step), options = spec.build(0)
                taken = partial(module.IMPLEMENTATIONS[name], **options)
                hopper = replace(step, target=Target(capability="9.0"))  # what a kernel takes, told without a card
                try:
                    jax.eval_shape(taken, *inputs, hopper)
                except NotImplementedError:
                    continue
                except Exception:  # noqa: BLE001 - whatever this is, it is written down when the check is run
                    pass
                if step.kind != "dense":
                    yield f"{op} {name}: {spec.name}", 3, partial(check, run, op, spec, name)


@dataclass(frozen=True)
class Sizes:
    """Of one op at work: arguments before the cache, the cache's shape of a layer, bytes and operations of a call."""

    inputs: tuple[Any, ...]
    cache: Any
    moved: float
    flops: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


def ssd_sizes(run: Run, step: Spans, state: int = 128) -> Sizes:
    heads, head_dim, state, groups = (4, 64, 64, 1) if run.small else (64, 64, state, 8)
    (tokens,), seqs = step.token_seq.shape, step.num_seqs
    bc, dt = normal(tokens, groups, state), jax.nn.softplus(normal(tokens, heads, dtype=jnp.float32) - 3)
    x = normal(tokens, heads, head_dim)
    states = 2 * seqs * state * heads * head_dim * 4
    flops = 0.0 if step.kind == "decode" else 2.0 * tokens * heads * (64 * state + 64 * head_dim + 2 * state * head_dim)
    inputs = (x, dt, -jnp.ones(heads), bc, bc, jnp.ones(heads))
    cache = jnp.zeros((seqs + 1, state, heads * head_dim))
    return Sizes(inputs, cache, states + 4.0 * (x.size + bc.size), flops)


def gated_delta_sizes(run: Run, step: Spans, by_channel: bool = False) -> Sizes:
    key_heads, heads, dim = (2, 2, 64) if run.small else (32 if by_channel else 16, 32, 128)
    (tokens,), seqs = step.token_seq.shape, step.num_seqs
    k, v = normal(tokens, key_heads, dim) / dim**0.5, normal(tokens, heads, dim)
    g = -jnp.ones((tokens, heads, dim) if by_channel else (tokens, heads)) / 8
    flops = 0.0 if step.kind == "decode" else 2.0 * tokens * heads * (4 * 64 * dim + 4 * dim * dim)
    state = jnp.zeros((seqs + 1, heads, dim, dim))
    inputs = (k, k, v, g, jnp.ones((tokens, heads)) / 2)
    return Sizes(inputs, state, 2.0 * seqs * state[0].size * 4, flops)


def selective_scan_sizes(run: Run, step: Spans) -> Sizes:
    channels, state = (128, 16) if run.small else (8192, 16)
    (tokens,), seqs = step.token_seq.shape, step.num_seqs
    bc, dt = normal(tokens, state), jax.nn.softplus(normal(tokens, channels, dtype=jnp.float32) - 3)
    inputs = (normal(tokens, channels), dt, -jnp.ones((channels, state)), bc, bc, jnp.ones(channels))
    moved = 2.0 * seqs * state * channels * 4 + tokens * channels * 8
    return Sizes(inputs, jnp.zeros((seqs + 1, state, channels)), moved)


def causal_conv_sizes(run: Run, step: Spans) -> Sizes:
    channels = 256 if run.small else 6144
    (tokens,), seqs = step.token_seq.shape, step.num_seqs
    inputs = (normal(tokens, channels), normal(channels, 4), None)
    moved = 2 * 4 * seqs * channels * 2 + 2 * tokens * channels * 2
    return Sizes(inputs, jnp.zeros((seqs + 1, 4, channels), jnp.bfloat16), moved)


def paged_attention_sizes(run: Run, step: Spans, dim: int = 128) -> Sizes:
    heads, kv_heads, dim = (4, 2, 64) if run.small else (32, 8, dim)
    (tokens,), seqs = step.token_seq.shape, step.num_seqs
    q, kv = normal(tokens, heads, dim), normal(tokens, kv_heads, dim)
    context = int(np.asarray(step.first_pos)[0] + np.asarray(step.query_start)[1])
    pages = jnp.zeros((step.page_table.size + 1, 16, 2 * kv_heads * dim), jnp.bfloat16)
    seen = context - tokens / seqs / 2
    flops = 4.0 * tokens * seen * heads * dim if step.kind != "decode" else 0.0
    return Sizes((q, kv, kv), pages, 2.0 * seqs * context * 2 * kv_heads * dim, flops, {"scale": 0.1})


SIZES: dict[str, Callable[..., Sizes]] = {
    "ssd": ssd_sizes,
    "gated_delta": gated_delta_sizes,
    "selective_scan": selective_scan_sizes,
    "causal_conv": causal_conv_sizes,
    "paged_attention": paged_attention_sizes,
}
OPS = tuple(SIZES)


def time_op(run: Run, op: str, name: str, lens: list[int], cached: int) -> dict[str, Any]:
    """An op in LAYERS layers of one program, in the form `name`: sequences of `lens` tokens after `cached` each."""
    function = getattr(importlib.import_module(f"kernels_pallas.{op}"), op)
    pages = -(-(cached + max(lens)) // 16) if op == "paged_attention" else 1
    step = run.on(spans(lens, [cached] * len(lens), pages))
    sizes = SIZES[op](run, step)
    rows, (first, *others) = len(sizes.cache), sizes.inputs
    layers = 1 if op == "paged_attention" else LAYERS  # a cache of several would be larger than the card

    def several(held: Any, first: Any, others: Any, step: Spans) -> Any:
        for layer in range(layers):
            options = sizes.options | {"base": layer * rows, "implementation": name}
            y, held = function(first, *others, held, step, **options)
            first += y.mean().astype(first.dtype)  # so that no layer can be left out
        return held, first

    held = jnp.zeros((layers * rows, *sizes.cache.shape[1:]), sizes.cache.dtype)
    seconds = timed(jax.jit(several, donate_argnums=0), held, first, others, step) / layers
    return floors(run, seconds, sizes.moved, sizes.flops)


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
    batches = [1, 2] if run.small else [1, 64, 256]
    served = [1, 2] if run.small else [1, 32, 128, 256]
    yield "checks", list(checks(run))
    cached, prompt = (40, 70) if run.small else (4095, 2048)
    for op in OPS:
        has = importlib.import_module(f"kernels_pallas.{op}").IMPLEMENTATIONS
        forms = [name for name in ("gpu", "parallel") if name in has]
        timings = [(f"{name}, {b} tokens", name, [1] * b) for b in batches for name in forms]
        timings += [(f"{name}, prompt of {prompt}", name, [prompt]) for name in (*forms, "xla")]
        timings += [(f"xla, {batches[1]} tokens", "xla", [1] * batches[1])]
        yield op, [(title, 15, partial(time_op, run, op, name, lens, cached)) for title, name, lens in timings]
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
