"""CompletionAnswers and ChatAnswers: deltas as the choices of OpenAI's two generation endpoints.

A stream's chunk and a whole answer are made by the same code: a whole answer is one delta, see `Call.answers`.
"""

import codecs
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jhybrid.request import Delta, TokenLogprobs
from jhybrid.tokenizer import Tokenizer
from jhybrid_server.desk import Call
from jhybrid_server.openai_schema import ChatBody, CompletionBody
from jhybrid_server.openai_tools import call_body
from jhybrid_server.talk import ChatDelta, Readings, Talk

LEAST_LOGPROB = -9999.0
"""What JSON shows for the log-probability of what cannot be; it has no minus infinity."""

_Utf8 = codecs.getincrementaldecoder("utf-8")


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as a key: its text, its bytes where they are no whole characters, its id where it has neither."""
    piece = b"" if tokenizer is None else tokenizer.token_bytes(token)
    if not piece:
        return f"token_id:{token}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Offsets:
    """Where each token's text begins in the text of one choice, in characters."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._utf8 = _Utf8("replace")
        self._at = 0

    def push(self, token: int) -> int:
        """The offset of the next token."""
        at, tokenizer = self._at, self._tokenizer
        if tokenizer is not None and not (self._skip and tokenizer.is_special(token)):
            self._at += len(self._utf8.decode(tokenizer.token_bytes(token, first=at == 0)))
        return at


