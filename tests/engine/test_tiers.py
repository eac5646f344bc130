"""What comes back from host memory or disk gives the cold run, whatever happens on the way down or up.

The oracle is the same request alone with nothing cached. Everything free is poisoned before each request.
"""

import dataclasses
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jhybrid import ConfigError, Engine, Output, Request
from jhybrid.cache.router import Router
from jhybrid.cache.tiers import tiers as tiers_module
from jhybrid.cache.tiers.copies import Copies
from jhybrid.cache.tiers.counts import LIMIT
from jhybrid.cache.tiers.price import Price
from jhybrid.cache.tiers.tiers import Tiers
from jhybrid.executables import Executables
from jhybrid.metrics import EngineCollector
from jhybrid.startup import Startup
from jhybrid.weights import load
from jhybrid.weights.fingerprint import fingerprint
from jhybrid.weights.load import make_runner, make_tiers
from jhybrid_server.wire import status_to_wire

from .bed import (
    alone,
    at_most,
    budget,
    caching,
    down,
    drain,
    engine_of,
    greedy,
    only_pages,
    parameters,
    poison,
    prompts,
    same,
    tiered,
)

PAGE = 8


def url(folder: Path) -> dict:
    return {"disk_cache_url": f"file://{folder}/", "disk_cache_bytes": 64 << 20}


def ask(engine: Engine, request: Request) -> Output:
    poison(engine)
    [output] = engine.generate([request])
    return output


def lower_to(engine: Engine, tiers: Tiers, tier: str) -> None:
    """Everything to one tier and to none above it."""
    down(engine)
    if tier == "disk":
        tiers.host.clear()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prefix_from_a_tier_is_the_cold_run_to_the_last_bit(engine: Engine, tier: str, tmp_path: Path):
    """The steps after the hit are those of the cold run, so that not even rounding differs."""
    [prompt] = prompts(engine, [200])
    request = greedy(prompt, 6, logprobs=5)
    with budget(engine, 64):
        cold = alone(engine, request)
        with tiered(engine, **url(tmp_path)) as tiers:
            ask(engine, greedy(prompt[:129], 1))
            lower_to(engine, tiers, tier)
            output = ask(engine, request)
            assert output.cached_tokens == 128
            assert (output.token_ids, output.logprobs) == (cold.token_ids, cold.logprobs)
            counts = tiers.status()[tier]
            assert (counts["hits"], counts["hit_tokens"], counts["failures"]) == (1, 128, 0)
            # and what was published of it serves the next from the device
            again = ask(engine, request)
            same(again, cold)
            assert again.cached_tokens > 128 and tiers.status()[tier]["hits"] == 1


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("shared", [1, 8, 9, 31, 32, 33, 60])
def test_a_hit_of_any_depth_is_the_cold_run(nemotron: Engine, tier: str, shared: int, tmp_path: Path):
    [base, other] = prompts(nemotron, [60, 30])
    with tiered(nemotron, **url(tmp_path)) as tiers:
        asked = [greedy(base, 9, logprobs=2), greedy(base[:shared] + other, 9, logprobs=2)]
        expected = [alone(nemotron, request) for request in asked]
        for _ in range(3):
            for request, cold in zip(asked, expected, strict=True):
                same(ask(nemotron, request), cold)
            lower_to(nemotron, tiers, tier)
        assert ask(nemotron, asked[1]).cached_tokens == (shared + 30 - 1) // PAGE * PAGE


def test_a_conversation_goes_on_after_its_engine_has_gone(engine: Engine, tmp_path: Path):
    [history] = prompts(engine, [20])
    known = 0
    for turn in range(4):
        request = greedy(history, 20, logprobs=1)
        expected = alone(engine, request)
        with tiered(engine, **url(tmp_path)):
            output = ask(engine, request)
            same(output, expected)
        assert output.cached_tokens >= (known - 1) // PAGE * PAGE, turn
        known = len(history) + len(output.token_ids) - 1
        history = history + output.token_ids + prompts(engine, [9], seed=turn)[0]


def test_a_state_alone_comes_back_where_the_device_has_kept_the_pages(nemotron: Engine):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 6, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron) as tiers:
        ask(nemotron, request)
        assert nemotron.drain_tiers(20)
        tree = nemotron.ledger.tree
        assert tree is not None
        while tree.evict_snapshot():
            pass
        output = ask(nemotron, request)
        same(output, expected)
        assert output.cached_tokens == 56 and tiers.host.counts.hits == 1
        assert nemotron.ledger.pages.used == tree.num_nodes


