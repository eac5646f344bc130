"""Answering: one generation over HTTP, as a JSON object or server-sent events, until it ends or its client goes."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from jhybrid.errors import RequestError
from jhybrid.request import Request
from jhybrid_server.desk import Call, Desk
from jhybrid_server.http_errors import error_body, error_response
from jhybrid_server.openai_answers import Answers, cost, envelope, now
from jhybrid_server.openai_schema import GenerationBody

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

LONG_ANSWER = 1024
"""Answers of more tokens, prompts included, become JSON away from the event loop: each may have log-probabilities."""


class Answering:
    """An ASGI application for one request that has been understood but not let in yet."""

    def __init__(
        self,
        desk: Desk,
        body: GenerationBody,
        name: str,
        requests: Sequence[Request],
        make_answers: Callable[[Call], Answers],
    ):
        self._desk, self._body, self._name, self._requests = desk, body, name, requests
        self._make_answers = make_answers
        self._created = now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(scope, receive, send) if self._body.stream else self._whole(scope, receive, send)
        await until_gone(receive, work)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._desk.call(self._requests, self._body.model) as call:
                answers = self._make_answers(call)
                parts = await call.answers()

                def response() -> JSONResponse:
                    return JSONResponse(self._envelope(answers.kind, answers.wholes(parts)) | cost(call, answers))

                usage = call.usage
                is_long = usage.prompt_tokens + usage.completion_tokens > LONG_ANSWER
                made = await asyncio.to_thread(response) if is_long else response()
                await made(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - every error becomes a response
            await error_response(renamed(error, self._body))(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = Events(send, self._name)
        try:
            async with self._desk.call(self._requests, self._body.model) as call:
                answers = self._make_answers(call)
                kind = answers.chunk_kind
                head = encode(self._envelope(kind, [])).removesuffix("]}")
                tail = '],"usage":null}' if self._body.wants_stream_usage else "]}"
                await events.start()
                await events.write(f"{head}{encode(choice)}{tail}" for choice in answers.begin())
                async for number, delta in call.deltas():
                    await events.write([f"{head}{encode(choice)}{tail}" for choice in answers.chunks(number, delta)])
                if self._body.wants_stream_usage:
                    await events.write([encode(self._envelope(kind, []) | cost(call, answers))])
                await events.end("[DONE]")
        except Exception as error:  # noqa: BLE001 - every error becomes a response or the stream's last event
            error = renamed(error, self._body)
            if events.started:
                await events.end(json.dumps(error_body(error)))
            else:
                await error_response(error)(scope, receive, send)

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return envelope(self._name, kind, self._desk.model_name, choices, self._created)


class Events:
    """Server-sent events. Sending waits for a client that is slow; `Connection` drops one that takes nothing."""

    def __init__(self, send: Send, name: str):
        self._send, self._name = send, name
        self.started = False

    async def start(self) -> None:
        """Status and headers. From here on an error can only be an event."""
        self.started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies must not gather events
            (b"x-request-id", self._name.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: Iterable[str]) -> None:
        """Some events, JSON each, in one piece."""
        data = "".join([f"data: {event}\n\n" for event in events])
        if data:
            await self._send({"type": "http.response.body", "body": data.encode(), "more_body": True})

    async def end(self, data: str) -> None:
        """The last event."""
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": False})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, the whole body having been read, and cancel it if the client leaves before."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def renamed(error: Exception, body: GenerationBody) -> Exception:
    """The error with the engine's name of a field replaced by the client's."""
    if isinstance(error, RequestError) and error.field in body.renames:
        return RequestError(body.renames[error.field], str(error).removeprefix(f"{error.field}: "))
    return error
