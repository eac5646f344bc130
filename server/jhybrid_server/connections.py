"""Connection: uvicorn's HTTP/1.1 on h11, which bounds the size of a request's head, with bounds on time.

uvicorn bounds the time between requests. A client that dribbles a head, or sends none, would hold a connection forever;
so would one that takes nothing of its answer, even after the answer's end: closing waits until all bytes are taken.
"""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jhybrid_server.desk import STALL_SECONDS

log = logging.getLogger("jhybrid_server")

HEAD_SECONDS = 15.0
"""From connecting, or from the first byte of a later request, to the end of its head."""


class Connection(H11Protocol):
    """Closes itself when the head of a request is late, or its client takes none of the bytes that wait for it."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._left, self._since = 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_SECONDS, transport.close)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Drop a client that has taken nothing for STALL_SECONDS. While nothing is written, the buffer only shrinks."""
        is_waiting = self.flow.write_paused or self.transport.is_closing()
        left, now = self.transport.get_write_buffer_size() if is_waiting else 0, self.loop.time()
        if not left or left != self._left:
            self._left, self._since = left, now
        elif now - self._since >= STALL_SECONDS:
            log.warning("a client took no bytes for %g s; its connection is dropped with %d left", STALL_SECONDS, left)
            self.transport.abort()
            return
        self._next_look = self.loop.call_later(STALL_SECONDS / 10, self._look)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
