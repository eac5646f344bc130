"""HTTP by the standard library, so that a test sees what is on the wire and can hang up when it likes."""

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


def ask(port: int, path: str, body: object = None, method: str = "", **headers: str) -> Reply:
    """One request. `body` is JSON unless it is bytes; underscores in names of headers are hyphens."""
    connection = _send(port, path, body, method, headers)
    response = connection.getresponse()
    reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return reply


def events(port: int, path: str, body: dict) -> Iterator[Any]:
    """The events of a stream as JSON, `[DONE]` as a string. Closing the iterator hangs up."""
    connection = _send(port, path, body | {"stream": True}, "", {})
    try:
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert (response.getheader("content-type") or "").startswith("text/event-stream")
        for line in response:
            if line.strip():
                data = line.decode().removeprefix("data: ").strip()
                yield data if data == "[DONE]" else json.loads(data)
    finally:
        connection.close()


def hang(port: int, path: str, body: dict, receive_buffer: int | None = None) -> socket.socket:
    """Send a request and keep the socket, its answer unread."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection = socket.socket()
    connection.settimeout(10)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + raw)
    return connection


def _send(port: int, path: str, body: object, method: str, headers: dict[str, str]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method or ("GET" if raw is None else "POST"), path, raw, given)
    return connection
