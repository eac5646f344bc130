"""DiskTier: what is read is what was written, or nothing. Whatever happens to the folder, and whoever else uses it."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jhybrid import ConfigError
from jhybrid.cache.tiers import counts, disk
from jhybrid.cache.tiers.disk import DiskTier
from jhybrid.cache.tiers.form import Blob
from jhybrid.cache.tiers.host import Name
from jhybrid.cache.tiers.manifest import Corrupt
from jhybrid.cache.tiers.store import Gone, Store

from .disk_writer import FINGERPRINT, PAGE, STATE, blob_of, prefix, tier

PATIENCE = 60.0  # seconds; more than a machine that does other things as well takes


@contextlib.contextmanager
def opened(folder: Path, *args, **options) -> Iterator[DiskTier]:
    one = tier(str(folder), *args, **options)
    try:
        yield one
    finally:
        one.close(PATIENCE)


def written(one: DiskTier, *prefixes: tuple[int, int]) -> None:
    for stem, pages in prefixes:
        one.write(prefix(stem, pages))
    assert one.drain(PATIENCE)


def check(one: DiskTier, stem: int, pages: int, first: int = 0) -> None:
    """A prefix comes back as it went, from any page on."""
    digests = prefix(stem, pages)
    assert one.deepest(digests) == pages
    blobs, state = one.read(digests, first, has_pages=True, has_state=True, patience=PATIENCE)
    for digest, blob in zip(digests[first:], blobs, strict=True):
        np.testing.assert_array_equal(blob, blob_of(Name(digest, "kv")))
    assert state is not None
    np.testing.assert_array_equal(state, blob_of(Name(digests[-1], "state")))


def data(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and pattern in str(path.relative_to(folder)))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_was_written_comes_back_also_after_a_restart(tmp_path: Path):
    with opened(tmp_path) as one:
        written(one, (1, 37), (1, 50), (2, 5))
        assert one.status()["entries"] == 3
        assert one.status()["bytes"] == size_of(tmp_path)
    with opened(tmp_path) as again:
        assert again.status()["bytes"] == size_of(tmp_path)
        for first in (0, 1, 15, 16, 17, 31, 32, 36, 37):
            check(again, 1, 37, first)
        check(again, 1, 50)
        check(again, 2, 5)
        assert again.deepest(prefix(1, 49)) == 37
        assert again.deepest(prefix(3, 49)) == 0


def test_prefixes_share_the_blocks_they_have_in_common(tmp_path: Path):
    with opened(tmp_path) as one:
        written(one, (1, 40), (1, 48))
        blocks = [path for path in data(tmp_path, "data/") if ".kv" in path.name]
        assert len(blocks) == 2 + 1 + 1
        assert one.counts.written_bytes == (40 + 16) * PAGE + 2 * STATE


def test_without_states_a_prefix_is_read_from_a_longer_one(tmp_path: Path):
    with opened(tmp_path, has_states=False) as one:
        written(one, (1, 40))
        assert one.deepest(prefix(1, 33)) == 33
        blobs, state = one.read(prefix(1, 33), 5, has_pages=True, has_state=False, patience=PATIENCE)
        assert len(blobs) == 28 and state is None
        np.testing.assert_array_equal(blobs[-1], blob_of(Name(prefix(1, 33)[-1], "kv")))


def test_without_pages_there_are_states_alone(tmp_path: Path):
    with opened(tmp_path, has_pages=False) as one:
        written(one, (1, 40))
        assert one.deepest(prefix(1, 40)) == 40
        blobs, state = one.read(prefix(1, 40), 0, has_pages=False, has_state=True, patience=PATIENCE)
        assert blobs == [] and state is not None


def test_another_model_finds_nothing(tmp_path: Path):
    with opened(tmp_path) as one, opened(tmp_path, fingerprint=FINGERPRINT[::-1]) as other:
        written(one, (1, 20))
        other.look()
        assert other.deepest(prefix(1, 20)) == 0


def test_a_manifest_of_another_model_in_its_folder_is_refused(tmp_path: Path):
    with opened(tmp_path, fingerprint=FINGERPRINT[::-1]) as other:
        written(other, (1, 20))
    [theirs] = tmp_path.iterdir()
    theirs.rename(tmp_path / FINGERPRINT.hex()[:32])
    with opened(tmp_path) as one:
        assert one.deepest(prefix(1, 20)) == 0


def test_the_least_recently_used_goes_first_and_the_budget_holds(tmp_path: Path):
    each = 10 * PAGE + STATE
    with opened(tmp_path, 3 * each + 20_000) as one:
        written(one, (0, 10), (1, 10), (2, 10))
        check(one, 0, 10)
        written(one, (3, 10))
        assert [stem for stem in range(4) if one.deepest(prefix(stem, 10))] == [0, 2, 3]
        assert size_of(tmp_path) <= one.index.budget
        assert one.status()["bytes"] == size_of(tmp_path)
        written(one, (4, 200))
        assert one.deepest(prefix(4, 200)) == 0, "what exceeds the budget by itself is not kept"
        assert one.counts.dropped == 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def swap(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize("damage", [flip, cut, swap, Path.unlink])
@pytest.mark.parametrize("what", [".kv16.", ".kv4.", ".state."])
def test_damaged_data_are_never_a_hit_and_are_replaced(tmp_path: Path, damage: Callable[[Path], None], what: str):
    with opened(tmp_path) as one:
        written(one, (1, 20), (1, 36))
        damage(data(tmp_path, what)[0])
        bad = 0
        for pages in (20, 36):
            if one.deepest(prefix(1, pages)) < pages:  # it shared the block that was found bad
                continue
            try:
                check(one, 1, pages)
            except (Corrupt, Gone):
                bad += 1
                assert one.deepest(prefix(1, pages)) < pages
        assert bad == 1
        written(one, (1, 20), (1, 36))
        check(one, 1, 20)
        check(one, 1, 36)


@pytest.mark.parametrize("damage", [flip, cut, swap])
def test_a_damaged_manifest_is_removed(tmp_path: Path, damage: Callable[[Path], None]):
    with opened(tmp_path) as one:
        written(one, (1, 20))
    [manifest] = data(tmp_path, "prefixes/")
    damage(manifest)
    with opened(tmp_path) as one:
        assert one.deepest(prefix(1, 20)) == 0
        written(one, (1, 20))
        check(one, 1, 20)


def test_two_engines_see_what_the_other_wrote_and_gave_up(tmp_path: Path):
    with opened(tmp_path) as one, opened(tmp_path) as other:
        written(one, (1, 20))
        written(other, (1, 20), (2, 20))
        assert one.deepest(prefix(2, 20)) == 0
        one.look()
        check(one, 2, 20)
        other.clear()
        assert other.deepest(prefix(1, 20)) == other.deepest(prefix(2, 20)) == 0
        other.delete_doomed()
        with pytest.raises(Gone):
            check(one, 2, 20)
        one.look()
        assert one.deepest(prefix(1, 20)) == 0
        written(one, (1, 20))
        other.look()
        check(other, 1, 20)


@pytest.mark.parametrize("place", ["data/ab.state.cd.77", "probe.ab.77"])
def test_data_that_no_manifest_names_go_at_the_second_look(tmp_path: Path, place: str):
    with opened(tmp_path) as one:
        written(one, (1, 20))
        stray = data(tmp_path, ".state.")[0].parents[1] / place
        stray.write_bytes(b"x" * 77)
        before = one.status()["bytes"]
        one.look()
        assert one.status()["bytes"] == before + 77
        one.look()
        one.delete_doomed()
        assert not stray.exists()
        assert one.status()["bytes"] == before
        check(one, 1, 20)


def test_a_forgotten_page_takes_all_that_goes_on_from_it_along(tmp_path: Path):
    with opened(tmp_path) as one:
        written(one, (1, 10), (1, 20), (1, 36), (2, 20))
        one.forget(prefix(1, 15)[-1])
        assert one.deepest(prefix(1, 36)) == 10
        check(one, 2, 20)
        one.delete_doomed()
    with opened(tmp_path) as again:
        assert again.deepest(prefix(1, 36)) == 10


@pytest.mark.parametrize("give_up", [lambda one: one.forget(prefix(1, 15)[-1]), DiskTier.clear])
def test_what_was_forgotten_is_not_found_again(tmp_path: Path, give_up: Callable[[DiskTier], None]):
    with opened(tmp_path) as one:
        written(one, (1, 20))
        give_up(one)
        one.look()
        assert one.deepest(prefix(1, 20)) == 0
    with opened(tmp_path) as again:
        written(again, (1, 20))
        give_up(again)  # and closed before the thread's next round
    with opened(tmp_path) as last:
        assert last.deepest(prefix(1, 20)) == 0
        assert size_of(tmp_path) == last.status()["bytes"] == 0


def test_engines_whose_last_bits_differ_do_not_spoil_each_others_prefixes(tmp_path: Path):
    def other_bits(names: Sequence[Name]) -> list[Blob | None]:
        return [blob_of(name) ^ np.uint8(1) for name in names]

    with opened(tmp_path) as one, opened(tmp_path, blobs=other_bits) as other:
        written(one, (1, 20))
        written(other, (1, 25), (1, 20))
        check(one, 1, 20)
        blobs, _ = other.read(prefix(1, 25), 3, has_pages=True, has_state=True, patience=PATIENCE)
        np.testing.assert_array_equal(blobs[0], blob_of(Name(prefix(1, 25)[3], "kv")) ^ np.uint8(1))
        other.look()
        one.look()
        check(one, 1, 20)
    with opened(tmp_path) as again:
        for pages in (20, 25):
            again.read(prefix(1, pages), 0, has_pages=True, has_state=True, patience=PATIENCE)


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path):
    with opened(tmp_path) as one:
        written(one, (1, 20))
    [manifest] = data(tmp_path, "prefixes/")
    strays = [manifest.with_name("notes.txt"), manifest.parents[1] / "data" / os.fsdecode(b"caf\xe9.state.x.5")]
    for stray in strays:
        stray.write_text("mine")  # the second's name is not UTF-8
    with opened(tmp_path) as again:
        again.look()
        check(again, 1, 20)
        assert again.counts.failures == 0 and all(stray.exists() for stray in strays)


@pytest.mark.parametrize("name", ["plain", "a b", "50% café"])
def test_stale_locks_are_removed_wherever_the_folder_is(name: str, tmp_path: Path):
    folder = tmp_path / name
    store = Store(f"file://{urllib.parse.quote(str(folder))}/")
    store.write("data/x", b"x")
    stale, fresh = folder / "data" / "y.__lock", folder / "data" / "z.__lock"
    for path in (stale, fresh):
        path.write_bytes(b"")
    os.utime(stale, (1.0, 1.0))
    store.remove_stale_locks()
    assert sorted(path.name for path in (folder / "data").iterdir()) == ["x", "z.__lock"]


@pytest.mark.parametrize("error", [OSError(28, "no space left"), PermissionError("denied"), ValueError("UNAVAILABLE")])
def test_writes_that_fail_take_the_tier_out_and_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    monkeypatch.setattr(counts, "FIRST_PAUSE", 0.2)
    with opened(tmp_path) as one:
        one.writes._pause = 0.2
        written(one, (1, 20))

        def fail(key: str, value: bytes) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(one.store, "write", fail)
            written(one, (2, 20), (3, 20), (4, 20), (5, 20))
            assert one.counts.failures == counts.LIMIT
            assert str(error) in one.status()["out"]
            assert one.counts.dropped >= 1
            check(one, 1, 20)
        time.sleep(0.3)
        written(one, (5, 20))
        assert one.status()["out"] is None
        check(one, 5, 20)
        assert one.status()["bytes"] == size_of(tmp_path)


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, inside: str):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"disk_cache_url: .*Not a directory.*; give file:///DIRECTORY/"):
        tier(str(tmp_path / "file" / inside))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path):
    folder = Path("/sys")  # nobody may, not even root
    if os.geteuid():
        folder = tmp_path
        folder.chmod(0o555)
    with pytest.raises(
        ConfigError, match=r"disk_cache_url: .*/. cannot be written to: \w+ .*; .*this process may write to"
    ):
        tier(str(folder))
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("error", [ValueError("RESOURCE_EXHAUSTED: full"), OSError(5, "i/o"), TimeoutError()])
def test_a_store_that_is_out_of_order_at_the_start_is_out_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    with opened(tmp_path) as one:
        written(one, (1, 20))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", fail)
        one = tier(str(tmp_path))
    until = time.monotonic() + PATIENCE
    while not one.deepest(prefix(1, 20)) and time.monotonic() < until:
        time.sleep(0.01)
    check(one, 1, 20)
    assert one.status()["out"] == (str(error) or "TimeoutError()") and one.counts.failures == 1
    written(one, (2, 20))
    assert one.counts.dropped == 1
    one.close(PATIENCE)


def test_a_start_leaves_nothing_behind(tmp_path: Path):
    with opened(tmp_path):
        assert data(tmp_path, "") == []


def test_looks_that_fail_while_nothing_is_written_do_not_take_the_tier_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk, "LOOK", 0.0)
    monkeypatch.setattr(disk, "TURN", 0.01)
    with opened(tmp_path) as one:
        written(one, (1, 20))
        with monkeypatch.context() as patch:
            patch.setattr(one.store, "keys", lambda: 1 / 0)
            until = time.monotonic() + PATIENCE
            while one.counts.failures <= 2 * counts.LIMIT and time.monotonic() < until:
                time.sleep(0.01)
        assert one.counts.failures > 2 * counts.LIMIT
        assert one.status()["out"] is None
        check(one, 1, 20)
        written(one, (2, 20))
        check(one, 2, 20)


def test_the_first_to_publish_a_prefix_has_published_it(tmp_path: Path):
    """Who comes second takes in what is there, so that nothing of the first is left without a name."""

    def other_bits(names: Sequence[Name]) -> list[Blob | None]:
        return [blob_of(name) ^ np.uint8(1) for name in names]

    with opened(tmp_path) as one, opened(tmp_path, blobs=other_bits) as other:
        written(one, (1, 20))
        before = {path: path.read_bytes() for path in data(tmp_path, "")}
        written(other, (1, 20))
        check(other, 1, 20)
        other.delete_doomed()
        assert {path: path.read_bytes() for path in data(tmp_path, "")} == before
        assert other.status()["bytes"] == one.status()["bytes"] == size_of(tmp_path)


def test_failures_of_what_was_begun_before_do_not_lengthen_the_pause():
    breaker = counts.Breaker("it")
    for _ in range(counts.LIMIT + 5):
        breaker.failed(OSError("broken"))
    assert not breaker.is_in and breaker._pause == 2 * counts.FIRST_PAUSE
    breaker._until = 0.0  # on trial
    breaker.failed(OSError("still"))
    assert not breaker.is_in and breaker.reason == "still" and breaker._pause == 4 * counts.FIRST_PAUSE
    breaker._until = 0.0
    breaker.succeeded()
    assert breaker.reason is None and breaker._pause == counts.FIRST_PAUSE


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "tests.cache.disk_writer"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        yield process


def kill_and_look(writers: subprocess.Popen, folder: Path, seed: int, budget: int) -> None:
    """Kill a writer at a random moment; what is there afterwards is right, and the folder is as good as ever."""
    assert writers.stdin is not None and writers.stdout is not None
    print(folder, budget, seed, sep="\t", file=writers.stdin, flush=True)
    writer = int(writers.stdout.readline())
    time.sleep(random.Random(seed).uniform(0.0, 0.4))
    os.kill(writer, signal.SIGKILL)
    assert writers.stdout.readline() == "gone\n"
    with opened(folder, budget) as one:
        found = 0
        for stem in range(100):
            digests = prefix(stem, 60)
            while pages := one.deepest(digests):
                check(one, stem, pages)
                digests, found = digests[: pages - 1], found + 1
        assert found == one.status()["entries"]
        assert one.counts.failures == 0
        written(one, (99, 20))
        check(one, 99, 20)
        assert one.status()["bytes"] <= budget


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_that_is_killed_leaves_nothing_wrong(writers: subprocess.Popen, tmp_path: Path, seed: int):
    for turn in range(2):
        kill_and_look(writers, tmp_path, 100 * seed + turn, 1 << 30 if seed else 4_000_000)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_killed_writers_leave_nothing_wrong(writers: subprocess.Popen, tmp_path: Path):
    for turn in range(200):
        kill_and_look(writers, tmp_path, 1000 + turn, 6_000_000)
    with opened(tmp_path, 6_000_000) as one:
        one.look()
        one.look()
        one.delete_doomed()
        kept = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and "__lock" not in path.name)
        assert kept == one.status()["bytes"] <= one.index.budget
