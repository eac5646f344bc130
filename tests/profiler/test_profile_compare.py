"""Comparing profiles, choosing the state mode, and configuration files."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jhybrid import EngineConfig, cli
from jhybrid.errors import ConfigError
from jhybrid.profiler.compare import compare
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.plan import Layout, Point, _plan_point, points_of, resolve_state_mode
from jhybrid.profiler.run import Profile, read_profile


def profile(points: dict[str, list[float]], seed: str = "real") -> Profile:
    rows = [
        {"point": name, "status": "measured", "seconds": sorted(s)[len(s) // 2], "spread": [min(s), max(s)]}
        | {"repeats": len(s)}
        for name, s in points.items()
    ]
    return Profile({"profile": {"seed": seed}, "machine": {"cores": 2}}, rows, None)


def test_only_ranges_that_do_not_meet_differ():
    a = profile({"p": [1.0, 1.1, 1.2], "q": [1.0, 1.1, 1.2], "r": [1.0, 1.1, 1.2], "x": [1.0]})
    b = profile({"p": [1.19, 1.3, 1.4], "q": [1.3, 1.32, 1.4], "r": [0.5, 0.55, 0.9], "y": [1.0]}, "synthetic")
    found = compare(a, b)
    assert [pair.verdict for pair in found.pairs] == ["within spread", "slower", "faster"]
    assert [pair.ratio for pair in found.pairs] == pytest.approx([1.3 / 1.1, 1.32 / 1.1, 0.5])
    assert (found.only_a, found.only_b) == (["x"], ["y"])
    assert found.differing == {"profile.seed": ("real", "synthetic")}
    last = found.describe()[-1]
    assert (last["slower"], last["faster"], last["within_spread"]) == (1, 1, 1)
    assert last["ratio"] == pytest.approx((1.3 / 1.1 * 1.2 * 0.5) ** (1 / 3))
    assert compare(a, profile({})).ratio is None
    few = compare(profile({"p": [1.0, 1.1]}), profile({"p": [2.0, 2.1]}))
    assert few.count("within spread") == 1


SCRIPT = """
import json, sys, types, psutil
psutil.virtual_memory = lambda: types.SimpleNamespace(available=int(sys.argv[1]))
from jhybrid.config import EngineConfig
from jhybrid.inspection import inspect_model
from jhybrid.cache.router import Router
from jhybrid.profiler.plan import Layout, resolve_state_mode
from jhybrid.weights.load import read_model
config = EngineConfig(model="demo", max_num_seqs=4, max_model_len=2048)
plan = inspect_model(config)["memory"]
router = Router(read_model(config)[2])
modes = []
for parked, chains in ((1, 1), (0, 1), (0, 4), (2, 2)):
    layout = Layout(16, router.has_pages, router.has_slots, 4, 512, 2048, plan["num_pages"], 4 + parked, 4 + parked)
    modes.append(resolve_state_mode("auto", layout, chains))
