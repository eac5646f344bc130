"""Perplexity: the table's figures, a resumed run equal to an uninterrupted one, and the command on the demo model."""

import contextlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jhybrid import cli
from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate import commands
from jhybrid.evaluate.documents import Document, read_documents
from jhybrid.evaluate.journal import Journal
from jhybrid.evaluate.perplexity import Perplexity
from jhybrid.evaluate.text_run import TextRun, prefix_token
from tests.evaluate.toy_text import BOS, EOS, LetterTokenizer, by_hand, text_engine

TEXTS = ["the rain in spain stays mainly in the plain. " * 5, "ay", " to be.\nor not.\n"]


class Killed(Exception):
    """The run's process is gone."""


def brute_force(text: str, prefix: int, length: int) -> float:
    """Each token given the prefix (in the first window) or the tokens before it, as the harness's windows have it."""
    tokens = LetterTokenizer().encode(text)
    total = 0.0
    for at in range(len(tokens)):
        number = at // length
        end = min((number + 1) * length, len(tokens))
        history = [prefix, *tokens[:at]] if number == 0 else tokens[end - length - 1 : at]
        total += by_hand([*history, tokens[at]], len(history))[0]
    return total


@pytest.mark.parametrize("length", [1, 7, 63])
@pytest.mark.parametrize("prefix", [None, EOS])
def test_figures_are_the_table_s(length: int, prefix: int | None):
    engine, _ = text_engine()
    run = TextRun(engine, [Document(t) for t in TEXTS], max_length=length, prefix_token_id=prefix)
    found = Perplexity.of(run.scores()).figures()
    total = sum(brute_force(text, BOS if prefix is None else prefix, length) for text in TEXTS)
    letters = sum(len(text) for text in TEXTS)
    assert found["loglikelihood"] == pytest.approx(total, rel=1e-12)
    assert found["tokens"] == found["bytes"] == letters
    assert found["words"] == 46 + 1 + 6  # white space at an end makes one more, as in the harness
    assert found["bits_per_byte"] == pytest.approx(-total / letters / math.log(2))
    assert found["token_perplexity"] == pytest.approx(math.exp(-total / letters))
    assert found["byte_perplexity"] == found["token_perplexity"]
    assert found["word_perplexity"] == pytest.approx(math.exp(-total / 53))


def test_the_prefix_changes_the_first_window_alone():
    engine, _ = text_engine()
    a, b = (TextRun(engine, [Document(TEXTS[0])], max_length=7, prefix_token_id=token) for token in (BOS, EOS))
    assert [w.tokens for w in a.windows[1:]] == [w.tokens for w in b.windows[1:]]
    assert (a.windows[0].tokens[0], b.windows[0].tokens[0]) == (BOS, EOS)
    assert Perplexity.of(a.scores()) != Perplexity.of(b.scores())


def test_prefix_token_is_bos_then_eos():
    tokenizer = LetterTokenizer()
    assert prefix_token(64, tokenizer, None) == BOS
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        prefix_token(min(BOS, EOS), tokenizer, None)
    tokenizer.bos_token_id = None
    assert prefix_token(64, tokenizer, None) == EOS
    tokenizer.eos_token_ids = ()
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        prefix_token(64, tokenizer, None)
    with pytest.raises(ConfigError, match=r"prefix_token_id: 64 is not in \[0, 64\)"):
        prefix_token(64, tokenizer, 64)


def killed_after(windows: int):
    seen = 0

    def done(count: int) -> None:
        nonlocal seen
        seen += count
        if seen >= windows:
            raise Killed

    return done


@pytest.mark.parametrize("windows", [1, 4, 9])
def test_a_killed_run_goes_on_and_gives_the_same(tmp_path: Path, windows: int):
    documents = [Document(t) for t in TEXTS]
    engine, _ = text_engine()
    whole = TextRun(engine, documents, max_length=7)
    expected = list(whole.scores())
    path = tmp_path / "journal"
    with pytest.raises(Killed), Journal(path, {"run": 1}) as journal:
        list(TextRun(engine, documents, max_length=7).scores(journal, killed_after(windows)))
    engine, runner = text_engine()
    again = TextRun(engine, documents, max_length=7)
    with Journal(path, {"run": 1}) as journal:
        assert list(again.scores(journal)) == expected
    assert again.resumed_windows == (windows - 1) // 4 * 4  # whole blocks of 4
    assert runner.calls > 0


