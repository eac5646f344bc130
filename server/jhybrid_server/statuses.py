"""Statuses: what each error is in gRPC and in HTTP, and back. The servers raise by it, the clients read by it.

A gRPC status carries google.rpc.ErrorInfo with the error's name as reason; for a refused request google.rpc.BadRequest
with the field; where the queue was full or the model is still loading, google.rpc.RetryInfo.
"""

from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from jhybrid.errors import EngineDeadError, JhybridError, QueueFullError, RequestError, StepError
from jhybrid_server.bridge import NotReadyError, StuckError

DOMAIN = "jhybrid"
DETAILS_KEY = "grpc-status-details-bin"  # where gRPC puts a google.rpc.Status
MOST_BYTES = 1000
"""Of a message over gRPC; clients take 8 KiB of headers, and a message is there three times, one of them in `%xx`."""


class ModelNotFoundError(JhybridError):
    """Another model was asked for than the one that is served."""


class UnauthenticatedError(JhybridError):
    """No API key was given, or none that is known here."""


class AbortedError(JhybridError):
    """Somebody ended the request by its id."""


class Status(NamedTuple):
    """What an error is to the client of each protocol."""

    grpc: grpc.StatusCode
    http: int
    kind: str
    """OpenAI's `type` of the error."""


STATUSES: dict[type[JhybridError], Status] = {
    RequestError: Status(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    UnauthenticatedError: Status(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
    ModelNotFoundError: Status(grpc.StatusCode.NOT_FOUND, 404, "not_found_error"),
    AbortedError: Status(grpc.StatusCode.ABORTED, 409, "aborted_error"),
    QueueFullError: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    EngineDeadError: Status(grpc.StatusCode.UNAVAILABLE, 503, "unavailable_error"),
    StuckError: Status(grpc.StatusCode.UNAVAILABLE, 503, "unavailable_error"),
    NotReadyError: Status(grpc.StatusCode.UNAVAILABLE, 503, "unavailable_error"),
    StepError: Status(grpc.StatusCode.INTERNAL, 500, "server_error"),
}
UNFORESEEN = STATUSES[StepError]
KINDS = {kind.__name__: kind for kind in STATUSES}
RETRYABLE = (QueueFullError, NotReadyError)
"""What passes: the same request may be answered later."""
RETRY_SECONDS = 1
"""When to try again: a running sequence ends within about that time, or the queue is long."""


def status_of(error: Exception) -> Status:
    """That of an internal error for what the table does not name."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), UNFORESEEN)


def message_of(error: Exception) -> str:
    """What gRPC tells of an error: as much of it as has room in what gRPC takes for headers, beside its details."""
    text = f"{error}" if isinstance(error, JhybridError) else f"{type(error).__name__}: {error}"
    said = text.encode("utf-8", "replace")
    return said.decode() if len(said) <= MOST_BYTES else said[:MOST_BYTES].decode("utf-8", "ignore") + "..."


def details_of(error: JhybridError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that tells programs what the status message tells people."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)]
    if isinstance(error, RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:200], description=message_of(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, RETRYABLE):
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS)))
    status = status_pb2.Status(code=status_of(error).grpc.value[0], message=message_of(error))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return ((DETAILS_KEY, status.SerializeToString()),)


def error_of(error: Any) -> Exception:
    """The error that an RpcError from a jhybrid server stands for; from elsewhere, the RpcError itself."""
    message, reason, field = error.details() or "", None, None
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            reason, field = _read(status_pb2.Status.FromString(value))
    if reason == RequestError.__name__ and field is not None:
        return RequestError(field, message.removeprefix(f"{field}: "))
    kind = KINDS.get(reason or "")
    return error if kind is None or kind is RequestError else kind(message)


def _read(status: status_pb2.Status) -> tuple[str | None, str | None]:
    """Reason and field of a status' details."""
    reason = field = None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = info.reason
        if detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    return reason, field
