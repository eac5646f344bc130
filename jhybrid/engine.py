"""Engine: the public object. Submit, abort, step, generate, score, close. One thread owns it and the device.

`step` is the whole engine: plan the next step and start it, then take in the one before, which ran meanwhile.
"""

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import NamedTuple, Self

from jhybrid import compilations
from jhybrid.batch import Bucket, Packer
from jhybrid.config import EngineConfig
from jhybrid.detokenizer import Detokenizer
from jhybrid.errors import EngineDeadError, OutOfMemoryError, QueueFullError, RequestError, StepError
from jhybrid.grammar import Constraint, Grammar, GrammarError
from jhybrid.guard import Guard
from jhybrid.intake import Intake
from jhybrid.occupancy import Occupancy
from jhybrid.request import Completion, Delta, Output, Request, SamplingParams, TokenLogprobs
from jhybrid.results import adjustments, prompt_entries, sampled_entry
from jhybrid.runner import Runner, StepHandle, StepResult
from jhybrid.scheduler import Item, Plan, Scheduler
from jhybrid.sequence import Phase, Sequence
from jhybrid.startup import Startup
from jhybrid.stats import Stats
from jhybrid.tokenizer import Tokenizer
from jhybrid.weights.load import Model, load_model, make_ledger, make_runner, make_tiers, make_tuner

log = logging.getLogger("jhybrid")

EXACT, ROUGH = 1e-3, 0.5
"""How far the log-probabilities of a hit may be from those of a cold run: in float32, and with rounded states."""


MASK_SECONDS = 0.005
"""How long a step may wait for the masks that its sequences need. Who has none by then sits it out."""


class Flight(NamedTuple):
    """A step under way, or just over."""

    plan: Plan
    handle: StepHandle
    bucket: Bucket
    started: float  # of perf_counter


