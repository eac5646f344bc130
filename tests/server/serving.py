"""A server in this process, on a free port, with its event loop in a thread of its own."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from jhybrid_server.bridge import Bridge, ServedEngine
from jhybrid_server.client import Client
from jhybrid_server.grpc_server import GrpcServer


@dataclass
class Served:
    bridge: Bridge
    server: GrpcServer
    loop: asyncio.AbstractEventLoop
    client: Client

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextlib.contextmanager
def serving(make_engine: Callable[[], ServedEngine], wait: bool = True) -> Iterator[Served]:
    """Serve until the block is left; with `wait` the engine is there when it is entered."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    bridge = Bridge(make_engine)

    async def start() -> GrpcServer:
        server = GrpcServer(bridge, "fake")
        await server.start()
        bridge.start()
        if wait:
            await bridge.ready()
            await server.serving()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        with Client(f"127.0.0.1:{server.port}") as client:
            yield Served(bridge, server, loop, client)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
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
