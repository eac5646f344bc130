"""Batch files: each line answered as over HTTP, in order, failures apart, and a killed run that goes on."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jhybrid import cli
from jhybrid.errors import ConfigError, EngineDeadError
from jhybrid.request import SamplingParams
from jhybrid_server.batch_file import Failure, Summary, read_lines, run_batch
from tests.evaluate.toy_text import LetterTokenizer, text_engine
from tests.server.fake_engine import FakeEngine
from tests.toy_model import expected_tokens

CONFIG = text_engine()[0].config
TEMPLATE = "{% for m in messages %}{{ m.content }}. {% endfor %}"
WORDS = ("to be", "or not", "that is the question", "whether", "tis nobler", "in the mind", "to suffer", "the slings")


DEEP: list[Any] = []
for _ in range(250):
    DEEP = [DEEP]


class Killed(Exception):
    """The run's process is gone."""


def completion(custom_id: str, prompt: str | list[str], **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def toy() -> Any:
    return text_engine(LetterTokenizer(chat_template=TEMPLATE))[0]


def by_hand(prompt: str) -> str:
    tokenizer = LetterTokenizer()
    answer = expected_tokens(tokenizer.encode(prompt), SamplingParams(max_tokens=9, temperature=0.0))
    return tokenizer.decode(answer)


def test_lines_are_answered_in_order(tmp_path: Path):
    records = [completion(f"q{i}", word, max_tokens=1 + 8 * (i % 2 == 0)) for i, word in enumerate(WORDS * 10)]
    records = [r | {"custom_id": f"q{i}"} for i, r in enumerate(records)]
    target = tmp_path / "out.jsonl"
    counts: list[int] = []
    summary = run_batch(
        CONFIG, write(tmp_path / "in.jsonl", records), target, progress=lambda total: counts.append, make_engine=toy
    )
    assert summary == Summary(lines=80, resumed=0, failed=0)
    assert sum(counts) == 80
    answers = read(target)
    assert [a["custom_id"] for a in answers] == [f"q{i}" for i in range(80)]
    for record, answer in zip(records, answers, strict=True):
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        assert body["object"] == "text_completion"
        if record["body"]["max_tokens"] == 9:
            assert body["choices"][0]["text"] == by_hand(record["body"]["prompt"])


def test_chats_and_several_prompts(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "to be"}], "max_tokens": 9, "temperature": 0}
    records = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        completion("two", ["to be", "or not"]),
    ]
    target = tmp_path / "out.jsonl"
    run_batch(CONFIG, write(tmp_path / "in.jsonl", records), target, make_engine=toy)
    chat_answer, two = (answer["response"]["body"] for answer in read(target))
    assert chat_answer["object"] == "chat.completion"
    assert chat_answer["choices"][0]["message"]["content"] == by_hand("to be. ")
    assert [choice["text"] for choice in two["choices"]] == [by_hand("to be"), by_hand("or not")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{no json\n", "line: is no JSON"),
        ('{"a": ' * 100_000 + "\n", "line: is no JSON: it is nested too deeply"),
        ("1" * 5000 + "\n", "line: is no JSON: Exceeds the limit"),
        (completion("x", "ay", user=DEEP), "body: is nested more than 200 levels deep; flatten it"),
        ("3\n", "line: must be an object, got int"),
        ({"method": "POST"}, "custom_id: must be a non-empty string"),
        (completion("good", "ay"), "custom_id: 'good' is given twice"),
        (completion("x", "ay") | {"method": "GET"}, "method: must be 'POST', got 'GET'"),
        (completion("x", "ay") | {"url": "/v1/embeddings"}, "url: must be /v1/completions or"),
        (completion("x", "ay") | {"body": None}, "body: must be an object, got NoneType"),
        (completion("x", "ay") | {"priority": 3}, "priority: is not a field of a batch's lines"),
        (completion("x", "ay", stream=True), "stream: is not for batches"),
        (completion("x", "ay", best_off=3), "best_off: is not a field that this server knows"),
        (completion("x", "ay", temperature=-1), "temperature: -1"),
        (completion("x", "ay" * 60), "leave no room in max_model_len=64"),
        (completion("x", "ay", model="another"), "model: 'another' is not served here"),
    ],
)
def test_a_line_that_is_wrong_fails_alone(tmp_path: Path, line: Any, message: str):
    records = [completion("good", "to be"), line, completion("last", "or not")]
    target = tmp_path / "out.jsonl"
    summary = run_batch(CONFIG, write(tmp_path / "in.jsonl", records), target, make_engine=toy)
    good, bad, last = read(target)
    failure = Failure(2, bad["custom_id"], bad["error"]["message"])
    assert summary == Summary(lines=3, resumed=0, failed=1, failures=(failure,))
    assert [a["response"]["body"]["choices"][0]["text"] for a in (good, last)] == [by_hand("to be"), by_hand("or not")]
    assert message in bad["error"]["message"]
    assert 400 <= bad["response"]["status_code"] < 500
    assert bad["response"]["body"]["error"]["message"] == bad["error"]["message"]


def killer(after: int) -> Callable[[int], Callable[[int], None]]:
    seen = -1  # the first call tells what was there already

    def done(_count: int) -> None:
        nonlocal seen
        seen += 1
        if seen == after:
            raise Killed

    return lambda _total: done


