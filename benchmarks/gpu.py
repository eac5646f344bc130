"""Ten minutes on a machine with an NVIDIA GPU: kernels checked, ops timed beside their floors, two models served.

    python benchmarks/gpu.py [--minutes 10] [--output benchmarks/results/gpu.json] [--only SECTION ...]

Sections run one after the other, each in a process of its own (see apart.py): a kernel that faults or hangs takes no
other piece with it. What fails or no longer fits into the time is written down with its reason, and the rest goes on.
`--small` shrinks all sizes, so that the script itself can be tried on a CPU.
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import apart
import jax
import jax.numpy as jnp
import numpy as np
from apart import Piece
from rich.console import Console
from rich.table import Table

from jhybrid.bench import measure
from jhybrid.config import EngineConfig
from jhybrid.machine import machine
from kernels_pallas.experts import experts
from kernels_pallas.experts.specs import SPECS
from kernels_pallas.gpus import GPUS, Gpu
from kernels_pallas.spans import Spans, make_spans
from kernels_pallas.specs import Spec
from kernels_pallas.target import Target

HERE = Path(__file__).parent
LAYERS = 4  # of an op in one program, so that starting it counts little
CALLS, REPEATS = 10, 5  # of a program, one after another, and of that


@dataclass
class Run:
    """The sizes, and the GPU whose floors are taken."""

    small: bool
    gpu: Gpu

    @property
    def target(self) -> Target:
        """The device at hand."""
        return Target(capability=getattr(jax.devices()[0], "compute_capability", None))

    def on(self, step: Spans) -> Spans:
        """The spans of a step, to be run on the device at hand."""
        return replace(step, target=self.target)


def timed(program: Any, cache: Any, *inputs: Any) -> float:
    """Median seconds of a call `program(cache, *inputs) -> (cache, ...)`, whose cache is passed on.

    Calls are started one after another without waiting, so that the host is ahead of the device.
    """
    cache, *rest = program(cache, *inputs)
    jax.block_until_ready((cache, rest))
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(CALLS):
            cache, *rest = program(cache, *inputs)
        jax.block_until_ready((cache, rest))
        taken.append((time.perf_counter() - started) / CALLS)
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
    """The greatest difference from the reference: of what valid tokens get, and of the cache but its scratch row.

    The reference goes token by token, which is slow on a GPU: it runs on the CPU beside it, where there is one.
    """
    function = getattr(importlib.import_module(f"kernels_pallas.{op}"), op)
    with jax.default_device(host()):
        (*inputs, cache, step), options = spec.build(0)
        want, want_cache = function(*inputs, jnp.array(cache), step, **options, implementation="reference")
    inputs, held, at = jax.device_put((inputs, cache, run.on(step)), jax.devices()[0])
    got, got_cache = function(*inputs, jnp.array(held), at, **options, implementation=name)
    valid, scratch = int(step.num_tokens), options.get("base", 0) + (spec.rows or len(cache)) - 1
    rows = np.arange(len(cache)) != scratch
    return compared(spec, (got[:valid], want[:valid]), (np.asarray(got_cache)[rows], np.asarray(want_cache)[rows]))


def compared(spec: Spec, *pairs: tuple[Any, Any]) -> dict[str, Any]:
    """The greatest difference of ours from theirs. AssertionError for one beyond what the spec allows."""
    worst = 0.0
    for pair in pairs:
        ours, theirs = (np.asarray(a, np.float64) for a in pair)
        if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
            raise AssertionError("NaN where the reference has none, or none where it has")
        worst = max(worst, float(np.nanmax(np.abs(ours - theirs), initial=0.0)))
    if not worst <= spec.atol:
        raise AssertionError(f"differs from the reference by {worst}, which may be {spec.atol}")
    return {"worst": worst}


def host() -> Any:
    """The CPU as a device, or None where JAX was told of accelerators alone."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def checks(run: Run, op: str, name: str) -> Iterator[Piece]:
    """Of one form of an op, on all cases that it takes."""
    module = importlib.import_module(f"kernels_pallas.{op}")
    specs = importlib.import_module(f"kernels_pallas.{op}.specs").SPECS
    if name not in module.IMPLEMENTATIONS:
        return
    for spec in specs[:: 20 if run.small else 1]:
        with jax.default_device(host()):
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
            yield Piece(f"{name} checked: {spec.name}", 3, partial(check, run, op, spec, name))


@dataclass(frozen=True)
class Sizes:
    """Of one op at work: arguments before the cache, the cache's shape of a layer, bytes and operations of a call."""

    inputs: tuple[Any, ...]
    cache: Any
    moved: float
    flops: float = 0.0
    exponentials: float = 0.0  # where the special function units decide
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
    moved = 2.0 * seqs * state[0].size * 4 + 4.0 * (k.size + v.size + g.size)
    return Sizes(inputs, state, moved, flops)


