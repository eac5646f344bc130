"""A server in this process, on a free port, with its event loop in a thread of its own."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from jhybrid_server.bridge import Bridge, ServedEngine
from jhybrid_server.call_log import CallLog
from jhybrid_server.client import Client
from jhybrid_server.desk import Desk
from jhybrid_server.grpc_server import GrpcServer
from jhybrid_server.http_server import HttpServer
from jhybrid_server.keys import Keys
from jhybrid_server.tls import ServerTls


@dataclass
class Served:
    bridge: Bridge
    desk: Desk
    server: GrpcServer
    http: HttpServer
    loop: asyncio.AbstractEventLoop
    client: Client

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    def drain(self, timeout: float) -> Coroutine[Any, Any, Any]:
        """What the process does at its end."""

        async def work() -> None:
            await asyncio.gather(self.desk.drain(timeout), self.server.health.update())

        return work()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextlib.contextmanager
def serving(
    make_engine: Callable[[], ServedEngine],
    wait: bool = True,
    keys: Keys | None = None,
    tls: ServerTls | None = None,
) -> Iterator[Served]:
    """Serve until the block is left; with `wait` the engine is there when it is entered."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    bridge = Bridge(make_engine)

    desk = Desk(bridge, "fake", observers=[CallLog()])

    async def start() -> tuple[GrpcServer, HttpServer]:
        server, http = GrpcServer(desk, keys=keys, tls=tls), HttpServer(desk, keys=keys, tls=tls)
        await asyncio.gather(server.start(), http.start())
        bridge.start()
        if wait:
            await bridge.ready()
            await server.health.update()
        return server, http

    async def stop() -> None:
        await asyncio.gather(server.stop(), http.stop())

    server, http = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        with Client(f"127.0.0.1:{server.port}") as client:
            yield Served(bridge, desk, server, http, loop, client)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        assert bridge.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
