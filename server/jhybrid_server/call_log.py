"""CallLog: one line per call at its end, with its request id. What was asked is in it only where that was asked for."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jhybrid.errors import RequestError
from jhybrid.request import Request
from jhybrid_server.statuses import ModelNotFoundError

if TYPE_CHECKING:
    from jhybrid_server.desk import Call

log = logging.getLogger("jhybrid_server")


class CallLog:
    """Writes the lines of one desk."""

    def __init__(self, prompts: bool = False):
        """With `prompts`, a line has the prompts, as text or token ids."""
        self._prompts = prompts

    def write(
        self,
        requests: Sequence[Request],
        call: "Call | None",
        outcome: str,
        seconds: float,
        error: BaseException | None,
    ) -> None:
        """The call has ended. `call` is None if it was not let in."""
        fields: dict[str, Any] = {"request_id": requests[0].request_id if requests else None, "outcome": outcome}
        fields["seconds"] = _rounded(seconds)
        if call is not None:
            usage, timing = call.usage, call.timing
            fields |= {
                "request_id": call.name,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "first_token_seconds": _rounded(timing.first_token_seconds),
                "queue_seconds": _rounded(timing.queue_seconds),
            }
        if error is not None:
            fields["error"] = _described(error)
        if self._prompts:
            fields["prompts"] = [r.prompt if r.prompt is not None else r.prompt_token_ids for r in requests]
        told = " ".join(f"{name}={value}" for name, value in fields.items() if name != "outcome" and value is not None)
        log.info("call %s: %s", outcome, told, extra={"fields": fields})


def _described(error: BaseException) -> str:
    """Messages of refusals may quote what was asked, so of those only the kind and the field are told."""
    kind = type(error).__name__
    if isinstance(error, RequestError):
        return f"{kind}: {error.field}"
    return kind if isinstance(error, ModelNotFoundError) or not str(error) else f"{kind}: {error}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
