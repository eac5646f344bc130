"""HttpServer: OpenAI's endpoints, and those for operators, on Starlette and uvicorn. `main.serve` runs it."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Iterator
from functools import partial

import uvicorn
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import jhybrid
from jhybrid.errors import ConfigError, EngineDeadError, JhybridError, RequestError
from jhybrid.metrics import EngineCollector
from jhybrid_server import page_files
from jhybrid_server.answering import Answering
from jhybrid_server.bridge import NotReadyError, StuckError
from jhybrid_server.connections import Connection
from jhybrid_server.desk import Desk
from jhybrid_server.http_errors import error_response
from jhybrid_server.keys import Keys
from jhybrid_server.openai_answers import ChatAnswers, CompletionAnswers, model_card, now
from jhybrid_server.openai_schema import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    rendering,
)
from jhybrid_server.tls import ServerTls
from jhybrid_server.tracing import traceparent

MAX_BODY_BYTES = 16 * 2**20
BODY_SECONDS = 30.0
"""How long a client may take to send its body."""
LONG_BODY = 64 * 2**10
"""Bodies beyond this are parsed away from the event loop."""
OPEN_PATHS = ("/health", "/ready")
"""What needs no key: probes cannot have one."""


class Endpoints:
    """The routes. Errors become responses in `http_errors`, nowhere else."""

    def __init__(self, desk: Desk):
        self._desk = desk
        self._created = now()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/v1/internal/status", self.status),
            *page_files.routes(),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        name = f"cmpl-{uuid.uuid4().hex}"
        with self._desk.metrics.refusals():
            body = await read(request, CompletionBody)
            body.check()
            requests = body.requests(name)
            tokenizer = self._desk.bridge.engine.tokenizer
        return Answering(self._desk, body, name, requests, lambda call: CompletionAnswers(body, call, tokenizer))

    async def chat(self, request: Request) -> ASGIApp:
        name = f"chatcmpl-{uuid.uuid4().hex}"
        with self._desk.metrics.refusals():
            body = await read(request, ChatBody)
            body.check()
            self._desk.check_model(body.model)
            prompt = await self._desk.chat_prompt(partial(rendering, body))
            talk = body.talk(self._desk.dialect, self._desk.tokenizer("messages"), prompt)
            requests = [await asyncio.to_thread(body.request, name, prompt, talk)]
        return Answering(self._desk, body, name, requests, lambda call: ChatAnswers(body, call, talk))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._desk.check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict:
        info = self._desk.bridge.engine.model_info()
        return model_card(self._desk.model_name, info["max_model_len"], self._created)

    async def tokenize(self, request: Request) -> Response:
        body = await read(request, TokenizeBody)
        body.check()
        self._desk.check_model(body.model)
        if body.messages is None:
            assert body.prompt is not None
            tokens = await self._desk.tokenize(body.prompt, body.add_special_tokens is not False, "prompt")
        else:
            prompt = await self._desk.chat_prompt(partial(rendering, body))
            tokens = await self._desk.tokenize(prompt, add_special_tokens=False, field="messages")
        limit = self._desk.bridge.engine.model_info()["max_model_len"]
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = await read(request, DetokenizeBody)
        self._desk.check_model(body.model)
        text = await self._desk.detokenize(body.tokens, skip_special_tokens=body.skip_special_tokens is True)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """What clients need that render and cut texts themselves, as lm-evaluation-harness does."""
        tokenizer = self._desk.tokenizer("tokenizer")
        templates = {"chat_template": tokenizer.chat_templates.get("default")}
        return JSONResponse({**tokenizer.named_tokens, **templates, "vocab_size": tokenizer.vocab_size})

    async def health(self, request: Request) -> Response:
        """Liveness: the process is worth keeping. One that is still loading is."""
        refusal = self._desk.refusal()
        if isinstance(refusal, EngineDeadError | StuckError):
            raise refusal
        return JSONResponse({"status": "alive", "startup": self._desk.bridge.startup.describe()})

    async def ready(self, request: Request) -> Response:
        """Readiness: requests sent here are answered. `degraded` names what is out of use all the same."""
        startup, refusal = self._desk.bridge.startup.describe(), self._desk.refusal()
        if refusal is not None:
            return error_response(refusal, startup=startup)
        degraded = {"degraded": found} if (found := self._desk.bridge.engine.degraded()) else {}
        return JSONResponse({"status": "ready", "startup": startup} | degraded)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": jhybrid.__version__})

    async def metrics(self, request: Request) -> Response:
        """Calls as clients see them, and the engine's own figures once it is there."""
        desk, registry = self._desk, CollectorRegistry()
        Gauge("jhybrid_ready", "Whether calls are let in", registry=registry).set(desk.refusal() is None)
        stalled = Gauge("jhybrid_stalled_seconds", "Since a step has ended though there is work", registry=registry)
        stalled.set(desk.bridge.stalled_seconds)
        ProcessCollector(registry=registry)
        with contextlib.suppress(NotReadyError):
            status = await desk.status()
            registry.register(EngineCollector(lambda: status))
        pages = generate_latest(desk.metrics.registry) + generate_latest(registry)
        return Response(pages, media_type=CONTENT_TYPE_LATEST)

    async def status(self, request: Request) -> Response:
        """What the engine does and holds; with `?sequences=true` also who runs and who holds which rows."""
        asked = request.query_params.get("sequences", "false")
        if asked not in ("true", "false") or request.query_params.keys() - {"sequences"}:
            raise RequestError("sequences", f"{request.url.query[:100]!r}: the query is ?sequences=true or nothing")
        desk = self._desk
        status = await (desk.picture() if asked == "true" else desk.status())
        calls = {"model": desk.model_name, "calls": desk.running, "draining": desk.draining}
        return JSONResponse(status | calls | {"latencies": desk.metrics.latencies()})


