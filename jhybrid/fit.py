"""Fit: the memory of a model's steps on a GPU that need not be there, told by compiling them for it.

`jhybrid inspect --gpu h200` shows it. The plan is the engine's own (`plan_memory`); weights are shapes, never read.
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhybrid.batch import Bucket, Geometry, Layout, make_buckets
from jhybrid.cache.arrays import MemoryPlan, abstract_cache, plan_memory, tree_bytes
from jhybrid.cache.router import Router
from jhybrid.config import EngineConfig
from jhybrid.dispatch import target_of
from jhybrid.models import abstract_params
from jhybrid.runner import step
from jhybrid.sampling import init_state
from jhybrid.weights.load import choose_max_model_len, held_params, read_model
from kernels_pallas.gpus import Gpu


class Fit:
    """A model's steps, compiled for a GPU bucket by bucket, and the memory plan that they leave."""

    def __init__(self, config: EngineConfig, gpu: Gpu):
        """Raises ConfigError for what cannot be served."""
        self.config, self.gpu = config, gpu
        model, self._module, parts, self.dtype = read_model(config, "gpu")
        self._router, params = Router(parts), abstract_params(self._module)
        self._params = held_params(config, model, self._module, params)
        self._pages_per_seq = -(-choose_max_model_len(config, model) // config.page_size)
        self._vocab_size = model.vocab_size
        self._sampler = jax.eval_shape(partial(init_state, config.max_num_seqs, model.vocab_size))
        self.num_parameters = sum(a.size for a in jax.tree.leaves(params))
        self.buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)

    def largest(self) -> list[Bucket]:
        """The largest bucket of each kind: what decides about memory."""
        return [max(b for b in self.buckets if b.kind == kind) for kind in ("decode", "ragged")]

    def plan(self, scratch: int = 0) -> MemoryPlan:
        """How the GPU's memory is shared out if a step needs `scratch` bytes. OutOfMemoryError if it does not fit."""
        config = self.config
        return plan_memory(
            self._router,
            weights=tree_bytes(self._params),
            sampler=tree_bytes(self._sampler),
            scratch=scratch,
            available=int(self.gpu.memory * config.memory_share("gpu")),
            max_num_seqs=config.max_num_seqs,
            pages_per_seq=self._pages_per_seq,
            num_pages=config.num_pages,
            prefix_caching=config.enable_prefix_caching,
            snapshot_slots=config.snapshot_slots,
            snapshot_dtype=config.snapshot_dtype,  # pyright: ignore[reportArgumentType]
        )

    def compile(self, bucket: Bucket, plan: MemoryPlan) -> Any:
        """The step of a bucket as the engine compiles it, for the GPU. ModuleNotFoundError without its compiler."""
        config = self.config
        slots = plan.num_slots + plan.snapshot_rows
        geometry = Geometry(
            page_size=config.page_size,
            table_width=self._pages_per_seq if self._router.has_pages else 0,
            has_slots=self._router.has_slots,
            scratch_slot=slots,
            scratch_page=plan.num_pages,
            scratch_row=config.max_num_seqs,
            chunk_size=config.chunk_size,
            target=target_of(config, self.gpu.kind),
            first_snapshot=plan.num_slots,
            has_snapshots=plan.num_snapshots > 0,
            has_staging=plan.num_staged > 0,
        )
        layout = Layout(bucket, geometry)
        arguments = (
            self._params,
            abstract_cache(self._router, slots=slots, pages=plan.num_pages),
            self._sampler,
            jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32),
            jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32),
            jax.ShapeDtypeStruct((bucket.seqs, -(-self._vocab_size // 32)), jnp.uint32),
        )
        run = jax.jit(partial(step, self._module, layout), donate_argnums=(1, 2))
        return run.lower(*self.gpu.place(arguments)).compile()

    def report(self, buckets: list[Bucket] | None = None) -> dict[str, Any]:
        """The memory plan with the scratch of `buckets` (None: the largest of each kind), and what each needs."""
        plan = self.plan()
        steps = []
        for bucket in buckets or self.largest():
            started = time.perf_counter()
            memory = self.compile(bucket, plan).memory_analysis()
            steps.append(
                {
                    "bucket": str(bucket),
                    "seconds": round(time.perf_counter() - started, 1),
                    "scratch": memory.temp_size_in_bytes,
                    "arguments": memory.argument_size_in_bytes,
                    "updated_in_place": memory.alias_size_in_bytes,
                }
            )
        final = self.plan(max(s["scratch"] for s in steps))
        facts = {"gpu": self.gpu.name, "num_parameters": self.num_parameters, "dtype": self.dtype}
        kinds = final.by_kind() | {"available": final.available}
        return facts | {"steps": steps, "memory": kinds | {"num_slots": final.num_slots, "num_pages": final.num_pages}}
