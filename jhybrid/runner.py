"""Runner: the only holder of device arrays. It runs the compiled programs on them; a missing bucket raises."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhybrid.batch import Batch, Bucket, Geometry
from jhybrid.cache.router import Cache
from jhybrid.cache.snapshots import Store
from jhybrid.cache.tiers.copies import Copies, Outgoing, Staged
from jhybrid.cache.tiers.form import Blob, Form
from jhybrid.errors import MissingBucketError
from jhybrid.programs import COPIES, Programs, StepOutput
from jhybrid.sampling import SamplerState


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


class Runner:
    """Holds parameters, cache and sampler state, and runs batches on them, one after the other."""

    def __init__(self, programs: Programs, params: Any):
        self._programs, self.params = programs, params
        self.router, self.buckets, self.memory = programs.router, programs.buckets, programs.memory
        self.executables, self.pages_per_copy = programs.executables, programs.pages_per_copy
        shapes = {programs.mask_shape(bucket) for bucket in self.buckets}
        on_all = None if self.executables.mesh is None else NamedSharding(self.executables.mesh, PartitionSpec())
        self._no_masks = {shape: jax.device_put(np.zeros(shape, np.uint32), on_all) for shape in shapes}
        self.reset()

    @property
    def bucket_seconds(self) -> dict[Bucket, float]:
        """That each bucket took to compile, or to load."""
        return self._programs.seconds

    def geometry(self) -> Geometry:
        """What batch layouts need to know of the caches."""
        return self._programs.geometry()

    def reset(self) -> None:
        """Fresh caches and sampler state. Compiles nothing."""
        self.cache: Cache
        self.sampler: SamplerState
        self.store: Store  # of snapshots, where these are not slots of the cache
        self.cache, self.sampler, self.store = self._programs.allocate()

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
        self.sampler = self._programs.set_row(self.sampler, np.int32(row), counts, bias)

    def copy_pages(self, moves: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers, and wait for it. Only a runner made with `copies_pages` can."""
        for at in range(0, len(moves), COPIES):
            self.cache = self._programs.copy_pages(self.cache, *_moves(moves[at : at + COPIES], COPIES))
        jax.block_until_ready(self.cache.arrays)

    def run(self, batch: Batch) -> StepHandle:
        """Start a step; it runs after all earlier ones. MissingBucketError if its shape was never compiled."""
        executable = self._programs.steps.get(batch.bucket)
        if executable is None:
            raise MissingBucketError(f"{batch.bucket} was not compiled; there are {[str(b) for b in self.buckets]}")
        if batch.loads:
            self.cache = self._programs.unpack(self.cache, self.store, *_moves(batch.loads, self.memory.num_staged))
        # What nobody is bound by stays on the device; no sequence of the batch reads it.
        mask = self._no_masks[self._programs.mask_shape(batch.bucket)] if batch.mask is None else batch.mask
        vectors = batch.ints, batch.floats, mask
        self.cache, self.sampler, output = executable(self.params, self.cache, self.sampler, *vectors)
        if batch.saves:
            self.store = self._programs.pack(self.cache, self.store, *_moves(batch.saves, self.memory.num_staged))
        return StepHandle(batch, output)

    # lower tiers

    @property
    def copies(self) -> Copies:
        """What copies rows to the host and back; only an engine with lower tiers has it."""
        assert self._programs.copies is not None, "made without lower tiers"
        return self._programs.copies

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


def device_bytes_free(mesh: Mesh | None = None) -> int:
    """Free bytes of each device's memory: of the first, or the least of a mesh's; on CPU a share of the machine's."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    every = [None if device.platform == "cpu" else device.memory_stats() for device in devices]
    known = [int(stats["bytes_limit"]) - int(stats["bytes_in_use"]) for stats in every if stats is not None]
    return min(known) if known else psutil.virtual_memory().available // len(devices)
