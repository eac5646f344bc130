"""Request, its sampling parameters, and what comes back. Called by everyone who asks something of the engine."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jhybrid.errors import RequestError
from jhybrid.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_SNAPSHOTS = 64
MAX_SALT = 256
MAX_ID = 256


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Field names are those that LLM servers share.

    `logprobs=k` returns the k most likely tokens of the model's own distribution (before temperature and
    filters) with the sampled token always among them; 0 returns the sampled token alone. `prompt_logprobs`
    is the same for the prompt's tokens. `seed` makes the tokens a function of the request alone.
    """

    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0  # index of the first prompt token whose log-probability is wanted; None before it
    stop: list[str] | str | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None  # what the text must look like

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def validate(self, vocab_size: int) -> None:
        """Refuse what cannot be meant. Raises RequestError naming the field, the value and the remedy."""
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        _integer("max_tokens", self.max_tokens, 0, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        _number("temperature", self.temperature, 0.0, None)
        _integer("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "0 keeps no token; use a value in (0, 1], or temperature=0 for greedy")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _integer("n", self.n, 1, MAX_N)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs_from", self.prompt_logprobs_from, 0, None)
        if self.stop is not None and not isinstance(self.stop, str | list | tuple):
            raise RequestError("stop", f"must be a string or a list of strings, got {type(self.stop).__name__}")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"{len(self.stop_strings)} strings given, at most {MAX_STOP_STRINGS} allowed")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError("stop", f"{text!r} is not a non-empty string; remove it")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise RequestError("stop_token_ids", f"must be a list of integers, got {self.stop_token_ids!r}")
        if not isinstance(self.logit_bias, dict):
            raise RequestError("logit_bias", f"must map token ids to numbers, got {self.logit_bias!r}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"{len(self.logit_bias)} entries given, at most {MAX_LOGIT_BIAS} allowed")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, vocab_size - 1)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise RequestError(
                "structured_outputs", f"must be StructuredOutputs(...), got {self.structured_outputs!r}"[:200]
            )


@dataclass(frozen=True)
class Request:
    """What was asked, unchanged for the life of the request. Exactly one of `prompt` and `prompt_token_ids`."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None  # None: the engine gives one
    priority: int = 0  # lower runs earlier
    add_special_tokens: bool = True  # for `prompt`: add BOS where the tokenizer's configuration says so
    cache_salt: str | None = None  # prefixes are shared only between requests of the same salt
    snapshot_at: list[int] = field(default_factory=list)
    """Prompt lengths, in tokens, at which to keep the recurrent state for others; rounded down to whole pages."""

    def validate(self, vocab_size: int) -> None:
        """Refuse what cannot be meant. Raises RequestError naming the field, the value and the remedy."""
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError("sampling", f"must be SamplingParams(...), got {self.sampling!r}")
        self.sampling.validate(vocab_size)
        if self.request_id is not None and not isinstance(self.request_id, str):
            raise RequestError("request_id", f"must be a string or None, got {self.request_id!r}")
        if self.request_id is not None and len(self.request_id) > MAX_ID:
            raise RequestError("request_id", f"has {len(self.request_id)} characters, at most {MAX_ID} allowed")
        _integer("priority", self.priority, None, None)
        _flag("add_special_tokens", self.add_special_tokens)
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise RequestError("prompt", "give exactly one of prompt and prompt_token_ids")
        if self.prompt is not None:
            if not isinstance(self.prompt, str):
                raise RequestError("prompt", f"must be a string, got {type(self.prompt).__name__}")
            return
        ids = self.prompt_token_ids
        if not isinstance(ids, list | tuple):
            raise RequestError("prompt_token_ids", f"must be a list of integers, got {type(ids).__name__}")
        if not ids:
            raise RequestError("prompt_token_ids", "is empty; give at least one token")
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError("prompt_token_ids", f"entry {at} is {token!r}; must be an integer")
            if not 0 <= token < vocab_size:
                raise RequestError("prompt_token_ids", f"entry {at} is {token}; must be in [0, {vocab_size})")


SCALARS = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "prompt_logprobs",
    "prompt_logprobs_from",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields of SamplingParams that every protocol has under their own names, as one optional value each."""

TokenLogprobs = list[tuple[int, float]]  # (token id, log-probability), highest first


@dataclass
class Completion:
    """One of a request's `n` answers."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    error: str | None = None


@dataclass
class Output:
    """A finished request. The fields of the first completion are also reachable here."""

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first entry is None: nothing precedes it
    cached_tokens: int = 0  # of the prompt's tokens, those not computed but taken from the prefix cache
    miss_cause: str | None = None  # why no more: never_saved | no_branch | evicted | unaligned | disabled

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.completions[0].error

    def add(self, delta: "Delta") -> None:
        """Take in what a step added."""
        completion = self.completions[delta.index]
        completion.token_ids.extend(delta.token_ids)
        completion.text += delta.text
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.index == 0:
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
            self.miss_cause = delta.miss_cause or self.miss_cause
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.error = delta.error

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.completions)


@dataclass(slots=True)
class Delta:
    """What one step added to one completion; the last one of a completion has a `finish_reason`."""

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the completion's first delta
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    miss_cause: str | None = None
    queue_seconds: float | None = None  # from submission to the first dispatch; once, with the first delta

    @classmethod
    def joined(cls, parts: Sequence["Delta"]) -> "Delta":
        """What consecutive deltas of one completion add up to."""
        first, last = parts[0], parts[-1]
        if first is last:
            return last
        return replace(
            last,
            token_ids=[token for delta in parts for token in delta.token_ids],
            text="".join(delta.text for delta in parts),
            logprobs=[entry for delta in parts for entry in delta.logprobs or ()] or None,
            prompt_logprobs=next((d.prompt_logprobs for d in parts if d.prompt_logprobs is not None), None),
            queue_seconds=first.queue_seconds,
        )


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(name, f"must be True or False, got {value!r}")


def _integer(name: str, value: object, low: int | None, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"must be an integer, got {value!r}")
    _range(name, value, low, high)


def _number(name: str, value: object, low: float | None, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(name, f"must be a number, got {value!r}")
    if abs(value) > sys.float_info.max or math.isnan(value):
        raise RequestError(name, f"must be finite, got {value!r}")
    _range(name, value, low, high)


def _range(name: str, value: float, low: float | None, high: float | None) -> None:
    if low is not None and value < low:
        raise RequestError(name, f"{value} is below the least allowed value {low}")
    if high is not None and value > high:
        raise RequestError(name, f"{value} is above the greatest allowed value {high}")
