"""Programs: an engine's compiled functions, and the memory plan that they are made for. They hold no array.

The engine's runner runs them; `jhybrid compile` makes them for devices that are not there. One ahead-of-time executable
per bucket.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jhybrid.batch import NO_TARGET, Bucket, Geometry, Layout, unpack
from jhybrid.cache import snapshots
from jhybrid.cache.arrays import MemoryPlan, abstract_cache, copy_pages, plan_memory, tree_bytes
from jhybrid.cache.router import Cache, Router
from jhybrid.cache.snapshots import SnapshotDtype, Store, bytes_per_snapshot
from jhybrid.cache.tiers.copies import Copies, bytes_of_copies, pages_per_copy
from jhybrid.dispatch import refusals
from jhybrid.errors import OutOfMemoryError
from jhybrid.executables import Executables
from jhybrid.mesh import shape_of
from jhybrid.sampling import SamplerState, init_state, sample, set_row, token_logprobs
from jhybrid.startup import Startup
from kernels_pallas.target import Target

PROMPT_LOGPROB_ROWS = 64  # rows of logits held at once while scoring a prompt
COPIES = 16  # pages that one call copies


class StepOutput(NamedTuple):
    """What a step leaves on the device for the host."""

    tokens: Array  # [S] int32: sampled token; -1 where the logits were not finite
    logprob: Array  # [S] float32, of `tokens`
    top_ids: Array  # [S, 20]
    top_logprobs: Array  # [S, 20]
    prompt_logprob: Array  # [T] float32, of `targets`
    prompt_top_ids: Array  # [T, 20]
    prompt_top_logprobs: Array  # [T, 20]


def step(
    module: Any,
    layout: Layout,
    params: Any,
    cache: Cache,
    sampler: SamplerState,
    ints: Array,
    floats: Array,
    mask: Array,
) -> tuple[Cache, SamplerState, StepOutput]:
    """One step of the model on one batch: forward, log-probabilities of the prompt where asked, sampling."""
    batch = unpack(layout, ints, floats, mask, sampler.last_token)
    variables = {"params": params}
    hidden, cache = module.apply(variables, batch.token_ids, cache, batch.spans)
    logits_of = partial(module.apply, variables, method="logits")
    last = jnp.maximum(batch.spans.query_start[1:] - 1, 0)
    sampler, sampled = sample(logits_of(hidden[last]), sampler, batch.sampling)
    prompt = _prompt_logprobs(logits_of, hidden, batch.targets)
    tokens = jnp.where(sampled.finite, sampled.tokens, -1)
    return cache, sampler, StepOutput(tokens, sampled.logprob, sampled.top_ids, sampled.top_logprobs, *prompt)


def _prompt_logprobs(logits_of: Any, hidden: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Log-probabilities of `targets` [T], a block of rows at a time, and only blocks that have targets.

    Logits that are not finite give the floor, which the engine turns into the failure of that sequence.
    """
    tokens = hidden.shape[0]
    rows = min(PROMPT_LOGPROB_ROWS, tokens)
    blocks = -(-tokens // rows)
    padded = jnp.pad(hidden, ((0, blocks * rows - tokens), (0, 0)))
    wanted = jnp.pad(targets, (0, blocks * rows - tokens), constant_values=NO_TARGET)
    shapes = jax.eval_shape(lambda h, t: token_logprobs(logits_of(h), t), padded[:rows], wanted[:rows])
    empty = tuple(jnp.zeros((blocks * rows, *s.shape[1:]), s.dtype) for s in shapes)

    def block(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        at = i * rows
        ids = jax.lax.dynamic_slice_in_dim(wanted, at, rows)

        def score(out: tuple[Array, ...]) -> tuple[Array, ...]:
            found = token_logprobs(logits_of(jax.lax.dynamic_slice_in_dim(padded, at, rows)), jnp.maximum(ids, 0))
            return tuple(jax.lax.dynamic_update_slice_in_dim(o, f, at, 0) for o, f in zip(out, found, strict=True))

        return jax.lax.cond((ids != NO_TARGET).any(), score, lambda out: out, out)

    last = jnp.max(jnp.where(targets != NO_TARGET, jnp.arange(tokens), -1)) // rows + 1
    out = jax.lax.fori_loop(0, last, block, empty)
    return tuple(o[:tokens] for o in out)  # pyright: ignore[reportReturnType]


class Programs:
    """Compiled for parameters of these shapes, one step per bucket and what else a runner needs."""

    def __init__(
        self,
        module: Any,
        params: Any,
        router: Router,
        buckets: list[Bucket],
        *,
        vocab_size: int,
        max_num_seqs: int,
        page_size: int,
        pages_per_seq: int,
        num_pages: int | None,
        chunk_size: int,
        target: Target,
        available: int,
        executables: Executables,
        startup: Startup,
        prefix_caching: bool = False,
        snapshot_slots: int | None = None,
        snapshot_dtype: SnapshotDtype = "auto",
        copies_pages: bool = False,
        has_tiers: bool = False,
    ):
        """`max_num_seqs` sequences can hold pages, a slot and a row; how many run at once, the buckets say.

        `params` are arrays or shapes; `available` the bytes of one device for all of it together. Nothing is compiled
        before `compile`.
        """
        self.module, self.router, self.buckets = module, router, buckets
        self.params = jax.tree.map(shape_of, params)
        self._sampler_shape = (max_num_seqs, vocab_size)
        self._page_size, self._table_width, self._chunk_size = page_size, pages_per_seq, chunk_size
        self._target = target
        self._snapshot_dtype: SnapshotDtype = snapshot_dtype
        self._copies_pages, self._has_tiers = copies_pages, has_tiers
        self._available = available
        self.seconds: dict[Bucket, float] = {}
        """That each bucket took to compile, or to load."""
        self.executables, self._startup = executables, startup
        self.steps: dict[Bucket, Any] = {}
        self._sampler = jax.eval_shape(partial(init_state, *self._sampler_shape))
        self.pages_per_copy = pages_per_copy(page_size, max(b.tokens for b in buckets), pages_per_seq)
        state_bytes = router.bytes_per_slot if snapshot_dtype == "auto" else bytes_per_snapshot(router, snapshot_dtype)
        copies = bytes_of_copies(router.bytes_per_page, state_bytes, self.pages_per_copy, pages_per_seq)
        self.plan = partial(
            plan_memory,
            router,
            weights=tree_bytes(self.params),
            sampler=tree_bytes(self._sampler),
            available=available,
            max_num_seqs=max_num_seqs,
            pages_per_seq=pages_per_seq,
            num_pages=num_pages,
            prefix_caching=prefix_caching,
            snapshot_slots=snapshot_slots,
            snapshot_dtype=snapshot_dtype,
            copies=copies if has_tiers else 0,
        )
        """The memory plan, by the `scratch` bytes that a step needs. Raises OutOfMemoryError."""

    def compile(self, at_once: int | None = None) -> None:
        """Everything, so many buckets at once (None: as many as there are cores, up to four).

        Raises OutOfMemoryError for what does not fit, ConfigError for implementations that refuse.
        """
        self._startup.compiled(0, len(self.buckets))
        self.memory = self._compile_within(at_once or min(4, os.cpu_count() or 1))
        cache, sampler = self.abstract_cache(self.memory), self._sampler
        self.stages = self.memory.num_staged > 0
        mesh, get = self.executables.mesh, self.executables.get
        dtype = self._snapshot_dtype
        store = snapshots.abstract_store(self.router, self.memory.num_snapshots, dtype, mesh) if self.stages else {}

        def allocate() -> tuple[Cache, SamplerState, Store]:
            caches, packed = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (cache, store))
            return caches, init_state(*self._sampler_shape), packed

        held = (cache, sampler, store)
        sizes = [(a.shape, str(a.dtype)) for a in jax.tree.leaves(held)]
        self.allocate = get("allocate", allocate, (), result=held, facts=(sizes,))
        self.set_row = self._compile_set_row(sampler)
        if self.stages:
            self._compile_packing(cache, store)
        if self._copies_pages:
            arguments = (cache, *_moves_shape(COPIES))
            facts = (self.router.arrays,)
            self.copy_pages = get("copy_pages", copy_pages, arguments, donate=(0,), result=cache, facts=facts)
        self.copies: Copies | None = None
        if self._has_tiers:
            self.copies = Copies(
                cache,
                store,
                self.executables,
                pages=self.pages_per_copy,
                first_snapshot=self.memory.num_slots,
                scratch_page=self.memory.num_pages,
            )

    def _compile_within(self, at_once: int) -> MemoryPlan:
        """Compile every bucket for the page count that memory allows once the steps' scratch is known."""
        largest = max(self.buckets, key=lambda b: (b.tokens, b.seqs))
        final, done = self._settled_plan(), set()
        if final is None:
            memory = self.plan(scratch=0)
            self._compile(largest, memory)
            final = self.plan(scratch=self.scratch(largest))
            same = (final.num_pages, final.num_snapshots) == (memory.num_pages, memory.num_snapshots)
            done = {largest} if same else set()
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            rest = [b for b in self.buckets if b not in done]
            list(pool.map(lambda bucket: self._compile(bucket, final), rest))
        # The executables are made for this number of pages, also if a smaller bucket turned out to need more scratch.
        return replace(final, scratch=max(self.scratch(b) for b in self.buckets))

    def _settled_plan(self) -> MemoryPlan | None:
        """The plan of executables that were made elsewhere. Raises OutOfMemoryError if it is too much here."""
        plan, available = self.executables.plan, self._available
        if plan is None:
            return None
        if plan.total > available:
            kinds = ", ".join(f"{kind} {size} B" for kind, size in plan.by_kind().items() if size)
            raise OutOfMemoryError(
                f"the bundle was made for {plan.total} B of each device ({kinds}), {available} B are available; free "
                "memory, raise memory_fraction, or compile a bundle for fewer num_pages or max_num_seqs"
            )
        return replace(plan, available=available, num_rows=self._sampler_shape[0])

    def _compile(self, bucket: Bucket, memory: MemoryPlan) -> None:
        start = time.perf_counter()
        layout = Layout(bucket, self.geometry(memory))
        cache, sampler = self.abstract_cache(memory), self._sampler
        vectors = (
            jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32),
            jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32),
            jax.ShapeDtypeStruct(self.mask_shape(bucket), jnp.uint32),
        )
        with refusals(self._target):
            self.steps[bucket] = self.executables.get(
                f"step {bucket}",
                partial(step, self.module, layout),
                (self.params, cache, sampler, *vectors),
                donate=(1, 2),
                result=(cache, sampler, StepOutput(*StepOutput._fields)),  # pyright: ignore[reportArgumentType]
                facts=(type(self.module), self.module, layout, self.router.arrays),
            )
        self.seconds[bucket] = time.perf_counter() - start
        self._startup.compiled(len(self.steps), len(self.buckets))

    def mask_shape(self, bucket: Bucket) -> tuple[int, int]:
        """Of the mask of tokens that a step takes."""
        return bucket.seqs, -(-self._sampler_shape[1] // 32)

    def _compile_set_row(self, sampler: SamplerState) -> Any:
        _, vocab_size = self._sampler_shape
        arguments = (
            sampler,
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((vocab_size,), jnp.int32),
            jax.ShapeDtypeStruct((vocab_size,), jnp.float32),
        )
        return self.executables.get("set_row", set_row, arguments, donate=(0,), result=sampler)

    def _compile_packing(self, cache: Cache, store: Store) -> None:
        arguments, facts = (cache, store, *_moves_shape(self.memory.num_staged)), (self.router.arrays,)
        get = self.executables.get
        self.pack = get("pack", snapshots.pack, arguments, donate=(1,), result=store, facts=facts)
        self.unpack = get("unpack", snapshots.unpack, arguments, donate=(0,), result=cache, facts=facts)

    def scratch(self, bucket: Bucket) -> int:
        """Bytes that a step needs beside its arguments."""
        analysis = self.steps[bucket].memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    def abstract_cache(self, memory: MemoryPlan) -> Cache:
        """The cache as shapes, with where they lie on a mesh."""
        return abstract_cache(
            self.router,
            slots=memory.num_slots + memory.snapshot_rows,
            pages=memory.num_pages,
            mesh=self.executables.mesh,
        )

    def geometry(self, memory: MemoryPlan | None = None) -> Geometry:
        """What batch layouts need to know of the caches."""
        memory = memory or self.memory
        max_num_seqs, _ = self._sampler_shape
        return Geometry(
            page_size=self._page_size,
            table_width=self._table_width if self.router.has_pages else 0,
            has_slots=self.router.has_slots,
            scratch_slot=memory.num_slots + memory.snapshot_rows,
            scratch_page=memory.num_pages,
            scratch_row=max_num_seqs,
            chunk_size=self._chunk_size,
            target=self._target,
            first_snapshot=memory.num_slots,
            has_snapshots=memory.num_snapshots > 0,
            has_staging=memory.num_staged > 0,
        )


def _moves_shape(most: int) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((most, 2), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
