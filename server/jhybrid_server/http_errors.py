"""Errors as HTTP responses in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from jhybrid.errors import JhybridError, RequestError
from jhybrid_server.statuses import RETRY_SECONDS, RETRYABLE, UNFORESEEN, UnauthenticatedError, status_of

log = logging.getLogger("jhybrid_server")


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON of an error; also the data of a stream's last event."""
    if isinstance(error, HTTPException):
        kind, message = "invalid_request_error", error.detail
    elif isinstance(error, JhybridError):
        kind, message = status_of(error).kind, str(error)
    else:
        log.error("a call failed for a reason that nobody foresaw", exc_info=error)
        kind, message = UNFORESEEN.kind, f"{type(error).__name__}: {error}"
    param = error.field if isinstance(error, RequestError) else None
    code = _code(error) if isinstance(error, JhybridError) and param is None else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception, **beside: object) -> JSONResponse:
    """The response that an error is, with what else its body is to say."""
    status = error.status_code if isinstance(error, HTTPException) else status_of(error).http
    headers: dict[str, str] = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, RETRYABLE):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error) | beside, status, headers)


def _code(error: JhybridError) -> str:
    """A word for programs: `queue_full`, `model_not_found`."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")
