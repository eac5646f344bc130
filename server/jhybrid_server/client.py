"""Client and AsyncClient: the gRPC service in the engine's own nouns (Request in, Delta or Output out).

What the server refuses is raised here as the error that the engine itself would raise. Other ends of a call
(deadline, lost connection) are grpc.RpcError.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypedDict, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jhybrid.errors import JhybridError
from jhybrid.request import Completion, Delta, Output, Request, SamplingParams
from jhybrid_server import wire
from jhybrid_server.scoring import ContinuationScore, Question
from jhybrid_server.statuses import error_of
from jhybrid_server.talk import ChatDelta, Choice
from jhybrid_server.tls import ClientTls
from jhybrid_server.tool_formats import Tool, ToolCall
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


AnyDelta = TypeVar("AnyDelta", bound=Delta)


class AssistantMessage(TypedDict):
    """What a chat's answer says, in the form in which a conversation takes it in."""

    role: str
    content: str
    reasoning: str
    tool_calls: list[ToolCall]


@dataclass(frozen=True)
class Answer:
    """A finished call."""

    output: Output
    usage: Usage
    timing: Timing
    messages: list[AssistantMessage] = field(default_factory=list)
    """Of a chat, one for each answer."""


class _Collected(Generic[AnyDelta]):
    """What a call's messages add up to; the two kinds of stream share it."""

    def __init__(self, request: Request, read: Callable[[pb.GenerateResponse], AnyDelta]):
        self.usage: Usage | None = None
        """Set with the last delta."""
        self.timing: Timing | None = None
        """Set with the last delta."""
        self._output = Output("", list(request.prompt_token_ids or ()), [])
        self._read = read
        self._messages: list[AssistantMessage] = []

    def take(self, message: pb.GenerateResponse) -> AnyDelta:
        delta = self._read(message)
        if message.HasField("usage"):
            self.usage = wire.usage_from_wire(message.usage)
            self.timing = wire.timing_from_wire(message.timing)
        self._output.request_id = delta.request_id
        while len(self._output.completions) <= delta.index:
            self._output.completions.append(Completion(len(self._output.completions)))
        self._output.add(delta)
        if isinstance(delta, ChatDelta):
            self._hear(delta)
        return delta

    def _hear(self, delta: ChatDelta) -> None:
        while len(self._messages) <= delta.index:
            self._messages.append({"role": "assistant", "content": "", "reasoning": "", "tool_calls": []})
        message = self._messages[delta.index]
        message["content"] += delta.text
        message["reasoning"] += delta.reasoning
        message["tool_calls"] += delta.tool_calls

    def take_all(self, message: pb.CompleteResponse) -> None:
        """The messages of a call that was answered at once."""
        message.answers[-1].usage.CopyFrom(message.usage)
        message.answers[-1].timing.CopyFrom(message.timing)
        for answer in message.answers:
            self.take(answer)

    def answer(self) -> Answer:
        assert self.usage is not None, "the call ended well but its last message has no usage"
        assert self.timing is not None
        return Answer(self._output, self.usage, self.timing, self._messages)


class DeltaStream(_Collected[AnyDelta]):
    """Deltas of one call as they come. `cancel` ends it; `usage` and `timing` are there at the end."""

    def __init__(self, request: Request, call: Any, read: Callable[[pb.GenerateResponse], AnyDelta]):
        super().__init__(request, read)
        self._call = call

    def __iter__(self) -> Iterator[AnyDelta]:
        try:
            for message in self._call:
                yield self.take(message)
        except grpc.RpcError as error:
            raise error_of(error) from error

    def cancel(self) -> None:
        """End the call; the server gives its memory back."""
        self._call.cancel()


class AsyncDeltaStream(_Collected[AnyDelta]):
    """DeltaStream for asyncio."""

    def __init__(self, request: Request, call: Any, read: Callable[[pb.GenerateResponse], AnyDelta]):
        super().__init__(request, read)
        self._call = call

    async def __aiter__(self) -> AsyncIterator[AnyDelta]:
        try:
            async for message in self._call:
                yield self.take(message)
        except grpc.RpcError as error:
            raise error_of(error) from error

    def cancel(self) -> None:
        """End the call; the server gives its memory back."""
        self._call.cancel()


class _Stub:
    """The service's calls with what every one of them carries."""

    def __init__(self, channel: Any, api_key: str | None):
        self._stub = services.InferenceServiceStub(channel)
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)

    def __call__(self, method: str, message: Any, timeout: float | None) -> Any:
        return getattr(self._stub, method)(message, timeout=timeout, metadata=self._metadata)


