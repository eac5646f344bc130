"""CallMetrics: what clients experience, counted by the desk for every protocol alike. `/metrics` shows it."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jhybrid.errors import EngineDeadError, QueueFullError, RequestError
from jhybrid.histogram import Histogram, family
from jhybrid_server.statuses import AbortedError, ModelNotFoundError, NotReadyError
from jhybrid_server.usage import Timing, Usage

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(4**i) for i in range(10))

OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (RequestError, "refused"),
    (ModelNotFoundError, "refused"),
    (QueueFullError, "queue_full"),
    (NotReadyError, "unavailable"),
    (EngineDeadError, "unavailable"),
    (AbortedError, "aborted"),
    (HTTPException, "refused"),
    (ClientDisconnect, "cancelled"),
    (Exception, "failed"),
    (BaseException, "cancelled"),  # CancelledError and the end of a generator that is left: the client has gone
)


HISTOGRAMS = {
    "time_to_first_token_seconds": (SECONDS, "From the call to its first token"),
    "inter_token_latency_seconds": (SECONDS, "Between two deltas of one answer, by their tokens"),
    "e2e_request_latency_seconds": (SECONDS, "From the call to its end"),
    "request_queue_time_seconds": (SECONDS, "Spent waiting for a place among the running sequences"),
    "request_prefill_time_seconds": (SECONDS, "From that place to the first token"),
    "request_decode_time_seconds": (SECONDS, "From the first token to the last"),
    "request_prompt_tokens": (TOKENS, "Prompt tokens of answered calls"),
    "request_generation_tokens": (TOKENS, "Tokens of answers"),
}
"""Name -> bounds and help. The names are vLLM's."""


class CallMetrics(Collector):
    """Counters of one desk, in a registry of their own. Its event loop alone writes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._calls = Counter("jhybrid_requests", "Calls by how they ended", ["outcome"], registry=self.registry)
        for outcome in dict.fromkeys(["ok", *(name for _, name in OUTCOMES)]):
            self._calls.labels(outcome)
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.first_token = self._histograms["time_to_first_token_seconds"].observe
        self.next_token = self._histograms["inter_token_latency_seconds"].observe

    def collect(self) -> Iterable[Metric]:
        for name, histogram in self._histograms.items():
            yield family(f"jhybrid_{name}", HISTOGRAMS[name][1], [({}, histogram.counted())])

    def latencies(self) -> dict[str, dict[str, object]]:
        """Of tokens, for the status."""
        names = ("time_to_first_token_seconds", "inter_token_latency_seconds")
        return {name: self._histograms[name].counted()._asdict() for name in names}

    def answered(self, usage: Usage, timing: Timing) -> None:
        """A call was answered to its end."""
        seen: dict[str, float] = {"prompt_tokens": usage.prompt_tokens, "generation_tokens": usage.completion_tokens}
        queue, first = timing.queue_seconds, timing.first_token_seconds
        if queue is not None:
            seen["queue_time_seconds"] = queue
        if first is not None:
            seen["prefill_time_seconds"] = max(0.0, first - (queue or 0.0))
            seen["decode_time_seconds"] = timing.total_seconds - first
        for name, value in seen.items():
            self._histograms[f"request_{name}"].observe(value)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Count a call that is refused inside, before the desk sees it."""
        try:
            yield
        except Exception as error:
            self._count(error)
            raise

    @contextlib.contextmanager
    def outcome(self, ended: Callable[[str, float, BaseException | None], None]) -> Iterator[None]:
        """Count a call by what its block raises, and tell `ended` the outcome, the seconds and the error."""
        started, outcome, cause = time.monotonic(), "ok", None
        try:
            yield
            self._calls.labels("ok").inc()
        except BaseException as error:
            outcome, cause = self._count(error), error
            raise
        finally:
            seconds = time.monotonic() - started
            self._histograms["e2e_request_latency_seconds"].observe(seconds)
            ended(outcome, seconds, cause)

    def _count(self, error: BaseException) -> str:
        outcome = next(name for kind, name in OUTCOMES if isinstance(error, kind))
        self._calls.labels(outcome).inc()
        return outcome
