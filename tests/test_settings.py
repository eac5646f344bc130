"""What flags, environment and file say of `jhybrid serve` together, and what they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

from jhybrid.cli import Serve
from jhybrid.errors import ConfigError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    variables: dict[str, str] = {}
    monkeypatch.setattr("jhybrid.cli.environment", lambda: dict(variables))
    return variables


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jhybrid.toml"


def test_flags_win_over_environment_over_file_over_defaults(environment: dict[str, str], file: Path):
    file.write_text(
        'port = 1\ngrpc_port = 1\nmax_num_seqs = 1\nhost = "::1"\nverify_hits = 0\nenable_prefix_caching=true'
    )
    environment |= {"JHYBRID_CONFIG": str(file), "JHYBRID_PORT": "2", "JHYBRID_MAX_NUM_SEQS": "2", "JHYBRID_DTYPE": ""}
    serve = Serve.of(["--max-num-seqs", "3"])
    assert (serve.engine.max_num_seqs, serve.port, serve.grpc_port, serve.host) == (3, 2, 1, "::1")
    assert serve.engine.enable_prefix_caching is True
    assert serve.engine.dtype == "auto" and serve.engine.max_queue == 4096
    file.with_name("other.toml").write_text("port = 9")
    assert Serve.of(["--config", str(file.with_name("other.toml"))]).grpc_port == 50051


def test_every_kind_of_value_from_the_environment(environment: dict[str, str]):
    environment |= {
        "JHYBRID_ENABLE_PREFIX_CACHING": "true",
        "JHYBRID_MEMORY_FRACTION": "0.5",
        "JHYBRID_MAX_MODEL_LEN": "64",
        "JHYBRID_SERVED_MODEL_NAME": "7",
        "JHYBRID_API_KEY": "one, two",
        "JHYBRID_CACHE_DIR": "/tmp/x",
    }
    serve = Serve.of([])
    engine = serve.engine
    assert (engine.enable_prefix_caching, engine.memory_fraction, engine.max_model_len) == (True, 0.5, 64)
    assert (serve.served_model_name, serve.api_key) == ("7", ("one", "two"))
    assert Serve.of(["--api-key", "three"]).api_key == ("three",)
    assert Serve.of(["--no-enable-prefix-caching"]).engine.enable_prefix_caching is False


def test_a_flag_may_be_what_makes_a_file_right(file: Path):
    file.write_text("snapshot_slots = 8")
    assert Serve.of(["--config", str(file), "--enable-prefix-caching"]).engine.snapshot_slots == 8
    with pytest.raises(ConfigError, match=f"snapshot_slots: 8 has no effect .* \\(from {file}\\)"):
        Serve.of([f"--config={file}"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_num_seq = 3", r"max_num_seq: in .*toml is no setting; did you mean max_num_seqs\?"),
        ("max-num-seqs = 3", "did you mean max_num_seqs"),
        ("[engine]\nmax_num_seqs = 3", "engine: in .*toml is no setting"),
        ("print_config = true", "print_config: in .* is no setting"),
        ('wat = 3\nport = "80"\nmax_num_seqs = true', r"wat: in .*\nport: '80' in .*\nmax_num_seqs: True in"),
        ("wat = 3", "`--help` shows them all"),
        ('port = "80"', "port: '80' in .*toml: input should be a valid integer"),
        ("port = true", "port: True in"),
        ("port = 1979-05-27", "port: .* no value of this kind"),
        ('api_key = "hush"', "api_key: the value in .*toml: input should be a valid"),
        ("max_num_seqs = 0", r"max_num_seqs: must be a positive integer, got 0 \(from .*toml\)"),
        ("port = ", "config: .*toml cannot be read: Invalid value"),
    ],
)
def test_what_a_file_may_not_say(file: Path, text: str, error: str):
    file.write_text(text)
    with pytest.raises(ConfigError, match=error) as caught:
        Serve.of(["--config", str(file)])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("JHYBRID_MAX_NUM_SEQ", "3", "JHYBRID_MAX_NUM_SEQ: is no setting; did you mean JHYBRID_MAX_NUM_SEQS"),
        ("JHYBRID_MAX_NUM_SEQS", "three", "JHYBRID_MAX_NUM_SEQS: 'three': input should be a valid integer"),
        ("JHYBRID_PORT", "tcp://10.0.0.1:8000", "Kubernetes .* enableServiceLinks"),
        ("JHYBRID_SERVICE_HOST", "10.0.0.1", "Kubernetes .* enableServiceLinks"),
        ("JHYBRID_JSON", "1", "JHYBRID_JSON: is no setting"),
        ("JHYBRID_CONFIG", "/nowhere.toml", "config: /nowhere.toml cannot be read"),
    ],
)
def test_what_the_environment_may_not_say(environment: dict[str, str], name: str, text: str, error: str):
    environment[name] = text
    with pytest.raises(ConfigError, match=error):
        Serve.of([])


def test_everything_wrong_in_the_environment_is_told_at_once(environment: dict[str, str]):
    environment |= {"JHYBRID_WAT": "1", "JHYBRID_PORT": "x", "JHYBRID_MAX_NUM_SEQS": "4", "JHYBRID_MAX_QUEUE": "many"}
    with pytest.raises(ConfigError) as caught:
        Serve.of([])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "JHYBRID_WAT",
        "JHYBRID_PORT",
        "JHYBRID_MAX_QUEUE",
    ]


def test_what_is_printed_reads_back_equal(file: Path, capsys: pytest.CaptureFixture[str]):
    flags = [
        "--max-num-seqs",
        "3",
        "--memory-fraction",
        "0.25",
        "--served-model-name",
        'a "b" \\ \x7f é',
        "--port",
        "0",
    ]
    flags += ["--compilation-cache-dir", "", "--enable-prefix-caching", "--drain-timeout", "2"]
    with pytest.raises(SystemExit) as left:
        Serve.of([*flags, "--print-config"])
    printed = capsys.readouterr().out
    file.write_text(printed)
    assert left.value.code == 0
    assert Serve.of(["--config", str(file)]) == Serve.of([*flags, "--config", str(file)])
    assert Serve.of(["--config", str(file)]).engine == Serve.of(flags).engine
    with pytest.raises(SystemExit):
        Serve.of(["--config", str(file), "--print-config"])
    assert capsys.readouterr().out == printed


def test_keys_are_never_shown(environment: dict[str, str], file: Path, capsys: pytest.CaptureFixture[str]):
    file.write_text('api_key = ["hush-1", "hush-2"]')
    for flag in ("--print-config", "--help", "--wat"):
        for given in ([], ["--api-key", "hush-3"]):
            with pytest.raises(SystemExit):
                Serve.of(["--config", str(file), flag, *given])
            out, err = capsys.readouterr()
            assert "hush" not in out + err
            assert (flag != "--print-config") or out.startswith(f"# api_key: {2 - len(given) // 2} given, not shown")
    environment["JHYBRID_API_KEY"] = "hush-4"
    with pytest.raises(SystemExit):
        Serve.of(["--help"])
    assert "hush" not in capsys.readouterr().out


def test_as_a_command(file: Path):
    file.write_text("max_num_seq = 3")
    command = [sys.executable, "-m", "jhybrid.cli", "serve", "--config", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "did you mean max_num_seqs?" in run.stderr


def test_a_flag_is_not_blamed_on_the_file_that_sets_the_same(file: Path):
    file.write_text("page_size = 64")
    for flags in (["--page-size", "0"], ["--page-size=0"]):
        with pytest.raises(ConfigError, match=r"^page_size: must be a positive integer, got 0$"):
            Serve.of(["--config", str(file), *flags])
