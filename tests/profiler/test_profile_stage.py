"""Chains and shadows: what they hold, that what they read is real, and that all of it comes back."""

import dataclasses
import json
from pathlib import Path

import pytest

from jhybrid import Engine, Request, SamplingParams
from jhybrid.errors import ConfigError, JhybridError, OutOfMemoryError, SlotPoolEmptyError, StepError
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.measure import measure
from jhybrid.profiler.plan import plan
from jhybrid.profiler.run import layout_of
from jhybrid.profiler.stage import ReferencesError, Stage

from ..toy_model import Fault, ToyRunner, expected_tokens
from .stages import GRID, is_as_new, profiled, toy

TEXT = [(i * i + 3) % 60 for i in range(64)]


def stage_on(engine: Engine, **options: object) -> Stage:
    return Stage(engine, TEXT, **{"chains": 1, "state": "copy", "is_real": True} | options)  # pyright: ignore


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("overlaps", [True, False])
def test_every_point_is_measured_on_real_caches(kind: str, caching: bool, overlaps: bool, tmp_path: Path):
    cache = {"enable_prefix_caching": True, "snapshot_slots": 6} if caching else {}
    engine, runner = toy(kind=kind, async_scheduling=overlaps, **cache)
    found = profiled(engine, tmp_path)
    assert not found.skipped and len(found.measured) == 2 * 2 + 3 * 2 + 2
    assert runner.violations == []
    assert {row["state_mode"] for row in found.rows} == {"none" if kind == "attention" else "copy"}
    assert found.summary is not None
    assert found.summary["references"]["before"] == found.summary["references"]["after"]
    assert engine.scheduler.num_preemptions == 0
    assert is_as_new(engine, runner)


@pytest.mark.parametrize("depth", [1, 4, 6, 8])
def test_shadows_answer_as_requests_with_the_same_prompt(depth: int):
    engine, runner = toy()
    answers: dict[str, list[int]] = {}
    with stage_on(engine) as stage:
        stage.chain_to(depth)
        names = [stage.shadow(i, depth, 1, depth + 9, own=i) for i in range(3)]
        while not all(stage.has_ended(name) for name in names):
            deltas = engine.step()
            stage._take(deltas)
            for delta in deltas:
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert runner.violations == []
    for i, name in enumerate(names):
        prompt = [*TEXT[:depth], TEXT[depth + 7 * i]]
        sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=i, ignore_eos=True)
        assert answers[name] == expected_tokens(prompt, sampling)
    assert len({tuple(answer) for answer in answers.values()}) == 3


def test_planning_counts_what_is_held(tmp_path: Path):
    """The most that a point holds at any step is what was counted beforehand: pages, slots and rows."""
    engine, runner = toy()
    layout = layout_of(engine)
    peaks: list[tuple[int, int, int]] = []
    runner.before_run = lambda _: peaks.append(
        (engine.ledger.pages.used, engine.ledger.slots.used, engine.ledger.rows.used)
    )
    with stage_on(engine) as stage:
        for planned in plan(GRID, engine.config, layout):
            stage.chain_to(planned.point.chain_depth)
            peaks.clear()
            measure(stage, planned.point, GRID, layout)
            needs = planned.needs
            assert tuple(map(max, zip(*peaks, strict=True))) == (needs.pages, needs.slots, needs.rows), planned


def test_what_just_fits_is_measured_and_one_page_less_is_skipped(tmp_path: Path):
    config = dataclasses.replace(GRID, kinds=("decode",), batches=(3,), depths=(6,))
    engine, _ = toy()
    [planned] = plan(config, engine.config, layout_of(engine))
    assert (planned.needs.chain_pages, planned.needs.forks) == (2, 3)
    for pages, status in ((planned.needs.pages, "measured"), (planned.needs.pages - 1, "skipped")):
        engine, runner = toy(num_pages=pages, max_model_len=16)
        runner.max_model_len = 16
        [row] = profiled(engine, tmp_path / status, config).rows
        assert row["status"] == status
        assert is_as_new(engine, runner)
    assert row["reason"] == "pool_shortfall"
    assert f"{planned.needs.pages} pages" in row["detail"] and f"{planned.needs.pages - 1} can be had" in row["detail"]


