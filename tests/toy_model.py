"""A model computable by hand, behind the runner's interface, for tests of scheduler and engine.

The next token is a hash of the whole history, and the history exists only in the simulated cache: pages hold the
token of each position, a slot holds a running hash over exactly positions [0, n), a row holds the last sampled
token. So any mix-up of pages, slots, rows or positions gives a wrong token. What can be recognised as a mix-up is
noted in `violations`: an exception would be, to the engine, just a failed step, and a real device raises none.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jhybrid.batch import FROM_DEVICE, NO_TARGET, Batch, Geometry, Layout, make_buckets
from jhybrid.cache.arrays import MemoryPlan
from jhybrid.cache.router import Part, Router
from jhybrid.cache.tiers.form import Blob, Form
from jhybrid.config import EngineConfig
from jhybrid.engine import Engine, fold_seed
from jhybrid.executables import Executables
from jhybrid.request import SamplingParams
from jhybrid.runner import StepResult
from jhybrid.sampling import LOGPROB_FLOOR, MAX_BANNED, PROMPT_BIT
from jhybrid.weights.load import Model

VOCAB = 64
EOS = frozenset({5})
POISON = -(1 << 40)
_MODULUS = (1 << 61) - 1


def extend(history_hash: int, token: int) -> int:
    """Hash of a history and one token more."""
    return (history_hash * 1_000_003 + token + 1) % _MODULUS


def hash_of(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = extend(value, token)
    return value


def next_token(history_hash: int, *, temperature: float, seed: int, step: int, banned: frozenset[int]) -> int:
    """The token that follows a history: the model's own when greedy, one that seed and step choose otherwise."""
    mixed = history_hash if temperature == 0 else history_hash ^ (seed * 2_654_435_761 + step * 97)
    token = (mixed % _MODULUS) % 1009 % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def logprob_of(history_hash: int, token: int) -> float:
    """The toy's log-probability of a token after a history; a multiple of 1/128, so float32 holds it exactly."""
    return -((history_hash ^ (token * 40_503)) % 997 + 1) / 128


def expected_tokens(prompt: list[int], sampling: SamplingParams, index: int = 0, max_model_len: int = 64) -> list[int]:
    """The answer that the engine must give, from the definition alone."""
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOS)
    room = max_model_len - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
    seed = fold_seed(sampling.seed or 0, index)
    tokens, value = [], hash_of(prompt)
    while len(tokens) < room:
        step = len(tokens)
        banned = frozenset(ends) if step < sampling.min_tokens else frozenset()
        token = next_token(value, temperature=sampling.temperature, seed=seed, step=step, banned=banned)
        tokens.append(token)
        value = extend(value, token)
        if token in ends:
            break
    return tokens


class DeviceFault(RuntimeError):
    """What the tests make the device raise."""


@dataclass
class Fault:
    """A failure of one call of `run`.

    `launch` raises from `run`, nothing done; `before` raises from the handle, nothing done; `after` raises from the
    handle, cache already changed; `lost` takes the caches with it until `reset`; `nan` gives the sequence at `row`
    logits that are not finite.
    """

    kind: str
    row: int = 0


@dataclass
class Slot:
    """A running hash over positions [0, length); poisoned until something is written."""

    length: int = POISON
    hash: int = POISON


class ToyHandle:
    """A step under way."""

    def __init__(self, batch: Batch, outcome: StepResult | Exception):
        self.batch = batch
        self._outcome = outcome

    def result(self) -> StepResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


@dataclass(frozen=True)
class Violation:
    """A mix-up seen in a call of `run`, at its index-th sequence; None if it is about the whole batch."""

    call: int
    index: int | None
    what: str


class ToyOutgoing:
    """A copy out of the toy's caches, which reads its sources as late as it may: when it is found, or made, ready.

    If the caches were lost before that, it fails.
    """

    def __init__(self, read: Callable[[], tuple[list[Blob], Blob | None] | None], polls: int):
        self._read, self._polls = read, polls
        self.seconds = 0.0
        self._blobs: tuple[list[Blob], Blob | None] | None = None
        self._done = threading.Event()

    @property
    def is_ready(self) -> bool:
        self._polls -= 1
        if self._polls <= 0:
            self.wait()
        return self._done.is_set()

    def wait(self) -> None:
        if not self._done.is_set():
            self._blobs = self._read()
            self._done.set()

    def fetch(self) -> tuple[list[Blob], Blob | None]:
        assert self._done.wait(20), "nobody looked whether the copy has run"
        if self._blobs is None:
            raise DeviceFault("the caches that a copy was to read were lost")
        return self._blobs