class HttpServer:
    """Listens from the start; what needs the engine is 503 until it is there."""

    def __init__(
        self, desk: Desk, host: str = "127.0.0.1", port: int = 0, keys: Keys | None = None, tls: ServerTls | None = None
    ):
        """Binds the port; 0 picks a free one, see `port`. Raises ConfigError if it is taken or no port."""
        if not 0 <= port <= 65535:
            raise ConfigError("port", f"{port} is not in [0, 65535]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise ConfigError("port", f"{host}:{port} cannot be bound ({error}); choose another") from error
        self.host, self.port = host, self._socket.getsockname()[1]
        config = uvicorn.Config(
            application(desk, keys or Keys()),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            **({} if tls is None else tls.uvicorn_options()),
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Close the port and every connection."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: `main` has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def application(desk: Desk, keys: Keys) -> ASGIApp:
    """The ASGI application."""
    errors = (HTTPException, JhybridError, ClientDisconnect, Exception)
    app = Starlette(routes=Endpoints(desk).routes(), exception_handlers=dict.fromkeys(errors, _respond))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        traces = (value for name, value in scope.get("headers", ()) if name == b"traceparent")
        traceparent.set(next((value.decode("latin-1") for value in traces), None))
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not page_files.is_open(scope["path"]):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            try:
                keys.check(None if given is None else given.decode("latin-1"))
            except JhybridError as error:
                await error_response(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)  # nobody reads it
    return error_response(error)


async def read(request: Request, kind: type[AnyBody]) -> AnyBody:
    """A request's body, its size and time bounded. Raises RequestError, or HTTPException for what HTTP itself has."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"content-type is {content_type[:100]!r}; send application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(415, f"content-encoding is {encoding[:100]!r}; send the body as it is")
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            declared = request.headers.get("content-length", "0")
            if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has {declared} bytes, at most {MAX_BODY_BYTES} are taken")
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} s") from error
    if len(raw) > LONG_BODY:
        return await asyncio.to_thread(parse, kind, bytes(raw))
    return parse(kind, bytes(raw))
