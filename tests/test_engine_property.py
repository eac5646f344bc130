"""Random lives of an engine on the toy model: arrivals, aborts, preemptions, failures, priorities, several answers.

Whatever happens, finished answers equal the closed form, nothing leaks, nothing is shared and nobody starves.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st

from jhybrid.batch import Batch
from jhybrid.cache.node import Node
from jhybrid.config import EngineConfig
from jhybrid.errors import QueueFullError, RequestError
from jhybrid.request import Completion, Delta, Output, Request, SamplingParams
from jhybrid.sequence import Phase, Sequence
from tests.toy_model import EOS, VOCAB, Fault, expected_tokens, hash_of, logprob_of, next_token, toy_engine

MAX_MODEL_LEN = 64
STEMS = [[(7 * i + 3) % 64 for i in range(34)], [(7 * i + 3) % 64 for i in range(17)] + [1] * 17]
OPTIONS: dict = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": [p for p in HypothesisPhase if p is not HypothesisPhase.explain],  # it traces every line
}


@dataclass
class Member:
    """One sequence's part in one call of the runner."""

    key: tuple[str, int]
    first_pos: int
    samples: bool


@dataclass
class Life:
    """An engine, what was asked of it, what came back, and the checks that hold after every step."""

    config: EngineConfig
    kind: str
    faults: dict[int, Fault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls: list[list[Member]] = []
        self.engine, self.runner = toy_engine(
            self.config, kind=self.kind, max_model_len=MAX_MODEL_LEN, faults=self.faults, before_run=self.record
        )
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, Output] = {}
        self.aborted: set[str] = set()
        self.slots: dict[tuple[str, int, int], int | None] = {}
        self.steps = 0

    def record(self, batch: Batch) -> None:
        """Called by the toy runner on each batch."""
        self.calls.append(
            [Member((i.sequence.request_id, i.sequence.index), i.first_pos, i.samples) for i in batch.items]
        )

    def evict(self) -> None:
        """Give up one idle page and one snapshot, as if there were no room for them."""
        tree = self.engine.ledger.tree
        if tree is not None:
            tree.evict_page()
            tree.evict_snapshot()

    def submit(self, request: Request) -> str:
        name = self.engine.submit(request)
        assert request.prompt_token_ids is not None
        self.requests[name] = request
        answers = [Completion(i) for i in range(request.sampling.n)]
        self.outputs[name] = Output(name, list(request.prompt_token_ids), answers)
        return name

    def abort(self, name: str) -> None:
        if self.engine.abort(name):
            self.aborted.add(name)
        assert not self.engine.abort(name)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        waiting, running = set(self.waiting()), set(scheduler.running)
        for delta in self.engine.step():
            self.take(delta)
        self.steps += 1
        self.check_ledger()
        admitted = [s.order for s in scheduler.running if s in waiting]
        passed_over = [s.order for s in self.waiting() if s in waiting and s.awaited is None and s.fetch is None]
        assert not admitted or not passed_over or max(admitted) < min(passed_over), "admitted out of order"
        preempted = [s.order for s in self.waiting() if s in running]
        kept = [s.order for s in scheduler.running if s in running]
        assert not preempted or not kept or min(preempted) > max(kept), "preempted for a later one"
        ledger = self.engine.ledger
        self.runner.poison_free(*(pool.free_rows() for pool in (ledger.pages, ledger.slots, ledger.snapshots)))

    def waiting(self) -> list[Sequence]:
        return [s for group in self.engine._sequences.values() for s in group if s.phase is Phase.WAITING]

    def take(self, delta: Delta) -> None:
        answer = self.outputs[delta.request_id].completions[delta.index]
        assert answer.finish_reason is None, f"{delta} after the end"
        self.outputs[delta.request_id].add(delta)

    def check_ledger(self) -> None:
        """What is held is held by running sequences, each once, and never changes hands while they run."""
        ledger, running = self.engine.ledger, self.engine.scheduler.running
        holdings = []
        for sequence in running:
            assert sequence.phase is Phase.RUNNING and sequence.holding is not None
            holdings.append(sequence.holding)
            life = (sequence.request_id, sequence.index, sequence.preemptions)
            assert self.slots.setdefault(life, sequence.holding.slot) == sequence.holding.slot, "a slot was swapped"
        own = [page for h in holdings for page in h.pages[h.published :] + h.duplicates]
        slots = [holding.slot for holding in holdings if holding.slot is not None]
        cached = self.check_tree(running)
        assert len(set(own)) == len(own) and not set(own) & cached
        assert len(own) + len(cached) == ledger.pages.used
        assert len(set(slots)) == len(slots) == ledger.slots.used
        assert len({holding.row for holding in holdings}) == len(holdings) == ledger.rows.used
        assert len(slots) == (len(running) if ledger.slots.size else 0)
        assert all(s.holding is None for s in self.waiting())
        assert self.engine.scheduler.num_waiting == len(self.waiting())
        check_not_negative(self.engine.status())

    def copied(self) -> set[Node]:
        """Nodes that copies to a lower tier read from."""
        return set()

    def check_tree(self, running: list[Sequence]) -> set[int]:
        """The books of the prefix tree agree with a count made from scratch. Returns the pages that are the tree's."""
        ledger = self.engine.ledger
        if ledger.tree is None:
            return set()
        references: Counter[Node] = Counter()
        for sequence in running:
            node = sequence.holding.node if sequence.holding else None
            while node is not None and node.parent is not None:
                references[node] += 1
                node = node.parent
        alive, stack = set(), list(ledger.tree.roots.values())
        assert all(root.children for root in stack), "an empty root was kept"
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                alive.add(node)
        assert all(node.alive for node in alive)
        assert all(node.refs == references[node] for node in alive | set(references))
        assert ledger.tree.num_nodes == len(alive)
        assert ledger.tree.num_idle == sum(not node.refs for node in alive)
        nodes = alive | set(references) | self.copied()
        rows = [node.snapshot for node in nodes if node.snapshot is not None]
        rows += [row for s in running if s.holding for row in s.holding.snapshots.values()]
        sources = {s.holding.source for s in running if s.holding and s.holding.source}
        rows += [s.snapshot for s in sources - nodes if s.snapshot is not None]
        assert len(set(rows)) == len(rows) == ledger.snapshots.used, (rows, ledger.snapshots.used)
        return {node.page for node in nodes if node.page is not None}

    def finish(self) -> None:
        """Step until idle, within the bound that fairness gives, and check everything at rest."""
        bound = self.bound()
        start = self.steps
        while self.engine.has_work:
            self.step()
            assert self.steps - start <= bound, f"still {self.engine.status()} after {bound} steps"
        self.check_rest()
        self.check_violations()
        for name in self.requests:
            for index in range(self.requests[name].sampling.n):
                self.check_answer(name, index)
        self.check_faults()

    def bound(self) -> int:
        """The first in order advances a token at least once per turn of the budget, then the second, and so on."""
        tokens = sum(
            MAX_MODEL_LEN if r.sampling.max_tokens is None else len(r.prompt_token_ids or []) + r.sampling.max_tokens
            for r in self.each_sequence()
        )
        turns = -(-self.config.max_num_seqs // self.config.max_num_batched_tokens)
        return (tokens + 4) * turns * (1 + sum(f.kind == "lost" for f in self.faults.values())) + 8

    def each_sequence(self) -> list[Request]:
        return [r for r in self.requests.values() for _ in range(r.sampling.n)]

    def check_rest(self) -> None:
        ledger, scheduler = self.engine.ledger, self.engine.scheduler
        self.check_ledger()
        self.engine.flush_cache()
        for pool in (ledger.pages, ledger.slots, ledger.rows, ledger.snapshots):
            assert pool.free == pool.size and sorted(pool.free_rows()) == list(range(pool.size)), pool.kind
        assert not scheduler.running and not scheduler.num_waiting and not self.engine._sequences

    def check_answer(self, name: str, index: int) -> None:
        request, output = self.requests[name], self.outputs[name]
        answer, sampling = output.completions[index], request.sampling
        expected = expected_tokens(output.prompt_token_ids, sampling, index, MAX_MODEL_LEN)
        if answer.finish_reason == "abort":
            assert name in self.aborted
        elif answer.finish_reason == "error":
            assert answer.error
        else:
            ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOS)
            stopped = bool(expected) and expected[-1] in ends and len(expected) > sampling.min_tokens
            assert answer.finish_reason == ("stop" if stopped else "length")
            assert len(answer.token_ids) == len(expected)
            assert answer.stop_reason == (expected[-1] if stopped else None)
            if sampling.prompt_logprobs is not None:
                assert output.prompt_logprobs is not None or index
        assert answer.token_ids == expected[: len(answer.token_ids)], f"{name}/{index} {answer.finish_reason}"
        self.check_logprobs(request, output, answer)

    def check_logprobs(self, request: Request, output: Output, answer: Completion) -> None:
        prompt, sampling = output.prompt_token_ids, request.sampling
        if sampling.logprobs is not None:
            assert len(answer.logprobs or []) == len(answer.token_ids)
            for at, entry in enumerate(answer.logprobs or []):
                token = answer.token_ids[at]
                assert entry == [(token, logprob_of(hash_of(prompt + answer.token_ids[:at]), token))]
        if output.prompt_logprobs is None:
            return
        assert sampling.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        for at, token in enumerate(prompt[1:], 1):
            value = hash_of(prompt[:at])
            greedy = next_token(value, temperature=0, seed=0, step=0, banned=frozenset())
            wanted = [greedy, token] if sampling.prompt_logprobs and greedy != token else [token]
            assert output.prompt_logprobs[at] == [(t, logprob_of(value, t)) for t in wanted]

    def struck(self) -> dict[int, list[Member]]:
        """Call -> the sequences that a fault in it met."""
        met = {call: self.calls[call] for call in self.runner.failed_calls}
        for call, fault in self.faults.items():
            members = self.calls[call] if call < len(self.calls) and call not in met else []
            if fault.kind == "nan" and fault.row < len(members) and members[fault.row].samples:
                met[call] = [members[fault.row]]
        return met

    def check_violations(self) -> None:
        """No mix-up was seen, but for sequences whose cache an earlier fault had left in an unknown state."""
        struck = self.struck()
        for violation in self.runner.violations:
            assert violation.index is not None, violation
            key = self.calls[violation.call][violation.index].key
            assert any(key == m.key for call in struck if call < violation.call for m in struck[call]), violation

    def check_faults(self) -> None:
        """A fault fails those it met and nobody else, and nothing is run again that it may have changed."""
        struck = [member for members in self.struck().values() for member in members if member.key[0] in self.outputs]
        for member in struck:
            name, index = member.key
            answer = self.outputs[name].completions[index]
            last_needed = len(self.outputs[name].prompt_token_ids) + len(answer.token_ids) - 2
            finished = answer.finish_reason in ("stop", "length")
            assert not finished or member.first_pos > last_needed, f"{member} finished on a failed step"
        for name, output in self.outputs.items():
            for answer in output.completions:
                met = any(member.key == (name, answer.index) for member in struck)
                assert answer.finish_reason != "error" or met, answer