print(json.dumps([plan["num_pages"], modes]))
"""


def test_processes_with_different_free_memory_decide_alike():
    """`auto` looks at layout and configuration alone."""
    command = [sys.executable, "-c", SCRIPT]
    outputs = [
        subprocess.run([*command, str(size)], capture_output=True, text=True, check=True).stdout
        for size in (60 << 20, 64 << 30)
    ]
    (pages_a, modes_a), (pages_b, modes_b) = map(json.loads, outputs)
    assert pages_a < pages_b
    assert modes_a == modes_b == ["copy", "copy", "inplace", "copy"]


def test_modes():
    hybrid = Layout(16, True, True, 4, 64, 256, 100, 5, 5)
    attention = Layout(16, True, False, 4, 64, 256, 100, 0, 5)
    assert resolve_state_mode("inplace", hybrid, 1) == "inplace"
    assert resolve_state_mode("copy", hybrid, 5) == "copy"  # asked for, and then skipped by name
    assert {resolve_state_mode(mode, attention, 1) for mode in ("auto", "copy", "inplace")} == {"none"}


def test_a_file_and_flags_over_it(tmp_path: Path):
    path = tmp_path / "profile.toml"
    path.write_text('max_num_seqs = 12\nrepeats = 7\nsteps = 3\nbatches = [1, 5]\ntext = "words.txt"\noutput = "out"\n')
    command = cli.Profile.of(["--config", str(path), "--repeats", "9", "--depths", "64", "128"])
    assert (command.engine.max_num_seqs, command.profile.repeats, command.profile.steps) == (12, 9, 3)
    assert (command.profile.batches, command.profile.depths) == ((1, 5), (64, 128))
    assert (command.profile.text, command.output) == (Path("words.txt"), Path("out"))


def test_axes_left_empty_follow_the_engine():
    engine, config = EngineConfig(max_num_seqs=12), ProfileConfig()
    axes = config.axes(engine, 2048)
    assert axes.batches == (1, 2, 3, 4, 6, 8, 12)
    assert axes.depths[0] == 64 and axes.depths[-1] + config.decode_steps + 2 == 2048
    assert axes.cached_tokens[0] == 0 and axes.cached_tokens[-1] + max(axes.new_tokens) < 2048
    points = list(points_of(config, axes))
    assert len(points) == len(set(points))
    twice = ProfileConfig(kinds=("decode",), batches=(2, 2, 1), depths=(9, 9))
    assert list(points_of(twice, twice.axes(engine, 2048))) == [Point("decode", b, 9, 0, 0) for b in (1, 2)]


def test_steps_that_leave_no_context_are_refused_where_depths_are_derived():
    engine, config = EngineConfig(), ProfileConfig(kinds=("decode",), repeats=20, steps=16)
    assert config.axes(engine, config.decode_steps + 3).depths == (1,)
    remedy = "use fewer repeats or steps, or a max_model_len above 325"
    with pytest.raises(ConfigError, match=rf"^repeats: .*repeats=20 \* steps=16 .*max_model_len=256 .*; {remedy}$"):
        config.axes(engine, 256)
    assert dataclasses.replace(config, depths=(9,)).axes(engine, 256).depths == (9,)  # skipped by name
    prompts = dataclasses.replace(config, kinds=("prefill",)).axes(engine, 256)
    assert min(prompts.cached_tokens) == 0


def test_a_depth_below_one_is_skipped():
    layout = Layout(16, True, True, 4, 64, 256, 100, 5, 5)
    point = _plan_point(Point("decode", 1, -69, 0, 0), ProfileConfig(repeats=20, steps=16), layout)
    assert (point.reason, point.detail) == ("model_len_exceeded", "-69 tokens of context; max_model_len=256")


HEAD = '{"format": 1}\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + '{"bandwidth": 1}\n{"point": "p"}\n', "the point in line 3 has no status"),
        (HEAD + '{"point": "p", "status": "measured", "seconds": 1}\n', "the point in line 2 has no spread, repeats"),
        (HEAD + '{"point": "p", "status": "skipped", "reason": "r"}\n', "the point in line 2 has no detail"),
        ('{\n  "format": 1\n}\n', "Expecting property name"),
        (HEAD + "[1]\n", "[1] is no object"),
        pytest.param(HEAD + "[" * 100_000 + "\n", "it is nested too deeply", id="deep"),
        ('{"format": 0}\n', "its first line is not the head of format 1"),
        ("", "its first line is not the head of format 1"),
        (None, "no such file"),
    ],
)
def test_what_is_no_profile_is_refused_and_never_to_be_removed(text: str | None, why: str, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    for named in (path, tmp_path):
        with pytest.raises(ConfigError) as caught:
            read_profile(named)
        message = str(caught.value)
        assert message.startswith(f"compare: {path} is no profile: ") and why in message
        assert message.endswith("; name a folder that `jhybrid profile --output` filled, or its rows.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch = [1]", "batch: in"),
        ("batches = [0]", "batches: must be an integer of at least 1, got 0"),
        ('batches = ["1"]', "batches: "),
        ('seed = "fake"', "seed: 'fake'"),
        ('state_mode = "share"', "state_mode: 'share'"),
        ("page_size = 0", "page_size"),
        ("bandwidth = -1.0", "bandwidth: must be a positive number of GB/s, got -1.0"),
        ("[profile", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path):
    (tmp_path / "profile.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        cli.Profile.of(["--config", str(tmp_path / "profile.toml")])
    assert message in str(caught.value)
