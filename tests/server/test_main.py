"""`serve` as a process of its own, over the fake engine: its ready line, its signals, its exit codes."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jhybrid.errors import EngineDeadError, JhybridError, RequestError
from jhybrid.request import Request, SamplingParams
from jhybrid_server.announcement import Announcement
from jhybrid_server.bridge import NotReadyError, StuckError
from jhybrid_server.client import Client
from jhybrid_server.grpc_server import SERVICE
from jhybrid_server.main import client
from jhybrid_server.tls import ServerTls
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.v1 import inference_pb2_grpc as services
from tests.server.fake_engine import answer_text
from tests.server.http_client import ask, events
from tests.server.serving import eventually

PROGRAM = """
import sys
from jhybrid.config import EngineConfig
from jhybrid_server.main import Listening, serve
from tests.server.fake_engine import FakeEngine
def make_engine(startup):
    return FakeEngine(step_seconds=0.005)

listening = Listening(port=0, grpc_port=0)
sys.exit(serve(EngineConfig(), listening, drain_timeout={drain}, watchdog_seconds=0.5, make_engine=make_engine))
"""

LOADING = """
import sys, time
from jhybrid.config import EngineConfig
from jhybrid_server.main import Listening, serve

def load(startup):
    print("loading", flush=True)
    time.sleep(60)

sys.exit(serve(EngineConfig(), Listening(port=0, grpc_port=0), make_engine=load))
"""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Start = Callable[..., tuple[subprocess.Popen, str, int]]


def run(program: str, stderr: int | None = None) -> tuple[subprocess.Popen, str]:
    """A Python process and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=stderr,
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
    counts = {"prompt_tokens": 3, "cached_tokens": 3, "completion_tokens": 12}
    assert second["usage"] == counts | {"miss_cause": None, "reasoning_tokens": None}
    with pytest.raises(RequestError, match="n: 0"):
        client(target, ["abc"], SamplingParams(n=0))
    with pytest.raises(JhybridError, match="DEADLINE_EXCEEDED"):
        client(target, ["abc"], SamplingParams(max_tokens=None), timeout=0.05)


def test_client_without_a_server():
    with pytest.raises(JhybridError, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        client("127.0.0.1:1", ["abc"], SamplingParams())
    with pytest.raises(JhybridError, match=r"is not serving after 0\.2 s"):
        client("127.0.0.1:1", ["abc"], SamplingParams(), wait_seconds=0.2)


def test_lines_to_try_work(start: Start):
    process, target, port = start()
    assert process.stdout is not None
    said = dict(process.stdout.readline().strip().split(maxsplit=1) for _ in range(4))
    assert said["memory"] == "100 B: weights 10 B, kv 20 B (100 pages), state 30 B (4 slots), scratch 40 B"
    assert said["page"] == f"http://127.0.0.1:{port}/"
    answer = subprocess.run(["bash", "-c", said["curl"]], capture_output=True, check=True, timeout=30).stdout
    assert json.loads(answer)["choices"][0]["text"] == answer_text(9, 20)
    program, plaintext, flag, body, address, method = shlex.split(said["grpcurl"])
    assert (program, plaintext, flag, address) == ("grpcurl", "-plaintext", "-d", target)
    with grpc.insecure_channel(address) as channel:  # as grpcurl does it: the request from JSON, the method by its name
        call = channel.unary_unary(f"/{method}", pb.GenerateRequest.SerializeToString, pb.CompleteResponse.FromString)
        assert call(json_format.Parse(body, pb.GenerateRequest())).answers[0].text == answer_text(9, 20)


def test_lines_to_try_with_key_and_tls():
    tls = ServerTls("a b.pem", "key.pem", "ca.pem")
    status = {"memory_bytes": {"weights": 12345678}}
    announcement = Announcement("m", "0.0.0.0:80", "[::]:81", tls, True, False, status)
    assert shlex.split(announcement.curl)[1:10] == [
        "--cacert", "a b.pem", "--cert", "CLIENT.pem", "--key", "CLIENT.key", "https://127.0.0.1:80/v1/completions",
        "-H", "authorization: Bearer $JHYBRID_API_KEY",
    ]  # fmt: skip
    assert shlex.split(announcement.grpcurl)[-2:] == ["[::1]:81", "jhybrid.v1.InferenceService/Complete"]
    assert json.loads(announcement.as_json())["memory_bytes"] == {"weights": 12345678}
    assert "12.35 MB" in announcement.as_text()


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


def health(target: str) -> tuple[int, str]:
    """What gRPC health says, and why."""
    with grpc.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        reply, call = check.with_call(health_pb2.HealthCheckRequest(service=SERVICE))
        return reply.status, dict(call.trailing_metadata()).get("jhybrid-reason", "")


def test_watchdog_says_stuck_and_takes_it_back(start: Start):
    process, target, port = start()
    with Client(target) as connection:
        stream = iter(connection.stream(Request(prompt="stick", sampling=SamplingParams(max_tokens=40))))
        text = next(stream).text
        eventually(lambda: ask(port, "/health").status == 503)
        for path in ("/health", "/ready"):
            reply = ask(port, path)
            assert (reply.status, reply.error["code"]) == (503, "stuck")
            assert re.match(r"no step has ended for \d+ s though there is work", reply.error["message"])
        status, reason = health(target)
        assert status == NOT_SERVING and reason.startswith("no step has ended for")
        with pytest.raises(StuckError, match="no step has ended"):
            connection.generate(Request(prompt="abc"))
        text += "".join(delta.text for delta in stream)
        assert text == answer_text(6, 40)
        assert ask(port, "/health").status == ask(port, "/ready").status == 200
        assert health(target) == (SERVING, "")
        assert connection.generate(Request(prompt="abc")).output.text == answer_text(4, 16)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_ports_answer_while_the_model_loads_and_compiles():
    ports = [str(free_port()) for _ in range(2)]
    flags = ["--port", ports[0], "--grpc-port", ports[1], "--compilation-cache-dir", ""]
    command = [sys.executable, "-m", "jhybrid.cli", "serve", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port, target = int(ports[0]), f"127.0.0.1:{ports[1]}"
        eventually(lambda: accepts(port), 60)
        assert ask(port, "/health").status == 200
        eventually(lambda: ask(port, "/ready").json["startup"]["phase"] == "compiling", 60)
        ready = ask(port, "/ready")
        assert (ready.status, ready.headers["retry-after"], ready.error["code"]) == (503, "1", "not_ready")
        startup = ready.json["startup"]
        assert 0 <= startup["buckets"] < startup["buckets_total"] and startup["seconds"] > 0
        assert f"of {startup['buckets_total']} buckets" in ready.error["message"]
        reply = ask(port, "/v1/completions", {"prompt": "abc"})
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
        status, reason = health(target)
        assert status == NOT_SERVING and "compiling" in reason
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
            services.InferenceServiceStub(channel).Complete(pb.GenerateRequest(text="abc"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # pyright: ignore[reportAttributeAccessIssue]
        assert "RetryInfo" in str(caught.value.trailing_metadata())  # pyright: ignore[reportAttributeAccessIssue]
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - started < 3
        assert process.stderr is not None
        *lines, last = process.stderr.read().splitlines()
        assert re.search(
            r" INFO left before the model was ready \(compiling, \d+ of \d+ buckets, \d+ s so far\)$", last
        )
        assert not [line for line in lines if " INFO " not in line]
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_sigterm_while_loading_exits_at_once():
    process, line = run(LOADING, subprocess.PIPE)
    assert line == "loading\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[1] == "", "warnings"
    assert process.returncode == 0
