"""Keys: who may call. Both servers ask it."""

import hashlib
import hmac
from collections.abc import Iterable

from jhybrid.errors import ConfigError
from jhybrid_server.statuses import UnauthenticatedError


class Keys:
    """API keys, kept as digests so that no log or trace can show them. None at all lets everybody in."""

    def __init__(self, keys: Iterable[str] = ()):
        keys = list(keys)
        if not all(keys):
            raise ConfigError("api_key", "is empty; give a key, or leave the flag out to let everybody in")
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """`authorization` is the header's value. Raises UnauthenticatedError unless it is `Bearer` and a known key.

        Takes as long for a wrong key as for a right one.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise UnauthenticatedError("a known API key is needed: send it as `authorization: Bearer KEY`")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