def check_not_negative(status: dict) -> None:
    for key, value in status.items():
        if isinstance(value, dict):
            check_not_negative(value)
        elif isinstance(value, tuple | list):
            check_not_negative(dict(enumerate(value)))
        elif value is not None:
            assert value >= 0, (key, status)


configs = st.builds(
    lambda seqs, budget, page_size, spare, asynchronous, chunk: EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        page_size=page_size,
        num_pages=-(-MAX_MODEL_LEN // page_size) + spare,
        chunk_size=chunk,
        async_scheduling=asynchronous,
        compilation_cache_dir="",
    ),
    seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 3, 5, 8, 16, 40, 100]),
    page_size=st.sampled_from([1, 4, 16, 64]),
    spare=st.integers(0, 12),
    asynchronous=st.booleans(),
    chunk=st.sampled_from([1, 4, 64]),
)
samplings = st.builds(
    lambda max_tokens, minimum, **rest: SamplingParams(
        max_tokens=max_tokens, min_tokens=min(minimum, max_tokens or 0), **rest
    ),
    max_tokens=st.one_of(st.none(), st.integers(0, 24)),
    minimum=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**40),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([None, 0, 1]),
    prompt_logprobs=st.sampled_from([None, None, 0, 1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    ignore_eos=st.booleans(),
)
requests = st.builds(
    lambda prompt, sampling, priority: Request(prompt_token_ids=prompt, sampling=sampling, priority=priority),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=39),
    sampling=samplings,
    priority=st.sampled_from([0, 0, 0, -1, 3]),
)
actions = st.lists(
    st.one_of(
        requests,
        requests,
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=16,
)
shared_requests = st.builds(
    lambda stem, length, rest, sampling, priority, salt, marks: Request(
        prompt_token_ids=(STEMS[stem][:length] + rest)[:39],
        sampling=sampling,
        priority=priority,
        cache_salt=salt,
        snapshot_at=[min(at, len((STEMS[stem][:length] + rest)[:39])) for at in marks],
    ),
    stem=st.integers(0, 1),
    length=st.integers(1, 34),
    rest=st.lists(st.integers(0, 3), max_size=6),
    sampling=samplings,
    priority=st.sampled_from([0, 0, 0, -1, 3]),
    salt=st.sampled_from([None, None, None, "a"]),
    marks=st.lists(st.integers(1, 39), max_size=2),
)
sharing_action = st.one_of(
    shared_requests,
    shared_requests,
    shared_requests,
    st.tuples(st.just("again"), st.integers(0, 8), st.lists(st.integers(0, 3), max_size=4)),
    st.tuples(st.just("abort"), st.integers(0, 8)),
    st.tuples(st.just("step"), st.integers(1, 30)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("idle")),
    st.tuples(st.just("evict"), st.integers(1, 4)),
)
sharing_actions = st.lists(sharing_action, min_size=2, max_size=20)
caching_configs = st.builds(
    lambda config, snapshots, interval, policy, dtype, verify: replace(
        config,
        enable_prefix_caching=True,
        snapshot_slots=snapshots,
        snapshot_interval=interval and interval * config.page_size,
        eviction_policy=policy,
        snapshot_dtype=dtype,
        verify_hits=verify,
    ),
    config=st.deferred(lambda: st.one_of(configs, crowded_configs)),
    snapshots=st.sampled_from([1, 2, 4, 30]),
    interval=st.sampled_from([None, None, 1, 3]),
    policy=st.sampled_from(["lru", "flop_aware"]),
    dtype=st.sampled_from(["auto", "int8"]),
    verify=st.sampled_from([0.0, 1.0]),
)
faults = st.dictionaries(
    st.integers(0, 30),
    st.builds(Fault, st.sampled_from(["launch", "before", "after", "lost", "nan"]), st.integers(0, 3)),
    max_size=3,
)
kinds = st.sampled_from(["hybrid", "attention", "recurrent"])


def play(life: Life, script: list) -> None:
    for action in script:
        if isinstance(action, Request):
            life.submit(action)
        elif action[0] == "flush":
            life.engine.flush_cache()
            life.check_ledger()
        elif action[0] == "idle":
            while not life.engine.has_work and life.engine.idle():
                while life.engine.has_work:
                    life.step()
        elif action[0] == "evict":
            for _ in range(action[1]):
                life.evict()
            life.check_ledger()
        elif action[0] == "again":  # the next turn of a conversation
            outputs = [o for o in life.outputs.values() if o.finished and o.finish_reason != "error"]
            if action[1] < len(outputs):
                said = outputs[action[1]]
                prompt = (said.prompt_token_ids + said.token_ids + action[2])[:60]
                life.submit(Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3, temperature=0.0)))
        elif action[0] == "abort":
            names = list(life.requests)
            if action[1] < len(names):
                life.abort(names[action[1]])
                life.check_ledger()
        else:
            for _ in range(action[1]):
                life.step()


