"""GrpcServer: the inference service over grpc.aio, with health and reflection. `main.serve` runs it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import jhybrid
from jhybrid.errors import ConfigError, JhybridError, RequestError, StepError
from jhybrid.request import Delta
from jhybrid_server import wire
from jhybrid_server.bridge import Bridge, NotReadyError, Stream
from jhybrid_server.statuses import ModelNotFoundError, code_of, details_of
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.v1 import inference_pb2_grpc as services

log = logging.getLogger("jhybrid_server")

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
MAX_MESSAGE_BYTES = 64 * 2**20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # answers are bounded by what was asked
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a silent share
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


class InferenceService(services.InferenceServiceServicer):
    """The four calls. Errors become statuses in `_statuses`, nowhere else."""

    def __init__(self, bridge: Bridge, model_name: str):
        self._bridge = bridge
        self._model_name = model_name
        self.draining = False
        self.running = 0
        """Generate calls that have been let in and have not ended."""

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with _statuses(context):
            clock = Clock()
            self._admit(request.model)
            self.running += 1
            try:
                stream = await self._bridge.open(wire.request_from_wire(request))
                try:
                    await self._answer(stream, clock, context)
                finally:
                    self._bridge.abandon(stream)
            finally:
                self.running -= 1

    async def _answer(self, stream: Stream, clock: "Clock", context: grpc.aio.ServicerContext) -> None:
        """Write a stream's deltas. An answer that fails lets its siblings finish, then fails the call."""
        usage = pb.Usage(prompt_tokens=stream.prompt_tokens)
        left, failures = stream.request.sampling.n, []
        async for delta in self._bridge.deltas(stream):
            left -= delta.finish_reason is not None
            if delta.finish_reason in ("error", "abort"):
                failures.append(delta)
                if delta.text:  # held back until now, of tokens that were told
                    await context.write(wire.delta_to_wire(delta))
                continue
            clock.saw(delta)
            usage.completion_tokens += len(delta.token_ids)
            if delta.index == 0:
                usage.cached_tokens = max(usage.cached_tokens, delta.cached_tokens)
                if delta.miss_cause is not None:
                    usage.miss_cause = delta.miss_cause
            message = wire.delta_to_wire(delta)
            if not left and not failures:
                message.usage.CopyFrom(usage)
                message.timing.CopyFrom(clock.timing())
            await context.write(message)
        if failures:
            raise self._failure(failures, stream.request.sampling.n)

    def _failure(self, failures: list[Delta], n: int) -> JhybridError:
        broken = [delta for delta in failures if delta.finish_reason == "error"]
        if broken:
            where = f"answers {[delta.index for delta in broken]} of {n}: " if n > 1 else ""
            return StepError(f"{where}{broken[0].error}")
        return NotReadyError("the server ended this request before its answer was complete")

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with _statuses(context):
            tokenizer = self._bridge.engine.tokenizer
            if tokenizer is None:
                raise RequestError("text", "this model has no tokenizer; it takes token ids only")
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await asyncio.to_thread(tokenizer.encode, request.text, add_special_tokens=special)
            return pb.TokenizeResponse(token_ids=ids)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with _statuses(context):
            engine = self._bridge.engine
            message = wire.model_info_to_wire(engine.model_info() | {"model": self._model_name})
            if engine.tokenizer is not None and engine.tokenizer.bos_token_id is not None:
                message.bos_token_id = engine.tokenizer.bos_token_id
            message.version = jhybrid.__version__
            return message

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        async with _statuses(context):
            return wire.status_to_wire(await self._bridge.ask(lambda engine: engine.status()))

    def _admit(self, model: str) -> None:
        if self.draining:
            raise NotReadyError("the server is shutting down; try another")
        if model and model != self._model_name:
            raise ModelNotFoundError(f"model: {model!r} is not served here, {self._model_name!r} is")


@dataclass
class Clock:
    """When a call came in and when its first token was there, by the monotonic clock, and how long it was queued."""

    started: float = 0.0
    first_token: float | None = None
    queue_seconds: float | None = None

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    def saw(self, delta: Delta) -> None:
        if delta.token_ids and self.first_token is None:
            self.first_token = time.monotonic()
        if self.queue_seconds is None:  # of several answers, the first to get a place
            self.queue_seconds = delta.queue_seconds

    def timing(self) -> pb.Timing:
        first = None if self.first_token is None else self.first_token - self.started
        total = time.monotonic() - self.started
        return pb.Timing(first_token_seconds=first, total_seconds=total, queue_seconds=self.queue_seconds)


class GrpcServer:
    """Listens from the start and says NOT_SERVING until `serving` is called."""

    def __init__(self, bridge: Bridge, model_name: str, host: str = "127.0.0.1", port: int = 0):
        """Binds the port; 0 picks a free one, see `port`. Raises ConfigError if it is taken or no port."""
        if not 0 <= port <= 65535:
            raise ConfigError("grpc_port", f"{port} is not in [0, 65535]")
        self._bridge = bridge
        self.service = InferenceService(bridge, model_name)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._server = grpc.aio.server(options=OPTIONS)
        services.add_InferenceServiceServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.host = host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError("grpc_port", f"{host}:{port} cannot be bound ({error}); choose another") from error

    async def start(self) -> None:
        """Accept connections. Calls are UNAVAILABLE until the engine is there."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def serving(self) -> None:
        """Say that the engine is there."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Refuse new calls; let running ones finish until `timeout` seconds or `hurry`; abort what is left then."""
        self.service.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if not await self._idle(timeout, hurry):
            log.warning("%d requests did not finish in time and are aborted", self.service.running)
            self._bridge.abort_all()
            await self._idle(5.0, None)

    async def stop(self) -> None:
        """Close the port and every connection."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace=0.5)

    async def _idle(self, timeout: float, hurry: asyncio.Event | None) -> bool:
        """Wait until no call runs; False if it took too long."""
        deadline = time.monotonic() + timeout
        while self.service.running:
            if time.monotonic() >= deadline or (hurry is not None and hurry.is_set()):
                return False
            await asyncio.sleep(0.02)
        return True

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)


@contextlib.asynccontextmanager
async def _statuses(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status that an error means. Cancellation passes through."""
    try:
        yield
    except JhybridError as error:
        await context.abort(code_of(error), str(error), details_of(error))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.exception("a call failed for a reason that nobody foresaw")
        await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
