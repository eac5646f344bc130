"""Inspection: what a model and a configuration come to, before any weight is read. Shown by `jhybrid inspect`."""

import re
from functools import partial
from itertools import groupby
from typing import Any

import flax.linen as nn
import jax
from rich.console import Console
from rich.table import Table

from jhybrid.batch import make_buckets
from jhybrid.cache.arrays import plan_memory, tree_bytes
from jhybrid.cache.router import Router
from jhybrid.config import EngineConfig
from jhybrid.errors import OutOfMemoryError
from jhybrid.layers.attention import Attention
from jhybrid.layers.gated_delta import GatedDelta
from jhybrid.layers.latent_attention import LatentAttention
from jhybrid.layers.mamba1 import Mamba1
from jhybrid.layers.mamba2 import Mamba2
from jhybrid.layers.mlp import Mlp
from jhybrid.layers.moe import Experts
from jhybrid.layers.short_conv import ShortConv
from jhybrid.models import abstract_params
from jhybrid.models.hf_config import load_json
from jhybrid.runner import device_bytes_free
from jhybrid.sampling import init_state
from jhybrid.weights.load import choose_max_model_len, find_model, held_params, read_model

BLOCKS = (Attention, LatentAttention, Mamba2, Mamba1, GatedDelta, ShortConv, Mlp, Experts)
LEFT_OUT = {  # key of a config.json, where it is not null, empty or 0: what of such a checkpoint is not served
    "vision_config": "images: the tower for them is not loaded",
    "audio_config": "sound: the tower for it is not loaded",
    "sound_config": "sound: the tower for it is not loaded",
    "num_nextn_predict_layers": "the draft head (mtp) is not loaded",
    "mtp_num_hidden_layers": "the draft head (mtp) is not loaded",
}


def inspect_model(config: EngineConfig, platform: str | None = None) -> dict[str, Any]:
    """Layers and their parts, the router's map and the buckets, as plain data, for "cpu", "gpu" or "tpu".

    Without a platform for this machine, with a memory plan for it, which leaves out the steps' scratch: only compiling
    tells that. Raises ConfigError for what cannot be served.
    """
    model_config, module, parts, dtype = read_model(config, platform)
    max_model_len = choose_max_model_len(config, model_config)
    blocks, params = _blocks(module, len(parts))
    weights = held_params(config, model_config, module, params)
    router = Router(parts)
    layers = [
        {
            "layer": i,
            "blocks": blocks[i],
            "parts": [
                {"part": p.name, "unit": p.unit, "shape": list(p.shape), "dtype": p.dtype}
                | {"array": router.place(i, p.name).array, "index": router.place(i, p.name).index}
                for p in layer
            ],
        }
        for i, layer in enumerate(parts)
    ]
    sampler = jax.eval_shape(partial(init_state, config.max_num_seqs, model_config.vocab_size))
    facts = {
        "model": config.model,
        "config": type(model_config).__name__,
        "dtype": dtype,
        "quantization": sorted({str(a.dtype) for a in jax.tree.leaves(weights) if a.dtype.itemsize == 1}),
        "vocab_size": model_config.vocab_size,
        "hidden_size": model_config.hidden_size,
        "num_parameters": sum(a.size for a in jax.tree.leaves(params)),
        "max_model_len": max_model_len,
        "layers": layers,
        "bytes_per_slot": router.bytes_per_slot,
        "bytes_per_page": router.bytes_per_page,
        "bytes_per_token": router.bytes_per_page // config.page_size,
        "not_served": _left_out(load_json(find_model(config.model) / "config.json")),
        "buckets": [
            {"kind": b.kind, "tokens": b.tokens, "seqs": b.seqs}
            for b in make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
        ],
    }
    if platform is None:
        facts["memory"] = _memory(config, router, max_model_len, tree_bytes(weights), tree_bytes(sampler))
    return facts


def _blocks(module: nn.Module, layers: int) -> tuple[list[list[str]], dict[str, Any]]:
    """What each layer consists of, in the order in which it runs, and the shapes of the parameters."""
    blocks: list[list[str]] = [[] for _ in range(layers)]
    running: list[int] = []

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        path = context.module.path
        layer = re.fullmatch(r"layers_(\d+)", path[0]) if len(path) == 1 else None
        if layer is not None:
            running[:] = [int(layer[1])]  # a block that layers share has a path of its own
        if isinstance(context.module, BLOCKS) and context.method_name == "__call__":
            blocks[running[0]].append(type(context.module).__name__)
        return call(*args, **kwargs)

    with nn.intercept_methods(watch):
        params = abstract_params(module)
    return blocks, params


def _left_out(raw: dict[str, Any]) -> list[str]:
    sections = [raw, *(raw[key] for key in ("text_config", "llm_config") if isinstance(raw.get(key), dict))]
    return sorted({said for section in sections for key, said in LEFT_OUT.items() if section.get(key)})


