"""Fleet: engines of a local Ray cluster give what one engine gives, whoever dies, and each answer once."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import ray

from jhybrid import cli, fleet
from jhybrid.engine import Engine
from jhybrid.errors import ConfigError, EngineDeadError, JhybridError, StepError
from jhybrid.evaluate.engines import EngineFleet, OneEngine, Worker
from jhybrid.evaluate.respondent import Respondent
from jhybrid.fleet import Fleet, RayOptions, room_for
from jhybrid_server.batch_file import Summary, run_batch
from tests.evaluate.toy_text import LetterTokenizer, text_engine

CONFIG = text_engine()[0].config
WORDS = ("to be", "or not", "that is the question", "whether", "tis nobler", "in the mind", "to suffer", "the slings")
TWO, THREE = RayOptions(ray=True, num_actors=2), RayOptions(ray=True, num_actors=3)
ROOT = Path(__file__).parent.parent.parent


class Killed(Exception):
    """The run's process is gone."""


# A raylet that a busy machine lets wait must not be taken for dead: it would end this process with it.
CLUSTER = """
import ray
patience = {"health_check_timeout_ms": 60_000, "health_check_failure_threshold": 20}
context = ray.init(
    address="local", num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, logging_level="ERROR",
    _system_config={"worker_niceness": 0, **patience},
)
print(context.address_info["address"], flush=True)
input()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of a process of its own: Ray forks to start its servers, which a process with threads must not."""
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # else the cluster has a token that only its starter knows
    with Popen([sys.executable, "-c", CLUSTER], stdin=PIPE, stdout=PIPE, text=True, env=env) as head:
        assert head.stdin is not None and head.stdout is not None
        ray.init(address=head.stdout.readline().strip(), logging_level="ERROR")
        yield
        ray.shutdown()
        head.stdin.close()


def toy(pids: Path) -> Engine:
    """A toy engine that says which process it is in."""
    (pids / str(os.getpid())).touch()
    return text_engine(LetterTokenizer())[0]


def kill_one(pids: Path) -> None:
    """Kill the process of the engine that came last."""
    victim = max(pids.iterdir(), key=lambda path: path.stat().st_mtime)
    os.kill(int(victim.name), signal.SIGKILL)
    victim.unlink()


class kills_once:
    """Progress in which one engine dies, when so much is done."""

    def __init__(self, pids: Path, after: int):
        self.pids, self.after = pids, after
        self.seen, self.dead = 0, False

    def __call__(self, count: int) -> None:
        self.seen += count
        if self.seen >= self.after and not self.dead:
            self.dead = True
            kill_one(self.pids)


def of_this_process() -> Callable[[int], tuple[int, int]]:
    def work(piece: int) -> tuple[int, int]:
        time.sleep(0.1)
        return piece, os.getpid()

    return work


@pytest.mark.timeout(900)  # a busy machine takes long to start Ray's processes
def test_engines_stay_and_one_that_is_killed_loses_nothing(cluster: None):
    pieces = list(range(12))
    with Fleet(TWO, of_this_process) as many:
        first = list(many.map(pieces))
        assert [piece for piece, _ in first] == pieces
        engines = {pid for _, pid in first}
        assert 1 <= len(engines) <= 2
        second = []
        for answer in many.map(pieces):
            if not second:
                os.kill(answer[1], signal.SIGKILL)
            second.append(answer)
        assert [piece for piece, _ in second] == pieces
        later = {pid for _, pid in second}
        assert second[0][1] not in {pid for _, pid in second[-4:]}
        assert len(engines | later) <= 3  # two, and one in the place of the one that was killed
        assert {pid for _, pid in many.map(pieces)} <= engines | later