def test_a_killed_run_goes_on(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion(f"q{i}", word) for i, word in enumerate(WORDS)])
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_batch(CONFIG, source, whole, make_engine=toy)
    with pytest.raises(Killed):
        run_batch(CONFIG, source, target, progress=killer(3), make_engine=toy)
    assert len(read(target)) == 3
    target.write_bytes(target.read_bytes() + whole.read_bytes().splitlines()[3][:50])  # a write that was cut short
    summary = run_batch(CONFIG, source, target, make_engine=toy)
    assert summary == Summary(lines=8, resumed=3, failed=0)

    def texts(path: Path) -> list[tuple[str, str]]:
        return [(a["custom_id"], a["response"]["body"]["choices"][0]["text"]) for a in read(path)]

    assert texts(target) == texts(whole)

    def no_engine() -> Any:
        raise AssertionError("all is answered")

    assert run_batch(CONFIG, source, target, make_engine=no_engine) == Summary(lines=8, resumed=8, failed=0)


def test_answers_to_something_else_are_left_alone(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion("a", "to be"), completion("b", "or not")])
    target = tmp_path / "out.jsonl"
    run_batch(CONFIG, write(tmp_path / "one.jsonl", [completion("a", "to be")]), target, make_engine=toy)
    answered = target.read_text()
    for content, message in (
        (answered.replace('"custom_id": "a"', '"custom_id": "b"'), "line 1 is of 'b', which is another line"),
        (answered * 3, "line 2 is of 'a', which is another line"),
        ("a diary\n", "line 1 is no answer"),
        ("a diary without an end", "line 1 is no answer"),
        (source.read_text()[:-1], "line 1 is no answer"),
        (answered + "a diary", "line 2 is no answer"),
    ):
        target.write_text(content)
        with pytest.raises(ConfigError, match=message):
            run_batch(CONFIG, source, target, make_engine=toy)
        assert target.read_text() == content


def test_answers_to_what_a_line_was_before_are_not_gone_on_with(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion("a", "to be"), completion("b", "or not")])
    target = tmp_path / "out.jsonl"
    run_batch(CONFIG, source, target, make_engine=toy)
    write(source, [completion("a", "to be"), completion("b", "nay"), completion("c", "ay")])
    with pytest.raises(ConfigError, match="line 2 answers 'b', but line 2 of the input is not what it was"):
        run_batch(CONFIG, source, target, make_engine=toy)
    for other in ({"base_seed": 1}, {"quantization": "int8"}, {"state_dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match=r"line 1 answers 'a', but the model's files, a setting such as quant"):
            run_batch(replace(CONFIG, **other), source, target, make_engine=toy)
    target.write_text(target.read_text().splitlines(keepends=True)[0])  # as the message says
    smaller = replace(CONFIG, max_num_seqs=1)  # which changes no answer
    assert run_batch(smaller, source, target, make_engine=toy) == Summary(lines=3, resumed=1, failed=0)
    assert [answer["custom_id"] for answer in read(target)] == ["a", "b", "c"]


def test_two_runs_do_not_write_one_file(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion(f"q{i}", word) for i, word in enumerate(WORDS)])
    target = tmp_path / "out.jsonl"

    def meanwhile(_total: int) -> Callable[[int], None]:
        with pytest.raises(ConfigError, match="output: another run is writing"):
            run_batch(CONFIG, source, target, make_engine=toy)
        return lambda _count: None

    assert run_batch(CONFIG, source, target, progress=meanwhile, make_engine=toy).failed == 0


def test_answers_by_another_model_are_not_gone_on_with(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion("a", "to be"), completion("b", "or not")])
    target = tmp_path / "out.jsonl"
    run_batch(CONFIG, source, target, served_model_name="one", make_engine=toy)
    with pytest.raises(ConfigError, match="line 1 was answered by 'one', not 'other'"):
        run_batch(CONFIG, source, target, served_model_name="other", make_engine=toy)


def test_a_dead_engine_answers_nothing(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion(f"q{i}", word) for i, word in enumerate(["ay", "die", "nay"])])
    target = tmp_path / "out.jsonl"
    with pytest.raises(EngineDeadError):
        run_batch(CONFIG, source, target, make_engine=FakeEngine)
    assert all(answer["error"] is None for answer in read(target))


def test_what_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"input: .* cannot be read"):
        read_lines(tmp_path / "nothing.jsonl", CONFIG)
    with pytest.raises(ConfigError, match=r"input: .* has no lines"):
        read_lines(write(tmp_path / "empty.jsonl", ["\n", "  \n"]), CONFIG)
    source = write(tmp_path / "in.jsonl", [completion("a", "to be")])
    for target in (tmp_path, source / "out.jsonl"):
        with pytest.raises(ConfigError, match=r"output: .* (cannot be written|is no regular file)"):
            run_batch(CONFIG, source, target, make_engine=toy)


def test_characters_that_utf_8_cannot_carry_are_escaped(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion("\ud800 ❤", "to be"), completion("é", "or not")])
    target = tmp_path / "out.jsonl"
    run_batch(CONFIG, source, target, make_engine=toy)
    assert [answer["custom_id"] for answer in read(target)] == ["\ud800 ❤", "é"]
    assert "é" in target.read_text()
    assert run_batch(CONFIG, source, target, make_engine=toy).resumed == 2


def test_the_command_on_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = write(tmp_path / "in.jsonl", [completion("king", "KING.\nMy lord"), completion("bad", "ay", n=0)])
    small = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32"]
    target = tmp_path / "out.jsonl"
    command = ["jhybrid", "batch", str(source), str(target), "--model", "demo", *small, "--json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    out, err = capsys.readouterr()
    summary = json.loads(out)
    [failure] = summary.pop("failures")
    assert summary == {"lines": 2, "resumed": 0, "failed": 1}
    assert (failure["line"], failure["custom_id"]) == (2, "bad")
    assert "line 2 (bad): n: 0" in err
    king, bad = read(target)
    assert king["response"]["body"]["usage"]["completion_tokens"] == 9
    assert bad["error"]["message"].startswith("n: 0")
