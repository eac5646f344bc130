"""`jhybrid profile` on the demo model: what it leaves behind, on disk and, which must be nothing, in the engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jhybrid import Engine, EngineConfig, Request, SamplingParams, cli
from jhybrid.errors import ConfigError
from jhybrid.profiler import plot
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.latency import LatencyModel
from jhybrid.profiler.run import read_profile, run_profile
from jhybrid.profiler.stage import Stage

LIMITS = {"max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 16}
CONFIG = EngineConfig(model="demo", **LIMITS)
FILE = """
model = "demo"
max_num_seqs = 2
max_model_len = 128
max_num_batched_tokens = 16
batches = [1, 2]
depths = [20, 70]
new_tokens = [8, 40]
cached_tokens = [0, 30]
mixed_batches = [1]
mixed_new_tokens = [12]
repeats = 5
steps = 2
burn_in = 0.2
text = "{folder}/words.txt"
"""


@pytest.fixture(scope="module")
def engine():
    with Engine(CONFIG, max_parked=1) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiles")
    (made / "words.txt").write_text("My lord, the king is come, and with him all the court. " * 20)
    (made / "profile.toml").write_text(FILE.format(folder=made))
    return made


def command(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jhybrid", "profile", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = int(left.code or 0)
    return code, *capsys.readouterr()


def test_a_profile_from_a_file_and_flags(folder: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["--config", str(folder / "profile.toml"), "--repeats", "3"]
    code, table, err = command(folder, capsys, *asked, "--output", str(folder / "real"))
    assert code == 0, err
    assert "decode batch=2 depth=70" in table and "held out" in table
    found = read_profile(folder / "real")
    assert found.summary is not None and found.summary["compilations"] == 0
    assert len(found.measured) == 4 + 4 + 2
    for row in found.measured:
        stamps = (row["state_mode"], row["kv"], row["repeats"], row["chains"], row["chain_depth"])
        assert stamps == ("copy", "real", 3, 1, max(row["depth"], row["cached"]))
        low, high = row["spread"]
        assert row["floor_seconds"] > 0 and 0 < low <= row["seconds"] <= high
        assert len(row["samples"]) == 3 and row["buckets"]
    rows = {row["point"]: row for row in found.measured}
    assert rows["decode batch=2 depth=70"]["buckets"] == ["decode[T=2,S=2]"]
    assert rows["decode batch=2 depth=70"]["context"] == [73, 78]
    assert rows["decode batch=2 depth=70"]["scheduled"]["sum_decode_kv_tokens"] == 2 * 75
    assert rows["prefill new=40 cached=30"]["buckets"] == ["ragged[T=16,S=2]"] * 3
    assert rows["prefill new=40 cached=30"]["scheduled"]["sum_prefill_kv_tokens"] == 30 + 46 + 62
    assert rows["mixed batch=1 depth=70 new=12 cached=0"]["scheduled"]["num_decode_requests"] == 1
    head = found.head
    assert head["engine"]["max_num_seqs"] == 2 and head["profile"]["steps"] == 2 and head["machine"]["jax"]
    assert LatencyModel.load(folder / "real").itl(2, 50) > 0
    assert (folder / "real" / "steps.svg").read_text().count("bandwidth floor") == 3


def test_synthetic_beside_real(folder: Path, capsys: pytest.CaptureFixture[str]):
    if not (folder / "real").exists():
        pytest.skip("needs the profile of the test before")
    asked = ["--config", str(folder / "profile.toml"), "--repeats", "3", "--seed", "synthetic"]
    code, lines, err = command(folder, capsys, *asked, "--output", str(folder / "synthetic"), "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in lines.splitlines()]
    assert {row["kv"] for row in rows[:-1]} == {"synthetic"}
    assert rows[-1]["summary"]["references"]["before"] == rows[-1]["summary"]["references"]["after"]
    both = ["--compare", str(folder / "real"), str(folder / "synthetic")]
    code, lines, err = command(folder, capsys, *both, "--json")
    last = json.loads(lines.splitlines()[-1])
    assert code == 0, err
    assert last["pairs"] == 10 and last["differing"] == {"profile.seed": ["real", "synthetic"]}
    code, table, _ = command(folder, capsys, *both)
    assert code == 0
    assert "profile.seed: A 'real', B 'synthetic'" in table and "geometric mean of 10 points" in table
    code, _, err = command(folder, capsys, *asked, "--output", str(folder / "real"))
    assert code == 2
    assert "is of another run (profile differ)" in err
    code, _, err = command(folder, capsys, "--compare", str(folder), str(folder / "real"))
    assert code == 2
    assert "is no profile" in err


def test_an_engine_that_was_profiled_answers_as_one_that_was_not(engine: Engine, tmp_path: Path):
    config = ProfileConfig(
        batches=(2,), depths=(21,), new_tokens=(9,), cached_tokens=(5,), repeats=1, burn_in=0.0, bandwidth=1.0
    )
    run_profile(engine, config, tmp_path)
    sampled = SamplingParams(max_tokens=16, temperature=1.0)  # with the engine's own seeds
    requests = [
        Request(prompt="My lord, ", sampling=SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)),
        Request(prompt="The king is dead. " * 3, sampling=sampled),
        Request(prompt="O", sampling=sampled),
    ]
    profiled = engine.generate(requests)
    with Engine(CONFIG, max_parked=1) as other:
        for mine, theirs in zip(profiled, other.generate(requests), strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == theirs.logprobs
    assert engine.stats.requests == 3


@pytest.mark.parametrize(("depth", "chains"), [(37, 1), (48, 1), (50, 2)])
def test_shadows_answer_as_the_engine_does(engine: Engine, depth: int, chains: int):
    """A fork in the middle of a page and at its end, with states copied and in place, beside a request run alone."""
    text = [(7 * i + i * i) % engine.model.vocab_size for i in range(256)]
    for in_place in (False, True):
        answers: dict[str, list[int]] = {}
        state = "inplace" if in_place else "copy"
        with Stage(engine, text, chains=1, state=state, is_real=True) as stage:
            stage.chain_to(depth)
            names = [stage.shadow(i, depth, 1, depth + 21, own=i) for i in range(1 if in_place else chains)]
            while not all(stage.has_ended(name) for name in names):
                deltas = engine.step()
                stage._take(deltas)
                for delta in deltas:
                    answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        for i, name in enumerate(names):
            sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=i, ignore_eos=True)
            prompt = [*text[:depth], text[depth + 7 * i]]
            [alone] = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
            assert answers[name] == alone.token_ids
            other = [prompt[0] + 1, *prompt[1:]]
            [changed] = engine.generate([Request(prompt_token_ids=other, sampling=sampling)])
            assert changed.token_ids != alone.token_ids


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.profiler.stages import profiled, toy
engine, runner = toy()
poison = runner.before_run
def run(batch):
    if runner.calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    poison(batch)
runner.before_run = run
profiled(engine, Path(sys.argv[1]))
print(runner.calls, flush=True)
"""


