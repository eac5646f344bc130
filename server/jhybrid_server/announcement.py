"""Announcement: what `jhybrid serve` prints once it is ready: what is served, where, the memory plan, what to try."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

from jhybrid_server.grpc_server import SERVICE
from jhybrid_server.tls import ServerTls

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
"""Where to reach a server on this machine that listens on every interface."""


@dataclass(frozen=True)
class Announcement:
    """Facts of a server that is ready."""

    model: str
    http: str
    """host:port."""
    grpc: str
    """host:port."""
    tls: ServerTls | None
    asks_key: bool
    has_tokenizer: bool
    status: dict[str, Any]
    """As `Engine.status` gives it."""

    def as_json(self) -> str:
        """One line."""
        facts: dict[str, Any] = {"model": self.model, "http": self.http, "grpc": self.grpc, "tls": self.tls is not None}
        memory = {"memory_bytes": self.status["memory_bytes"]}
        return json.dumps(facts | memory | {"curl": self.curl, "grpcurl": self.grpcurl})

    def as_text(self) -> str:
        """The first line has the addresses."""
        http, grpc = ("https", "grpcs") if self.tls else ("http", "grpc")
        return "\n".join(
            (
                f"jhybrid serves {self.model} at {http}://{self.http} and {grpc}://{self.grpc}",
                f"  memory   {self._memory()}",
                f"  page     {http}://{_reachable(self.http)}/",
                f"  curl     {self.curl}",
                f"  grpcurl  {self.grpcurl}",
            )
        )

    def _memory(self) -> str:
        kinds = self.status["memory_bytes"]
        rows = {"kv": "pages", "state": "slots", "snapshots": "snapshots"}
        parts = []
        for kind, size in kinds.items():
            total = self.status.get(rows.get(kind, ""), {}).get("total")
            parts.append(f"{kind} {_bytes(size)}" + (f" ({total} {rows[kind]})" if total else ""))
        return f"{_bytes(sum(kinds.values()))}: {', '.join(parts)}"

    @property
    def curl(self) -> str:
        """Asks for a few tokens over HTTP."""
        scheme, trust = ("https", self._trust("--cacert", "--cert", "--key")) if self.tls else ("http", "")
        prompt = "The king" if self.has_tokenizer else [1, 2, 3]
        body = shlex.quote(json.dumps({"prompt": prompt, "max_tokens": 20}))
        url = f"{scheme}://{_reachable(self.http)}/v1/completions"
        return f"curl {trust}{url} {self._key()}-H 'content-type: application/json' -d {body}"

    @property
    def grpcurl(self) -> str:
        """Asks for a few tokens over gRPC."""
        trust = self._trust("-cacert", "-cert", "-key") if self.tls else "-plaintext "
        prompt = {"text": "The king"} if self.has_tokenizer else {"token_ids": {"ids": [1, 2, 3]}}
        body = shlex.quote(json.dumps(prompt | {"sampling": {"max_tokens": 20}}))
        return f"grpcurl {trust}{self._key()}-d {body} {_reachable(self.grpc)} {SERVICE}/Complete"

    def _key(self) -> str:
        return '-H "authorization: Bearer $JHYBRID_API_KEY" ' if self.asks_key else ""

    def _trust(self, ca: str, cert: str, key: str) -> str:
        assert self.tls is not None
        own = f"{cert} CLIENT.pem {key} CLIENT.key " if self.tls.ca else ""
        return f"{ca} {shlex.quote(self.tls.cert)} {own}"


def _reachable(address: str) -> str:
    """An address that clients on this machine can use."""
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK.get(host, host)}:{port}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
