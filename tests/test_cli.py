"""The command line: what it prints, as text and as JSON, and how it refuses. Run in this process, help aside."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jhybrid import cli

GOLDEN = Path(__file__).parent / "golden"
SMALL = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jhybrid", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_generate_streams_text_and_json_agrees(run):
    asked = ["generate", "--model", "demo", *SMALL, "--prompt", "My lord", "--max-tokens", "12", "--seed", "3"]
    code, text, _ = run(*asked)
    assert code == 0
    code, line, _ = run(*asked, "--json")
    answer = json.loads(line)
    [completion] = answer["completions"]
    assert code == 0
    assert completion["text"] + "\n" == text
    assert len(completion["token_ids"]) == 12
    assert completion["finish_reason"] == "length"
    code, both, _ = run(*asked, "--prompt", "My lord", "The king", "--n", "2")
    assert code == 0
    assert both.count("---") == 4


def test_score_and_inspect(run):
    code, line, _ = run("score", "--model", "demo", *SMALL, "--text", "To be, or not to be", "--json")
    scored = json.loads(line)
    assert code == 0
    assert len(scored["logprobs"]) == len(scored["token_ids"]) == scored["tokens"]
    assert scored["prefix_token_id"] == 0
    assert scored["loglikelihood"] == pytest.approx(sum(scored["logprobs"]))
    code, table, _ = run("score", "--model", "demo", *SMALL, "--text", "To be, or not to be")
    assert code == 0
    assert f"{scored['loglikelihood']:.4f}" in table

    code, line, _ = run("inspect", "--model", str(GOLDEN / "nemotron_h_moe"), *SMALL, "--json")
    facts = json.loads(line)
    assert code == 0
    assert {p["array"] for layer in facts["layers"] for p in layer["parts"]} == {"kv", "ssm", "conv"}
    assert facts["buckets"][0] == {"kind": "decode", "tokens": 1, "seqs": 1}
    assert facts["memory"]["num_slots"] == 2
    code, table, _ = run("inspect", "--model", str(GOLDEN / "nemotron_h_moe"), *SMALL)
    assert code == 0
    assert "Memory plan" in table


def test_bench_gives_figures(run):
    small = ["--prefill-tokens", "20", "--prompt-tokens", "4", "--output-tokens", "4", "--repeats", "1"]
    code, line, _ = run("bench", "--model", "demo", *SMALL, "--batch-sizes", "1", "2", *small, "--json")
    figures = json.loads(line)
    assert code == 0
    assert [row["batch_size"] for row in figures["decode"]] == [1, 2]
    assert figures["prefill"]["tokens_per_second"] > 0
    assert figures["compilations_after_ready"] == 0


def broken(tmp_path: Path, name: str) -> Path:
    """A copy of a good model directory with one thing wrong."""
    directory = tmp_path / name
    shutil.copytree(GOLDEN / "llama", directory)
    config = json.loads((directory / "config.json").read_text())
    weights = directory / "model.safetensors"
    if name == "key":
        del config["hidden_size"]
    elif name == "kind":
        config["model_type"] = "perceptron"
    elif name == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "weights":
        weights.unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("key", [], "hidden_size"),
        ("kind", [], "perceptron"),
        ("truncated", [], "model.safetensors"),
        ("weights", [], "safetensors"),
        ("good", ["--page-size", "48"], "page_size"),
        ("good", ["--max-model-len", "1048576"], "max_model_len"),
        ("good", ["--dtype", "int3"], "dtype"),
        ("good", ["--temperature", "nan"], "temperature"),
        ("good", ["--n", "0"], "n: 0"),
        ("good", [], "prompt: this model has no tokenizer"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, tmp_path: Path, name: str, flags: list[str], message: str):
    code, out, err = run("generate", "--model", str(broken(tmp_path, name)), *SMALL, *flags, "--prompt", "x", "--json")
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert message in json.loads(out)["error"]


def test_an_answer_that_cannot_fit(run):
    code, _, err = run("generate", "--model", "demo", *SMALL, "--prompt", "x", "--max-tokens", "1000000")
    assert code == 2
    assert err.startswith("error: max_tokens: 1000000")


def test_a_model_that_is_not_there(run):
    for command in ("generate", "score", "inspect"):
        flag = ["--text", "x"] if command == "score" else ["--prompt", "x"] if command == "generate" else []
        code, _, err = run(command, "--model", "/nowhere/at/all", *flag)
        assert code == 2
        assert err.startswith("error: model: '/nowhere/at/all' is no directory")


def test_help_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "jhybrid", "--help"], capture_output=True, text=True, check=True)
    for command in cli.COMMANDS:
        assert command in done.stdout