def test_keys_and_values_without_their_state_are_no_hit(nemotron: Engine):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 6, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron) as tiers:
        ask(nemotron, request)
        down(nemotron)
        for name in [name for name in tiers.host._shelves["state"].entries if name.kind == "state"]:
            tiers.host._shelves["state"].remove(name)
        output = ask(nemotron, request)
        same(output, expected)
        assert output.cached_tokens == 0 and tiers.host.counts.hits == 0


def test_salts_keep_prefixes_apart(nemotron: Engine, tmp_path: Path):
    [prompt] = prompts(nemotron, [40])
    with tiered(nemotron, **url(tmp_path)) as tiers:
        for salt in ("a", "b", None):
            request = dataclasses.replace(greedy(prompt, 2), cache_salt=salt)
            assert ask(nemotron, request).cached_tokens == 0
            lower_to(nemotron, tiers, "disk")
        for salt in ("a", "b", None):
            request = dataclasses.replace(greedy(prompt, 2), cache_salt=salt)
            assert ask(nemotron, request).cached_tokens == 32


def test_another_checkpoint_of_the_same_name_never_hits(engine: Engine, tmp_path: Path):
    """One bit of one weight is enough."""
    [prompt] = prompts(engine, [60])
    with tiered(engine, **url(tmp_path)):
        ask(engine, greedy(prompt, 2))
        assert engine.drain_tiers(20)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(engine.runner.params)]

    def flipped(path: str, array: np.ndarray) -> np.ndarray:
        if path == paths[len(paths) // 2]:
            array.reshape(-1).view(np.uint32)[-1] ^= 1
        return array

    before, model = fingerprint(engine.config, engine.model, engine.runner.executables), engine.model
    with parameters(engine, flipped):
        engine.model = dataclasses.replace(model, params=engine.runner.params)
        assert fingerprint(engine.config, engine.model, engine.runner.executables) != before
        with tiered(engine, **url(tmp_path)):
            assert ask(engine, greedy(prompt, 2)).cached_tokens == 0
        engine.model = model
    with tiered(engine, **url(tmp_path)):
        assert ask(engine, greedy(prompt, 2)).cached_tokens == 56


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("pages", [20, 60])
def test_a_crowd_under_pressure_is_right(engine: Engine, policy: str, pages: int, tmp_path: Path):
    """Preemption and eviction on the device and in the host, while prefixes go down and come up."""
    if not engine.ledger.pages.size:
        pytest.skip("this model has no pages to run out of")
    [base] = prompts(engine, [40])
    requests = [greedy(base[: 8 * i] + prompts(engine, [10 + i], seed=i)[0], 40, logprobs=1) for i in range(5)]
    expected = [alone(engine, request) for request in requests]
    router = engine.runner.router
    tight = 2 * router.bytes_per_slot + 40 * router.bytes_per_page
    with tiered(engine, policy, host_cache_bytes=tight, **url(tmp_path)) as tiers, only_pages(engine, pages):
        for _ in range(4):
            poison(engine)
            for output, cold in zip(engine.generate(requests), expected, strict=True):
                same(output, cold)
        status = tiers.status()
        assert status["host"]["writes"] > 0
        assert status["host"]["failures"] == status["disk"]["failures"] == 0
        assert status["host"]["bytes"] <= tight
        engine.flush_cache()


def test_what_is_evicted_comes_back_with_write_back(nemotron: Engine):
    """More conversations than the device holds: those whose pages were given up are served from the host."""
    requests = [greedy(prompt, 8, logprobs=1) for prompt in prompts(nemotron, [60] * 6)]
    expected = [alone(nemotron, request) for request in requests]
    with tiered(nemotron, "write_back") as tiers, only_pages(nemotron, 34):
        depths = []
        for _ in range(2):
            for request, cold in zip(requests, expected, strict=True):
                output = ask(nemotron, request)
                same(output, cold)
                depths.append(output.cached_tokens)
                while nemotron.idle():
                    pass
        assert tiers.host.counts.hits >= 4, tiers.host.status()
        assert depths[6:].count(56) >= 4
        nemotron.flush_cache()


class Slow:
    """Holds fetches up at the door of the device until it is opened."""

    def __init__(self, engine: Engine, tiers: Tiers, patch: pytest.MonkeyPatch):
        self.door, self.came = threading.Event(), threading.Event()
        stage = engine.runner.stage

        def slowly(*blobs):
            self.came.set()
            assert self.door.wait(20)
            return stage(*blobs)

        patch.setattr(tiers._fetcher, "_stage", slowly)


def test_a_request_cancelled_while_its_copy_is_under_way_harms_nobody(hybrid: Engine, monkeypatch: pytest.MonkeyPatch):
    """All slots, pages and snapshots are given to others before the copy arrives; it is written nowhere."""
    lengths = [60, 50, 51, 52, 53, 90]
    [first, *others] = prompts(hybrid, lengths)
    asked = [greedy(prompt, 12, logprobs=1) for prompt in others]
    expected = [alone(hybrid, request) for request in asked]
    cold = alone(hybrid, greedy(first, 6, logprobs=1))
    with tiered(hybrid) as tiers:
        ask(hybrid, greedy(first, 2))
        down(hybrid)
        slow = Slow(hybrid, tiers, monkeypatch)
        name = hybrid.submit(greedy(first, 6))
        hybrid.step()
        assert slow.came.wait(20)
        ledger = hybrid.ledger
        assert ledger.pages.used == ledger.slots.used == ledger.snapshots.used == 0, "a pending copy holds no row"
        hybrid.abort(name)
        threading.Timer(0.05, slow.door.set).start()
        for output, oracle in zip(hybrid.generate(asked), expected, strict=True):
            same(output, oracle)
        drain(hybrid)
        assert slow.door.wait(20)
        monkeypatch.undo()
        same(ask(hybrid, greedy(first, 6, logprobs=1)), cold)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_cancelled_right_after_its_load_harms_nobody(hybrid: Engine, steps: int):
    """Its rows are given on while the step that reads them is still under way."""
    [prompt, other] = prompts(hybrid, [100, 100])
    expected = [alone(hybrid, greedy(tokens, 6, logprobs=1)) for tokens in (prompt, other)]
    with tiered(hybrid), budget(hybrid, 16):
        ask(hybrid, greedy(prompt, 2))
        down(hybrid)
        name = hybrid.submit(greedy(prompt + other, 6))
        admitted = hybrid.ledger.tiers
        assert admitted is not None
        while not hybrid.scheduler.running:
            hybrid.step()
        for _ in range(steps - 1):
            hybrid.step()
        hybrid.abort(name)
        for tokens, cold in zip((other, prompt), reversed(expected), strict=True):
            [output] = hybrid.generate([greedy(tokens, 6, logprobs=1)])
            same(output, cold)
        drain(hybrid)


def test_others_pass_while_one_waits_and_a_slow_tier_is_given_up(nemotron: Engine, monkeypatch: pytest.MonkeyPatch):
    [prompt, other] = prompts(nemotron, [60, 30])
    expected = [alone(nemotron, greedy(tokens, 4, logprobs=1)) for tokens in (prompt, other)]
    with tiered(nemotron, cache_load_timeout=0.4) as tiers:
        ask(nemotron, greedy(prompt, 2))
        down(nemotron)
        slow = Slow(nemotron, tiers, monkeypatch)
        started, ends = time.perf_counter(), []
        names = [nemotron.submit(greedy(tokens, 4, logprobs=1)) for tokens in (prompt, other)]
        outputs = {name: [] for name in names}
        while nemotron.has_work:
            for delta in nemotron.step():
                outputs[delta.request_id] += delta.token_ids
                if delta.finish_reason:
                    ends.append(delta.request_id)
        assert ends == names[::-1], "the second did not wait for the first"
        assert 0.3 < time.perf_counter() - started < 5
        assert [outputs[name] for name in names] == [output.token_ids for output in expected]
        assert tiers.host.counts.misses["timeout"] == 1
        slow.door.set()


def test_a_fetch_without_a_row_for_its_state_is_put_off_and_then_computed(nemotron: Engine):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 4, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron) as tiers:
        ask(nemotron, request)
        down(nemotron)
        taken = nemotron.ledger.snapshots.take(nemotron.ledger.snapshots.free)
        assert taken is not None
        output = ask(nemotron, request)
        same(output, expected)
        assert output.cached_tokens == 0
        assert tiers.host.counts.misses["no_room"] == 1
        assert tiers.host.counts.deferrals == 1 + tiers_module.MOST_DEFERRALS
        nemotron.ledger.snapshots.give(taken)


