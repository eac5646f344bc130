"""Client and AsyncClient: the gRPC service in the engine's own nouns (Request in, Delta or Output out).

What the server refuses is raised here as the error that the engine itself would raise. Other ends of a call
(deadline, lost connection) are grpc.RpcError.
"""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jhybrid.errors import JhybridError
from jhybrid.request import Completion, Delta, Output, Request
from jhybrid_server import wire
from jhybrid_server.statuses import error_of
from jhybrid_server.usage import Timing, Usage
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.v1 import inference_pb2_grpc as services

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

UNARY_SECONDS = 30.0  # deadline of calls that answer at once


@dataclass(frozen=True)
class Answer:
    """A finished call."""

    output: Output
    usage: Usage
    timing: Timing


class _Collected:
    """What a call's messages add up to; the two kinds of stream share it."""

    def __init__(self, request: Request):
        self.usage: Usage | None = None
        """Set with the last delta."""
        self.timing: Timing | None = None
        """Set with the last delta."""
        self._output = Output("", list(request.prompt_token_ids or ()), [])

    def take(self, message: pb.GenerateResponse) -> Delta:
        delta = wire.delta_from_wire(message)
        if message.HasField("usage"):
            self.usage = wire.usage_from_wire(message.usage)
            self.timing = wire.timing_from_wire(message.timing)
        self._output.request_id = delta.request_id
        while len(self._output.completions) <= delta.index:
            self._output.completions.append(Completion(len(self._output.completions)))
        self._output.add(delta)
        return delta

    def answer(self) -> Answer:
        assert self.usage is not None, "the call ended well but its last message has no usage"
        assert self.timing is not None
        return Answer(self._output, self.usage, self.timing)


class DeltaStream(_Collected):
    """Deltas of one call as they come. `cancel` ends it; `usage` and `timing` are there at the end."""

    def __init__(self, request: Request, call: Any):
        super().__init__(request)
        self._call = call

    def __iter__(self) -> Iterator[Delta]:
        try:
            for message in self._call:
                yield self.take(message)
        except grpc.RpcError as error:
            raise error_of(error) from error

    def cancel(self) -> None:
        """End the call; the server gives its memory back."""
        self._call.cancel()


class AsyncDeltaStream(_Collected):
    """DeltaStream for asyncio."""

    def __init__(self, request: Request, call: Any):
        super().__init__(request)
        self._call = call

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for message in self._call:
                yield self.take(message)
        except grpc.RpcError as error:
            raise error_of(error) from error

    def cancel(self) -> None:
        """End the call; the server gives its memory back."""
        self._call.cancel()


class Client:
    """A connection to one server. Usable from several threads; close it, or use it in a `with`.

    `timeout` is a call's deadline in seconds, None for none; answers have none unless one is given.
    """

    def __init__(self, target: str, model: str = ""):
        """`target` is host:port; `model` empty means whichever is served."""
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._stub = services.InferenceServiceStub(self._channel)
        self._model = model

    def wait_until_serving(self, timeout: float) -> None:
        """Wait for a server that is still starting. JhybridError with the last thing seen."""
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        deadline, seen = time.monotonic() + timeout, "nothing"
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=left, wait_for_ready=True)
            except grpc.RpcError as error:
                seen = error.details()  # pyright: ignore[reportAttributeAccessIssue]
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                seen = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            time.sleep(min(0.1, max(0.0, left)))
        raise JhybridError(f"the server is not serving after {timeout:g} s; last seen: {seen}")

    def stream(self, request: Request, timeout: float | None = None) -> DeltaStream:
        """Start a call. RequestError and the like are raised while iterating. `timeout` in seconds is its deadline."""
        message = wire.request_to_wire(request, self._model)
        return DeltaStream(request, self._stub.Generate(message, timeout=timeout))

    def generate(self, request: Request, timeout: float | None = None) -> Answer:
        """The whole answer at once."""
        stream = self.stream(request, timeout)
        for _ in stream:
            pass
        return stream.answer()

    def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = UNARY_SECONDS) -> list[int]:
        message = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(_call(self._stub.Tokenize, message, timeout).token_ids)

    def model_info(self, timeout: float | None = UNARY_SECONDS) -> pb.GetModelInfoResponse:
        return _call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)

    def status(self, timeout: float | None = UNARY_SECONDS) -> pb.GetStatusResponse:
        return _call(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Client for asyncio. Make it inside a running event loop."""

    def __init__(self, target: str, model: str = ""):
        """`target` is host:port; `model` empty means whichever is served."""
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._stub = services.InferenceServiceStub(self._channel)
        self._model = model

    def stream(self, request: Request, timeout: float | None = None) -> AsyncDeltaStream:
        """Start a call. RequestError and the like are raised while iterating. `timeout` in seconds is its deadline."""
        message = wire.request_to_wire(request, self._model)
        return AsyncDeltaStream(request, self._stub.Generate(message, timeout=timeout))

    async def generate(self, request: Request, timeout: float | None = None) -> Answer:
        """The whole answer at once."""
        stream = self.stream(request, timeout)
        async for _ in stream:
            pass
        return stream.answer()

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, timeout: float | None = UNARY_SECONDS
    ) -> list[int]:
        message = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await _async_call(self._stub.Tokenize, message, timeout)).token_ids)

    async def model_info(self, timeout: float | None = UNARY_SECONDS) -> pb.GetModelInfoResponse:
        return await _async_call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)

    async def status(self, timeout: float | None = UNARY_SECONDS) -> pb.GetStatusResponse:
        return await _async_call(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _call(method: Any, message: Any, timeout: float | None) -> Any:
    try:
        return method(message, timeout=timeout)
    except grpc.RpcError as error:
        raise error_of(error) from error


async def _async_call(method: Any, message: Any, timeout: float | None) -> Any:
    try:
        return await method(message, timeout=timeout)
    except grpc.RpcError as error:
        raise error_of(error) from error
