"""CallTracer: a span of OpenTelemetry per call, made at its end, with its queue, prefill and decode as children.

Needs the extra `otel`. The parent is the `traceparent` that the client sent, if it did (W3C Trace Context).
"""

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jhybrid
from jhybrid.errors import ConfigError
from jhybrid.request import Request

if TYPE_CHECKING:
    from jhybrid_server.desk import Call

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""Of the call that is being answered; both servers set it."""


class CallTracer:
    """Sends spans to a collector, in batches and from a thread of its own."""

    def __init__(self, endpoint: str, model: str):
        """`endpoint` is a URL for OTLP over HTTP: http://127.0.0.1:4318/v1/traces. ConfigError without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError("otlp_traces_endpoint", "needs OpenTelemetry: pip install 'jhybrid[otel]'") from error
        facts = {"service.name": "jhybrid", "service.version": jhybrid.__version__}
        self._provider = TracerProvider(resource=Resource.create(facts))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("jhybrid")
        self._model = model

    def write(
        self,
        requests: Sequence[Request],
        call: "Call | None",
        outcome: str,
        seconds: float,
        error: BaseException | None,
    ) -> None:
        """The call has ended. `call` is None if it was not let in."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        start = end - int(seconds * 1e9)
        given = traceparent.get()
        parent = TraceContextTextMapPropagator().extract({} if given is None else {"traceparent": given})
        attributes: dict[str, Any] = {"gen_ai.request.model": self._model, "jhybrid.outcome": outcome}
        if call is not None:
            usage = call.usage
            attributes["gen_ai.response.id"] = call.name
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if error is not None:
            attributes["error.type"] = type(error).__name__
        span = self._tracer.start_span(
            "generate", parent, kind=trace.SpanKind.SERVER, start_time=start, attributes=attributes
        )
        if outcome == "failed":
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span, parent)
        for name, begun, ended in _parts(call):
            part = self._tracer.start_span(name, inside, start_time=start + begun)
            part.end(start + ended)
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _parts(call: "Call | None") -> list[tuple[str, int, int]]:
    """Name, begin and end of a call's parts, in nanoseconds since its start."""
    if call is None or call.timing.first_token_seconds is None:
        return []
    timing = call.timing
    queue, first, total = (
        int(1e9 * (s or 0.0)) for s in (timing.queue_seconds, timing.first_token_seconds, timing.total_seconds)
    )
    return [("queue", 0, queue), ("prefill", queue, max(queue, first)), ("decode", first, max(first, total))]
