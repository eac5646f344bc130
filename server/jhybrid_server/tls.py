"""Tls: certificates of servers and clients, read once and checked before anything listens or connects."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jhybrid.errors import ConfigError


@dataclass(frozen=True)
class ServerTls:
    """A server's certificate chain and key, and the authority whose clients alone may connect (mutual TLS)."""

    cert: str
    key: str
    ca: str | None = None

    @classmethod
    def of(cls, cert: str | None, key: str | None, ca: str | None) -> "ServerTls | None":
        """What flags give; None if they give nothing. ConfigError for half a pair or what is no certificate."""
        if cert is None and key is None:
            if ca is not None:
                raise ConfigError("tls_ca", "is given without tls_cert and tls_key; give them too")
            return None
        if cert is None or key is None:
            raise ConfigError("tls_key" if key is None else "tls_cert", "is missing: tls_cert and tls_key go together")
        tls = cls(cert, key, ca)
        for field, path in (("tls_cert", cert), ("tls_key", key), ("tls_ca", ca)):
            if path is not None:
                _read(field, path)
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
        except ssl.SSLError as error:
            raise ConfigError("tls_cert", f"{cert} and {key} are no pair of certificate and key ({error})") from error
        return tls

    def credentials(self) -> grpc.ServerCredentials:
        """For the gRPC server."""
        pairs: Any = [(_read("tls_key", self.key), _read("tls_cert", self.cert))]
        ca = None if self.ca is None else _read("tls_ca", self.ca)
        return grpc.ssl_server_credentials(pairs, ca, require_client_auth=ca is not None)

    def uvicorn_options(self) -> dict[str, Any]:
        """For the HTTP server."""
        options: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.ca is not None:
            options |= {"ssl_ca_certs": self.ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options


@dataclass(frozen=True)
class ClientTls:
    """What a client trusts (None: the system's authorities), and its own certificate where the server asks for one."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError naming the file that cannot be read."""
        ca, key, cert = (
            None if path is None else _read(field, path)
            for field, path in (("tls_ca", self.ca), ("tls_key", self.key), ("tls_cert", self.cert))
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, f"{path} cannot be read: {error}") from error