def selective_scan_sizes(run: Run, step: Spans) -> Sizes:
    channels, state = (128, 16) if run.small else (8192, 16)
    (tokens,), seqs = step.token_seq.shape, step.num_seqs
    bc, dt = normal(tokens, state), jax.nn.softplus(normal(tokens, channels, dtype=jnp.float32) - 3)
    inputs = (normal(tokens, channels), dt, -jnp.ones((channels, state)), bc, bc, jnp.ones(channels))
    moved = 2.0 * seqs * state * channels * 4 + tokens * channels * 8
    return Sizes(inputs, jnp.zeros((seqs + 1, state, channels)), moved, exponentials=1.0 * tokens * channels * state)


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
    return Sizes((q, kv, kv), pages, 2.0 * seqs * context * 2 * kv_heads * dim, flops, options={"scale": 0.1})


SIZES: dict[str, Callable[..., Sizes]] = {
    "ssd": ssd_sizes,
    "gated_delta": gated_delta_sizes,
    "selective_scan": selective_scan_sizes,
    "causal_conv": causal_conv_sizes,
    "paged_attention": paged_attention_sizes,
}
OPS = tuple(SIZES)


def time_op(run: Run, op: str, name: str, lens: list[int], cached: int, **more: Any) -> dict[str, Any]:
    """An op in LAYERS layers of one program, in the form `name`: sequences of `lens` tokens after `cached` each; `more`
    are sizes other than the usual."""
    function = getattr(importlib.import_module(f"kernels_pallas.{op}"), op)
    pages = -(-(cached + max(lens)) // 16) if op == "paged_attention" else 1
    step = run.on(spans(lens, [cached] * len(lens), pages))
    sizes = SIZES[op](run, step, **more)
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
    return floors(run, seconds, sizes.moved, sizes.flops, sizes.exponentials)


def experts_sizes(run: Run, tokens: int) -> Sizes:
    """Of 128 experts without a gate, of which each token chooses six; the weights are in place of a cache."""
    count, size, width, k = (8, 64, 128, 2) if run.small else (128, 1856, 2688, 6)
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(count)[:k] for _ in range(tokens)]).astype(np.int32)
    weights = normal(count, size, width) / width**0.5, normal(count, width, size) / size**0.5
    products = 2.0 * size * width  # weights of an expert, or multiply-adds of a token with it
    moved = 2.0 * (len(np.unique(chosen)) * products + 3 * tokens * width)
    inputs = normal(tokens, width), jnp.asarray(chosen), jnp.full(chosen.shape, 1 / k)
    return Sizes(inputs, weights, moved, 2.0 * chosen.size * products, options={"activation": "relu2"})


def time_experts(run: Run, tokens: int, name: str) -> dict[str, Any]:
    sizes = experts_sizes(run, tokens)

    def once(weights: Any, inputs: Any) -> Any:
        return weights, experts(*inputs, *weights, **sizes.options, target=run.target, implementation=name)

    seconds = timed(jax.jit(once, donate_argnums=0), sizes.cache, sizes.inputs)
    return floors(run, seconds, sizes.moved, sizes.flops)


def check_experts(run: Run, spec: Spec) -> dict[str, Any]:
    """As `check`, of the op that has no cache."""
    with jax.default_device(host()):
        args, options = spec.build(0)
        want = experts(*args, **options, implementation="reference")
    args = jax.device_put(args, jax.devices()[0])
    got = experts(*args, **options, target=run.target, implementation="gpu")
    return compared(spec, (got, want))


def floors(run: Run, seconds: float, moved: float, flops: float = 0.0, exponentials: float = 0.0) -> dict[str, Any]:
    floor = run.gpu.floor_seconds(moved, flops, exponentials)
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


def small_granite() -> dict[str, Any]:
    return json.loads((HERE / "models" / "granite_h_156m" / "config.json").read_text())


