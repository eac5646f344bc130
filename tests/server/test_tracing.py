"""Spans of calls, as a collector gets them."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from jhybrid.errors import RequestError
from jhybrid.request import Request, SamplingParams
from jhybrid_server.tracing import CallTracer
from jhybrid_server.v1 import inference_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.http_client import ask
from tests.server.serving import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    """A collector's URL, and the spans that it got."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            raw = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_span_per_call(collector: tuple[str, list[Span]]):
    url, spans = collector
    tracer = CallTracer(url, "fake")
    with serving(lambda: FakeEngine(step_seconds=0.002)) as served:
        served.desk.observers = [tracer]
        body = {"prompt": "secret", "max_tokens": 5}
        reply = ask(served.http.port, "/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
        stub = served.client._stub._stub
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        stub.Complete(pb.GenerateRequest(text="abc"), metadata=metadata)
        ask(served.http.port, "/v1/completions", {"prompt": "nan"})
        with pytest.raises(RequestError):
            served.client.generate(Request(prompt="abc", sampling=SamplingParams(n=0)))
    tracer.close()
    calls = [span for span in spans if span.name == "generate"]
    assert len(calls) == 4
    for call in calls[:2]:
        assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    first = {entry.key: entry.value for entry in calls[0].attributes}
    assert first["gen_ai.response.id"].string_value == reply.json["id"]
    assert first["gen_ai.usage.output_tokens"].int_value == 5
    parts = {span.name: span for span in spans if span.parent_span_id == calls[0].span_id}
    assert parts.keys() == {"queue", "prefill", "decode"}
    assert calls[0].start_time_unix_nano <= parts["prefill"].start_time_unix_nano
    assert parts["prefill"].end_time_unix_nano == parts["decode"].start_time_unix_nano
    outcomes = [next(e.value.string_value for e in c.attributes if e.key == "jhybrid.outcome") for c in calls]
    assert outcomes == ["ok", "ok", "failed", "refused"]
    assert calls[2].parent_span_id == b"" and calls[2].status.code == 2
    assert "secret" not in str(spans)
