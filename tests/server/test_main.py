"""`serve` as a process of its own, over the fake engine: its ready line, its signals, its exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from jhybrid.errors import EngineDeadError, JhybridError, RequestError
from jhybrid.request import Request, SamplingParams
from jhybrid_server.bridge import NotReadyError
from jhybrid_server.client import Client
from jhybrid_server.main import client
from tests.server.fake_engine import answer_text
from tests.server.http_client import ask, events
from tests.server.serving import eventually

PROGRAM = """
import sys
from jhybrid.config import EngineConfig
from jhybrid_server.main import Listening, serve
from tests.server.fake_engine import FakeEngine
def make_engine():
    return FakeEngine(step_seconds=0.005)

listening = Listening(port=0, grpc_port=0)
sys.exit(serve(EngineConfig(), listening, drain_timeout={drain}, make_engine=make_engine))
"""

LOADING = """
import sys, time
from jhybrid.config import EngineConfig
from jhybrid_server.main import Listening, serve

def load():
    print("loading", flush=True)
    time.sleep(60)

sys.exit(serve(EngineConfig(), Listening(port=0, grpc_port=0), make_engine=load))
"""

Start = Callable[..., tuple[subprocess.Popen, str, int]]


def run(program: str) -> tuple[subprocess.Popen, str]:
    """A Python process and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers; gives the process, its gRPC address and its HTTP port."""
    processes = []

    def start(drain: float = 10.0) -> tuple[subprocess.Popen, str, int]:
        process, line = run(PROGRAM.format(drain=drain))
        processes.append(process)
        match = re.fullmatch(r"jhybrid serves demo at http://127\.0\.0\.1:(\d+) and grpc://(127\.0\.0\.1:\d+)\n", line)
        assert match, line
        return process, match[2], int(match[1])

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_client_streams_text_and_prints_json(start: Start, capsys: pytest.CaptureFixture):
    _, target, _ = start()
    client(target, ["abc"], SamplingParams(max_tokens=6))
    assert capsys.readouterr().out == answer_text(4, 6) + "\n"
    client(target, ["abc", "de"], SamplingParams(max_tokens=6, n=2), json_output=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [c["text"] for c in first["output"]["completions"]] == [answer_text(4, 6), answer_text(4, 6, 1)]
    assert second["prompt"] == "de"
    assert second["usage"] == {"prompt_tokens": 3, "cached_tokens": 3, "completion_tokens": 12, "miss_cause": None}
    with pytest.raises(RequestError, match="n: 0"):
        client(target, ["abc"], SamplingParams(n=0))
    with pytest.raises(JhybridError, match="DEADLINE_EXCEEDED"):
        client(target, ["abc"], SamplingParams(max_tokens=None), timeout=0.05)


def test_client_without_a_server():
    with pytest.raises(JhybridError, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        client("127.0.0.1:1", ["abc"], SamplingParams())
    with pytest.raises(JhybridError, match=r"is not serving after 0\.2 s"):
        client("127.0.0.1:1", ["abc"], SamplingParams(), wait_seconds=0.2)


def test_sigterm_lets_running_calls_finish_and_exits_zero(start: Start):
    process, target, _ = start()
    with Client(target) as connection:
        stream = iter(connection.stream(Request(prompt="abc", sampling=SamplingParams(max_tokens=100))))
        text = next(stream).text
        process.send_signal(signal.SIGTERM)
        text += "".join(delta.text for delta in stream)
    assert text == answer_text(4, 100)
    assert process.wait(10) == 0


def test_sigterm_over_http(start: Start):
    process, target, port = start()
    streams = [events(port, "/v1/completions", {"prompt": "abc", "max_tokens": 100}) for _ in range(4)]
    texts = [next(stream)["choices"][0]["text"] for stream in streams]
    process.send_signal(signal.SIGTERM)
    eventually(lambda: ask(port, "/ready").status == 503, 0.3)
    refused = ask(port, "/v1/completions", {"prompt": "abc"})
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    for i, stream in enumerate(streams):
        *chunks, done = stream
        texts[i] += "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert done == "[DONE]"
    assert texts == [answer_text(4, 100)] * 4
    assert process.wait(10) == 0
    for number in (port, int(target.split(":")[1])):
        socket.create_server(("127.0.0.1", number)).close()


def test_what_does_not_finish_over_http_gets_a_last_event(start: Start):
    process, _, port = start(0.05)
    stream = events(port, "/v1/completions", {"prompt": "abc", "max_tokens": 1900})
    next(stream)
    process.send_signal(signal.SIGTERM)
    assert list(stream)[-1]["error"]["code"] == "not_ready"
    assert process.wait(10) == 0


@pytest.mark.parametrize(("drain", "signals"), [(0.05, 1), (60.0, 2)])
def test_what_does_not_finish_is_ended_and_exits_zero(start: Start, drain: float, signals: int):
    process, target, _ = start(drain)
    with Client(target) as connection:
        stream = iter(connection.stream(Request(prompt="abc", sampling=SamplingParams(max_tokens=None))))
        next(stream)
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            threading.Timer(0.3, process.send_signal, (signal.SIGINT,)).start()
        with pytest.raises(NotReadyError):
            list(stream)
    assert process.wait(10) == 0


def test_death_of_the_engine_thread_exits_nonzero(start: Start):
    process, target, _ = start()
    with Client(target) as connection, pytest.raises(EngineDeadError, match="the device is gone"):
        connection.generate(Request(prompt="die"))
    assert process.wait(10) == 1


def test_sigterm_while_loading_exits_at_once():
    process, line = run(LOADING)
    assert line == "loading\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
