"""What `jhybrid serve` and `jhybrid client` run."""

import asyncio
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from jhybrid.config import EngineConfig
from jhybrid.errors import JhybridError
from jhybrid.request import Request, SamplingParams
from jhybrid.startup import Startup
from jhybrid_server.announcement import Announcement
from jhybrid_server.bridge import Bridge, ServedEngine, StuckError
from jhybrid_server.call_log import CallLog
from jhybrid_server.client import Client
from jhybrid_server.desk import Desk
from jhybrid_server.dialect import Parsers
from jhybrid_server.grpc_server import GrpcServer, Health
from jhybrid_server.http_server import HttpServer
from jhybrid_server.keys import Keys
from jhybrid_server.tls import ClientTls, ServerTls
from jhybrid_server.tracing import CallTracer

log = logging.getLogger("jhybrid_server")

WATCH_SECONDS = 0.5
"""How often health is brought up to date."""


@dataclass(frozen=True)
class Listening:
    """Where and to whom a server answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Of HTTP; 0 picks a free one."""
    grpc_port: int = 50051
    """0 picks a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """None lets everybody in."""
    tls: ServerTls | None = None
    """None for unencrypted connections."""


def serve(
    config: EngineConfig,
    listening: Listening,
    served_model_name: str | None = None,
    drain_timeout: float = 30.0,
    watchdog_seconds: float = 0.0,
    log_prompts: bool = False,
    otlp_traces_endpoint: str | None = None,
    json_output: bool = False,
    parsers: Parsers | None = None,
    stream_interval: int = 1,
    make_engine: Callable[[Startup], ServedEngine] | None = None,
) -> int:
    """Serve over HTTP and gRPC until SIGTERM or SIGINT; returns the process's exit code.

    Listens at once, and prints an Announcement when requests are answered, with `json_output` as a JSON object. The
    first signal lets running requests finish for up to `drain_timeout` seconds, a second one ends them at once. With
    work and no step that ends for `watchdog_seconds`, health turns NOT_SERVING until one does; 0 for never. Raises what
    keeps the engine from starting (ConfigError, WeightsError, OutOfMemoryError). Exit code 1 means that the engine's
    thread died. A signal before the engine is there ends the process at once, with 0. `stream_interval` is the
    bridge's; `make_engine` stands in for the engine in tests.
    """
    startup = Startup()
    bridge = Bridge(partial(make_engine or partial(_engine, config), startup), startup, stream_interval)
    name = served_model_name or config.model
    tracers = [CallTracer(otlp_traces_endpoint, name)] if otlp_traces_endpoint else []
    desk = Desk(bridge, name, watchdog_seconds, [CallLog(log_prompts), *tracers], parsers)
    code = asyncio.run(_serve(desk, listening, drain_timeout, json_output))
    for tracer in tracers:
        tracer.close()
    if not bridge.close(timeout=10.0 if bridge.started else 0.0):
        # Loading, compiling and a step cannot be interrupted, and the interpreter would wait for their threads.
        if bridge.started:
            log.warning("the engine's thread is still inside a step; leaving without it")
        else:
            log.info("left before the model was ready (%s)", startup)
        sys.stdout.flush()
        os._exit(code)
    return code


def _engine(config: EngineConfig, startup: Startup) -> ServedEngine:
    from jhybrid.engine import Engine

    engine = Engine(config, startup)
    if engine.intake.grammars is not None:
        engine.intake.grammars.guard()
    gc.collect()
    gc.freeze()  # what an engine consists of stays, and looking through it would stop all threads for long
    return engine


async def _serve(desk: Desk, listening: Listening, drain_timeout: float, json_output: bool) -> int:
    keys = Keys(listening.api_keys)
    if not keys and not _is_loopback(listening.host):
        log.warning("anybody who reaches %s can use this server; give --api-key to change that", listening.host)
    http = HttpServer(desk, listening.host, listening.port, keys, listening.tls)
    grpc_ = GrpcServer(desk, listening.host, listening.grpc_port, keys, listening.tls)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, lambda: hurry.set() if stop.is_set() else stop.set())
    await asyncio.gather(http.start(), grpc_.start())
    addresses = f"{http.host}:{http.port}", f"{grpc_.host}:{grpc_.port}"
    log.info("listening on %s for HTTP and on %s for gRPC; requests are answered once the model is loaded", *addresses)
    desk.bridge.start()
    watch = asyncio.create_task(_watch(desk, grpc_.health))
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(desk.bridge.ready())
    death = asyncio.create_task(desk.bridge.death())
    try:
        await asyncio.wait((stopped, ready), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return 0
        await ready
        await grpc_.health.update()
        has_tokenizer = desk.bridge.engine.tokenizer is not None
        facts = desk.model_name, *addresses, listening.tls, bool(keys), has_tokenizer, await desk.status()
        announcement = Announcement(*facts)
        print(announcement.as_json() if json_output else announcement.as_text(), flush=True)
        await asyncio.wait((stopped, death), return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            return 1
        log.info("shutting down: running requests have %g s to finish", drain_timeout)
        await asyncio.gather(desk.drain(drain_timeout, hurry), grpc_.health.update())
        return 0
    finally:
        await asyncio.gather(http.stop(), grpc_.stop())
        tasks = (stopped, ready, death, watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(desk: Desk, health: Health) -> None:
    """Keep gRPC health true, and log when the engine gets stuck and when it moves again."""
    was_stuck = False
    while True:
        await health.update()
        refusal = desk.refusal()
        is_stuck = isinstance(refusal, StuckError)
        if is_stuck and not was_stuck:
            log.error("%s. The engine's thread is here:\n%s", refusal, desk.bridge.stack())
        if was_stuck and not is_stuck:
            log.warning("steps end again")
        was_stuck = is_stuck
        await asyncio.sleep(WATCH_SECONDS)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def client(
    target: str,
    prompts: Sequence[str],
    sampling: SamplingParams,
    timeout: float | None = None,
    json_output: bool = False,
    wait_seconds: float = 0.0,
    api_key: str | None = None,
    tls: ClientTls | None = None,
) -> None:
    """Ask a server and print its answers: text as it streams in, or with `json_output` one object per prompt.

    `wait_seconds` waits that long for a server that is still starting. Raises RequestError and the like as the
    engine would, and JhybridError where the call itself failed.
    """
    with Client(target, api_key=api_key, tls=tls) as connection:
        if wait_seconds:
            connection.wait_until_serving(wait_seconds)
        for prompt in prompts:
            try:
                _ask(connection, Request(prompt=prompt, sampling=sampling), timeout, json_output)
            except grpc.RpcError as error:
                raise JhybridError(f"{target}: {error.code().name}: {error.details()}") from error  # pyright: ignore[reportAttributeAccessIssue]


def _ask(connection: Client, request: Request, timeout: float | None, json_output: bool) -> None:
    stream = connection.stream(request, timeout)
    together = request.sampling.n == 1 and not json_output
    for delta in stream:
        if together:
            print(delta.text, end="", flush=True)
    if together:
        print()
        return
    answer = stream.answer()
    if json_output:
        print(json.dumps({"prompt": request.prompt} | dataclasses.asdict(answer), ensure_ascii=False))
        return
    for completion in answer.output.completions:
        print(f"--- [{completion.index}] {completion.finish_reason}")
        print(completion.text)