def two_billion() -> dict[str, Any]:
    """A dense Nemotron-H of half the width and half the depth: about 1.5 billion parameters."""
    config = json.loads((HERE / "models" / "nemotron_h_8b" / "config.json").read_text())
    pattern = config["hybrid_override_pattern"][: 26 if config["num_hidden_layers"] == 52 else None]
    halved = {name: config[name] // 2 for name in ("hidden_size", "intermediate_size", "mamba_num_heads")}
    halved |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    return config | halved | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


def op_section(run: Run, op: str) -> list[Piece]:
    """Its kernel's checks and times, beside those of the form in plain JAX."""
    cached, prompt = (40, 70) if run.small else (4095, 2048)
    one, some, many = (1, 2, 4) if run.small else (1, 64, 256)
    variants: dict[str, dict[str, Any]] = {"": {}}
    if op == "gated_delta":
        variants[", decay per channel"] = {"by_channel": True}
    whole = f"prompt of {prompt}"
    steps = {f"{n} tokens": [1] * n for n in (some, many, one)} | {whole: [prompt]}
    pieces = list(checks(run, op, "gpu"))
    for name, of in (("gpu", list(steps)), ("parallel", [f"{some} tokens", whole])):
        for what, (variant, more) in product(of, variants.items()):
            work = partial(time_op, run, op, name, steps[what], cached, **more)
            pieces.append(Piece(f"{name}, {what}{variant}", 10, work))
    return pieces


def experts_section(run: Run) -> list[Piece]:
    steps = {"gpu": [1, 4], "xla": [1, 4]} if run.small else {"gpu": [64, 1, 128, 256], "xla": [64, 1, 2048]}
    of_kernels = [spec for spec in SPECS if spec.name.startswith("gpu-")]
    pieces = [Piece(f"gpu checked: {spec.name}", 3, partial(check_experts, run, spec)) for spec in of_kernels]
    for name, tokens in steps.items():
        pieces += [Piece(f"{name}, {t} tokens", 10, partial(time_experts, run, t, name)) for t in tokens]
    return pieces


def served_section(run: Run, config: Callable[[], dict[str, Any]]) -> list[Piece]:
    tiny = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "vocab_size": 256}
    sizes = (config() | tiny, [1, 2]) if run.small else (config(), [1, 32, 128, 256])
    return [Piece("", 90, partial(serve, run, *sizes))]


def torch_section(run: Run) -> list[Piece]:
    return [Piece("", 20, partial(time_torch, run))]


def sections(small: bool) -> dict[str, Callable[[Run], Sequence[Piece]]]:
    """Title -> its pieces, the most telling first: the forms in plain JAX are what the tests on CPU check."""
    of_ops = {op: partial(op_section, op=op) for op in OPS}
    first = {op: of_ops.pop(op) for op in ("ssd", "gated_delta", "paged_attention")}
    served = {"156 million parameters, served": partial(served_section, config=small_granite)}
    larger = {} if small else {"1.5 billion parameters, served": partial(served_section, config=two_billion)}
    rest = {"experts, 128 of which 6": experts_section} | larger | {"PyTorch on the same card": torch_section}
    plain = {f"{op} in plain JAX": lambda run, op=op: list(checks(run, op, "parallel")) for op in OPS}
    return first | served | of_ops | rest | plain


def table_of(found: dict[str, Any]) -> Table:
    table = Table("section", "what", "figures", title=f"{found['machine']['device']}, jax {jax.__version__}")
    for title, results in found["sections"].items():
        for result in results:
            told = {k: v for k, v in result.items() if k not in ("name", "seconds")}
            if "decode" in told:
                told = {f"decode {row['batch_size']}": f"{row['tokens_per_second']:.0f}/s" for row in told["decode"]}
                told["prefill"] = f"{result['prefill']['tokens_per_second']:.0f}/s"
            words = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items()]
            table.add_row(title, result["name"], ", ".join(words))
    return table


def run_all(
    worker: Sequence[str], titles: Sequence[str], deadline: float, output: Path | None = None
) -> dict[str, Any]:
    """Every section, each by `worker --section TITLE --deadline SECONDS` in a process of its own.

    What is known is written after each, lest a run that is cut off leave nothing. No device is touched here: a process
    that held it would leave the others no memory.
    """
    found: dict[str, Any] = {"command": "python benchmarks/gpu.py", "machine": {"device": "none"}, "sections": {}}
    for title in titles:
        facts, results = apart.results_of([*worker, "--section", title, "--deadline", str(deadline)], deadline)
        found |= facts
        found["sections"][title] = results
        if output is not None:
            output.write_text(json.dumps(found, indent=1) + "\n")
    return found


def usable() -> bool:
    """Whether the device still takes work: after an illegal access it does not, for this process."""
    try:
        return int(jnp.ones(8, jnp.int32).sum()) == 8
    except Exception:  # noqa: BLE001 - whatever it is, it does not
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it may take")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a trial of the script, on any device")
    parser.add_argument("--only", nargs="+", choices=sections(False), help="these sections alone")
    for name, kind in {"section": str, "deadline": float, "first": int, "report": Path}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = sections(arguments.small)
    if arguments.section is None:
        worker = [sys.executable, sys.argv[0], *["--small"] * arguments.small]
        deadline = time.time() + arguments.minutes * 60 - 15
        found = run_all(worker, arguments.only or list(known), deadline, arguments.output)
        Console(width=160).print(table_of(found))
        return
    kept = EngineConfig().compilation_cache()
    jax.config.update("jax_compilation_cache_dir", str(kept))  # a second run has more time for the rest
    kind = jax.devices()[0].device_kind
    gpu = next((g for g in GPUS.values() if g.kind == kind), GPUS["h200"])
    pieces = list(known[arguments.section](Run(arguments.small, gpu)))
    with arguments.report.open("a") as report:
        facts = {"machine": machine(), "floors_of": gpu.name}
        apart.work(pieces, arguments.first, report, arguments.deadline, usable, **facts)


if __name__ == "__main__":
    main()