class Engine:
    """An engine for one model.

    Raises ConfigError, WeightsError or OutOfMemoryError when it cannot start. `submit` raises RequestError or
    QueueFullError and leaves everything as it was.
    """

    def __init__(self, config: EngineConfig, startup: Startup | None = None, *, max_parked: int = 0):
        """`startup` is kept up to date meanwhile, for other threads to read.

        `max_parked` sequences can hold pages and state without running, beside the `max_num_seqs` that run.
        """
        startup = startup or Startup()
        log.info("configuration: %s", config.describe())
        with compilations.starting():
            startup.phase = "loading weights"
            model = load_model(config)
            runner = make_runner(config, model, startup, max_parked)
        self._assemble(config, model, runner)
        startup.phase = "ready"
        log.info("ready in %.1f s: %s", startup.seconds, self.stats.describe(self))

    @classmethod
    def with_runner(cls, config: EngineConfig, model: Model, runner: Runner) -> Self:
        """An engine on a runner that exists already, as the scheduler's tests have one."""
        engine = cls.__new__(cls)
        engine._assemble(config, model, runner)
        return engine

    def _assemble(self, config: EngineConfig, model: Model, runner: Runner) -> None:
        self.config, self.model, self.runner = config, model, runner
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.ledger = make_ledger(config, model, runner.memory)
        if config.host_cache_bytes and self.ledger.tree is not None:
            self.ledger.tiers = make_tiers(config, model, runner)
        self.scheduler = Scheduler(
            self.ledger, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.packer = Packer(runner.buckets, runner.geometry())
        self.intake = Intake(model)
        self.stats = Stats()
        self._sequences: dict[str, list[Sequence]] = {}
        self._flight: Flight | None = None
        self.landed: Flight | None = None
        """The step whose results were taken in last."""
        self._told: list[Delta] = []  # ends that no step produced: aborts, failures
        self._masking: list[tuple[Sequence, Future]] = []  # their next masks are being made
        self._num_late = 0  # of these, the first ones, for which a step has waited already
        self._seeds = random.Random(config.base_seed)
        self._numbers = itertools.count()
        self._names = (f"req-{i}" for i in self._numbers)
        self._compiled_before = compilations.count()
        self._closed = False
        parts = [part for part, _ in model.router.arrays.values()]
        exact = {model.dtype, *(part.dtype for part in parts)} == {"float32"} and config.snapshot_dtype == "auto"
        self._guard = Guard(
            config.verify_hits,
            EXACT if exact else ROUGH,
            config.page_size,
            needs_state=model.router.has_slots,
            seed=config.base_seed,
        )
        tree = self.ledger.tree
        tunes = tree is not None and config.eviction_policy == "flop_aware"
        self._tuner = make_tuner(config, model, runner.memory, tree) if tunes and tree else None

    # submitting

    def submit(self, request: Request) -> str:
        """Queue a request and return its id. Nothing is kept of a request that is refused."""
        if self._closed:
            raise EngineDeadError("the engine is closed")
        prompt = self.intake.check(request)
        name = request.request_id or next(n for n in self._names if n not in self._sequences)
        if name in self._sequences or any(delta.request_id == name for delta in self._told):
            raise RequestError("request_id", f"{name!r} is already running; choose another or leave it out")
        n = request.sampling.n
        if n > self.config.max_queue:
            raise RequestError("n", f"{n} answers never fit in max_queue={self.config.max_queue}; ask for fewer")
        if self.scheduler.num_waiting + n > self.config.max_queue:
            raise QueueFullError(
                f"{self.scheduler.num_waiting} sequences wait and max_queue is {self.config.max_queue}; try again later"
            )
        grammar = self.intake.grammar(request)
        self._sequences[name] = [self._sequence(name, i, request, prompt, grammar) for i in range(n)]
        for sequence in self._sequences[name]:
            self.scheduler.add(sequence)
        self.stats.requests += 1
        return name

    def _sequence(
        self, name: str, index: int, request: Request, prompt: list[int], grammar: Grammar | None = None
    ) -> Sequence:
        sampling = request.sampling
        given = sampling.seed
        entries: list[TokenLogprobs | None] = [None] * len(prompt)
        wants_prompt = sampling.prompt_logprobs is not None and index == 0
        detokenizer = Detokenizer(
            self.tokenizer,
            stop=sampling.stop_strings,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            prompt=prompt,
        )
        return Sequence(
            request_id=name,
            index=index,
            request=request,
            prompt_len=len(prompt),
            token_ids=list(prompt),
            max_total=self.intake.max_total(request, len(prompt)),
            eos_token_ids=frozenset() if sampling.ignore_eos else self.model.eos_token_ids,
            seed=self._seeds.getrandbits(32) if given is None else fold_seed(given, index),
            detokenizer=detokenizer,
            constraint=None if grammar is None else self._constraint(grammar, sampling, detokenizer.opens),
            prompt_logprobs=entries if wants_prompt else None,
        )

    def _constraint(self, grammar: Grammar, sampling: SamplingParams, opens: bool) -> Constraint:
        grammars, ends = self.intake.grammars, self.model.eos_token_ids
        assert grammars is not None
        return Constraint(
            grammars.pool,
            grammar,
            first=grammars.opening if opens else frozenset(),
            early=ends | frozenset(sampling.stop_token_ids),
            least=sampling.min_tokens,
            never=ends if sampling.ignore_eos else frozenset(),
        )

    def abort(self, request_id: str) -> bool:
        """End a request in whatever phase it is. The next `step` returns its last deltas. False if it is unknown."""
        sequences = self._sequences.get(request_id)
        if sequences is None:
            return False
        for sequence in list(sequences):
            self._told.append(self._end(sequence, Delta(request_id, sequence.index, finish_reason="abort")))
        return True

    # parking and forking, for the profiler

    def park(self, name: str, tokens: list[int], depth: int, *, computed: bool = True) -> Sequence:
        """Have the first `depth` of these tokens computed by the steps to come, and held until `abort(name)`.

        `extend` computes more of them. Without `computed` the pages and the state are taken as they are. Raises
        OutOfMemoryError or SlotPoolEmptyError, with nothing held, where they cannot be had.
        """
        sequence = self._aside(name, tokens, len(tokens) + 1, seed=0)
        sequence.computable = depth
        if not self.ledger.reserve(sequence, depth):
            raise self._no_pages(name, self.ledger.pages_for(depth))
        self._adopt(sequence, 0 if computed else depth)
        return sequence

    def extend(self, parked: Sequence, depth: int, *, computed: bool = True) -> None:
        """Have a parked sequence computed up to `depth`. Raises OutOfMemoryError, with nothing changed."""
        if not self.ledger.reserve(parked, depth):
            raise self._no_pages(parked.request_id, self.ledger.pages_for(depth))
        parked.computable = depth
        if not computed:
            parked.dispatched = depth

    def fork(
        self, parked: Sequence, name: str, tokens: list[int], room: int, *, shares: int, in_place: bool, seed: int
    ) -> Sequence:
        """Run a sequence of its own from where a parked one stands, or, with `shares` 0, from the beginning.

        The first `shares` of its `tokens` are the parked one's; it goes on, sampling, until it has `room` tokens, for
        which it gets the pages at once. Raises as `park` does, or what the device raised, with nothing held.
        """
        child = self._aside(name, tokens, room, seed)
        moves = self.ledger.fork(parked, child, shares, room, shares_slot=in_place)
        if moves is None:
            raise self._no_pages(name, self.ledger.pages_for(room) - shares // self.ledger.page_size)
        try:
            if moves:
                self.runner.copy_pages(moves)
        except Exception as error:
            self.ledger.release(child)
            if self.runner.lost:
                self._start_over(error)
            raise
        self._adopt(child, shares)
        return child

    def _aside(self, name: str, tokens: list[int], room: int, seed: int) -> Sequence:
        """A sequence that is neither counted nor cached."""
        if name in self._sequences:
            raise RequestError("name", f"{name!r} is already running")
        sampling = SamplingParams(max_tokens=room - len(tokens), temperature=1.0, seed=seed, ignore_eos=True)
        request = Request(prompt_token_ids=tokens, sampling=sampling)
        sequence = self._sequence(name, 0, request, tokens)
        sequence.is_cold = sequence.is_check = True
        return sequence

    def _adopt(self, sequence: Sequence, tokens: int) -> None:
        self._sequences[sequence.request_id] = [sequence]
        self.packer.admit(sequence)
        self.scheduler.adopt(sequence, tokens)

    def _no_pages(self, name: str, count: int) -> OutOfMemoryError:
        pages = self.ledger.pages
        return OutOfMemoryError(f"{name} needs {count} pages, {self.ledger.available_pages} of {pages.size} can be had")

    # stepping

    @property
    def max_queue(self) -> int:
        """Sequences that may wait."""
        return self.config.max_queue

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self._flight is not None or bool(self._told)

    @property
    def steps_ended(self) -> int:
        """Steps whose results were taken in, or that failed. A watchdog sees by it whether anything moves."""
        return self.stats.steps_ended

    def step(self) -> list[Delta]:
        """Start the next step and take in the one before. Returns what became known."""
        with self.stats.timed("step"):
            if self._masking:
                self._take_masks()
            plan = self.scheduler.plan()
            if plan is None and self._flight is None and self._masking:
                wait([mask for _, mask in self._masking], MASK_SECONDS, FIRST_COMPLETED)
            before, self._flight = self._flight, None  # a launch that fails leaves the step before it alone
            self._flight = self._launch(plan)
            self.ledger.tick()
            if plan is None and before is None and self.ledger.tiers is not None:
                self.ledger.tiers.wait_for_fetch()
            if before is not None:  # the device is busy anyway
                self._tune()
            deltas = self._land(before)
            if not self.config.async_scheduling:
                before, self._flight = self._flight, None
                deltas += self._land(before)
            deltas, self._told = self._told + deltas, []
            if self._guard.is_checking:
                deltas = [delta for delta in deltas if not self._take_check(delta)]
        self.stats.log_now_and_then(self)
        return deltas

    def _take_masks(self) -> None:
        """Take in the masks that are there, having waited a moment for those begun in the last step, and no others."""
        wait([mask for _, mask in self._masking[self._num_late :]], MASK_SECONDS)
        late = []
        for sequence, mask in self._masking:
            if sequence.phase is Phase.FINISHED:
                continue
            if not mask.done():
                late.append((sequence, mask))
                continue
            try:
                self._bind(sequence)
            except GrammarError as error:
                self._told.append(self._failure(sequence, error))
        self._masking, self._num_late = late, len(late)

    def _bind(self, sequence: Sequence) -> None:
        """Take in what a sequence may go on with, which may be nothing. GrammarError."""
        assert sequence.constraint is not None
        complete = sequence.constraint.finish()
        if complete or len(sequence.token_ids) >= sequence.max_total:
            delta = self._delta(sequence, [])
            delta.finish_reason = "stop" if complete else "length"
            self._told.append(self._end(sequence, delta))

    def idle(self) -> bool:
        """Do a little of what can wait until nothing else is to be done. False if there is nothing of it either.

        That is checking hits (`verify_hits`), for which steps are to follow, tuning the eviction policy, and copying
        prefixes to the lower tiers.
        """
        return not self.has_work and (self._begin_check() or self._tune() or self.ledger.keep_copying())

    def _begin_check(self) -> bool:
        asked = self._guard.begin()
        for name, request, is_cold in asked:
            sequence = self._sequence(name, 0, request, request.prompt_token_ids or [])
            sequence.is_check, sequence.is_cold = True, is_cold
            self._sequences[name] = [sequence]
            self.scheduler.add(sequence)
        return bool(asked)

    def _take_check(self, delta: Delta) -> bool:
        """Whether a delta belongs to a check, and not to a caller."""
        if not self._guard.owns(delta.request_id):
            return False
        verdict = self._guard.take(delta)
        if verdict is not None:
            self.ledger.counts.verified += verdict.worst is not None
            if verdict.forget is not None:
                log.error("a cached prefix differs by %s from computing it again: forgotten", verdict.worst)
                self.ledger.quarantine(verdict.forget)
        return True

    def _tune(self) -> bool:
        tree = self.ledger.tree
        return (
            self._tuner is not None
            and tree is not None
            and self._tuner.turn(tree.evicted_pages + tree.evicted_snapshots > 0)
        )

    def _launch(self, plan: Plan | None) -> Flight | None:
        for sequence, error in self.scheduler.failed:
            self._told.append(self._failure(sequence, error))
        self.scheduler.failed.clear()
        if plan is None:
            return None
        try:
            for sequence in plan.admitted:
                if not sequence.preemptions and not sequence.is_check:
                    if sequence.hit is not None:
                        self._guard.saw(sequence.hit, sequence.request.cache_salt, sequence.token_ids)
                    sequence.queue_seconds = time.perf_counter() - sequence.submitted
                self.packer.admit(sequence)
                self._load(sequence)
                adjusted = adjustments(sequence, self.model.vocab_size)
                if adjusted is not None:
                    assert sequence.holding is not None
                    self.runner.set_row(sequence.holding.row, *adjusted)
            batch = self.packer.pack(plan.items)
            with self.stats.timed("launch"):
                started = time.perf_counter()
                flight = Flight(plan, self.runner.run(batch), batch.bucket, started)
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails this step's sequences and no others
            self._fail_step(plan, error)
            return None
        self.stats.launched(plan, batch.bucket.tokens)
        return flight

    def _load(self, sequence: Sequence) -> None:
        """Write what came from a lower tier into the rows of a sequence that has just been admitted."""
        holding = sequence.holding
        load = holding.load if holding else None
        if holding is not None and load is not None:
            pages = holding.pages[load.first : load.depth]
            self.runner.copy_in(load.fetch.staged, load.first - load.fetch.first, pages, load.snapshot)

    def _land(self, flight: Flight | None) -> list[Delta]:
        if flight is None:
            return []
        try:
            with self.stats.timed("wait"):
                result = flight.handle.result()
        except Exception as error:  # noqa: BLE001 - a failed step fails its sequences and is never retried
            self._fail_step(flight.plan, error)
            return []
        finally:
            self.stats.steps_ended += 1
        seconds = self.stats.landed(flight.bucket, flight.started)
        self.ledger.computed([item.num_tokens for item in flight.plan.items], seconds)
        self.landed = flight
        tokens = result.tokens.tolist()
        deltas, start = [], 0
        for i, item in enumerate(flight.plan.items):
            if self.scheduler.landed(item):
                delta = self._take(item, result, i, tokens[i], start)
                if delta is not None:
                    deltas.append(delta)
            start += item.num_tokens
        return deltas

    def _fail_step(self, plan: Plan, error: Exception) -> None:
        """Fail every sequence of a step with its cause. If the caches went with it, the others start over."""
        log.error("step of %d sequences failed", len(plan.items), exc_info=error)
        self.stats.failed_steps += 1
        cause = StepError(f"the step failed: {type(error).__name__}: {error}")
        cause.__cause__ = error
        for item in plan.items:
            if self.scheduler.landed(item):
                self._told.append(self._failure(item.sequence, cause))
        if self.runner.lost:
            self._start_over(error)

    def _start_over(self, error: Exception) -> None:
        """The caches are lost: fail the step that ran on what was left of them, and compute all others again."""
        flight, self._flight = self._flight, None
        if flight is not None:  # it ran on what the failed step left
            self._fail_step(flight.plan, error)
        self.scheduler.preempt_all()
        self.ledger.flush()
        self.runner.reset()

    # taking results in

    def _take(self, item: Item, result: StepResult, i: int, token: int, start: int) -> Delta | None:
        """What a step means for one sequence; None when it shows nothing yet (mid-prefill)."""
        sequence = item.sequence
        if token < 0:  # also where nothing is sampled: what it computed must not be shared
            self.stats.nan_events += 1
            at = item.first_pos + item.num_tokens - 1
            self.ledger.distrust(sequence)
            if sequence.hit is not None and not sequence.is_check:
                self._guard.suspect(sequence.hit, sequence.request.cache_salt, sequence.token_ids)
            why = "are NaN or infinite; check the checkpoint's weights for such numbers, or use dtype float32"
            return self._failure(sequence, StepError(f"the model's logits at position {at} {why}"))
        if sequence.prompt_logprobs is not None and not prompt_entries(item, result, start):
            return self._failure(sequence, StepError(f"log-probabilities of the prompt near {item.first_pos} are NaN"))
        loaded = self.scheduler.commit(item)
        if loaded is not None and not sequence.is_check:
            self._guard.saw(loaded, sequence.request.cache_salt, sequence.token_ids)
        if item.samples:
            return self._token(item, result, i, token)
        done = item.first_pos + item.num_tokens
        if sequence.max_total == sequence.prompt_len == done:  # max_tokens=0: the prompt was all
            delta = self._delta(sequence, [])
            delta.finish_reason = "length"
            return self._end(sequence, delta)
        return None

    def _token(self, item: Item, result: StepResult, i: int, token: int) -> Delta:
        sequence, sampling = item.sequence, item.sequence.request.sampling
        sequence.token_ids.append(token)
        self.stats.output_tokens += not sequence.is_check
        delta = self._delta(sequence, [token])
        if sampling.logprobs is not None:
            delta.logprobs = [sampled_entry(result, i, token, sampling.logprobs)]
        ends = token in sequence.eos_token_ids or token in sampling.stop_token_ids
        ends = ends and sequence.num_outputs > sampling.min_tokens
        stopped = None
        if not ends or sampling.include_stop_str_in_output:
            delta.text, stopped = sequence.detokenizer.push([token])
        if stopped is not None:
            delta.finish_reason, delta.stop_reason = "stop", stopped
        elif ends:
            delta.finish_reason, delta.stop_reason = "stop", token
        elif sequence.constraint is not None:  # it also knows whether the answer is complete, see `_take_masks`
            self._masking.append((sequence, sequence.constraint.take(token)))
        elif len(sequence.token_ids) >= sequence.max_total:
            delta.finish_reason = "length"
        return delta if delta.finish_reason is None else self._end(sequence, delta)

    def _delta(self, sequence: Sequence, token_ids: list[int]) -> Delta:
        delta = Delta(
            sequence.request_id,
            sequence.index,
            token_ids,
            cached_tokens=sequence.cached_tokens,
            miss_cause=sequence.miss_cause,
        )
        if sequence.queue_seconds is not None:  # its first delta
            delta.queue_seconds, sequence.queue_seconds = sequence.queue_seconds, None
            delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        return delta

    def _failure(self, sequence: Sequence, error: Exception) -> Delta:
        self.stats.failed_sequences += 1
        delta = Delta(sequence.request_id, sequence.index, finish_reason="error", error=str(error))
        delta.cached_tokens = sequence.cached_tokens
        return self._end(sequence, delta)

    def _end(self, sequence: Sequence, last: Delta) -> Delta:
        """Close a sequence's books; `last` is its last delta, which gets the text that was held back."""
        last.text += sequence.detokenizer.finish()
        if self._tuner is not None and sequence.dispatched and not sequence.is_check:
            self._tuner.saw(sequence.request.cache_salt, sequence.token_ids, sequence.prompt_len)
        self.scheduler.finish(sequence)
        siblings = self._sequences[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request_id]
        return last

    # whole answers

    def stream(self, request: Request) -> Iterator[Delta]:
        """The deltas of one request as they come. Leaving the iterator early aborts it. Streams may be interleaved."""
        name = self.submit(request)
        try:
            left = request.sampling.n
            while left:
                for delta in self._step_of({name}):
                    left -= delta.finish_reason is not None
                    yield delta
        finally:
            self._leave({name})

    def generate(self, requests: Iterable[Request]) -> list[Output]:
        """Answer requests, in their order. If one is refused, none of them runs on."""
        waiting: deque[Request] = deque()
        names: set[str] = set()
        for request in requests:
            prompt = self.intake.check(request)
            if request.request_id in names:
                raise RequestError("request_id", f"{request.request_id!r} is given twice; choose another")
            if request.request_id:
                names.add(request.request_id)
            waiting.append(replace(request, prompt=None, prompt_token_ids=prompt))
        left = sum(request.sampling.n for request in waiting)
        outputs: dict[str, Output] = {}
        try:
            while left:
                while waiting and self._takes(waiting[0].sampling.n):
                    request = waiting.popleft()
                    name = self.submit(request)
                    answers = [Completion(i) for i in range(request.sampling.n)]
                    outputs[name] = Output(name, request.prompt_token_ids or [], answers)
                for delta in self._step_of(outputs):
                    left -= delta.finish_reason is not None
                    outputs[delta.request_id].add(delta)
        finally:
            self._leave(outputs)
        while not self.has_work and self._begin_check():
            while self._guard.is_checking:
                deltas = self.step()
                self._told += deltas
        return list(outputs.values())

    def _takes(self, n: int) -> bool:
        """Whether the queue has room for `n` sequences; an empty one lets `submit` say why it has not."""
        waiting = self.scheduler.num_waiting
        return not waiting or waiting + n <= self.config.max_queue

    def _step_of(self, names: Container[str]) -> list[Delta]:
        """What a step made known of some requests. Deltas of others are kept for the next who steps."""
        mine, others = [], []
        for delta in self.step():
            (mine if delta.request_id in names else others).append(delta)
        self._told = others
        return mine

    def _leave(self, names: Collection[str]) -> None:
        """Nobody listens to these requests any more: end them, and forget what was still to be told of them."""
        for name in names:
            self.abort(name)
        self._told = [delta for delta in self._told if delta.request_id not in names]
        self._settle()

    def _settle(self) -> None:
        """Take in a last step that was started for sequences which have ended since."""
        if self._flight is not None and not self.scheduler.has_work:
            flight, self._flight = self._flight, None
            self._told += self._land(flight)

    def score(self, sequences: list[list[int]], starts: list[int] | None = None) -> list[list[float | None]]:
        """Log-probability of each token given those before it; the first of each sequence has none (None).

        With `starts`, only those from an index on, None before it: what comes before can then be shared between
        sequences by the prefix cache, and is marked to be.
        """
        if starts is not None and len(starts) != len(sequences):
            raise RequestError("starts", f"{len(starts)} given for {len(sequences)} sequences; give one for each")
        requests = []
        for i, tokens in enumerate(sequences):
            start = 0 if starts is None else starts[i]
            sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=start)
            marks = [start - 1] if 1 < start <= len(tokens) else []
            requests.append(Request(prompt_token_ids=tokens, sampling=sampling, snapshot_at=marks))
        outputs = self.generate(requests)
        scores: list[list[float | None]] = []
        for output in outputs:
            if output.prompt_logprobs is None:
                raise StepError(output.error or "no log-probabilities came back")
            scores.append([None if entry is None else entry[0][1] for entry in output.prompt_logprobs])
        return scores

    # looking and leaving

    @property
    def compilations_after_ready(self) -> int:
        """Executables that XLA compiled since this engine was ready; 0 unless something is wrong."""
        return compilations.count() - self._compiled_before

    def status(self) -> dict:
        """Running and waiting sequences, pages, slots, memory by kind, compilations after ready, counters."""
        return self.stats.status(self)

    def occupancy(self) -> Occupancy:
        """Who holds which slots, pages and snapshots now."""
        return Occupancy.of(self.scheduler, self.ledger)

    def degraded(self) -> dict[str, str]:
        """What is out of use though requests are answered, and why. Any thread may ask."""
        return {} if self.ledger.tiers is None else self.ledger.tiers.out()

    def model_info(self) -> dict:
        """The model's name, family, sizes and limits."""
        return self.model.info()

    def flush_cache(self, *, device_only: bool = False) -> None:
        """Forget cached prefixes. What running sequences use of them is given back when they end.

        With `device_only`, what the host and disk tiers have stays.
        """
        self.ledger.flush()
        if self.ledger.tiers is not None and not device_only:
            self.ledger.tiers.clear()

    def drain_tiers(self, seconds: float = 60.0) -> bool:
        """Wait until what is worth keeping has arrived in the host and disk tiers. False if it took longer."""
        return self.ledger.drain(seconds)

    def close(self) -> None:
        """End what runs and give everything back. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        for name in list(self._sequences):
            self.abort(name)
        if self._flight is not None:
            flight, self._flight = self._flight, None
            for item in flight.plan.items:
                self.scheduler.landed(item)
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fold_seed(seed: int, index: int) -> int:
    """The 32-bit seed of a request's index-th answer: the SplitMix64 hash (Steele, Lea and Flood 2014) of both."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0xFFFFFFFF