@pytest.mark.parametrize(
    ("reason", "settings", "change"),
    [
        ("pool_shortfall", {"num_pages": 16}, {"depths": (32,), "batches": (4,)}),
        ("state_mode_invalid", {"kind": "attention"}, {"state_mode": "copy"}),
        ("state_mode_invalid", {"kind": "attention"}, {"state_mode": "inplace"}),
        ("state_inplace_unsupported", {}, {"state_mode": "inplace", "batches": (2,)}),
        ("model_len_exceeded", {}, {"depths": (60,)}),
        ("batch_exceeded", {}, {"batches": (5,)}),
        ("batch_exceeded", {"max_num_batched_tokens": 2}, {"batches": (3,)}),
    ],
)
def test_what_cannot_run_is_skipped_with_its_reason(reason: str, settings: dict, change: dict, tmp_path: Path):
    config = dataclasses.replace(
        ProfileConfig(kinds=("decode",), depths=(8,), batches=(1,), bandwidth=1.0, burn_in=0.0), **change
    )
    engine, runner = toy(**settings)
    [row] = profiled(engine, tmp_path, config).rows
    assert (row["status"], row["reason"]) == ("skipped", reason)
    assert "seconds" not in row
    assert row["detail"]
    assert runner.calls == 0
    assert not (tmp_path / "latency_model.json").exists()


def test_what_a_layout_has_no_slots_for_is_skipped():
    config = dataclasses.replace(GRID, kinds=("decode",), batches=(4,), depths=(8,))
    engine, _ = toy(max_parked=0)
    layout = layout_of(engine)
    [planned] = plan(config, engine.config, layout)  # the chain holds one of four
    assert (planned.reason, planned.detail) == ("pool_shortfall", "5 slots, there are 4")
    attention = dataclasses.replace(layout, has_state=False, slots=0)
    [planned] = plan(config, engine.config, attention)
    assert (planned.reason, planned.detail) == ("pool_shortfall", "5 rows, there are 4")
    copy = dataclasses.replace(config, state_mode="copy", chains=4)
    [planned] = plan(copy, engine.config, layout)
    assert (planned.reason, planned.detail) == (
        "state_copy_unsupported",
        "4 chains and 4 slots leave none to copy to",
    )


@pytest.mark.parametrize(("parked", "chains"), [(0, 1), (1, 2)])
def test_an_engine_without_room_for_the_chains_is_refused(parked: int, chains: int, tmp_path: Path):
    engine, _ = toy(max_parked=parked)
    with pytest.raises(ConfigError) as caught:
        profiled(engine, tmp_path / "profile", dataclasses.replace(GRID, chains=chains))
    assert caught.value.field == "chains"
    assert f"room for {parked} beside max_num_seqs=4; make it with max_parked={chains}" in str(caught.value)
    assert not (tmp_path / "profile").exists()


def test_in_place_spends_a_chain_for_each_point(tmp_path: Path):
    config = dataclasses.replace(GRID, state_mode="inplace", chains=3, batches=(1, 3), mixed_batches=(2,))
    engine, runner = toy(max_parked=3)
    found = profiled(engine, tmp_path, config)
    assert not found.skipped
    assert {row["state_mode"] for row in found.rows} == {"inplace"}
    assert runner.violations == []
    assert is_as_new(engine, runner)


def faults() -> list:
    """A failure of every kind at every stage of a point: (what to arrange, error)."""
    steps = {"chain": 0, "warm-up": 1, "measured": 3, "last": 6}
    cases = [
        pytest.param(("step", call, kind), StepError, id=f"{name}-{kind}")
        for name, call in steps.items()
        for kind in ("launch", "before", "after", "lost", "nan")
        if (name, kind) != ("chain", "nan")  # it samples nothing
    ]
    cases += [
        pytest.param(("copy", at, kind), Exception, id=f"copy-{at}-{kind}")
        for at in (0, 2)
        for kind in ("before", "lost")
    ]
    cases += [pytest.param(("pool", "pages", left), OutOfMemoryError, id=f"pages-{left}") for left in (0, 1, 2, 5, 8)]
    cases += [
        pytest.param(("pool", pool, left), SlotPoolEmptyError, id=f"{pool}-{left}")
        for pool in ("slots", "rows")
        for left in (0, 1, 3)
    ]
    return cases


@pytest.mark.parametrize(("failure", "error"), faults())
def test_a_failure_at_any_stage_unwinds_completely(failure: tuple, error: type[Exception], tmp_path: Path):
    config = dataclasses.replace(GRID, kinds=("decode",), batches=(3,), depths=(6,))
    engine, runner = toy()
    what, where, how = failure
    taken: list[int] = []
    pool = getattr(engine.ledger, where) if what == "pool" else None
    if what == "step":
        runner.faults[where] = Fault(how)
    elif what == "copy":
        runner.copy_faults = [Fault("none")] * where + [Fault(how)]
    else:
        taken = pool.take(pool.free - how)
    layout = layout_of(toy()[0])
    [planned] = plan(config, engine.config, layout)
    assert planned.reason is None
    baseline = engine.ledger.references()
    with pytest.raises(error) as caught, stage_on(engine) as stage:
        stage.chain_to(planned.point.chain_depth)
        measure(stage, planned.point, config, layout)
    assert not isinstance(caught.value, ReferencesError)
    assert engine.ledger.references() == baseline
    if pool is not None:
        pool.give(taken)
    failed = runner.failed_calls | {v.call for v in runner.violations}
    assert failed <= {where, where + 1} if what == "step" else not failed  # the step after it was under way already
    assert is_as_new(engine, runner)


