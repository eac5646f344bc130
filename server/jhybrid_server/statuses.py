"""Statuses: the gRPC status that each error is, and back. The server raises by it, the clients read by it.

A status carries google.rpc.ErrorInfo with the error's name as reason, and for a refused request google.rpc.BadRequest
with the field.
"""

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from jhybrid.errors import EngineDeadError, JhybridError, QueueFullError, RequestError, StepError
from jhybrid_server.bridge import NotReadyError

DOMAIN = "jhybrid"
DETAILS_KEY = "grpc-status-details-bin"  # where gRPC puts a google.rpc.Status


class ModelNotFoundError(JhybridError):
    """Another model was asked for than the one that is served."""


CODES: dict[type[JhybridError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineDeadError: grpc.StatusCode.UNAVAILABLE,
    NotReadyError: grpc.StatusCode.UNAVAILABLE,
    StepError: grpc.StatusCode.INTERNAL,
}
KINDS = {kind.__name__: kind for kind in CODES}


def code_of(error: Exception) -> grpc.StatusCode:
    """INTERNAL for errors that the table does not name."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: JhybridError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that tells programs what the status message tells people."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)]
    if isinstance(error, RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error))
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