@dataclass
class ToyStaged:
    """What has come up from a lower tier, in no cache yet."""

    pages: list[Blob]
    state: Blob | None


@dataclass
class Row:
    """What the sampler keeps of a running sequence."""

    last_token: int = POISON
    counts: np.ndarray | None = None


@dataclass
class ToyRunner:
    """Runner of the toy model. `kind` says which caches it has."""

    config: EngineConfig
    kind: str = "hybrid"  # hybrid | attention | recurrent
    max_model_len: int = 64
    max_parked: int = 0
    faults: dict[int, Fault] = field(default_factory=dict)  # by number of the call of `run`
    copy_faults: list[Fault] = field(default_factory=list)  # of the calls of `copy_pages` to come
    before_run: Callable[[Batch], None] = lambda _batch: None
    violations: list[Violation] = field(default_factory=list)
    calls: int = 0
    resets: int = 0
    copy_polls: int = 1  # looks at a copy until it has run
    pages_per_copy: int = 3
    failed_calls: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        config = self.config
        slot = [Part("ssm", "slot", (2,), "float32")] if self.kind != "attention" else []
        page = [Part("kv", "page", (config.page_size,), "float32")] if self.kind != "recurrent" else []
        self.router = Router([slot, page])
        self.buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
        width = -(-self.max_model_len // config.page_size)
        pages = config.num_pages if config.num_pages is not None else (config.max_num_seqs + self.max_parked) * width
        sizes = dict.fromkeys(("weights", "kv", "state", "snapshots", "sampler", "scratch", "available"), 0)
        rows = config.max_num_seqs + self.max_parked
        slots = rows if slot else 0
        snapshots = config.snapshot_slots or 0 if slot and config.enable_prefix_caching else 0
        self.memory = MemoryPlan(
            **sizes, num_slots=slots, num_pages=pages if page else 0, num_snapshots=snapshots, num_rows=rows
        )
        self._width = width if page else 0
        self.executables = Executables(None)
        self.page_form = Form({"kv": (1, (config.page_size,), np.dtype("int64"))} if page else {})
        self.state_form = Form({"ssm": (1, (2,), np.dtype("int64"))} if slot else {})
        self.reset()

    def reset(self) -> None:
        """Fresh caches, all poison."""
        self.resets += 1
        page_size = self.config.page_size
        self.pages = [[POISON] * page_size for _ in range(self.memory.num_pages + 1)]
        self.slots = [Slot() for _ in range(self.memory.num_slots + self.memory.snapshot_rows + 1)]
        self.store = [Slot() for _ in range(self.memory.num_snapshots)]
        self.rows = [Row() for _ in range(self.memory.num_rows + 1)]
        self.lost = False

    def geometry(self) -> Geometry:
        return Geometry(
            page_size=self.config.page_size,
            table_width=self._width,
            has_slots=self.router.has_slots,
            scratch_slot=self.memory.num_slots + self.memory.snapshot_rows,
            scratch_page=self.memory.num_pages,
            scratch_row=self.memory.num_rows,
            chunk_size=self.config.chunk_size,
            first_snapshot=self.memory.num_slots,
            has_snapshots=self.memory.num_snapshots > 0,
            has_staging=self.memory.num_staged > 0,
        )

    def set_row(self, row: int, counts: np.ndarray, _bias: np.ndarray) -> None:
        self.rows[row].counts = counts.copy()

    def poison_free(self, pages: list[int], slots: list[int], snapshots: list[int]) -> None:
        """Overwrite what nobody holds, as the tests of the real caches do with NaN."""
        if self.memory.num_staged:
            for row in snapshots:
                self.store[row] = Slot()
            snapshots = list(range(self.memory.num_staged))
        slots = slots + [self.memory.num_slots + row for row in snapshots]
        for page in pages:
            self.pages[page] = [POISON] * self.config.page_size
        for slot in slots:
            self.slots[slot] = Slot()

    def copy_pages(self, moves: list[tuple[int, int]]) -> None:
        """Each move is a call that may fail as those of `run` may."""
        for source, target in moves:
            fault = self.copy_faults.pop(0) if self.copy_faults else Fault("none")
            if fault.kind != "none":
                self.lost = fault.kind == "lost"
                raise DeviceFault(f"injected: {fault.kind}")
            self.pages[target] = list(self.pages[source])

    def copy_out(self, pages: Sequence[int], snapshot: int | None) -> ToyOutgoing:
        assert len(pages) <= self.pages_per_copy

        resets = self.resets

        def read() -> tuple[list[Blob], Blob | None] | None:
            if self.lost or self.resets != resets:
                return None
            slots = self.store if self.memory.num_staged else self.slots[self.memory.num_slots :]
            state = None if snapshot is None else _blob([slots[snapshot].length, slots[snapshot].hash])
            return [_blob(self.pages[page]) for page in pages], state

        return ToyOutgoing(read, self.copy_polls)

    def stage(self, pages: Sequence[Blob], state: Blob | None, until: float) -> ToyStaged:
        return ToyStaged(list(pages), state)

    def copy_in(self, staged: ToyStaged, skip: int, pages: Sequence[int], snapshot: int | None) -> None:
        if self.lost:
            return
        for page, blob in zip(pages, staged.pages[skip:], strict=bool(pages)):
            self.pages[page] = blob.view(np.int64).tolist()
        if snapshot is not None:
            assert staged.state is not None
            slot = Slot(*staged.state.view(np.int64).tolist())
            if self.memory.num_staged:
                self.store[snapshot] = slot
            else:
                self.slots[self.memory.num_slots + snapshot] = slot

    def run(self, batch: Batch) -> ToyHandle:
        """Do a step at once; what went wrong comes out of the handle, as with a real device."""
        call = self.calls
        self.calls += 1
        self.before_run(batch)
        fault = self.faults.get(call, Fault("none"))
        self.failed_calls.add(call)
        if fault.kind == "launch":
            raise DeviceFault("injected: launch")
        if self.lost:
            return ToyHandle(batch, DeviceFault("the caches are lost"))
        if fault.kind in ("before", "lost"):
            self.lost = fault.kind == "lost"
            return ToyHandle(batch, DeviceFault(f"injected: {fault.kind}"))
        for row, slot in batch.loads:
            self.slots[slot] = self.store[row]
        result = ToyStep(self, batch, call, fault.row if fault.kind == "nan" else None).run()
        for slot, row in batch.saves:
            self.store[row] = self.slots[slot]
        if fault.kind == "after":
            return ToyHandle(batch, DeviceFault("injected: after"))
        self.failed_calls.discard(call)
        return ToyHandle(batch, result)


class ToyStep:
    """One batch on the toy's caches. Reads nothing but the packed vectors, as a device would."""

    def __init__(self, runner: ToyRunner, batch: Batch, call: int, nan_row: int | None):
        self.runner, self.geometry, self.bucket, self.mask = runner, runner.geometry(), batch.bucket, batch.mask
        self.call, self.nan_row = call, nan_row
        layout = Layout(batch.bucket, self.geometry)
        assert batch.ints.dtype == np.int32 and batch.floats.dtype == np.float32
        assert (batch.ints.size, batch.floats.size) == (layout.num_ints, layout.num_floats)
        vectors = ((batch.ints, layout.ints), (batch.floats, layout.floats))
        self.f = {
            name: vector[at : at + math.prod(shape)].reshape(shape)
            for vector, fields in vectors
            for name, (at, shape) in fields.items()
        }
        self.count = int((np.diff(self.f["query_start"]) > 0).sum())
        self.lengths = np.diff(self.f["query_start"])

    def run(self) -> StepResult:
        try:
            self.check_structure()
        except AssertionError as what:
            self.runner.violations.append(Violation(self.call, None, str(what)))
        seqs, tokens = self.bucket.seqs, self.bucket.tokens
        result = StepResult(
            tokens=np.zeros(seqs, np.int32),
            logprob=np.zeros(seqs, np.float32),
            top_ids=np.full((seqs, 20), -1, np.int32),
            top_logprobs=np.full((seqs, 20), LOGPROB_FLOOR, np.float32),
            prompt_logprob=np.full(tokens, np.nan, np.float32),
            prompt_top_ids=np.full((tokens, 20), -1, np.int32),
            prompt_top_logprobs=np.full((tokens, 20), LOGPROB_FLOOR, np.float32),
        )
        for i in range(self.count):
            try:
                self.sequence(i, result)
            except AssertionError as what:
                self.runner.violations.append(Violation(self.call, i, str(what)))
        return result

    def check_structure(self) -> None:
        """What must hold of any batch: nothing shared, padding on scratch, chunks that partition the tokens."""
        f, count, geometry = self.f, self.count, self.geometry
        assert (self.lengths[count:] == 0).all(), f"padding among sequences: {self.lengths}"
        rows = f["row"][:count].tolist()
        assert len(set(rows)) == count and geometry.scratch_row not in rows, f"rows {rows}"
        assert (f["row"][count:] == geometry.scratch_row).all(), f"padding rows {f['row']}"
        assert not f["sample"][count:].any(), "padding samples"
        if geometry.has_slots:
            slots = f["write_slot"][:count].tolist()
            assert len(set(slots)) == count and geometry.scratch_slot not in slots, f"slots {slots}"
            for name in ("read_slot", "write_slot"):
                assert (f[name][count:] == geometry.scratch_slot).all(), f"padding {name} {f[name]}"
            self.check_snapshots(slots)
        if geometry.table_width:
            self.check_pages()
        if self.bucket.kind == "decode":
            assert (self.lengths[:count] == 1).all(), f"decode batch of {self.lengths}"
        else:
            self.check_chunks()

    def check_pages(self) -> None:
        used, written = Counter(), set()
        size = self.geometry.page_size
        for i in range(self.count):
            first, end = int(self.f["first_pos"][i]), int(self.f["first_pos"][i] + self.lengths[i])
            table = self.f["page_table"][i].tolist()
            assert self.geometry.scratch_page not in table[: -(-end // size)], f"scratch in use: {table}"
            used.update(table[: -(-end // size)])
            written.update(table[first // size : -(-end // size)])
        shared = {page for page in written if used[page] > 1}
        assert not shared, f"pages {shared} are written and shared"

    def check_snapshots(self, slots: list[int]) -> None:
        """Written snapshots are nobody's slot, each written once, and none that is read in the same step."""
        f, geometry = self.f, self.geometry
        written = [slot for slot in f["chunk_snapshot"].tolist() if slot != geometry.scratch_slot]
        assert len(set(written)) == len(written) == int(f["num_snapshots"]), f"snapshots {written}"
        assert all(slot >= geometry.first_snapshot for slot in written), f"snapshots {written}"
        for slot, read in zip(slots, f["read_slot"].tolist(), strict=False):
            assert read == slot or read not in (*slots, geometry.scratch_slot), f"{slot} reads {read} of {slots}"
            assert read not in written, f"snapshot {read} is read and written"

    def snapshots_of(self, i: int) -> dict[int, int]:
        """Tokens of sequence i in this step -> slot that is to hold the state after them."""
        f, start = self.f, int(self.f["query_start"][i])
        if not self.geometry.has_slots:
            return {}
        if self.bucket.kind == "decode":
            ends = {1: int(f["chunk_snapshot"][i])}
        else:
            mine = [c for c in range(int(f["num_chunks"])) if f["chunk_seq"][c] == i]
            ends = {int(f["chunk_start"][c] + f["chunk_len"][c]) - start: int(f["chunk_snapshot"][c]) for c in mine}
        return {end: slot for end, slot in ends.items() if slot != self.geometry.scratch_slot}

    def check_chunks(self) -> None:
        f = self.f
        owners = np.repeat(np.arange(self.count), self.lengths[: self.count])
        at = 0
        for c in range(int(f["num_chunks"])):
            start, length = int(f["chunk_start"][c]), int(f["chunk_len"][c])
            assert start == at and 0 < length <= self.geometry.chunk_size, f"chunk {c}: {start}, {length}"
            assert (owners[start : start + length] == f["chunk_seq"][c]).all(), f"chunk {c} crosses sequences"
            at += length
        assert at == len(owners), f"chunks cover {at} of {len(owners)} tokens"
        assert (f["token_seq"][:at] == owners).all()

    def sequence(self, i: int, result: StepResult) -> None:
        """Take a sequence's tokens in, and sample where asked."""
        f, runner = self.f, self.runner
        row = runner.rows[int(f["row"][i])]
        first, start, length = int(f["first_pos"][i]), int(f["query_start"][i]), int(self.lengths[i])
        history = self.read_pages(i, first)
        value = self.read_slot(i, first)
        if value is None:
            assert history is not None
            value = hash_of(history)
        snapshots = self.snapshots_of(i)
        for at in range(start, start + length):
            known = int(f["token_ids"][at])
            token = row.last_token if known == FROM_DEVICE else known
            assert 0 <= token < VOCAB, f"token {token} at position {first + at - start}"
            value = extend(value, token)
            if history is not None:
                history.append(token)
                self.write_page(i, len(history) - 1, token)
            if at + 1 - start in snapshots:
                runner.slots[snapshots[at + 1 - start]] = Slot(first + at + 1 - start, value)
            target = int(f["targets"][at])
            if target != NO_TARGET:
                greedy = next_token(value, temperature=0, seed=0, step=0, banned=frozenset())
                result.prompt_logprob[at] = logprob_of(value, target)
                result.prompt_top_ids[at, 0], result.prompt_top_logprobs[at, 0] = greedy, logprob_of(value, greedy)
        if self.geometry.has_slots:
            runner.slots[int(f["write_slot"][i])] = Slot(first + length, value)
        if f["sample"][i]:
            self.sample(i, row, value, history, result)

    def sample(self, i: int, row: Row, value: int, history: list[int] | None, result: StepResult) -> None:
        f = self.f
        if self.nan_row == i:
            result.tokens[i] = -1
            return
        step = int(f["step"][i])
        if history is not None:
            value = (value + hash_of(history)) * pow(2, -1, _MODULUS) % _MODULUS  # their mean: either may be wrong
        banned = frozenset(f["banned"][i].tolist()) - {-1}
        if f["masked"][i]:
            assert self.mask is not None and self.mask.shape == (self.bucket.seqs, VOCAB // 32)
            words = self.mask[i]
            banned |= {token for token in range(VOCAB) if not words[token // 32] >> (token % 32) & 1}
        assert len(f["banned"][i]) == MAX_BANNED
        seed = int(f["seed"][i].astype(np.uint32))
        token = next_token(value, temperature=float(f["temperature"][i]), seed=seed, step=step, banned=banned)
        if f["adjust"][i] and history is not None:
            self.check_counts(row, history, step)
        if row.counts is not None:
            row.counts[token] += 1
        row.last_token = token
        result.tokens[i] = result.top_ids[i, 0] = token
        result.logprob[i] = result.top_logprobs[i, 0] = logprob_of(value, token)

    def check_counts(self, row: Row, history: list[int], step: int) -> None:
        """Penalties count the tokens of this sequence, the prompt's marked."""
        split = len(history) - step
        counts = np.bincount(history[split:], minlength=VOCAB).astype(np.int32)
        counts[sorted(set(history[:split]))] += PROMPT_BIT
        assert row.counts is not None and (row.counts == counts).all(), "token counts of another sequence or moment"

    def read_pages(self, i: int, length: int) -> list[int] | None:
        """The tokens of positions [0, length) through the page table; None for a model without attention."""
        size = self.geometry.page_size
        if not self.geometry.table_width:
            return None
        table = self.f["page_table"][i]
        tokens = [self.runner.pages[table[p // size]][p % size] for p in range(length)]
        assert POISON not in tokens, f"sequence {i} reads poison at position {tokens.index(POISON)} of {length}"
        return tokens

    def write_page(self, i: int, position: int, token: int) -> None:
        size = self.geometry.page_size
        self.runner.pages[self.f["page_table"][i][position // size]][position % size] = token

    def read_slot(self, i: int, length: int) -> int | None:
        """The running hash over [0, length); the empty history's at position 0, where nothing may be read."""
        if not self.geometry.has_slots:
            return None
        if length == 0:
            return hash_of([])
        slot = self.runner.slots[int(self.f["read_slot"][i])]
        assert slot.length == length, f"sequence {i} is at {length}, its slot holds [0, {slot.length})"
        return slot.hash


def _blob(values: list[int]) -> Blob:
    return np.array(values, np.int64).view(np.uint8)


def toy_model(router: Router, max_model_len: int) -> Model:
    return Model(
        name="toy",
        architecture="Toy",
        config=None,
        module=None,
        params={},
        router=router,
        tokenizer=None,
        eos_token_ids=EOS,
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        dtype="float32",
    )


def toy_engine(config: EngineConfig, **options: object) -> tuple[Engine, ToyRunner]:
    """An engine on the toy model; `options` are the runner's."""
    runner = ToyRunner(config, **options)  # pyright: ignore[reportArgumentType]
    return Engine.with_runner(config, toy_model(runner.router, runner.max_model_len), runner), runner  # pyright: ignore[reportArgumentType]