def test_a_killed_run_goes_on(tmp_path: Path):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root, root / "server")))}

    def run(folder: str, at: int) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, "-c", KILLED, str(tmp_path / folder), str(at)]
        return subprocess.run(asked, capture_output=True, text=True, env=environment, cwd=root)

    killed = run("a", 60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = (tmp_path / "a" / "rows.jsonl").read_text().splitlines()
    assert len(before) > 4 and "summary" not in before[-1]
    with (tmp_path / "a" / "rows.jsonl").open("a") as file:
        file.write('{"point": "torn')
    rest = run("a", -1)
    assert rest.returncode == 0, rest.stderr
    lines = (tmp_path / "a" / "rows.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before
    points = [json.loads(line).get("point") for line in lines]
    named = [point for point in points if point]
    assert len(named) == len(set(named)) == 12 and "summary" in lines[-1]
    assert (tmp_path / "a" / "latency_model.json").exists()


def test_what_cannot_be_made_is_refused_before_the_model_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jhybrid.engine.Engine.__init__", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    asked = ["--config", str(folder / "profile.toml"), "--output"]
    for arguments, message in (
        ([str(tmp_path / "file")], "output: "),
        (["/proc/none"], "output: /proc/none cannot be a folder to write to"),
        ([str(tmp_path / "new"), "--plot", "steps.gif"], "plot: steps.gif ends in none of"),
        ([str(tmp_path / "new"), "--depths", "--steps", "30"], "repeats: a decode point takes 153 steps"),
    ):
        code, _, err = command(folder, capsys, *asked, *arguments)
        assert (code, err.count(message)) == (2, 1), err


def test_where_every_point_is_skipped_only_the_rows_are_left(folder: Path, capsys: pytest.CaptureFixture[str]):
    deep = ["--config", str(folder / "profile.toml"), "--kinds", "decode", "--depths", "2000"]
    code, table, err = command(folder, capsys, *deep, "--output", str(folder / "deep"))
    assert code == 0, err
    assert table.count("model_len_exceeded") == 2
    assert table.endswith("deep: rows.jsonl\n")
    assert [path.name for path in (folder / "deep").iterdir()] == ["rows.jsonl"]


def test_an_interrupted_run_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jhybrid.profiler.run.measure", interrupted)
    again = ["--config", str(folder / "profile.toml"), "--output", str(folder / "interrupted")]
    code, _, err = command(folder, capsys, *again)
    assert code == 130
    assert f"goes on from {folder / 'interrupted'}" in err


def test_plots(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not (folder / "real").exists():
        pytest.skip("needs the profile of the test before")
    found = read_profile(folder / "real")
    plot.plot_profile(found, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="ends in none of"):
        plot.plot_profile(found, tmp_path / "steps.txt")
    monkeypatch.setattr(plot, "has_matplotlib", lambda: False)
    with pytest.raises(ConfigError, match=r"jhybrid\[plot\]"):
        plot.plot_profile(found, tmp_path / "steps.png")
