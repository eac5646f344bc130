"""CallMetrics: what clients experience, counted by the desk for every protocol alike. `/metrics` shows it."""

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jhybrid.errors import EngineDeadError, QueueFullError, RequestError
from jhybrid_server.statuses import AbortedError, ModelNotFoundError, NotReadyError

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

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


class CallMetrics:
    """Counters of one desk, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter("jhybrid_calls", "Calls by how they ended", ["outcome"], registry=self.registry)
        self._first_token = Histogram(
            "jhybrid_time_to_first_token_seconds", "From the call to its first token",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._duration = Histogram(
            "jhybrid_call_seconds", "From the call to its end", buckets=SECONDS, registry=self.registry
        )

    def first_token(self, seconds: float) -> None:
        """A call has its first token."""
        self._first_token.observe(seconds)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Count a call that is refused inside, before the desk sees it."""
        try:
            yield
        except Exception as error:
            self._count(error)
            raise

    @contextlib.contextmanager
    def outcome(self) -> Iterator[None]:
        """Count a call by what its block raises."""
        started = time.monotonic()
        try:
            yield
            self._calls.labels("ok").inc()
        except BaseException as error:
            self._count(error)
            raise
        finally:
            self._duration.observe(time.monotonic() - started)

    def _count(self, error: BaseException) -> None:
        self._calls.labels(next(name for kind, name in OUTCOMES if isinstance(error, kind))).inc()