@pytest.mark.slow
def test_scores_and_answers_are_those_of_one_engine(cluster: None, tmp_path: Path):
    """An engine dies while they are scored."""
    alone = Respondent(OneEngine(text_engine(LetterTokenizer())[0]), max_length=60)
    model = text_engine(LetterTokenizer())[0].model
    pairs = [(f"{a} {b} ", c) for a in WORDS for b in WORDS for c in WORDS[:4]]
    with Fleet(THREE, partial(Worker, partial(toy, tmp_path))) as many:
        assert many.num_engines == 3
        engines = EngineFleet(many, CONFIG, model)
        spread = Respondent(engines, max_length=60)
        kill = kills_once(tmp_path, len(pairs) // 4)
        assert spread.loglikelihoods(pairs, kill) == alone.loglikelihoods(pairs)
        assert kill.dead and kill.seen == len(pairs)
        assert engines.tally.asked == alone.engines.tally.asked
        assert engines.tally.cached > engines.tally.asked / 3
        sampled = [(text, {"max_gen_toks": 9, "do_sample": True, "temperature": 2.0}) for text in [*WORDS, *WORDS]]
        answers = spread.generate(sampled)
        assert answers == alone.generate(sampled)
        assert answers[: len(WORDS)] != answers[len(WORDS) :]  # the same question, asked again, is drawn anew
    assert ray.is_initialized()  # a cluster that was there before stays


def questions(path: Path, count: int) -> Path:
    def line(i: int) -> dict[str, Any]:
        body = {"prompt": WORDS[i % len(WORDS)], "max_tokens": 9, "temperature": 1.5 * (i % 2)}
        return {"custom_id": f"q{i}", "method": "POST", "url": "/v1/completions", "body": body}

    lines = [json.dumps(line(i)) for i in range(count)]
    lines[5] = "{no json"
    path.write_text("\n".join(lines) + "\n")
    return path


def told(path: Path) -> list[Any]:
    """What a file of answers says, without names and times."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    bodies = [record["response"]["body"] for record in records]
    return [
        (record["id"], record["custom_id"], record["error"], body.get("choices"))
        for record, body in zip(records, bodies, strict=True)
    ]


@pytest.mark.slow
def test_a_batch_file_s_answers_are_those_of_one_engine(cluster: None, tmp_path: Path):
    """An engine dies, and later the run itself, which goes on from there."""
    source = questions(tmp_path / "in.jsonl", 120)
    one, many, pids = tmp_path / "one.jsonl", tmp_path / "many.jsonl", tmp_path / "pids"
    pids.mkdir()
    run_batch(CONFIG, source, one, make_engine=partial(toy, tmp_path))
    run = partial(run_batch, CONFIG, source, many, make_engine=partial(toy, pids), cluster=TWO)
    kill = kills_once(pids, 20)

    def done(count: int) -> None:
        kill(count)
        if kill.seen == 83:
            raise Killed

    with pytest.raises(Killed):
        run(progress=lambda _total: done)
    assert kill.dead
    many.write_bytes(many.read_bytes()[:-9])  # a write that was cut short
    assert replace(run(), failures=()) == Summary(lines=120, resumed=82, failed=1)
    assert told(many) == told(one)


def deadly(piece: int) -> int:
    if piece == 3:
        raise EngineDeadError("out of memory, say")
    return piece


def faulty(piece: int) -> int:
    if piece == 3:
        raise StepError("the step failed")
    return piece


def odd(piece: int) -> int:
    if piece == 3:
        raise ValueError("nobody foresaw this")
    return piece


def no_engine() -> Engine:
    raise ConfigError("model", "'x' is no directory")


def no_start() -> Engine:
    os._exit(1)


def no_device() -> Engine:
    raise RuntimeError("the device is busy")


@pytest.mark.slow
def test_work_that_cannot_be_done_is_given_up_with_its_cause(cluster: None):
    got = []
    with Fleet(THREE, partial(partial, deadly)) as many:
        with pytest.raises(JhybridError, match="each time that piece 3 of the work was begun"):
            for answer in many.map(list(range(5))):
                got.append(answer)
        assert got == [0, 1, 2]
    for build, message in (
        (partial(partial, faulty), "the step failed"),
        (partial(partial, odd), "ValueError: nobody foresaw this"),
        (no_engine, "model: 'x' is no directory"),
        (no_device, "RuntimeError: the device is busy"),
        (no_start, "each time that piece 0 of the work was begun"),
    ):
        with Fleet(THREE, build) as many, pytest.raises(JhybridError, match=message):
            list(many.map(list(range(5))))


@pytest.mark.slow
def test_more_engines_than_the_cluster_has_room_for_are_refused(cluster: None):
    with pytest.raises(ConfigError, match=r"num_actors: 4 of 1 CPU each, .* room for 3 \(3 CPU in all\)"):
        Fleet(RayOptions(ray=True, num_actors=4), no_engine)
    with pytest.raises(ConfigError, match=r"num_actors: 1 of 1 CPU and 1 GPU each, .* room for 0 \(3 CPU, 0 GPU"):
        Fleet(RayOptions(ray=True, actor_gpus=1), no_engine)


def test_what_an_engine_takes_and_how_many_there_are():
    cpu, gpu, tpu = {"CPU": 64.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "TPU": 16.0}
    auto = RayOptions(ray=True)
    assert auto.demand(cpu, 2) == {"CPU": 1}
    assert auto.demand(gpu, 2) == {"CPU": 1, "GPU": 2}
    assert auto.demand(tpu, 4) == {"CPU": 1, "TPU": 4}
    assert [auto.engines([c] * 5, auto.demand(c, 4)) for c in (cpu, gpu, tpu)] == [5, 10, 20]
    own = RayOptions(ray=True, num_actors=3, actor_cpus=0, actor_gpus=0.5, actor_resources=("slice=1",))
    assert own.demand(gpu, 4) == {"GPU": 0.5, "slice": 1}
    assert own.engines([gpu], own.demand(gpu, 4)) == 3
    as_text = RayOptions(ray=True, actor_resources="TPU=4+slice=1")  # pyright: ignore[reportArgumentType]
    assert as_text.resources() == {"TPU": 4, "slice": 1}


def test_an_engine_is_on_one_machine():
    four = {"CPU": 8.0, "GPU": 4.0}
    assert room_for({"GPU": 8}, [four, four]) == 0
    assert room_for({"GPU": 3}, [four, four]) == 2
    assert room_for({"CPU": 1, "GPU": 0.5}, [four, {"CPU": 2.0}]) == 8
    assert room_for({"CPU": 0.1}, [{"CPU": 1.0}]) == 10
    assert room_for({}, [four]) > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_actors": 2}, "num_actors: 2 has no effect without ray"),
        ({"ray": True, "num_actors": 0}, "num_actors: must be a positive integer, got 0"),
        ({"ray": True, "actor_gpus": -1}, "actor_gpus: must not be negative, got -1"),
        ({"ray": True, "actor_resources": ("TPU",)}, "actor_resources: 'TPU' is no NAME=AMOUNT"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        RayOptions(**options)


def test_without_ray_there_is_a_word_about_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray: Ray is needed .* pip install 'jhybrid\[ray\]'"):
        fleet.Fleet(RayOptions(ray=True), no_engine)


@pytest.mark.slow
def test_the_eval_command_on_the_demo_model(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    small = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32", "--dtype", "float32"]
    tasks = ["--tasks", "demo_next_line", "--include-path", str(ROOT / "examples" / "eval_tasks"), "--limit", "12"]
    found = []
    for more in ([], ["--ray", "--num-actors", "2"]):
        output = tmp_path / "results.json"
        command = ["jhybrid", "eval", *tasks, *small, "--log-samples", "--output", str(output), *more]
        monkeypatch.setattr(sys, "argv", command)
        cli.main()
        found.append(json.loads(output.read_text()))
    alone, spread = found
    assert spread["results"] == alone["results"]
    assert spread["config"]["model_num_engines"] == 2
    for a, b in zip(alone["samples"]["demo_next_line"], spread["samples"]["demo_next_line"], strict=True):
        assert a["doc_hash"] == b["doc_hash"]
        for [mine], [theirs] in zip(a["resps"], b["resps"], strict=True):
            assert float(mine[0]) == pytest.approx(float(theirs[0]), abs=1e-3)
            assert mine[1] == theirs[1]