def _memory(config: EngineConfig, router: Router, max_model_len: int, weights: int, sampler: int) -> dict[str, Any]:
    try:
        plan = plan_memory(
            router,
            weights=weights,
            sampler=sampler,
            scratch=0,
            available=int(device_bytes_free() * config.memory_share(jax.default_backend())),
            max_num_seqs=config.max_num_seqs,
            pages_per_seq=-(-max_model_len // config.page_size),
            num_pages=config.num_pages,
            prefix_caching=config.enable_prefix_caching,
            snapshot_slots=config.snapshot_slots,
            snapshot_dtype=config.snapshot_dtype,  # pyright: ignore[reportArgumentType]
        )
    except OutOfMemoryError as error:
        return {"error": str(error)}
    return plan.by_kind() | {
        "available": plan.available,
        "num_slots": plan.num_slots,
        "num_snapshots": plan.num_snapshots,
        "num_pages": plan.num_pages,
        "num_tokens": plan.num_pages * config.page_size,
    }


def print_inspection(facts: dict[str, Any], console: Console) -> None:
    """The same as tables."""
    console.print(
        f"[bold]{facts['model']}[/bold] {facts['config']}: {facts['num_parameters']:,} parameters, {facts['dtype']}, "
        f"vocabulary {facts['vocab_size']}, up to {facts['max_model_len']} tokens"
    )
    runs = [(len(list(group)), blocks) for blocks, group in groupby(layer["blocks"] for layer in facts["layers"])]
    console.print("layers: " + ", ".join(f"{count} x {' + '.join(blocks)}" for count, blocks in runs))
    quantised = f"weights in {', '.join(facts['quantization'])}; " if facts["quantization"] else ""
    console.print(f"{quantised}{facts['bytes_per_slot']:,} bytes per sequence, {facts['bytes_per_token']:,} per token")
    for left_out in facts["not_served"]:
        console.print(f"not served: {left_out}")
    table = Table("layer", "part", "per", "shape", "dtype", "array", "index", title="Cache parts and where they are")
    for layer in facts["layers"]:
        for part in layer["parts"] or [None]:
            row = [] if part is None else [part["part"], part["unit"], str(part["shape"]), part["dtype"]]
            place = [] if part is None else [part["array"], str(part["index"])]
            table.add_row(str(layer["layer"]), *row, *place)
    console.print(table)
    if "memory" in facts:
        memory = Table("kind", "amount", title="Memory plan (without the steps' scratch)")
        for kind, amount in facts["memory"].items():
            memory.add_row(kind, f"{amount:,}" if isinstance(amount, int) else amount)
        console.print(memory)
    buckets = Table("kind", "tokens", "sequences", title="Buckets: one compiled executable each")
    for bucket in facts["buckets"]:
        buckets.add_row(bucket["kind"], str(bucket["tokens"]), str(bucket["seqs"]))
    console.print(buckets)
    if "fit" in facts:
        print_fit(facts["fit"], console)


def print_fit(fit: dict[str, Any], console: Console) -> None:
    """A report of `Fit` as tables."""
    columns = "step", "scratch", "updated in place", "kernels", "compiled in s"
    steps = Table(*columns, title=f"Steps compiled for {fit['site']}")
    steps.columns[0].no_wrap, steps.columns[3].overflow = True, "fold"  # names are told whole
    for step in fit["steps"]:
        kernels = ", ".join(f"{count} {op}" for op, count in step["kernels"].items())
        sizes = f"{step['scratch']:,}", f"{step['updated_in_place']:,}"
        steps.add_row(step["bucket"], *sizes, kernels, f"{step['seconds']:.0f}")
    console.print(steps)
    if "cycles" in fit["steps"][0]:
        _print_cycles(fit, console)
    memory = Table("kind", "amount", title=f"Memory plan for each device of {fit['site']}, the steps' scratch included")
    for kind, amount in fit["memory"].items():
        memory.add_row(kind, f"{amount:,}")
    console.print(memory)
    console.print(f"{fit['fits']['sequences']:,} sequences at once; pages for {fit['fits']['tokens']:,} tokens")


def _print_cycles(fit: dict[str, Any], console: Console) -> None:
    table = Table("step", "at least", "at most", "of kernels", "ms at least", title=f"Cycles on {fit['site']}")
    for step in fit["steps"]:
        spent = step["cycles"]
        figures = (f"{spent[name]:,}" for name in ("least", "most", "kernels"))
        table.add_row(step["bucket"], *figures, f"{step['milliseconds_at_least']:.2f}")
    console.print(table)
    console.print(
        "The compiler's estimates of its own instructions, without and with branches and one turn of each loop, and "
        "floors of the kernels; attention's pages and transfers between devices are not counted."
    )