def test_requests_that_arrive_together_fetch_their_prefix_once(engine: Engine):
    [prefix, *suffixes] = prompts(engine, [64, 5, 9, 2, 6])
    requests = [greedy(prefix + suffix, 6, logprobs=1) for suffix in suffixes]
    expected = [alone(engine, request) for request in requests]
    with tiered(engine) as tiers:
        ask(engine, dataclasses.replace(greedy([*prefix, 1], 1), snapshot_at=[64]))
        down(engine)
        before = engine.stats.prompt_tokens
        poison(engine)
        for output, cold in zip(engine.generate(requests), expected, strict=True):
            same(output, cold)
            assert output.cached_tokens == 64
        assert engine.stats.prompt_tokens - before == sum(map(len, suffixes))
        assert tiers.host.counts.hits == 1


FAULTS = {
    "unreadable": OSError("input/output error"),
    "denied": PermissionError("denied"),
    "late": TimeoutError(),
    "other": ValueError("UNAVAILABLE: the bucket has gone"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_to_read_is_a_miss_and_then_taken_out(
    nemotron: Engine, monkeypatch: pytest.MonkeyPatch, fault: str, tmp_path: Path
):
    asked = [greedy(prompt, 4, logprobs=1) for prompt in prompts(nemotron, [40] * (LIMIT + 1))]
    expected = [alone(nemotron, request) for request in asked]
    with tiered(nemotron, **url(tmp_path)) as tiers:
        for request in asked:
            ask(nemotron, request)
        lower_to(nemotron, tiers, "disk")
        assert tiers.disk is not None

        def fail(*_: object) -> None:
            raise FAULTS[fault]

        monkeypatch.setattr(tiers.disk.store, "read_all", fail)
        for request, cold in zip(asked, expected, strict=True):
            output = ask(nemotron, request)
            same(output, cold)
            assert output.cached_tokens == 0
        misses = tiers.disk.counts.misses
        assert misses["timeout" if fault == "late" else "failed"] == LIMIT
        assert misses["out"] == 1
        assert nemotron.status()["tiers"]["disk"]["out"]
        assert nemotron.status()["failed_sequences"] == nemotron.stats.failed_sequences


def test_flipped_bytes_on_the_disk_are_a_miss(nemotron: Engine, tmp_path: Path):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 4, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron, **url(tmp_path)) as tiers:
        ask(nemotron, request)
        lower_to(nemotron, tiers, "disk")
        for path in tmp_path.rglob("*.state.*"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        output = ask(nemotron, request)
        same(output, expected)
        assert output.cached_tokens == 0
        assert tiers.disk is not None and tiers.disk.counts.misses["corrupt"] >= 1
        lower_to(nemotron, tiers, "disk")
        assert ask(nemotron, request).cached_tokens == 56, "it was written anew"


def test_a_full_disk_fails_nobody(nemotron: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with tiered(nemotron, **url(tmp_path)) as tiers:
        assert tiers.disk is not None

        def full(*_: object) -> None:
            raise OSError(28, "no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(tiers.disk.store, "write", full)
            for prompt in prompts(nemotron, [40] * 4):
                request = greedy(prompt, 4, logprobs=1)
                same(ask(nemotron, request), alone(nemotron, request))
                nemotron.drain_tiers(5)
            assert "no space left" in tiers.status()["disk"]["out"]
            down(nemotron)
            assert ask(nemotron, request).cached_tokens == 32, "the host is as good as ever"


def test_memory_that_runs_out_takes_the_host_out(nemotron: Engine, monkeypatch: pytest.MonkeyPatch):
    with tiered(nemotron) as tiers:

        def full(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(tiers.host, "put", full)
        for prompt in prompts(nemotron, [40] * (LIMIT + 1)):
            request = greedy(prompt, 4, logprobs=1)
            same(ask(nemotron, request), alone(nemotron, request))
            nemotron.drain_tiers(5)
        assert tiers.status()["host"]["out"]
        assert nemotron.ledger.snapshots.used


def test_a_copy_that_fails_loses_one_prefix(nemotron: Engine, monkeypatch: pytest.MonkeyPatch):
    """The device's copy stays good, and the next request has its prefix saved as ever."""
    [prompt, other] = prompts(nemotron, [60, 60])
    with tiered(nemotron) as tiers:
        copy = tiers._saver._copy

        def broken(*rows):
            outgoing = copy(*rows)
            monkeypatch.setattr(outgoing, "fetch", lambda: 1 / 0)
            return outgoing

        tiers._saver._copy = broken
        ask(nemotron, greedy(prompt, 1))
        nemotron.drain_tiers(5)
        tiers._saver._copy = copy
        assert tiers.host.counts.failures >= 1 and tiers.host.status()["entries"] == 0
        assert ask(nemotron, greedy(prompt, 1)).cached_tokens == 56
        ask(nemotron, greedy(other, 1))
        down(nemotron)
        assert ask(nemotron, greedy(other, 1)).cached_tokens == 56


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_step_with_a_load_shares_nothing(nemotron: Engine, monkeypatch: pytest.MonkeyPatch, lost: bool):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 4, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron):
        ask(nemotron, request)
        down(nemotron)

        def fail(batch: object) -> None:
            if lost:
                for array in jax.tree.leaves(nemotron.runner.cache):
                    array.delete()
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(nemotron.runner, "run", fail)
            assert ask(nemotron, request).finish_reason == "error"
        assert nemotron.ledger.pages.used == nemotron.ledger.snapshots.used == 0
        for depth in (56, 56):
            output = ask(nemotron, request)
            same(output, expected)
            assert output.cached_tokens == depth


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_guard_finds_a_wrong_prefix_and_forgets_it_everywhere(
    nemotron: Engine, monkeypatch: pytest.MonkeyPatch, tier: str, tmp_path: Path
):
    """Planted in the host's memory before it went down, so that its hash is that of the wrong bytes."""
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 4, logprobs=1)
    expected = alone(nemotron, request)
    monkeypatch.setattr(nemotron._guard, "rate", 1.0)
    with tiered(nemotron, **url(tmp_path)) as tiers:
        put = tiers.host.put

        def wrongly(entries, age):
            entries = list(entries)
            for name, entry in entries:
                if name.kind == "state":
                    entry.blob.view(np.float32)[:] *= 0.5
            put(entries, age)

        with monkeypatch.context() as patch:
            patch.setattr(tiers.host, "put", wrongly)
            ask(nemotron, request)
            lower_to(nemotron, tiers, tier)
        assert ask(nemotron, request).cached_tokens == 56  # wrong, and found out right afterwards
        assert nemotron.status()["prefix_cache"]["quarantined"] == 1
        assert tiers.status()[tier]["entries"] == 0
        output = ask(nemotron, request)
        same(output, expected)


def test_a_load_with_nan_fails_one_request_and_is_forgotten(nemotron: Engine):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 4, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron) as tiers:
        ask(nemotron, request)
        down(nemotron)
        for name, entry in tiers.host._shelves["state"].entries.items():
            if name.kind == "state":
                entry.blob.view(np.float32)[:] = np.nan
        assert ask(nemotron, request).finish_reason == "error"
        output = ask(nemotron, request)
        same(output, expected)
        assert output.cached_tokens == 0


def test_a_prefix_that_is_forgotten_while_it_comes_up_is_not_shared(nemotron: Engine):
    [prompt] = prompts(nemotron, [60])
    request = greedy(prompt, 4, logprobs=1)
    expected = alone(nemotron, request)
    with tiered(nemotron):
        ask(nemotron, request)
        down(nemotron)
        nemotron.submit(request)
        while not nemotron.scheduler.running:
            nemotron.step()
        nemotron.flush_cache()
        drain(nemotron)
        assert nemotron.ledger.pages.used == nemotron.ledger.snapshots.used == 0
        output = ask(nemotron, request)
        same(output, expected)
        assert output.cached_tokens == 0


def test_two_engines_share_a_folder(nemotron: Engine, tmp_path: Path):
    [prompt, other] = prompts(nemotron, [60, 60])
    expected = [alone(nemotron, greedy(tokens, 6, logprobs=1)) for tokens in (prompt, other)]
    config = dataclasses.replace(nemotron.config, **url(tmp_path))
    with tiered(nemotron, **url(tmp_path)) as first:
        second = make_tiers(config, nemotron.model, nemotron.runner)
        for tiers, tokens in ((first, prompt), (second, other)):
            nemotron.ledger.tiers = tiers
            ask(nemotron, greedy(tokens, 2))
            down(nemotron)
        for tiers in (first, second):
            nemotron.ledger.tiers = tiers
            tiers.host.clear()
            assert tiers.disk is not None
            tiers.disk.look()
            for tokens, cold in zip((prompt, other), expected, strict=True):
                output = ask(nemotron, greedy(tokens, 6, logprobs=1))
                assert output.cached_tokens == 56
                same(output, cold)
            down(nemotron)
        assert nemotron.ledger.tree is not None
        second.close(nemotron.ledger.tree)
        nemotron.ledger.tiers = first


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_come_back_and_touch_nothing_else(nemotron: Engine, pinned: bool, tmp_path: Path):
    """Also through pinned host memory, as on an accelerator."""
    runner = nemotron.runner
    memory, compiled = runner.memory, nemotron.compilations_after_ready
    copies = Copies(
        jax.eval_shape(lambda: runner.cache),
        {},
        Executables(tmp_path),
        pages=4,
        first_snapshot=memory.num_slots,
        scratch_page=memory.num_pages,
        pinned=pinned,
    )
    nemotron._compiled_before += nemotron.compilations_after_ready - compiled
    rng = np.random.default_rng(0)
    kept = runner.cache
    filled = jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype)), kept)
    before = {name: np.array(array) for name, array in filled.arrays.items()}
    blobs = copies.out(filled, {}, [3, 9, 4], None).fetch()[0] + copies.out(filled, {}, [11], None).fetch()[0]
    state = copies.out(filled, {}, [], 2).fetch()[1]
    staged = copies.stage([*blobs, *blobs[:2]], state, float("inf"))
    after, _ = copies.into(filled, {}, staged, 1, [20, 21, 22, 23, 24], 5)
    for name, (part, layers) in runner.router.arrays.items():
        rows = len(before[name]) // layers
        moves = {9: 20, 4: 21, 11: 22, 3: 23, 24: 24} if part.unit == "page" else {}
        moves = {9: 20, 4: 21, 11: 22, 3: 23} if part.unit == "page" else {memory.num_slots + 2: memory.num_slots + 5}
        written = {20, 21, 22, 23, 24, rows - 1} if part.unit == "page" else {memory.num_slots + 5}
        for layer in range(layers):
            was, now = before[name][layer * rows :][:rows], np.array(after.arrays[name])[layer * rows :][:rows]
            for source, target in moves.items():
                np.testing.assert_array_equal(now[target], was[source])
            others = [row for row in range(rows) if row not in written]
            np.testing.assert_array_equal(now[others], was[others])
            if part.unit == "page":
                np.testing.assert_array_equal(now[24], was[9])


