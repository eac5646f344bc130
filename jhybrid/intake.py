"""Intake: what a request must be to enter. Everything refused here names the field, the value and the remedy."""

from jhybrid.errors import RequestError
from jhybrid.request import Request
from jhybrid.sampling import MAX_BANNED
from jhybrid.weights.load import Model


class Intake:
    """Checks requests against a model and turns their prompts into tokens. Safe to call from any thread."""

    def __init__(self, model: Model):
        self.model = model
        self.max_model_len = model.max_model_len

    def check(self, request: Request) -> list[int]:
        """The prompt's token ids. Raises RequestError."""
        sampling = request.sampling
        sampling.validate(self.model.vocab_size)
        if isinstance(request.priority, bool) or not isinstance(request.priority, int):
            raise RequestError("priority", f"must be an integer, got {request.priority!r}")
        if sampling.stop_strings and self.model.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer and this model has none; use stop_token_ids")
        if sampling.min_tokens:
            own = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
            ends = len(own | set(sampling.stop_token_ids))
            if ends > MAX_BANNED:
                raise RequestError(
                    "stop_token_ids", f"{ends} stop tokens with min_tokens, at most {MAX_BANNED} allowed"
                )
        prompt = self._tokens(request)
        self._check_length(request, len(prompt))
        return prompt

    def max_total(self, request: Request, prompt_len: int) -> int:
        """Prompt and answer together, at most."""
        wanted = request.sampling.max_tokens
        return self.max_model_len if wanted is None else prompt_len + wanted

    def _tokens(self, request: Request) -> list[int]:
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise RequestError("prompt", "give exactly one of prompt and prompt_token_ids")
        if request.prompt is not None:
            return self._encode(request)
        ids = request.prompt_token_ids
        assert ids is not None
        if not isinstance(ids, list | tuple):
            raise RequestError("prompt_token_ids", f"must be a list of integers, got {type(ids).__name__}")
        if not ids:
            raise RequestError("prompt_token_ids", "is empty; give at least one token")
        limit = self.model.vocab_size
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError("prompt_token_ids", f"entry {at} is {token!r}; must be an integer")
            if not 0 <= token < limit:
                raise RequestError("prompt_token_ids", f"entry {at} is {token}; must be in [0, {limit})")
        return list(ids)

    def _encode(self, request: Request) -> list[int]:
        if not isinstance(request.prompt, str):
            raise RequestError("prompt", f"must be a string, got {type(request.prompt).__name__}")
        if self.model.tokenizer is None:
            raise RequestError("prompt", "this model has no tokenizer; give prompt_token_ids")
        ids = self.model.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
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
            raise RequestError(
                field, f"{length} tokens leave no room in max_model_len={limit}; shorten it to at most {limit - 1}"
            )
        if wanted is not None and length + wanted > limit:
            raise RequestError(
                "max_tokens",
                f"{wanted} after {length} prompt tokens exceeds max_model_len={limit}; use at most {limit - length}",
            )
        if request.sampling.min_tokens > limit - length:
            raise RequestError(
                "min_tokens", f"{request.sampling.min_tokens} exceeds the {limit - length} tokens left of max_model_len"
            )
