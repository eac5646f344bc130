"""What lies in server/deploy: flags, ports, probes and grace periods are those that the server has."""

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from jhybrid.cli import Serve
from jhybrid.config import PREFIX
from jhybrid_server.bridge import Bridge
from jhybrid_server.desk import Desk
from jhybrid_server.http_server import OPEN_PATHS, Endpoints
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "server" / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CLOSING_SECONDS = 20
"""What the end takes beyond the drain: aborted calls get 5 s to be told, the engine's thread 10 to close."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that `serve` sees."""
    variables: dict[str, str] = {}
    monkeypatch.setattr("jhybrid.cli.environment", lambda: dict(variables))
    return variables


def containerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip() and line[0] != "#"]  # pyright: ignore[reportReturnType]


def variables_of_image() -> dict[str, str]:
    return dict(pair.split("=", 1) for name, text in containerfile() if name == "ENV" for pair in shlex.split(text))


def test_containerfile(environment: dict[str, str]):
    steps = containerfile()
    targets = re.findall(r" AS (\w+)", "\n".join(text for name, text in steps if name == "FROM"))
    assert targets == ["wheel", "base", "cpu", "cuda", "tpu"]
    environment |= {name: value for name, value in variables_of_image().items() if name.startswith(PREFIX)}
    [entry], [command] = ([yaml.safe_load(text) for n, text in steps if n == name] for name in ("ENTRYPOINT", "CMD"))
    assert [*entry, *command] == ["jhybrid", "serve"]
    serve = Serve.of([])
    assert (serve.host, serve.log_format) == ("0.0.0.0", "json")
    [ports] = [text for name, text in steps if name == "EXPOSE"]
    assert ports.split() == [str(serve.port), str(serve.grpc_port)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"jhybrid\[(\w+)\]", "\n".join(text for _, text in steps))
    assert extras == ["cuda", "tpu"] and set(extras) <= project["optional-dependencies"].keys()
    for text in (text for name, text in steps if name == "COPY" and not text.startswith("--from")):
        for source in text.split()[:-1]:
            assert (ROOT / source).exists(), source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "page/*" in packages["package-data"]["jhybrid_server"]
    users = [text for name, text in steps if name == "USER"]
    assert users == ["10001"] * 3


def documents(manifest: Path) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.read_text())}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest(manifest: Path, environment: dict[str, str], tmp_path: Path):
    found = documents(manifest)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}

    assert pod["enableServiceLinks"] is False
    environment |= {n: v for n, v in variables_of_image().items() if n.startswith(PREFIX)}
    environment |= {entry["name"]: entry.get("value", "from-a-secret") for entry in container["env"]}
    (tmp_path / "jhybrid.toml").write_text(found["ConfigMap"]["data"]["jhybrid.toml"])
    command, *flags = [part.replace(str(mounts["config"]), str(tmp_path)) for part in container["args"]]
    serve = Serve.of(flags)
    assert command == "serve" and serve.config == tmp_path / "jhybrid.toml"
    assert serve.host == "0.0.0.0" and serve.api_key == ("from-a-secret",)
    assert Path(serve.engine.model).is_relative_to(mounts["models"])
    assert variables_of_image()["JHYBRID_CACHE_DIR"] == str(mounts["cache"])
    assert variables_of_image()["HOME"] == str(mounts["tmp"])

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": serve.port, "grpc": serve.grpc_port}
    service = found["Service"]["spec"]
    assert {port["targetPort"] for port in service["ports"]} == ports.keys()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"] == labels == found["Deployment"]["spec"]["selector"]["matchLabels"]
    annotations = found["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    paths = {route.path for route in Endpoints(Desk(Bridge(FakeEngine), "x")).routes()}  # pyright: ignore[reportAttributeAccessIssue]
    assert annotations["prometheus.io/path"] in paths
    assert annotations["prometheus.io/port"] == str(serve.port)

    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["httpGet"]["port"] == "http"
        assert probe["httpGet"]["path"] in paths and probe["httpGet"]["path"] in OPEN_PATHS
    assert [probe["httpGet"]["path"] for probe in probes.values()] == ["/ready", "/ready", "/health"]
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= wait + serve.drain_timeout + CLOSING_SECONDS

    target = container["image"].rpartition(":")[2]
    assert f" AS {target}" in (DEPLOY / "Containerfile").read_text()
    assert set(container["resources"]["limits"]) - {"memory"} <= {"google.com/tpu", "nvidia.com/gpu"}
    assert container["resources"]["limits"].keys() != {"memory"}
    assert serve.engine.tensor_parallel_size == 1


def test_there_is_one_for_each_accelerator():
    assert [path.stem for path in MANIFESTS] == ["gpu", "tpu"]


def test_unit(environment: dict[str, str]):
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read(DEPLOY / "jhybrid.service")
    service = unit["Service"]
    name, _, value = service["Environment"].partition("=")
    environment[name] = value
    assert value == f"/var/cache/{service['CacheDirectory']}"
    program, command, *flags = shlex.split(service["ExecStart"].replace("/etc/jhybrid", str(DEPLOY)))
    assert (Path(program).name, command) == ("jhybrid", "serve")
    serve = Serve.of(flags)
    assert serve.config == DEPLOY / "jhybrid.toml" and serve.engine.model == "demo"
    assert float(service["TimeoutStopSec"]) >= serve.drain_timeout + CLOSING_SECONDS
    assert service["KillSignal"] == "SIGTERM"
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert "MemoryDenyWriteExecute" not in service  # XLA writes code


def test_documentation_names_files_and_flags_that_exist(environment: dict[str, str]):
    text = (ROOT / "docs" / "deploy.md").read_text()
    for path in re.findall(r"\.\./(server/deploy/[\w./-]+)", text):
        assert (ROOT / path).exists(), path
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([\w-]+)", text)}
    assert flags and flags <= set(Serve.__dataclass_fields__) | set(Serve().engine.__dataclass_fields__)
