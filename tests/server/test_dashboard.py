"""The Grafana dashboard asks for nothing that `/metrics` of a server with the real engine does not have."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from jhybrid.request import Request, SamplingParams
from tests.server.http_client import ask
from tests.server.serving import Served

DASHBOARD = Path(__file__).resolve().parents[2] / "server" / "deploy" / "grafana-dashboard.json"
ADDED_BY_PROMETHEUS = {"job", "instance"}


def offered(served: Served) -> dict[str, set[str]]:
    """Name of each sample -> its labels, after a request has gone through and another has missed the cache."""
    for prompt in ([5] * 40, [5] * 40, [5] * 20 + [6] * 20):
        served.client.generate(Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4)))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(ask(served.http.port, "/metrics").raw.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_name_and_label_is_there(hybrid: Served):
    names = offered(hybrid)
    dashboard = json.loads(DASHBOARD.read_text())
    asked: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            used = re.findall(r"\b((?:jhybrid|process)_\w+)", expression)
            assert used, panel["title"]
            asked.update(used)
            for name in used:
                assert name in names, f"{panel['title']}: /metrics has no {name}"
            by = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for name in used:
                assert by <= names[name] | ADDED_BY_PROMETHEUS, f"{panel['title']}: {name} has only {names[name]}"
            assert shown <= by
    for variable in dashboard["templating"]["list"]:
        text = json.dumps(variable)
        assert set(re.findall(r"\bjhybrid_\w+", text)) <= names.keys()
    own = {name.removesuffix("_bucket").removesuffix("_count") for name in names if name.startswith("jhybrid_")}
    assert len(asked) > 30 and len(own) > 40


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
