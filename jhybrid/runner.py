"""Runner: the only holder of device arrays. One ahead-of-time executable per bucket; a missing bucket raises."""

import os
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import Array

from jhybrid.batch import NO_TARGET, Batch, Bucket, Geometry, Layout, unpack
from jhybrid.cache import snapshots
from jhybrid.cache.arrays import MemoryPlan, abstract_cache, copy_pages, plan_memory, tree_bytes
from jhybrid.cache.router import Cache, Router
from jhybrid.cache.snapshots import SnapshotDtype, Store, bytes_per_snapshot
from jhybrid.cache.tiers.copies import Copies, Outgoing, Staged, bytes_of_copies, pages_per_copy
from jhybrid.cache.tiers.form import Blob, Form
from jhybrid.dispatch import refusals
from jhybrid.errors import MissingBucketError
from jhybrid.executables import Executables
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


@dataclass(frozen=True)
class StepResult:
    """A step's results on the host; fields nobody asked for are None."""

    tokens: np.ndarray
    logprob: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprob: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None


class StepHandle:
    """A step under way. `result` waits for it and raises what the device raised."""

    def __init__(self, batch: Batch, output: StepOutput):
        self.batch = batch
        self._output = output

    def result(self) -> StepResult:
        out, batch = self._output, self.batch
        fields: dict[str, np.ndarray] = {"tokens": np.asarray(out.tokens)}
        if batch.wants_logprobs:
            fields |= {name: np.asarray(getattr(out, name)) for name in ("logprob", "top_ids", "top_logprobs")}
        if batch.wants_prompt_logprobs:
            names = ("prompt_logprob", "prompt_top_ids", "prompt_top_logprobs")
            fields |= {name: np.asarray(getattr(out, name)) for name in names}
        return StepResult(**fields)


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


