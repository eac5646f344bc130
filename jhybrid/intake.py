"""Intake: what a request must be to enter. Everything refused here names the field, the value and the remedy."""

from jhybrid.errors import RequestError
from jhybrid.grammar import Grammar, Grammars
from jhybrid.request import MAX_SALT, MAX_SNAPSHOTS, Request
from jhybrid.sampling import MAX_BANNED
from jhybrid.weights.load import Model

MAX_JOINED = 4
"""Characters that a tokenizer's normaliser may make one of."""


class Intake:
    """Checks requests against a model and turns their prompts into tokens. Safe to call from any thread."""

    def __init__(self, model: Model):
        self.model = model
        self.max_model_len = model.max_model_len
        self.grammars: Grammars | None = None
        if model.tokenizer is not None and model.eos_token_ids:
            self.grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)

    def check(self, request: Request) -> list[int]:
        """The prompt's token ids. Raises RequestError."""
        if not isinstance(request, Request):
            raise RequestError("request", f"must be Request(...), got {request!r}")
        ids = request.prompt_token_ids
        if isinstance(ids, list) and len(ids) > self.max_model_len:  # before time is spent on them
            raise self._no_room("prompt_token_ids", len(ids))
        request.validate(self.model.vocab_size)
        sampling = request.sampling
        if sampling.stop_strings and self.model.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer and this model has none; use stop_token_ids")
        if sampling.min_tokens:
            own = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
            ends = len(own | set(sampling.stop_token_ids))
            if ends > MAX_BANNED:
                raise RequestError(
                    "stop_token_ids", f"{ends} stop tokens with min_tokens, at most {MAX_BANNED} allowed"
                )
        if request.prompt is not None:
            prompt = self._encode(request.prompt, request.add_special_tokens)
        else:
            prompt = list(request.prompt_token_ids or ())
        self._check_length(request, len(prompt))
        _check_cache_hints(request, len(prompt))
        return prompt

    def grammar(self, request: Request) -> Grammar | None:
        """The grammar that a request asks for, compiled if it is not known yet; found again while somebody holds it.

        Raises RequestError.
        """
        wanted = request.sampling.structured_outputs
        if wanted is None:
            return None
        if self.grammars is None:
            raise RequestError("structured_outputs", "needs a tokenizer with an end token and this model has none")
        return self.grammars.of(wanted)

    def max_total(self, request: Request, prompt_len: int) -> int:
        """Prompt and answer together, at most."""
        wanted = request.sampling.max_tokens
        return self.max_model_len if wanted is None else prompt_len + wanted

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.model.tokenizer is None:
            raise RequestError("prompt", "this model has no tokenizer; give prompt_token_ids")
        most = self.max_model_len * self.model.tokenizer.longest * MAX_JOINED
        if len(text) > most:
            what = f"has {len(text)} characters, and max_model_len={self.max_model_len} tokens stand for {most} at most"
            raise RequestError("prompt", f"{what}; shorten it")
        ids = self.model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError("prompt", "is empty and the tokenizer adds no token of its own; give some text")
        if max(ids) >= self.model.vocab_size:
            raise RequestError(
                "prompt",
                f"has token {max(ids)} of the tokenizer, the model has {self.model.vocab_size}; leave that text out, "
                "or use the tokenizer that belongs to the model",
            )
        return ids

    def _check_length(self, request: Request, length: int) -> None:
        wanted, limit = request.sampling.max_tokens, self.max_model_len
        field = "prompt" if request.prompt is not None else "prompt_token_ids"
        if length > limit or (length == limit and wanted != 0):
            raise self._no_room(field, length)
        if wanted is not None and length + wanted > limit:
            raise RequestError(
                "max_tokens",
                f"{wanted} after {length} prompt tokens exceeds max_model_len={limit}; use at most {limit - length}",
            )
        if request.sampling.min_tokens > limit - length:
            raise RequestError(
                "min_tokens", f"{request.sampling.min_tokens} exceeds the {limit - length} tokens left of max_model_len"
            )

    def _no_room(self, field: str, length: int) -> RequestError:
        limit = self.max_model_len
        why = f"{length} tokens leave no room in max_model_len={limit}; shorten it to at most {limit - 1}"
        return RequestError(field, why)


def _check_cache_hints(request: Request, length: int) -> None:
    salt, offsets = request.cache_salt, request.snapshot_at
    if salt is not None and not isinstance(salt, str):
        raise RequestError("cache_salt", f"must be a string, got {salt!r}")
    if salt is not None and not 0 < len(salt) <= MAX_SALT:
        raise RequestError("cache_salt", f"has {len(salt)} characters, must have 1 to {MAX_SALT}")
    if not isinstance(offsets, list | tuple):
        raise RequestError("snapshot_at", f"must be a list of integers, got {type(offsets).__name__}")
    if len(offsets) > MAX_SNAPSHOTS:
        raise RequestError("snapshot_at", f"{len(offsets)} offsets given, at most {MAX_SNAPSHOTS} allowed")
    for at in offsets:
        if isinstance(at, bool) or not isinstance(at, int):
            raise RequestError("snapshot_at", f"{at!r} is a {type(at).__name__}, must be an integer")
        if not 1 <= at <= length:
            raise RequestError("snapshot_at", f"{at!r} is no length of a part of this prompt; use 1 to {length}")