class Client:
    """A connection to one server. Usable from several threads; close it, or use it in a `with`.

    `timeout` is a call's deadline in seconds, None for none; answers have none unless one is given.
    """

    def __init__(self, target: str, model: str = "", api_key: str | None = None, tls: ClientTls | None = None):
        """`target` is host:port; `model` empty means whichever is served; without `tls` nothing is encrypted."""
        self._channel = (
            grpc.insecure_channel(target, options=OPTIONS)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options=OPTIONS)
        )
        self._stub = _Stub(self._channel, api_key)
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

    def stream(self, request: Request, timeout: float | None = None) -> DeltaStream[Delta]:
        """Start a call. RequestError and the like are raised while iterating. `timeout` in seconds is its deadline."""
        message = wire.request_to_wire(request, self._model)
        return DeltaStream(request, self._stub("Generate", message, timeout), wire.delta_from_wire)

    def generate(self, request: Request, timeout: float | None = None) -> Answer:
        """The whole answer at once."""
        collected = _Collected(request, wire.delta_from_wire)
        collected.take_all(self._ask("Complete", wire.request_to_wire(request, self._model), timeout))
        return collected.answer()

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        sampling: SamplingParams,
        timeout: float | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Iterable[Tool] = (),
        tool_choice: Choice | None = None,
    ) -> DeltaStream[ChatDelta]:
        """Start an answer to a conversation, which the model's chat template writes out.

        `messages` have role and content, perhaps name, reasoning, tool_calls (`ToolCall`s) and tool_call_id; those of
        an `Answer` can be put among them.
        """
        variables = chat_template_kwargs or {}
        message = wire.chat_to_wire(messages, sampling, self._model, variables, tools, tool_choice)
        return DeltaStream(Request(), self._stub("Chat", message, timeout), wire.chat_delta_from_wire)

    def score(self, question: Question, timeout: float | None = None) -> list[ContinuationScore]:
        """Log-probabilities of continuations of a context."""
        message = wire.question_to_wire(question, self._model)
        return wire.scores_from_wire(self._ask("Score", message, timeout))

    def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = UNARY_SECONDS) -> list[int]:
        message = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._ask("Tokenize", message, timeout).token_ids)

    def detokenize(
        self, ids: Iterable[int], skip_special_tokens: bool = False, timeout: float | None = UNARY_SECONDS
    ) -> str:
        message = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        return self._ask("Detokenize", message, timeout).text

    def model_info(self, timeout: float | None = UNARY_SECONDS) -> pb.GetModelInfoResponse:
        return self._ask("GetModelInfo", pb.GetModelInfoRequest(), timeout)

    def status(self, timeout: float | None = UNARY_SECONDS) -> pb.GetStatusResponse:
        return self._ask("GetStatus", pb.GetStatusRequest(), timeout)

    def flush_cache(self, timeout: float | None = UNARY_SECONDS) -> None:
        """Forget every cached prefix."""
        self._ask("FlushCache", pb.FlushCacheRequest(), timeout)

    def abort(self, request_id: str, timeout: float | None = UNARY_SECONDS) -> bool:
        """End a running request of anybody. False if there is none of that id."""
        return self._ask("Abort", pb.AbortRequest(request_id=request_id), timeout).found

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, message: Any, timeout: float | None) -> Any:
        try:
            return self._stub(method, message, timeout)
        except grpc.RpcError as error:
            raise error_of(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Client for asyncio. Make it inside a running event loop."""

    def __init__(self, target: str, model: str = "", api_key: str | None = None, tls: ClientTls | None = None):
        """`target` is host:port; `model` empty means whichever is served; without `tls` nothing is encrypted."""
        self._channel = (
            grpc.aio.insecure_channel(target, options=OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(target, tls.credentials(), options=OPTIONS)
        )
        self._stub = _Stub(self._channel, api_key)
        self._model = model

    def stream(self, request: Request, timeout: float | None = None) -> AsyncDeltaStream[Delta]:
        """Start a call. RequestError and the like are raised while iterating. `timeout` in seconds is its deadline."""
        message = wire.request_to_wire(request, self._model)
        return AsyncDeltaStream(request, self._stub("Generate", message, timeout), wire.delta_from_wire)

    async def generate(self, request: Request, timeout: float | None = None) -> Answer:
        """The whole answer at once."""
        collected = _Collected(request, wire.delta_from_wire)
        collected.take_all(await self._ask("Complete", wire.request_to_wire(request, self._model), timeout))
        return collected.answer()

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        sampling: SamplingParams,
        timeout: float | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Iterable[Tool] = (),
        tool_choice: Choice | None = None,
    ) -> AsyncDeltaStream[ChatDelta]:
        """Start an answer to a conversation; see `Client.chat`."""
        variables = chat_template_kwargs or {}
        message = wire.chat_to_wire(messages, sampling, self._model, variables, tools, tool_choice)
        return AsyncDeltaStream(Request(), self._stub("Chat", message, timeout), wire.chat_delta_from_wire)

    async def score(self, question: Question, timeout: float | None = None) -> list[ContinuationScore]:
        """Log-probabilities of continuations of a context."""
        message = wire.question_to_wire(question, self._model)
        return wire.scores_from_wire(await self._ask("Score", message, timeout))

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, timeout: float | None = UNARY_SECONDS
    ) -> list[int]:
        message = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._ask("Tokenize", message, timeout)).token_ids)

    async def detokenize(
        self, ids: Iterable[int], skip_special_tokens: bool = False, timeout: float | None = UNARY_SECONDS
    ) -> str:
        message = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        return (await self._ask("Detokenize", message, timeout)).text

    async def model_info(self, timeout: float | None = UNARY_SECONDS) -> pb.GetModelInfoResponse:
        return await self._ask("GetModelInfo", pb.GetModelInfoRequest(), timeout)

    async def status(self, timeout: float | None = UNARY_SECONDS) -> pb.GetStatusResponse:
        return await self._ask("GetStatus", pb.GetStatusRequest(), timeout)

    async def flush_cache(self, timeout: float | None = UNARY_SECONDS) -> None:
        """Forget every cached prefix."""
        await self._ask("FlushCache", pb.FlushCacheRequest(), timeout)

    async def abort(self, request_id: str, timeout: float | None = UNARY_SECONDS) -> bool:
        """End a running request of anybody. False if there is none of that id."""
        return (await self._ask("Abort", pb.AbortRequest(request_id=request_id), timeout)).found

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, method: str, message: Any, timeout: float | None) -> Any:
        try:
            return await self._stub(method, message, timeout)
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
