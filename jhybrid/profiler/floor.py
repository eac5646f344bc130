"""Floor: the least time that a step can take, from the bytes it must read and what the memory delivers."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jhybrid.cache.arrays import tree_bytes
from jhybrid.cache.router import Router
from jhybrid.layers.moe import ExpertsSpec
from jhybrid.profiler.timing import Timing
from jhybrid.weights.load import Model

EXPERT_PARAMETERS = ("up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Floor:
    """Bytes that a step moves at least, and the bandwidth in bytes per second."""

    weight_bytes: int  # without experts and lookup tables
    expert_bytes: int  # of all experts
    experts: int  # in a layer; 0 for none
    experts_per_token: int
    slot_bytes: int
    token_bytes: float  # keys and values of one position
    bandwidth: float

    def bytes(self, step: Timing) -> float:
        """Weights once, of experts those of one token; state read and written; keys and values of the context."""
        states = 2 * len(step.decodes) + sum(1 + (cached > 0) for _, cached in step.prefills)
        positions = sum(step.decodes) + sum(new + cached for new, cached in step.prefills)
        experts = self.expert_bytes * self.experts_per_token / self.experts if self.experts else 0
        return self.weight_bytes + experts + states * self.slot_bytes + positions * self.token_bytes

    def seconds(self, steps: list[Timing]) -> float:
        return sum(self.bytes(step) for step in steps) / self.bandwidth


def make_floor(model: Model, page_size: int, bandwidth: float) -> Floor:
    """The floor of a model at `bandwidth` bytes per second."""
    weights = experts = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] in EXPERT_PARAMETERS and leaf.ndim == 3:
            experts += tree_bytes(leaf)
        elif names[-1] != "embedding" or _is_tied(model):
            weights += tree_bytes(leaf)
    spec = next(_specs(model.config), None)
    router: Router = model.router
    return Floor(
        weight_bytes=weights,
        expert_bytes=experts,
        experts=spec.num_experts if spec else 0,
        experts_per_token=spec.top_k if spec else 0,
        slot_bytes=router.bytes_per_slot,
        token_bytes=router.bytes_per_page / page_size,
        bandwidth=bandwidth,
    )


def _is_tied(model: Model) -> bool:
    return model.config is not None and model.config.tie_word_embeddings


def _specs(config: Any) -> Iterator[ExpertsSpec]:
    """The experts that a model's configuration describes."""
    if isinstance(config, ExpertsSpec):
        yield config
    elif is_dataclass(config):
        for field in fields(config):
            yield from _specs(getattr(config, field.name))


def measure_bandwidth(repeats: int = 7) -> float:
    """Bytes per second at which a product of a matrix and a vector reads the matrix; the best of some."""
    rows, columns = 4096, 12288  # 201 MB, past any cache
    matrix, vector = jnp.ones((rows, columns), jnp.float32), jnp.ones(columns, jnp.float32)
    product = jax.jit(lambda m, v: m @ v).lower(matrix, vector).compile()
    product(matrix, vector).block_until_ready()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        product(matrix, vector).block_until_ready()
        times.append(time.perf_counter() - started)
    return matrix.size * 4 / statistics.median_low(sorted(times)[:3])