def test_a_journal_is_of_one_configuration():
    """Whatever may change a bit of the figures."""
    engine, _ = text_engine()
    first = TextRun(engine, [Document("to be")]).identity()
    others: dict[str, Any] = {"quantization": "int8", "load_format": "dummy", "ssm_impl": "xla", "dtype": "bfloat16"}
    for name, value in others.items():
        engine.config = replace(text_engine()[0].config, **{name: value})
        assert TextRun(engine, [Document("to be")]).identity() != first, name
    assert json.loads(json.dumps(first)) == first


def test_documents_of_a_file(tmp_path: Path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one\u2028two", "body": "three"}\n\n{"text": "", "body": "four"}\n')
    assert read_documents(file) == [Document("one\u2028two", 1)]
    assert read_documents(file, "body") == [Document("three", 1), Document("four", 3)]
    with pytest.raises(RequestError, match="line 1 has no text under 'title'"):
        read_documents(file, "title")
    plain = tmp_path / "play.txt"
    plain.write_text("To be\n\nor not\n")
    [document] = read_documents(plain)
    assert (document.num_words, document.num_bytes) == (5, 14)
    assert Document("\u00e9\ud800").num_bytes == 5
    plain.write_bytes(b"\xef\xbb\xbfTo be\r\n")
    assert read_documents(plain) == [Document("To be\r\n")]
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="cannot be read as UTF-8"):
        read_documents(plain)


def test_the_commands_share_texts_and_what_a_killed_one_had_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, journal = tmp_path / "texts.jsonl", tmp_path / "journal"
    texts = ["KING.\nMy lord, I am the king.\n" * 3, "", "Käse, 数学"]
    file.write_text("".join(json.dumps({"play": text}) + "\n" for text in texts))
    more = ["--text-key", "play", "--max-length", "8", "--journal", str(journal), "--model", "demo"]
    small = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32"]

    def run(*command: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["jhybrid", *command, *more, *small, "--json"])
        cli.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def kill() -> None:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(commands, "progress", lambda *_: contextlib.nullcontext(killed_after(5)))
            run("score", str(file))
        capsys.readouterr()

    whole = run("score", str(file))
    assert not journal.exists()
    assert [record["line"] for record in whole] == [1, 3]
    for record, text in zip(whole, (texts[0], texts[2]), strict=True):
        assert record["tokens"] == len(record["token_ids"]) == len(record["logprobs"])
        assert record["bytes"] == len(text.encode())
        assert record["loglikelihood"] == pytest.approx(sum(record["logprobs"]))
        assert record["bits_per_byte"] == pytest.approx(-record["loglikelihood"] / record["bytes"] / math.log(2))
        assert record["prefix_token_id"] == 0 not in record["token_ids"]
    kill()
    assert run("score", str(file)) == whole
    kill()
    [figures] = run("perplexity", str(file))
    assert figures["resumed_windows"] == 4
    assert figures["loglikelihood"] == pytest.approx(sum(record["loglikelihood"] for record in whole), rel=1e-12)


def test_the_command_on_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "play.txt"
    file.write_text("KING.\nMy lord, I am the king of England, and you are not.\n" * 8)
    small = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32"]
    command = ["jhybrid", "perplexity", str(file), "--model", "demo", *small]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    cli.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["windows"] == 2
    assert figures["prefix_token_id"] == 0
    assert figures["bytes"] == file.stat().st_size
    assert 0.1 < figures["bits_per_byte"] < 2.5  # the demo's is 1.9 on new text, and this one repeats itself
    monkeypatch.setattr(sys, "argv", command)
    cli.main()
    assert f"{figures['bits_per_byte']:.4g}" in capsys.readouterr().out
