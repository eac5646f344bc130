"""Scoring: log-probabilities of given continuations of one context, as requests that generate nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from jhybrid.errors import RequestError
from jhybrid.request import Request, SamplingParams
from jhybrid_server.desk import Call, Desk

MAX_CONTINUATIONS = 1024

Text = str | list[int]
"""A text or token ids."""


@dataclass(frozen=True)
class Question:
    """What is to be scored."""

    context: Text
    continuations: Sequence[Text]
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class ContinuationScore:
    """One continuation's tokens, the log-probability of each, and whether each was the likeliest at its place."""

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool

    @property
    def total(self) -> float:
        return sum(self.logprobs)


async def requests_of(desk: Desk, question: Question) -> list[Request]:
    """One request for each continuation. The prefix cache is told where the context ends, so that they share it.

    Raises RequestError for what has nothing to score, or nothing before it.
    """
    if not question.continuations:
        raise RequestError("continuations", "is empty; give at least one")
    count, queue = len(question.continuations), desk.bridge.engine.max_queue
    if count > min(MAX_CONTINUATIONS, queue):
        most = f"{MAX_CONTINUATIONS} allowed" if queue >= MAX_CONTINUATIONS else f"max_queue={queue} allowed"
        raise RequestError("continuations", f"{count} given, at most {most}; send fewer at a time")
    context = await _tokens(desk, question.context, question.add_special_tokens, "context")
    if not context:
        raise RequestError("context", "has no token, so nothing precedes the continuations; give at least one")
    limit = desk.bridge.engine.model_info()["max_model_len"]
    if len(context) >= limit:
        raise RequestError("context", f"{len(context)} tokens leave no room in max_model_len={limit}; shorten it")
    requests = []
    for at, continuation in enumerate(question.continuations):
        field = f"continuations[{at}]"
        if not continuation:
            raise RequestError(field, "is empty; give at least one token")
        if isinstance(continuation, str) and isinstance(question.context, str):
            # The border may lie inside a token of the whole: it is told apart as evaluation harnesses do.
            whole = await _tokens(desk, question.context + continuation, question.add_special_tokens, field)
            start = min(len(context), len(whole) - 1)
        else:
            whole, start = context + await _tokens(desk, continuation, False, field), len(context)
        if len(whole) > limit:
            why = f"{len(whole)} tokens with the context exceed max_model_len={limit}; shorten one of them"
            raise RequestError(field, why)
        requests.append(
            Request(
                prompt_token_ids=whole,
                sampling=SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=start),
                snapshot_at=[start - 1] if start > 1 else [],
                priority=question.priority,
                cache_salt=question.cache_salt,
            )
        )
    return requests


async def scores_of(call: Call, requests: Sequence[Request]) -> list[ContinuationScore]:
    """The scores that a call of `requests_of` brings, in their order."""
    scores: dict[int, ContinuationScore] = {}
    async for number, delta in call.deltas():
        if delta.prompt_logprobs is None:
            continue
        start = requests[number].sampling.prompt_logprobs_from
        tokens, entries = call.prompts[number][start:], delta.prompt_logprobs[start:]
        pairs = [(token, entry) for token, entry in zip(tokens, entries, strict=True) if entry is not None]
        assert len(pairs) == len(tokens), f"{len(tokens) - len(pairs)} of {len(tokens)} tokens have no log-probability"
        logprobs = [next(value for other, value in entry if other == token) for token, entry in pairs]
        scores[number] = ContinuationScore(tokens, logprobs, all(entry[0][0] == token for token, entry in pairs))
    return [scores[number] for number in range(len(requests))]


async def _tokens(desk: Desk, text: Text, add_special_tokens: bool, field: str) -> list[int]:
    return await desk.tokenize(text, add_special_tokens, field) if isinstance(text, str) else list(text)