@settings(max_examples=80, **OPTIONS)
@given(config=configs, kind=kinds, script=actions, faults=faults)
def test_any_life_gives_right_answers_and_leaks_nothing(config, kind, script, faults):
    life = Life(config, kind, faults)
    play(life, script)
    life.finish()


@settings(max_examples=200, **OPTIONS)
@given(config=caching_configs, kind=kinds, script=sharing_actions, faults=faults)
def test_any_life_with_shared_prefixes_gives_right_answers_and_leaks_nothing(config, kind, script, faults):
    life = Life(config, kind, faults)
    play(life, script)
    life.finish()
    assert life.engine.status()["prefix_cache"]["quarantined"] == 0


@settings(max_examples=40, **OPTIONS)
@given(config=configs, kind=kinds, script=actions, faults=faults)
def test_closing_in_the_middle_gives_everything_back(config, kind, script, faults):
    life = Life(config, kind, faults)
    play(life, script)
    life.engine.close()
    life.check_rest()
    life.check_violations()


crowded_configs = st.builds(
    lambda seqs, budget, page_size, spare, asynchronous: EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        page_size=page_size,
        num_pages=MAX_MODEL_LEN // page_size + spare,
        chunk_size=4,
        async_scheduling=asynchronous,
        compilation_cache_dir="",
    ),
    seqs=st.integers(3, 6),
    budget=st.sampled_from([2, 6, 16, 50]),
    page_size=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 3),
    asynchronous=st.booleans(),
)
long_requests = st.builds(
    lambda prompt, max_tokens, priority, **rest: Request(
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **rest),
        priority=priority,
    ),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=30),
    max_tokens=st.integers(12, 34),
    priority=st.sampled_from([0, 0, -1]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32),
    n=st.sampled_from([1, 2]),
    logprobs=st.sampled_from([None, 1]),
    prompt_logprobs=st.sampled_from([None, 1]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
)
crowded_actions = st.lists(
    st.one_of(
        long_requests,
        st.tuples(st.just("step"), st.integers(1, 25)),
        st.tuples(st.just("abort"), st.integers(0, 4)),
    ),
    max_size=10,
)


