"""Usage and Timing: what a call cost. The desk counts them; wire, HTTP answers and clients pass them on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens of one call, all its answers together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    miss_cause: str | None = None
    reasoning_tokens: int | None = None
    """Of a chat's completion tokens; None where no reasoning was to be expected."""


@dataclass(frozen=True)
class Timing:
    """Seconds since the server received the call."""

    first_token_seconds: float | None
    total_seconds: float
    queue_seconds: float | None = None
