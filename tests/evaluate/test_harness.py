"""The harness itself on the demo model; what the model answers is tested in test_respondent."""

import contextlib
import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import jax
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from jhybrid import cli
from jhybrid.errors import ConfigError
from jhybrid.evaluate import harness_model
from jhybrid.evaluate.engines import EngineFleet, OneEngine
from jhybrid.evaluate.harness_model import HarnessModel

TASKS = Path(__file__).parent.parent.parent / "examples" / "eval_tasks"
SMALL = "max_num_seqs=2,max_model_len=128,max_num_batched_tokens=32,dtype=float32"
FLAGS = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32", "--dtype", "float32"]
CHATS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model():
    built = get_model("jhybrid").create_from_arg_string(f"model=demo,{SMALL}", {"batch_size": 1})
    assert isinstance(built, HarnessModel)
    with contextlib.closing(built):
        yield built


def evaluate(model: HarnessModel, *tasks: str, **options) -> dict:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)
    assert results is not None
    return dict(results)


def test_the_demo_model_knows_which_line_comes_next(model: HarnessModel):
    results = evaluate(model, "demo_next_line", limit=12)
    assert results["results"]["demo_next_line"]["acc,none"] > 0.9  # chance is 0.25
    shots = evaluate(model, "demo_next_line", limit=12, num_fewshot=1)
    assert shots["results"]["demo_next_line"]["acc,none"] > 0.7
    assert results["config"]["scoring"]["reuse"] > 0.2
    assert isinstance(model.respondent.engines, OneEngine)
    assert model.respondent.engines.engine.compilations_after_ready == 0


def test_perplexity_is_that_of_the_command(
    model: HarnessModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with_bos = evaluate(model, "demo_perplexity")["results"]["demo_perplexity"]
    monkeypatch.setattr(model.respondent, "add_bos_token", False)
    found = evaluate(model, "demo_perplexity")["results"]["demo_perplexity"]
    text = str(TASKS / "julius_caesar.txt")
    monkeypatch.setattr(sys, "argv", ["jhybrid", "perplexity", text, "--model", "demo", *FLAGS, "--json"])
    cli.main()
    ours = json.loads(capsys.readouterr().out)
    assert ours["windows"] > 2
    for name in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        assert found[f"{name},none"] == pytest.approx(ours[name], rel=1e-5)
    # The demo's tokenizer adds BOS, which the harness has scored after the prefix unless told otherwise.
    assert with_bos["bits_per_byte,none"] > found["bits_per_byte,none"] + 1e-4


def test_a_system_instruction_and_a_chat_template_are_part_of_the_question(model: HarnessModel):
    def first_context(**options) -> str:
        samples = evaluate(model, "demo_next_line", limit=1, **options)["samples"]["demo_next_line"]
        return samples[0]["arguments"][0][0]

    plain = first_context()
    assert first_context(system_instruction="Speak, I charge thee.") == f"Speak, I charge thee.{plain}"
    model.respondent.tokenizer.chat_templates["default"] = CHATS
    try:
        assert model.chat_template(True) == CHATS
        chat = first_context(system_instruction="Speak.", apply_chat_template=True)
    finally:
        del model.respondent.tokenizer.chat_templates["default"]
    assert chat.startswith("system: Speak.\nuser: ")
    assert plain.strip() in chat


def test_answers_are_those_of_the_engine_alone(model: HarnessModel):
    options = {"until": ["\n\n"], "max_gen_toks": 16}
    instances = [Instance("generate_until", {}, (text, options), 0) for text in ("KING.\nMy", "ANTONY.\n")]
    answers = model.generate_until(instances, disable_tqdm=True)
    alone = [model.generate_until([instance], disable_tqdm=True)[0] for instance in instances]
    assert answers == alone
    assert all(answers)


def test_the_harness_s_command_line_finds_the_model():
    """It names the model, and passes on a device that nobody asked for."""
    results = simple_evaluate(
        "jhybrid",
        model_args=f"model=demo,{SMALL}",
        device=EvaluatorConfig().device,
        tasks=["demo_next_line"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        limit=2,
        bootstrap_iters=0,
    )
    assert results is not None
    assert dict(results)["results"]["demo_next_line"]["acc,none"] == 1


def test_the_entry_point_names_the_model():
    project = tomllib.loads((TASKS.parent.parent / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["lm_eval.models"]["jhybrid"]
    assert EntryPoint("jhybrid", value, "lm_eval.models").load() is HarnessModel


def test_what_the_model_cannot_be_given():
    with pytest.raises(ConfigError, match=r"pretrained: 'x' was given"):
        HarnessModel.create_from_arg_string("pretrained=x")
    with pytest.raises(ConfigError, match="device: 'cuda' cannot be chosen here"):
        HarnessModel(device="cuda")


def test_over_ray_this_process_takes_no_accelerator(monkeypatch: pytest.MonkeyPatch):
    def backend() -> str:
        raise AssertionError("JAX was asked for its backend")

    monkeypatch.setattr(jax, "default_backend", backend)
    monkeypatch.setattr(harness_model, "Fleet", lambda *_: contextlib.nullcontext())
    with contextlib.closing(HarnessModel("demo", ray=True, device=harness_model.UNASKED_DEVICE)) as built:
        assert isinstance(built.respondent.engines, EngineFleet)
    with pytest.raises(ConfigError, match="device: 'cpu' cannot be chosen here"):
        HarnessModel("demo", ray=True, device="cpu")


def test_the_eval_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "results.json"
    command = ["jhybrid", "eval", "--tasks", "demo_next_line", "--include-path", str(TASKS), "--limit", "4", *FLAGS]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    cli.main()
    assert "demo_next_line" in capsys.readouterr().out
    results = json.loads(output.read_text())
    assert results["results"]["demo_next_line"]["sample_len"] == 4
    assert results["config"]["model_args"]["max_model_len"] == 128
    for task, folder, more, message in (
        ("no_such_task", TASKS, [], "tasks: no_such_task: no such task"),
        ("demo_next_line", tmp_path / "none", [], f"include_path: {tmp_path / 'none'} is no folder"),
        ("demo_next_line", TASKS, ["--limit", "0"], "limit: must be a positive number"),
        ("demo_next_line", TASKS, ["--num-fewshot", "-2"], "num_fewshot: must not be negative, got -2"),
    ):
        monkeypatch.setattr(sys, "argv", ["jhybrid", "eval", "--tasks", task, "--include-path", str(folder), *more])
        with pytest.raises(SystemExit):
            cli.main()
        assert message in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--output", "/dev/full"])
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr()
    assert "demo_next_line" in told.out and "output: /dev/full cannot be written: No space left" in told.err