class CompletionAnswers:
    """The choices of /v1/completions: `n` for each prompt, in the prompts' order."""

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, call: Call, tokenizer: Tokenizer | None):
        self._body, self._call, self._tokenizer = body, call, tokenizer
        self._n = body.n or 1
        skip = body.skip_special_tokens is not False
        self._offsets: dict[int, Offsets] = defaultdict(lambda: Offsets(tokenizer, skip))
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self._early: dict[int, list[Delta]] = defaultdict(list)
        self._echoed: set[int] = set()

    @property
    def details(self) -> dict[str, Any]:
        """What usage says of the tokens beyond their numbers."""
        return {}

    def begin(self) -> list[dict[str, Any]]:
        """Choices of a stream before the first delta."""
        return []

    def chunks(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices that a delta adds to a stream."""
        early = self._early[number]
        if delta.prompt_logprobs is not None:
            self._prompts[number] = delta.prompt_logprobs
        elif self._echoes_logprobs and number not in self._prompts:
            early.append(delta)  # the first of the answers brings what all of them echo
            return []
        deltas, self._early[number] = [delta, *early], []
        return [self.choice(number, each) for each in deltas if each.text or each.finish_reason or each.logprobs]

    def wholes(self, answers: dict[tuple[int, int], Delta]) -> list[dict[str, Any]]:
        """The choices of whole answers, by number of prompt and of answer."""
        for (number, _), delta in answers.items():
            if delta.prompt_logprobs is not None:
                self._prompts[number] = delta.prompt_logprobs
        return [self.choice(number, delta) for (number, _), delta in sorted(answers.items())]

    def choice(self, number: int, delta: Delta) -> dict[str, Any]:
        index = number * self._n + delta.index
        text, tokens, entries = delta.text, list(delta.token_ids), list(delta.logprobs or ())
        first = index not in self._echoed
        self._echoed.add(index)
        if first and self._body.echo:
            prompt = self._call.prompts[number]
            text = self._prompt_text(number) + text
            tokens = [*prompt, *tokens]
            entries = [*self._prompts.get(number, ()), *entries]
        logprobs = None if self._body.logprobs is None else self._logprobs(index, tokens, entries)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        choice["stop_reason"] = delta.stop_reason
        if self._body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = _prompt_logprobs(self._tokenizer, self._prompts.get(number))
        return choice

    @property
    def _echoes_logprobs(self) -> bool:
        return self._body.prompt_logprobs is not None or bool(self._body.echo and self._body.logprobs is not None)

    def _prompt_text(self, number: int) -> str:
        prompt = self._body.prompt[number]
        if isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens is not False)

    def _logprobs(self, index: int, tokens: list[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        offsets = self._offsets[index]
        texts = [token_text(self._tokenizer, token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [entry and _chosen(entry, token) for token, entry in zip(tokens, entries, strict=True)],
            "top_logprobs": [
                entry and {token_text(self._tokenizer, token): _finite(value) for token, value in entry}
                for entry in entries
            ],
            "text_offset": [offsets.push(token) for token in tokens],
        }


class ChatAnswers:
    """The choices of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, call: Call, talk: Talk):
        del call
        self._body, self._tokenizer = body, talk.tokenizer
        self._readings = Readings(talk)

    def begin(self) -> list[dict[str, Any]]:
        """Choices of a stream before the first delta: who speaks."""
        return [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for i in range(self._body.n or 1)
        ]

    def chunks(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices that a delta adds to a stream."""
        del number
        reading = self._readings[delta.index]
        first_call = reading.num_calls
        read = reading.take(delta)
        said: dict[str, Any] = {"content": read.text} if read.text else {}
        if read.reasoning:
            said["reasoning_content"] = read.reasoning
        if read.tool_calls:
            said["tool_calls"] = [{"index": first_call + i} | call_body(call) for i, call in enumerate(read.tool_calls)]
        if not (said or read.finish_reason or read.logprobs or read.prompt_logprobs):
            return []
        return [self._choice(read, {"delta": said})]

    def wholes(self, answers: dict[tuple[int, int], Delta]) -> list[dict[str, Any]]:
        """The choices of whole answers, by number of prompt and of answer."""
        return [self._whole(delta) for _, delta in sorted(answers.items())]

    def _whole(self, delta: Delta) -> dict[str, Any]:
        read = self._readings[delta.index].take(delta)
        message: dict[str, Any] = {"role": "assistant", "content": read.text}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.tool_calls:
            message |= {"content": read.text or None, "tool_calls": [call_body(call) for call in read.tool_calls]}
        return self._choice(read, {"message": message})

    @property
    def details(self) -> dict[str, Any]:
        """What usage says of the tokens, in OpenAI's form."""
        count = self._readings.reasoning_tokens
        return {} if count is None else {"completion_tokens_details": {"reasoning_tokens": count}}

    def _choice(self, delta: ChatDelta, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            logprobs = {"content": [self._logprob(token, entry) for token, entry in pairs]}
        choice = {"index": delta.index, **said, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        choice["stop_reason"] = delta.stop_reason
        if delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
        return choice

    def _logprob(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(other, value) for other, value in entry[: self._body.top_logprobs or 0]]
        return self._token(token, _chosen(entry, token)) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))
        return {"token": token_text(self._tokenizer, token), "logprob": _finite(logprob), "bytes": piece}


Answers = CompletionAnswers | ChatAnswers


def envelope(name: str, kind: str, model: str, choices: Sequence[dict[str, Any]], created: int) -> dict[str, Any]:
    """What an answer and each chunk of a stream are wrapped in."""
    return {"id": name, "object": kind, "created": created, "model": model, "choices": list(choices)}


def cost(call: Call, answers: Answers) -> dict[str, Any]:
    """Usage in OpenAI's form, and beside it what else is known: why the cache gave no more, and times in seconds."""
    usage, timing = call.usage, call.timing
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            **answers.details,
        },
        "jhybrid": {
            "miss_cause": usage.miss_cause,
            "queue_seconds": timing.queue_seconds,
            "first_token_seconds": timing.first_token_seconds,
            "total_seconds": timing.total_seconds,
        },
    }


def model_card(name: str, max_model_len: int, created: int) -> dict[str, Any]:
    """An entry of /v1/models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "jhybrid", "max_model_len": max_model_len}


def now() -> int:
    """Seconds since 1970, as OpenAI's `created`."""
    return int(time.time())


def _prompt_logprobs(tokenizer: Tokenizer | None, entries: Iterable[TokenLogprobs | None] | None) -> list | None:
    if entries is None:
        return None
    return [
        entry and {str(t): {"logprob": _finite(value), "decoded_token": token_text(tokenizer, t)} for t, value in entry}
        for entry in entries
    ]


def _chosen(entry: TokenLogprobs, token: int) -> float:
    return _finite(next(value for other, value in entry if other == token))


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > LEAST_LOGPROB else LEAST_LOGPROB