class Runner:
    """Holds parameters, cache and sampler state, and runs batches on them, one after the other."""

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
        memory_fraction: float,
        executables: Executables,
        startup: Startup,
        prefix_caching: bool = False,
        snapshot_slots: int | None = None,
        snapshot_dtype: SnapshotDtype = "auto",
        copies_pages: bool = False,
        has_tiers: bool = False,
    ):
        """`max_num_seqs` sequences can hold pages, a slot and a row; how many run at once, the buckets say."""
        self.module, self.params, self.router, self.buckets = module, params, router, buckets
        self._sampler_shape = (max_num_seqs, vocab_size)
        self._page_size, self._table_width, self._chunk_size = page_size, pages_per_seq, chunk_size
        self._target = target
        self.bucket_seconds: dict[Bucket, float] = {}
        self.executables, self._startup = executables, startup
        self._executables: dict[Bucket, Any] = {}
        sampler = jax.eval_shape(partial(init_state, *self._sampler_shape))
        self.pages_per_copy = pages_per_copy(page_size, max(b.tokens for b in buckets), pages_per_seq)
        state_bytes = router.bytes_per_slot if snapshot_dtype == "auto" else bytes_per_snapshot(router, snapshot_dtype)
        copies = bytes_of_copies(router.bytes_per_page, state_bytes, self.pages_per_copy, pages_per_seq)
        plan = partial(
            plan_memory,
            router,
            weights=tree_bytes(params),
            sampler=tree_bytes(sampler),
            available=int((device_bytes_free() + tree_bytes(params)) * memory_fraction),
            max_num_seqs=max_num_seqs,
            pages_per_seq=pages_per_seq,
            num_pages=num_pages,
            prefix_caching=prefix_caching,
            snapshot_slots=snapshot_slots,
            snapshot_dtype=snapshot_dtype,
            copies=copies if has_tiers else 0,
        )
        startup.compiled(0, len(buckets))
        self.memory = self._compile_within(plan, sampler)
        startup.phase = "allocating"
        cache = self._abstract_cache(self.memory)
        staged = self.memory.num_staged > 0
        store = snapshots.abstract_store(router, self.memory.num_snapshots, snapshot_dtype) if staged else {}

        def allocate() -> tuple[Cache, SamplerState, Store]:
            caches, packed = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (cache, store))
            return caches, init_state(*self._sampler_shape), packed

        self._allocate = executables.get(
            "allocate",
            allocate,
            (),
            result=(cache, sampler, store),
            facts=(jax.tree.leaves((cache, sampler, store)),),
        )
        self._set_row = self._compile_set_row(sampler)
        if staged:
            self._compile_packing(cache, store)
        shapes = {self._mask_shape(bucket) for bucket in buckets}
        self._no_masks = {shape: jax.device_put(np.zeros(shape, np.uint32)) for shape in shapes}
        if copies_pages:
            self._copy_pages = executables.get(
                "copy_pages",
                copy_pages,
                (cache, *_moves_shape(COPIES)),
                donate=(0,),
                result=cache,
                facts=(router.arrays,),
            )
        self._copies: Copies | None = None
        if has_tiers:
            self._copies = Copies(
                cache,
                store,
                executables,
                pages=self.pages_per_copy,
                first_snapshot=self.memory.num_slots,
                scratch_page=self.memory.num_pages,
            )
        self.reset()

    def _compile_within(self, plan: Any, sampler: Any) -> MemoryPlan:
        """Compile every bucket for the page count that memory allows once the steps' scratch is known."""
        largest = max(self.buckets, key=lambda b: (b.tokens, b.seqs))
        memory = plan(scratch=0)
        self._compile(largest, memory, sampler)
        scratch = self._scratch(largest)
        final = plan(scratch=scratch)
        if (final.num_pages, final.num_snapshots) != (memory.num_pages, memory.num_snapshots):
            self._compile(largest, final, sampler)
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            rest = [b for b in self.buckets if b != largest]
            list(pool.map(lambda bucket: self._compile(bucket, final, sampler), rest))
        # The executables are made for this number of pages, also if a smaller bucket turned out to need more scratch.
        return replace(final, scratch=max(self._scratch(b) for b in self.buckets))

    def _compile(self, bucket: Bucket, memory: MemoryPlan, sampler: Any) -> None:
        start = time.perf_counter()
        layout = Layout(bucket, self.geometry(memory))
        cache = self._abstract_cache(memory)
        params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.params)
        vectors = (
            jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32),
            jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32),
            jax.ShapeDtypeStruct(self._mask_shape(bucket), jnp.uint32),
        )
        with refusals(self._target):
            self._executables[bucket] = self.executables.get(
                f"step {bucket}",
                partial(step, self.module, layout),
                (params, cache, sampler, *vectors),
                donate=(1, 2),
                result=(cache, sampler, StepOutput(*StepOutput._fields)),  # pyright: ignore[reportArgumentType]
                facts=(type(self.module), self.module, layout, self.router.arrays),
            )
        self.bucket_seconds[bucket] = time.perf_counter() - start
        self._startup.compiled(len(self._executables), len(self.buckets))

    def _mask_shape(self, bucket: Bucket) -> tuple[int, int]:
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
        self._pack = get("pack", snapshots.pack, arguments, donate=(1,), result=store, facts=facts)
        self._unpack = get("unpack", snapshots.unpack, arguments, donate=(0,), result=cache, facts=facts)

    def _scratch(self, bucket: Bucket) -> int:
        analysis = self._executables[bucket].memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    def _abstract_cache(self, memory: MemoryPlan) -> Cache:
        return abstract_cache(self.router, slots=memory.num_slots + memory.snapshot_rows, pages=memory.num_pages)

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

    def reset(self) -> None:
        """Fresh caches and sampler state. Compiles nothing."""
        self.cache: Cache
        self.sampler: SamplerState
        self.store: Store  # of snapshots, where these are not slots of the cache
        self.cache, self.sampler, self.store = self._allocate()

    @property
    def lost(self) -> bool:
        """Whether a failed step took the donated caches with it."""
        held = (self.cache, self.sampler, self.store)
        if any(a.is_deleted() for a in jax.tree.leaves(held)):
            return True
        try:
            jax.block_until_ready(held)
        except RuntimeError:  # they are the outputs of the step that failed
            return True
        return False

    def set_row(self, row: int, counts: np.ndarray, bias: np.ndarray) -> None:
        """Tell the sampler a row's token counts [V] and logit biases [V], before the row's next step."""
        self.sampler = self._set_row(self.sampler, np.int32(row), counts, bias)

    def copy_pages(self, moves: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers, and wait for it. Only a runner made with `copies_pages` can."""
        for at in range(0, len(moves), COPIES):
            self.cache = self._copy_pages(self.cache, *_moves(moves[at : at + COPIES], COPIES))
        jax.block_until_ready(self.cache.arrays)

    def run(self, batch: Batch) -> StepHandle:
        """Start a step; it runs after all earlier ones. MissingBucketError if its shape was never compiled."""
        executable = self._executables.get(batch.bucket)
        if executable is None:
            raise MissingBucketError(f"{batch.bucket} was not compiled; there are {[str(b) for b in self.buckets]}")
        if batch.loads:
            self.cache = self._unpack(self.cache, self.store, *_moves(batch.loads, self.memory.num_staged))
        # What nobody is bound by stays on the device; no sequence of the batch reads it.
        mask = self._no_masks[self._mask_shape(batch.bucket)] if batch.mask is None else batch.mask
        vectors = batch.ints, batch.floats, mask
        self.cache, self.sampler, output = executable(self.params, self.cache, self.sampler, *vectors)
        if batch.saves:
            self.store = self._pack(self.cache, self.store, *_moves(batch.saves, self.memory.num_staged))
        return StepHandle(batch, output)

    # lower tiers

    @property
    def copies(self) -> Copies:
        """What copies rows to the host and back; only an engine with lower tiers has it."""
        assert self._copies is not None, "made without lower tiers"
        return self._copies

    @property
    def page_form(self) -> Form:
        return self.copies.page_form

    @property
    def state_form(self) -> Form:
        return self.copies.state_form

    def copy_out(self, pages: Seq[int], snapshot: int | None) -> Outgoing:
        """Start copying pages, at most `pages_per_copy`, and a snapshot, as they are after the steps started so far."""
        return self.copies.out(self.cache, self.store, pages, snapshot)

    def stage(self, pages: Seq[Blob], state: Blob | None, until: float) -> Staged:
        """Bring a prefix to the device, into no cache yet, and wait for it. Any thread may call it."""
        return self.copies.stage(pages, state, until)

    def copy_in(self, staged: Staged, skip: int, pages: Seq[int], snapshot: int | None) -> None:
        """Write staged pages from the `skip`-th on, and the state, into rows, after the steps started so far."""
        self.cache, self.store = self.copies.into(self.cache, self.store, staged, skip, pages, snapshot)


def _moves(moves: list[tuple[int, int]], most: int) -> tuple[np.ndarray, np.int32]:
    """Moves between rows as a compiled function takes them: padded to [most, 2], and their number."""
    rows = np.zeros((most, 2), np.int32)
    rows[: len(moves)] = moves
    return rows, np.int32(len(moves))


def _moves_shape(most: int) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((most, 2), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)


def device_bytes_free() -> int:
    """Free bytes of the first device's memory; of the machine's on CPU."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        return psutil.virtual_memory().available
    return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
