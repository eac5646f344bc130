"""Runs whose process is killed with SIGKILL, anywhere and again and again, end with what an undisturbed run gives."""

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path

from jhybrid.evaluate.documents import Document
from jhybrid.evaluate.journal import Journal
from jhybrid.evaluate.perplexity import Perplexity
from jhybrid.evaluate.text_run import TextRun
from jhybrid_server.batch_file import run_batch
from tests.evaluate.toy_text import text_engine

KILLS = 6
TEXTS = ["the rain in spain stays mainly in the plain. " * 40, "to be or not to be, that is".replace(",", ""), "ay "]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.evaluate.test_kill"])


def perplexity(folder: Path) -> None:
    engine, _ = text_engine()
    run = TextRun(engine, [Document(text) for text in TEXTS * 4], max_length=7)
    with Journal(folder / "journal", {"run": 1}) as journal:
        figures = Perplexity.of(run.scores(journal)).figures()
    (folder / "figures.json").write_text(json.dumps(figures))


def batch(folder: Path) -> None:
    run_batch(text_engine()[0].config, folder / "in.jsonl", folder / "out.jsonl", make_engine=lambda: text_engine()[0])


def killed_again_and_again(work: Callable[[Path], None], folder: Path, growing: Path) -> int:
    """Run it until it ends by itself; returns how often it was killed, each time once its file had grown somewhat."""
    rng, kills = random.Random(5), 0
    while True:
        size = growing.stat().st_size if growing.exists() else 0
        process = CONTEXT.Process(target=work, args=(folder,))
        process.start()
        most = size + rng.randrange(1, 2000)
        while kills < KILLS and process.is_alive():
            if growing.exists() and growing.stat().st_size >= most:
                time.sleep(rng.random() * 0.01)
                process.kill()
                break
            time.sleep(0.001)
        process.join()
        if process.exitcode == 0:
            return kills
        assert process.exitcode == -9, process.exitcode
        kills += 1


def test_perplexity(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    perplexity(whole)
    assert killed_again_and_again(perplexity, killed, killed / "journal") == KILLS
    assert (killed / "figures.json").read_text() == (whole / "figures.json").read_text()
    assert (killed / "journal").read_text() == (whole / "journal").read_text()


def test_batch(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        with (folder / "in.jsonl").open("w") as file:
            for i in range(100):
                body = {"prompt": TEXTS[1][: 3 + i % 20], "max_tokens": 9, "temperature": 1.5 * (i % 2)}
                line = {"custom_id": f"q{i}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(line) + "\n")
    batch(whole)
    assert killed_again_and_again(batch, killed, killed / "out.jsonl") == KILLS
    ours, theirs = (
        [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()] for folder in (killed, whole)
    )
    assert [(a["custom_id"], a["response"]["body"]["choices"]) for a in ours] == [
        (a["custom_id"], a["response"]["body"]["choices"]) for a in theirs
    ]
