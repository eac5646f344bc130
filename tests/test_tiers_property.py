"""Random lives of an engine with host and disk tiers, restarts among them, on the toy model.

The toy's copies read their sources as late as the engine lets them, and free rows are poisoned after every step: a
source that was given away too early shows in a wrong answer.
"""

import dataclasses
import tempfile
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jhybrid.cache.node import Node
from jhybrid.config import EngineConfig
from jhybrid.request import Request, SamplingParams
from tests.test_engine_property import MAX_MODEL_LEN, OPTIONS, STEMS, Life, faults, kinds, play, sharing_action
from tests.toy_model import Fault


@dataclass
class TieredLife(Life):
    """A life whose engine is closed and made again; what was asked of the one before is over by then."""

    copy_polls: int = 1
    asked: list[Request] = field(default_factory=list)  # in all lives

    def submit(self, request: Request) -> str:
        self.asked.append(request)
        return super().submit(request)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner.copy_polls = self.copy_polls
        if self.engine.ledger.tiers is not None:
            self.engine.ledger.tiers.price.is_worth_it = lambda *_: True  # the toy computes in no time

    def copied(self) -> set[Node]:
        tiers = self.engine.ledger.tiers
        return {node for flight in tiers._saver._flights for node in flight.nodes} if tiers else set()

    def step(self) -> None:
        calls = self.runner.calls
        super().step()
        if self.runner.calls == calls:  # it waited for a fetch, which has its own limits
            self.steps -= 1

    def check_rest(self) -> None:
        ledger = self.engine.ledger
        if ledger.tiers is not None and ledger.tree is not None:
            assert not any(s.fetch for s in self.waiting())
            ledger.tiers.wait_for_sources(ledger.tree)
            assert not ledger.tiers._fetcher._fetches
        super().check_rest()

    def run_out(self) -> None:
        """To the end of all requests, checked, without forgetting what is cached."""
        while self.engine.has_work:
            self.step()

    def restart(self) -> None:
        self.run_out()
        self.check_violations()
        for name in self.requests:
            for index in range(self.requests[name].sampling.n):
                self.check_answer(name, index)
        self.engine.close()
        self.faults = {}
        self.__post_init__()

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.engine.close()


tiered_configs = st.builds(
    lambda seqs, budget, page_size, spare, asynchronous, snapshots, interval, dtype, verify, host, share, policy: (
        EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            page_size=page_size,
            num_pages=MAX_MODEL_LEN // page_size + spare,
            chunk_size=4,
            async_scheduling=asynchronous,
            enable_prefix_caching=True,
            snapshot_slots=snapshots,
            snapshot_interval=interval and interval * page_size,
            snapshot_dtype=dtype,
            verify_hits=verify,
            host_cache_bytes=host,
            host_cache_state_share=share,
            cache_write_policy=policy,
            compilation_cache_dir="",
        )
    ),
    seqs=st.integers(1, 4),
    budget=st.sampled_from([2, 5, 16, 50]),
    page_size=st.sampled_from([2, 4, 16]),
    spare=st.integers(0, 20),
    asynchronous=st.booleans(),
    snapshots=st.sampled_from([1, 2, 6]),
    interval=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from(["auto", "int8"]),
    verify=st.sampled_from([0.0, 1.0]),
    host=st.sampled_from([800, 1000, 1 << 20, 1 << 20]),
    share=st.sampled_from([None, None, 0.3]),
    policy=st.sampled_from(["write_through", "write_through", "write_back"]),
)
wanted = st.builds(
    lambda stem, length, rest, count, n: Request(
        prompt_token_ids=STEMS[stem][:length] + rest,
        sampling=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, n=n),
    ),
    stem=st.integers(0, 1),
    length=st.sampled_from([9, 17, 33, 34]),
    rest=st.lists(st.integers(0, 63), max_size=4),
    count=st.integers(0, 20),
    n=st.sampled_from([1, 1, 1, 2]),
)
repeat = st.tuples(st.just("repeat"), st.integers(0, 12), st.lists(st.integers(0, 63), max_size=6))
turn = st.tuples(
    st.lists(st.one_of(repeat, repeat, wanted, wanted, sharing_action), min_size=1, max_size=6),
    st.sampled_from([("down",), ("down",), ("down",), ("restart",), ("flush_device",), ("distrust",), ("step", 3)]),
)
tiered_actions = st.lists(turn, min_size=2, max_size=5).map(
    lambda turns: [a for some, last in turns for a in (*some, last)]
)


def play_tiered(life: TieredLife, script: list) -> None:
    for action in script:
        tiers = life.engine.ledger.tiers
        match action:
            case ("repeat", at, more) if life.asked:
                before = life.asked[at % len(life.asked)]
                prompt = [*(before.prompt_token_ids or []), *more][:39]
                life.submit(dataclasses.replace(before, prompt_token_ids=prompt))
            case ("repeat", _, _):
                pass
            case ("flush_device",):
                life.engine.flush_cache(device_only=True)
                life.check_ledger()
            case ("down",):  # everything to the lower tiers, and nothing above
                life.run_out()
                assert life.engine.drain_tiers(20)
                life.engine.flush_cache(device_only=True)
                life.check_ledger()
            case ("restart",):
                life.restart()
            case ("distrust",):
                names = list(tiers.host._distinct[0].entries) if tiers else []
                if tiers and names:
                    tiers.forget(names[0].digest)
            case _:
                play(life, [action])


def live(config: EngineConfig, kind: str, script: list, faults: dict[int, Fault], polls: int, disk: bool) -> TieredLife:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if disk:
            config = dataclasses.replace(config, disk_cache_url=f"file://{folder}/", disk_cache_bytes=1 << 20)
        life = TieredLife(config, kind, faults, copy_polls=polls)
        play_tiered(life, script)
        life.finish()
        return life


SETTINGS = OPTIONS | {"suppress_health_check": list(HealthCheck)}
lives = {
    "config": tiered_configs,
    "kind": kinds,
    "script": tiered_actions,
    "faults": faults,
    "polls": st.sampled_from([1, 2, 7]),
    "disk": st.booleans(),
}


@settings(max_examples=60, **SETTINGS)
@given(**lives)
def test_any_life_with_tiers_gives_right_answers_and_leaks_nothing(config, kind, script, faults, polls, disk):
    assert live(config, kind, script, faults, polls, disk).engine.status()["prefix_cache"]["quarantined"] == 0


@pytest.mark.slow
@settings(max_examples=1500, **SETTINGS)
@given(**lives)
def test_many_lives_with_tiers(config, kind, script, faults, polls, disk):
    assert live(config, kind, script, faults, polls, disk).engine.status()["prefix_cache"]["quarantined"] == 0
