"""What `serve` logs of calls: a line each, with its id, and nothing of what was asked unless that is wanted."""

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jhybrid.errors import JhybridError
from jhybrid.logs import JsonFormatter
from jhybrid.request import Request, SamplingParams
from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server.call_log import CallLog
from tests.server.fake_engine import FakeEngine
from tests.server.http_client import ask, events
from tests.server.serving import Served, eventually, serving

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
SECRET = "dagger"


class Lines(logging.Handler):
    """Keeps everything that is logged, from DEBUG on, as the lines that it becomes."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def calls(self) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.lines) if "outcome" in line]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    for name in ("jhybrid", "jhybrid_server"):
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)
    for name in ("jhybrid", "jhybrid_server"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def ask_everything(served: Served) -> int:
    """Calls of every protocol and ending, all with the secret somewhere; returns how many reached the desk."""
    port = served.http.port
    text = f"is this a {SECRET}"
    assert ask(port, "/v1/completions", {"prompt": text, "max_tokens": 3}).status == 200
    assert list(events(port, "/v1/completions", {"prompt": text, "max_tokens": 3}))[-1] == "[DONE]"
    assert (
        ask(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 3}).status
        == 200
    )
    assert ask(port, "/v1/completions", {"prompt": text * 999}).status == 400
    assert ask(port, "/v1/completions", {"prompt": text, "model": SECRET}).status == 404
    for body in ({"prompt": text, "n": 0}, {"prompt": text, "n": SECRET}, {SECRET: 1}, {"prompt": text, "stop": [""]}):
        assert ask(port, "/v1/completions", body).status == 400
    assert ask(port, "/tokenize", {"prompt": text}).status == 200
    served.client.generate(Request(prompt=text, sampling=SamplingParams(max_tokens=3, stop=[SECRET])))
    stream = iter(served.client.stream(Request(prompt=text, sampling=SamplingParams(max_tokens=None))))
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(JhybridError):
        served.client.generate(Request(prompt=text, sampling=SamplingParams(max_tokens=-1)))
    eventually(lambda: served.desk.running == 0)
    return 9


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(step_seconds=0.001)
    engine.tokenizer = ByteTokenizer(263, chat_template=TEMPLATE)
    return engine


def test_prompts_are_not_logged(engine: FakeEngine, lines: Lines):
    with serving(lambda: engine) as served:
        calls = ask_everything(served)
        reply = ask(served.http.port, "/v1/completions", {"prompt": "abc", "max_tokens": 4}).json
        broken = ask(served.http.port, "/v1/completions", {"prompt": "nan"})
    assert len(lines.calls()) >= calls
    assert [line for line in lines.lines if SECRET in line] == []
    [line] = [line for line in lines.calls() if line["request_id"] == reply["id"]]
    assert (line["outcome"], line["prompt_tokens"], line["completion_tokens"]) == ("ok", 4, 4)
    assert line["level"] == "INFO" and line["time"].endswith("+00:00")
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert {line["outcome"] for line in lines.calls()} >= {"ok", "refused", "cancelled", "failed"}
    assert broken.status == 500
    assert any("logits at position 5" in line.get("error", "") for line in lines.calls())


def test_prompts_are_logged_where_wanted(engine: FakeEngine, lines: Lines):
    with serving(lambda: engine) as served:
        served.desk.observers = [CallLog(prompts=True)]
        ask(served.http.port, "/v1/completions", {"prompt": [f"is this a {SECRET}", "abc"], "max_tokens": 3})
    assert [line["prompts"] for line in lines.calls()] == [[f"is this a {SECRET}", "abc"]]


def test_exceptions_stay_on_their_line():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("broke",), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: two\nlines")
    assert json.loads(line)["message"] == "it broke"