def test_tiers_that_cannot_be_are_refused_before_anything_is_compiled(
    nemotron: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("a runner was made")

    monkeypatch.setattr(load, "Runner", too_late)
    (tmp_path / "file").write_text("in the way")
    refused: list[tuple[dict, str]] = [
        ({"host_cache_bytes": 5000}, r"host_cache_bytes: 5000 is less than two states .* use at least"),
        ({"host_cache_bytes": 1 << 20, "host_cache_state_share": 0.001}, "host_cache_state_share: leaves 1048 B"),
        ({"disk_cache_url": "nothing://x"}, "disk_cache_url: 'nothing://x' cannot be opened"),
        (
            {"disk_cache_url": f"file://{tmp_path}/file"},
            "disk_cache_url: .* cannot be written to: Not a directory; give",
        ),
        ({"host_cache_bytes": 1 << 60}, "host_cache_bytes: .* is more than the .* use less"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            make_runner(dataclasses.replace(nemotron.config, **options), nemotron.model, Startup())
    with pytest.raises(AssertionError, match="a runner was made"):
        make_runner(dataclasses.replace(nemotron.config, **url(tmp_path)), nemotron.model, Startup())
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing stays behind"


def test_a_host_tier_must_hold_what_all_devices_hold_together(nemotron: Engine):
    parts = [part for part, _ in nemotron.model.router.arrays.values()]

    def refusal(router: Router) -> str:
        config = dataclasses.replace(nemotron.config, host_cache_bytes=100)
        with pytest.raises(ConfigError) as refused:
            load.check_tiers(config, dataclasses.replace(nemotron.model, router=router))
        return str(refused.value)

    alone, spread = Router([parts]), Router([[dataclasses.replace(part, shards=2) for part in parts]])
    assert spread.bytes_per_slot == alone.bytes_per_slot / 2
    assert f"two states ({2 * alone.bytes_per_slot} B)" in refusal(alone)
    assert refusal(spread) == refusal(alone)


def test_without_tiers_there_is_nothing_of_them(nemotron: Engine):
    with caching(nemotron), at_most(nemotron, 2):
        [prompt] = prompts(nemotron, [40])
        ask(nemotron, greedy(prompt, 2))
        assert "tiers" not in nemotron.status()
        assert nemotron.drain_tiers()
    assert engine_of("nemotron_h_moe") is nemotron


def test_metrics_and_the_wire_say_what_status_says(nemotron: Engine, tmp_path: Path):
    [prompt] = prompts(nemotron, [60])
    with tiered(nemotron, **url(tmp_path)) as tiers:
        for _ in range(2):
            ask(nemotron, greedy(prompt, 4))
            lower_to(nemotron, tiers, "disk")
        assert nemotron.degraded() == {}
        tiers.host.breaker.reason, tiers.host.breaker._until = "no memory", float("inf")
        assert nemotron.degraded() == {"host tier": "no memory"}
        status = nemotron.status()
        message = status_to_wire(status)
        registry = CollectorRegistry()
        registry.register(EngineCollector(nemotron.status))
        text = generate_latest(registry).decode()
        gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        for name, counts in status["tiers"].items():
            for field, gauge in (("hits", "hits_total"), ("entries", "entries"), ("dropped", "dropped_total")):
                value = float(gauges[f'jhybrid_tier_{gauge}{{tier="{name}"}}'])
                assert getattr(message.tiers[name], field) == counts[field] == value
            assert dict(message.tiers[name].misses) == counts["misses"] != {}
        assert message.tiers["disk"].hits == 1
        assert message.tiers["host"].out == "no memory" and not message.tiers["disk"].HasField("out")
        assert gauges['jhybrid_tier_out{tier="host"}'] == "1.0"


def test_a_prefix_that_comes_up_slower_than_it_is_computed_is_computed(
    nemotron: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A slow disk is tried once, and from then on left alone; what is in the host comes up as ever."""
    asked = [greedy(prompt, 4, logprobs=1) for prompt in prompts(nemotron, [40] * 3)]
    expected = [alone(nemotron, request) for request in asked]
    with tiered(nemotron, **url(tmp_path)) as tiers:
        tiers.price = Price(2.0)
        for request in asked:
            ask(nemotron, request)
        lower_to(nemotron, tiers, "disk")
        disk = tiers.disk
        assert disk is not None
        read = disk.store.read_all

        def slowly(keys: list[str], patience: float) -> object:
            time.sleep(0.3)
            return read(keys, patience)

        monkeypatch.setattr(disk.store, "read_all", slowly)
        depths = []
        for request, cold in zip(asked, expected, strict=True):
            output = ask(nemotron, request)
            same(output, cold)
            depths.append(output.cached_tokens)
        assert depths == [32, 0, 0]
        assert disk.counts.misses["slow"] == 2 and disk.counts.failures == 0
        nemotron.flush_cache(device_only=True)
        assert ask(nemotron, asked[0]).cached_tokens == 32
        assert tiers.host.counts.hits == 1


def test_a_shallower_prefix_in_the_host_is_taken_where_the_deeper_on_disk_is_not_worth_it(
    nemotron: Engine, tmp_path: Path
):
    [prompt] = prompts(nemotron, [100])
    long, short = greedy(prompt, 4, logprobs=1), greedy(prompt[:41], 1)
    expected = alone(nemotron, long)
    with tiered(nemotron, **url(tmp_path)) as tiers:
        tiers.price = Price(2.0)
        ask(nemotron, long)
        lower_to(nemotron, tiers, "disk")
        assert ask(nemotron, short).cached_tokens == 0
        down(nemotron)
        assert tiers.disk is not None
        tiers.disk.loads.saw(1, 100.0)
        output = ask(nemotron, long)
        same(output, expected)
        assert output.cached_tokens == 40
        assert tiers.disk.counts.misses["slow"] == 1 and tiers.host.counts.hits == 1


def test_a_transfer_stops_at_its_time_limit(nemotron: Engine):
    copies = nemotron.runner.copies
    state = np.zeros(copies.state_form.bytes, np.uint8)
    copies.stage([], state, time.monotonic() + 60)
    with pytest.raises(TimeoutError, match="the time to bring a prefix to the device is over"):
        copies.stage([], state, time.monotonic() - 1)