@settings(max_examples=80, **OPTIONS)
@given(
    config=crowded_configs,
    kind=st.sampled_from(["hybrid", "attention"]),
    crowd=st.lists(long_requests, min_size=3, max_size=5),
    script=crowded_actions,
    faults=st.dictionaries(
        st.integers(0, 60), st.builds(Fault, st.sampled_from(["after", "lost", "nan"]), st.integers(0, 3)), max_size=1
    ),
)
def test_preempted_answers_are_those_of_uninterrupted_ones(config, kind, crowd, script, faults):
    life = Life(config, kind, faults)
    play(life, crowd + script)
    life.finish()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("budget", [2, 16])
def test_nobody_starves_under_endless_arrivals(asynchronous, budget):
    """A short request at every step, more than can be served: all are admitted in order, and run in bounded time."""
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        page_size=4,
        num_pages=18,
        async_scheduling=asynchronous,
        compilation_cache_dir="",
    )
    life = Life(config, "hybrid")
    long = Request(
        prompt_token_ids=list(range(30)), sampling=SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    )
    began: dict[str, int] = {}
    for step in range(400):
        length = 1 + step % 9
        sampling = SamplingParams(max_tokens=1 + step % 7, ignore_eos=True, temperature=0.0)
        life.submit(long if step % 20 == 3 else Request(prompt_token_ids=[step % VOCAB] * length, sampling=sampling))
        life.step()
        for sequence in life.engine.scheduler.running:
            began.setdefault(sequence.request_id, step)
    assert list(began) == sorted(began, key=list(life.requests).index), "admitted out of turn"
    assert len(began) > 40
    for name, start in began.items():
        request = life.requests[name]
        tokens = len(request.prompt_token_ids or []) + (request.sampling.max_tokens or 0)
        if start + 4 * tokens + 60 < 400:  # it shares the budget with three, and may be preempted by earlier ones
            assert life.outputs[name].finished, name
    for name in list(life.requests)[len(began) :]:
        life.abort(name)
    life.finish()