def test_a_failed_run_goes_on_where_it_was(tmp_path: Path):
    engine, runner = toy()
    runner.faults[40] = Fault("before")
    with pytest.raises(StepError, match="injected"):
        profiled(engine, tmp_path)
    kept = (tmp_path / "rows.jsonl").read_text()
    calls, runner.faults = runner.calls, {}
    found = profiled(engine, tmp_path)
    assert len(found.measured) == 12
    assert (tmp_path / "rows.jsonl").read_text().startswith(kept)
    assert kept.count('"measured"') > 2
    whole = runner.calls - calls
    assert profiled(engine, tmp_path) == found
    assert runner.calls - calls == whole
    again, runner = toy()
    profiled(again, tmp_path / "anew")
    assert whole < runner.calls


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path):
    engine, _ = toy()
    profiled(engine, tmp_path)
    with pytest.raises(ConfigError, match="profile differ"):
        profiled(engine, tmp_path, dataclasses.replace(GRID, repeats=3))


@pytest.mark.parametrize("name", ["status", "spread", "buckets", "kind"])
def test_rows_that_somebody_has_changed_are_refused(name: str, tmp_path: Path):
    engine, _ = toy()
    profiled(engine, tmp_path)
    path = tmp_path / "rows.jsonl"
    head, *entries = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(entry for entry in entries if entry.get("status") == "measured")
    at = entries.index(row) + 2
    del row[name]
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *entries[:-1]]))  # killed before its end
    with pytest.raises(
        ConfigError, match=rf"^output: .*rows.jsonl is no profile: the point in line {at} has no {name}; "
    ):
        profiled(engine, tmp_path)


def test_a_busy_engine_is_refused(tmp_path: Path):
    engine, _ = toy()
    engine.submit(Request(prompt_token_ids=[1, 2]))
    with pytest.raises(ConfigError, match="idle"):
        profiled(engine, tmp_path)
    assert engine.has_work


def test_a_reference_left_over_is_told():
    engine, _ = toy()
    with pytest.raises(ReferencesError, match="page"), stage_on(engine):
        engine.ledger.pages.take(1)


def test_a_reference_left_over_is_told_where_prefixes_were_cached():
    engine, _ = toy(enable_prefix_caching=True, snapshot_slots=6)
    engine.generate([Request(prompt_token_ids=[5, 4, 3] * 5, sampling=SamplingParams(max_tokens=4))])
    assert engine.ledger.pages.used > 1
    with pytest.raises(ReferencesError, match="page"), stage_on(engine):
        engine.ledger.pages.take(1)


def test_cached_prefixes_are_gone_afterwards(tmp_path: Path):
    engine, runner = toy(enable_prefix_caching=True, snapshot_slots=6)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    request = Request(prompt_token_ids=[5, 4, 3] * 5, sampling=sampling)
    engine.generate([request])
    [hit] = engine.generate([request])
    assert hit.cached_tokens == 12
    counted = engine.ledger.counts.queries
    profiled(engine, tmp_path)
    assert engine.ledger.counts.queries == counted
    [cold] = engine.generate([request])
    assert cold.cached_tokens == 0
    assert cold.token_ids == hit.token_ids
    assert runner.violations == []
    with stage_on(engine) as stage:  # the pages of a prefix that nobody uses can be had
        stage.chain_to(40)
    assert isinstance(stage, Stage) and issubclass(ReferencesError, JhybridError)


def test_a_stage_survives_its_chain(tmp_path: Path):
    """A shadow whose chain has ended before its first step still reads the chain's slot and pages."""
    engine, runner = toy()
    with stage_on(engine) as stage:
        stage.chain_to(6)
        name = stage.shadow(0, 6, 1, 12, own=0)
        engine.abort(stage._chains[0].request_id)
        answers = []
        while not stage.has_ended(name):
            deltas = engine.step()
            stage._take(deltas)
            answers += [t for delta in deltas for t in delta.token_ids if delta.request_id == name]
    assert runner.violations == []
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=0, ignore_eos=True)
    assert answers == expected_tokens(TEXT[:7], sampling)
    assert isinstance(runner, ToyRunner)
