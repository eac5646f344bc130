"""GrpcServer: the inference service over grpc.aio, with health and reflection. `main.serve` runs it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import jhybrid
from jhybrid.errors import ConfigError, JhybridError, RequestError
from jhybrid_server import wire
from jhybrid_server.desk import STALL_SECONDS, Call, Desk
from jhybrid_server.grpc_chat import conversation_of, renamed_fields
from jhybrid_server.keys import Keys
from jhybrid_server.openai_schema import rendering
from jhybrid_server.scoring import requests_of, scores_of
from jhybrid_server.statuses import AbortedError, UnauthenticatedError, details_of, message_of, status_of
from jhybrid_server.talk import Readings
from jhybrid_server.tls import ServerTls
from jhybrid_server.tracing import traceparent
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.v1 import inference_pb2_grpc as services

log = logging.getLogger("jhybrid_server")

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_SECONDS = 30.0
"""How long a client may take to send the message of its call."""
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
    """The calls. Errors become statuses in `_statuses`, nowhere else."""

    def __init__(self, desk: Desk):
        self._desk = desk

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with _statuses(context), self._desk.call([wire.request_from_wire(request)], request.model) as call:
            await _answer(call, context)

    async def Complete(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.CompleteResponse:
        async with _statuses(context), self._desk.call([wire.request_from_wire(request)], request.model) as call:
            answers = await call.answers()
            return pb.CompleteResponse(
                answers=[wire.delta_to_wire(delta) for _, delta in sorted(answers.items())],
                usage=wire.usage_to_wire(call.usage),
                timing=wire.timing_to_wire(call.timing),
            )

    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        async with _statuses(context):
            with renamed_fields() as names:
                with self._desk.metrics.refusals():
                    self._desk.check_open()
                    chat = await asyncio.to_thread(conversation_of, request)
                    names |= chat.grammar_names
                    prompt = await self._desk.chat_prompt(partial(rendering, chat))
                    talk = chat.talk(self._desk.dialect, self._desk.tokenizer("messages"), prompt)
                    asked = wire.chat_request_from_wire(request, prompt)
                    asked = replace(asked, sampling=await asyncio.to_thread(talk.bind, asked.sampling))
                async with self._desk.call([asked], request.options.model) as call:
                    await _answer(call, context, Readings(talk))

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        async with _statuses(context):
            self._desk.check_open()
            requests = await requests_of(self._desk, wire.question_from_wire(request))
            async with self._desk.call(requests, request.model) as call:
                scores = await scores_of(call, requests)
                return wire.scores_to_wire(scores, call.usage, call.timing)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with _statuses(context):
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return pb.TokenizeResponse(token_ids=await self._desk.tokenize(request.text, special))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with _statuses(context):
            text = await self._desk.detokenize(request.token_ids, request.skip_special_tokens)
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with _statuses(context):
            engine = self._desk.bridge.engine
            message = wire.model_info_to_wire(engine.model_info() | {"model": self._desk.model_name})
            if engine.tokenizer is not None and engine.tokenizer.bos_token_id is not None:
                message.bos_token_id = engine.tokenizer.bos_token_id
            message.version = jhybrid.__version__
            return message

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        async with _statuses(context):
            return wire.status_to_wire(await self._desk.status())

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushCacheResponse:
        async with _statuses(context):
            await self._desk.flush_cache()
            return pb.FlushCacheResponse()

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        async with _statuses(context):
            return pb.AbortResponse(found=await self._desk.abort(request.request_id))


async def _answer(call: Call, context: grpc.aio.ServicerContext, readings: Readings | None = None) -> None:
    """Write a call's deltas, those of a chat as read; the last one also has what the call cost, unless it fails."""
    await context.send_initial_metadata(())  # now, while there is time, and not with the first token
    try:
        async with Patience(STALL_SECONDS) as patience:
            async for _, delta in call.deltas():
                message = wire.delta_to_wire(delta if readings is None else readings[delta.index].take(delta))
                if call.ended_well:
                    reasoning = None if readings is None else readings.reasoning_tokens
                    message.usage.CopyFrom(wire.usage_to_wire(replace(call.usage, reasoning_tokens=reasoning)))
                    message.timing.CopyFrom(wire.timing_to_wire(call.timing))
                patience.begin()
                await context.write(message)
                patience.end()
    except TimeoutError as error:
        raise AbortedError(f"the client took no message for {STALL_SECONDS:g} s") from error


class Patience:
    """Bounds each of many waits by one timer: the block ends with TimeoutError when one of them takes too long."""

    def __init__(self, seconds: float):
        self._seconds, self._limit = seconds, asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    def begin(self) -> None:
        """A wait begins."""
        self._since = self._loop.time()

    def end(self) -> None:
        """It is over."""
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._next_look = self._loop.call_later(self._seconds / 10, self._look)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._next_look.cancel()
        await self._limit.__aexit__(*error)


class Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """Standard health of every service alike. Its answers carry the reason in the trailing metadata."""

    def __init__(self, desk: Desk):
        super().__init__()
        self._desk = desk
        self._told: bool | None = None

    async def update(self) -> None:
        """Say what is so: whether calls are let in."""
        refusal = self._desk.refusal()
        if (refusal is None) is self._told:
            return
        self._told = refusal is None
        kinds = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self.set(name, kinds.SERVING if refusal is None else kinds.NOT_SERVING)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        refusal = self._desk.refusal()
        if refusal is not None:
            reason = str(refusal).encode("ascii", "replace").decode()
            context.set_trailing_metadata((("jhybrid-reason", reason),))
        await self.update()
        return await super().Check(request, context)


class KeyCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a known API key. Health checks need none: probes cannot have one."""

    def __init__(self, keys: Keys):
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if not handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            given = dict(handler_call_details.invocation_metadata or ()).get("authorization")
            try:
                self._keys.check(given if given is None else str(given))
            except UnauthenticatedError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


class Parsing(grpc.aio.ServerInterceptor):
    """Takes in the one message of a call, and refuses what is none as the bad request that it is.

    By itself grpc would end a call with bytes of another kind with UNKNOWN, and log a fault of the server's; one that
    was closed without a message it would leave without a status. So it is told that there may be several.
    """

    def __init__(self, desk: Desk):
        self._desk = desk

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        kind = "stream" if handler.response_streaming else "unary"
        parse, method = handler.request_deserializer, getattr(handler, f"unary_{kind}")
        name = handler_call_details.method.rpartition("/")[2]

        async def parsed(_: object, context: grpc.aio.ServicerContext) -> Any:
            async with _statuses(context):
                with self._desk.metrics.refusals():
                    try:
                        async with asyncio.timeout(MESSAGE_SECONDS):
                            raw: Any = await context.read()
                    except TimeoutError as error:
                        raise RequestError("message", f"did not come within {MESSAGE_SECONDS:g} s; send one") from error
                    if not isinstance(raw, bytes):  # the end of the client's part
                        raise RequestError("message", f"is missing; send the one that {name} takes")
                    try:
                        request = parse(raw)
                    except DecodeError as error:
                        why = f"is none that {name} takes, or is nested more than 100 levels deep ({error}); correct it"
                        raise RequestError("message", why) from error
            return await method(request, context)

        own = {"request_streaming": True, "request_deserializer": None, f"stream_{kind}": parsed}
        return handler._replace(**own)


def _refusing(error: JhybridError) -> grpc.RpcMethodHandler:
    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(status_of(error).grpc, message_of(error), details_of(error))

    return grpc.stream_stream_rpc_method_handler(refuse)  # pyright: ignore[reportArgumentType]


class GrpcServer:
    """Listens from the start; `health` says NOT_SERVING until the engine is there."""

    def __init__(
        self, desk: Desk, host: str = "127.0.0.1", port: int = 0, keys: Keys | None = None, tls: ServerTls | None = None
    ):
        """Binds the port; 0 picks a free one, see `port`. Raises ConfigError if it is taken or no port."""
        if not 0 <= port <= 65535:
            raise ConfigError("grpc_port", f"{port} is not in [0, 65535]")
        self.health = Health(desk)
        self._server = grpc.aio.server(interceptors=[KeyCheck(keys or Keys()), Parsing(desk)], options=OPTIONS)
        services.add_InferenceServiceServicer_to_server(InferenceService(desk), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.host = host
        try:
            self.port = (
                self._server.add_insecure_port(f"{host}:{port}")
                if tls is None
                else self._server.add_secure_port(f"{host}:{port}", tls.credentials())
            )
        except RuntimeError as error:
            raise ConfigError("grpc_port", f"{host}:{port} cannot be bound ({error}); choose another") from error

    async def start(self) -> None:
        """Accept connections. Calls are UNAVAILABLE until the engine is there."""
        await self.health.update()
        await self._server.start()

    async def stop(self) -> None:
        """Close the port and every connection."""
        await self.health.enter_graceful_shutdown()
        await self._server.stop(grace=0.5)


@contextlib.asynccontextmanager
async def _statuses(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status that an error means. Cancellation passes through."""
    traceparent.set(next((str(v) for k, v in context.invocation_metadata() or () if k == "traceparent"), None))
    try:
        yield
    except JhybridError as error:
        await context.abort(status_of(error).grpc, message_of(error), details_of(error))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.exception("a call failed for a reason that nobody foresaw")
        await context.abort(grpc.StatusCode.INTERNAL, message_of(error))