def test_the_most_urgent_goes_first():
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, page_size=4, num_pages=16, compilation_cache_dir="")
    life = Life(config, "hybrid")
    ask = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    names = [life.submit(Request(prompt_token_ids=[1], sampling=ask, priority=p)) for p in (5, 0, -2, 0)]
    ended: list[str] = []
    while life.engine.has_work:
        life.step()
        ended += [n for n in names if life.outputs[n].finished and n not in ended]
    assert ended == [names[2], names[1], names[3], names[0]]
    life.finish()


def test_nobody_waits_for_ever_for_prefixes_that_are_evicted_at_once():
    """One snapshot, which a decoding sequence keeps taking, and a stream of requests that never wait themselves."""
    config = EngineConfig(
        max_num_seqs=3,
        max_num_batched_tokens=8,
        page_size=4,
        num_pages=60,
        enable_prefix_caching=True,
        snapshot_slots=1,
        compilation_cache_dir="",
    )
    life = Life(config, "hybrid")
    life.submit(Request(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)))
    shared = list(range(30))
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True, temperature=0.0)
    life.submit(Request(prompt_token_ids=shared, sampling=scored))
    life.step()
    plain = life.submit(
        Request(prompt_token_ids=[*shared, 5], sampling=SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0))
    )
    for step in range(60):
        if step % 4 == 0:
            life.submit(Request(prompt_token_ids=shared, sampling=scored))
        life.step()
        if life.outputs[plain].finished:
            break
    assert life.outputs[plain].finished
    life.finish()


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
def test_five_requests_through_two_slots(kind):
    """Distinct slots in a batch, one for a sequence's whole run, all free afterwards: `check_ledger` sees to it."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=6, page_size=4, num_pages=32, compilation_cache_dir="")
    life = Life(config, kind)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    for i in range(5):
        life.submit(Request(prompt_token_ids=list(range(i, 4 * i + 3)), sampling=sampling))
    most = 0
    while life.engine.has_work:
        life.step()
        most = max(most, len(life.engine.scheduler.running))
    life.finish()
    assert most == 2
    assert all(len(output.token_ids) == 9 for output in life.outputs.values())


def test_a_full_queue_refuses_and_keeps_nothing():
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=8, page_size=4, num_pages=16, max_queue=2, compilation_cache_dir=""
    )
    life = Life(config, "hybrid")
    ask = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    life.submit(Request(prompt_token_ids=[1, 2], sampling=ask))
    life.step()
    kept = [life.submit(Request(prompt_token_ids=[3], sampling=ask)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="max_queue is 2"):
        life.submit(Request(prompt_token_ids=[4], sampling=ask))
    with pytest.raises(RequestError, match="already running"):
        life.submit(Request(prompt_token_ids=[4], sampling=ask, request_id=kept[0]))
    life.finish()
    assert len(life.outputs) == 3


@pytest.mark.parametrize("phase", ["queued", "prefill", "decoding"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_abort_in_every_phase(phase, asynchronous):
    config = EngineConfig(
        max_num_seqs=1,
        max_num_batched_tokens=4,
        page_size=4,
        num_pages=16,
        async_scheduling=asynchronous,
        compilation_cache_dir="",
    )
    life = Life(config, "hybrid")
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    first = life.submit(Request(prompt_token_ids=list(range(20)), sampling=sampling))
    second = life.submit(Request(prompt_token_ids=list(range(9)), sampling=sampling))
    for _ in range({"queued": 1, "prefill": 3, "decoding": 10}[phase]):
        life.step()
    victim, other = (second, first) if phase == "queued" else (first, second)
    got = len(life.outputs[victim].token_ids)
    assert (got > 0) == (phase == "decoding")
    life.abort(victim)
    life.check_ledger()
    life.finish()
    assert life.outputs[victim].finish_reason == "abort"
    assert len(life.outputs[victim].token_ids) == got, "tokens after the abort"
    assert life.outputs[other].finish_reason == "length"


@pytest.mark.parametrize("kind", ["launch", "before", "after", "lost"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_step_fails_its_sequences_and_no_others(asynchronous, kind):
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=3,
        page_size=4,
        num_pages=96,
        async_scheduling=asynchronous,
        compilation_cache_dir="",
    )
    life = Life(config, "hybrid", {20: Fault(kind)})
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, logprobs=0)
    for token in range(6):
        life.submit(Request(prompt_token_ids=[token], sampling=sampling))
    life.finish()
    followed = asynchronous and kind == "lost"  # the step after it was under way on the same caches
    met = {member.key[0] for call in ([20, 21] if followed else [20]) for member in life.calls[call]}
    for name, output in life.outputs.items():
        assert (output.finish_reason == "error") == (name in met), name
    assert 0 < len(met) < 6
    assert all(f"injected: {kind}" in (life.outputs[name].error or "") for name in met)
    assert not life.runner.lost


def small_config() -> EngineConfig:
    return EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=64, compilation_cache_dir="")


def asks(count: int, **options) -> list[Request]:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    return [Request(prompt_token_ids=[i, 2, 3], sampling=sampling, **options) for i in range(count)]


def right(request: Request) -> list[int]:
    return expected_tokens(list(request.prompt_token_ids or []), request.sampling)


def test_interleaved_streams_take_nothing_from_each_other():
    engine, _ = toy_engine(small_config())
    first, second, third = asks(3)
    streams = [engine.stream(first), engine.stream(second)]
    tokens = [list(next(stream).token_ids) for stream in streams]
    assert engine.generate([third])[0].token_ids == right(third)
    for got, stream in zip(tokens, streams, strict=True):
        for delta in stream:
            got.extend(delta.token_ids)
    assert tokens == [right(first), right(second)]
    assert not engine.has_work


def test_an_id_left_early_can_be_used_again():
    engine, _ = toy_engine(small_config())
    [request] = asks(1, request_id="again")
    stream = engine.stream(request)
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not engine.has_work
    assert engine.generate([request])[0].token_ids == right(request)


def test_a_refusal_among_several_leaves_nothing_running():
    engine, _ = toy_engine(small_config())
    with pytest.raises(RequestError, match="request_id"):
        engine.generate(asks(2, request_id="twice"))
    engine.submit(asks(1, request_id="b")[0])
    with pytest.raises(RequestError, match="request_id"):
        engine.generate([*asks(1), *asks(1, request_id="b")])
    assert engine.scheduler.num_waiting + len(engine.scheduler.running) == 1


def test_a_launch_that_takes_the_caches_leaves_the_step_before_it_alone():
    """That step's results are on their way: a sequence that needs no more than them ends well."""
    engine, runner = toy_engine(small_config())
    once = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    first, second = Request(prompt_token_ids=[1, 2], sampling=once), Request(prompt_token_ids=[3], sampling=once)
    names = [engine.submit(first)]
    assert not engine.step()
    names.append(engine.submit(second))
    run = runner.run

    def broken(_: Batch):
        runner.run, runner.lost = run, True
        raise RuntimeError("out of memory")

    runner.run = broken
    ends = {delta.request_id: delta for delta in engine.step()}
    assert (ends[names[0]].finish_reason, ends[names[0]].token_ids) == ("length", right(first))
    assert ends[names[1]].finish_reason == "error"
    assert not engine.has_work and not runner.lost
