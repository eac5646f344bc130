"""Inspection: what a model and a configuration come to, before any weight is read. Shown by `jhybrid inspect`."""

from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jhybrid.batch import make_buckets
from jhybrid.cache.arrays import plan_memory, tree_bytes
from jhybrid.cache.router import Router
from jhybrid.config import EngineConfig
from jhybrid.errors import OutOfMemoryError
from jhybrid.models import abstract_params
from jhybrid.runner import device_bytes_free
from jhybrid.sampling import init_state
from jhybrid.weights.load import choose_max_model_len, held_params, read_model


def inspect_model(config: EngineConfig) -> dict[str, Any]:
    """Layers and their parts, the router's map, the memory plan and the buckets, as plain data.

    The plan leaves out the steps' scratch, which only compiling tells. Raises ConfigError for what cannot be served.
    """
    model_config, module, parts, dtype = read_model(config)
    max_model_len = choose_max_model_len(config, model_config)
    params = abstract_params(module)
    weights = held_params(config, model_config, module, params)
    router = Router(parts)
    layers = [
        {
            "layer": i,
            "parts": [
                {"part": p.name, "unit": p.unit, "shape": list(p.shape), "dtype": p.dtype}
                | {"array": router.place(i, p.name).array, "index": router.place(i, p.name).index}
                for p in layer
            ],
        }
        for i, layer in enumerate(parts)
    ]
    sampler = jax.eval_shape(partial(init_state, config.max_num_seqs, model_config.vocab_size))
    return {
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
        "memory": _memory(config, router, max_model_len, tree_bytes(weights), tree_bytes(sampler)),
        "buckets": [
            {"kind": b.kind, "tokens": b.tokens, "seqs": b.seqs}
            for b in make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
        ],
    }


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
    table = Table("layer", "part", "per", "shape", "dtype", "array", "index", title="Cache parts and where they are")
    for layer in facts["layers"]:
        for part in layer["parts"] or [None]:
            row = [] if part is None else [part["part"], part["unit"], str(part["shape"]), part["dtype"]]
            place = [] if part is None else [part["array"], str(part["index"])]
            table.add_row(str(layer["layer"]), *row, *place)
    console.print(table)
    memory = Table("kind", "amount", title="Memory plan (without the steps' scratch)")
    for kind, amount in facts["memory"].items():
        memory.add_row(kind, f"{amount:,}" if isinstance(amount, int) else amount)
    console.print(memory)
    buckets = Table("kind", "tokens", "sequences", title="Buckets: one compiled executable each")
    for bucket in facts["buckets"]:
        buckets.add_row(bucket["kind"], str(bucket["tokens"]), str(bucket["seqs"]))
    console.print(buckets)
