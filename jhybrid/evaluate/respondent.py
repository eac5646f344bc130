"""Respondent: a model that answers what lm-evaluation-harness asks, in texts. It needs no part of the harness.

How texts become tokens, how much of a context is kept, and what a text is scored after are those of the harness's
`hf` model, so that both give the same figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jhybrid.chat_template import ChatTemplate
from jhybrid.engine import fold_seed
from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate.engines import Done, Engines, nobody
from jhybrid.evaluate.scorer import Likelihood, window_length
from jhybrid.evaluate.text_run import prefix_token
from jhybrid.evaluate.windows import continuation_window, rolling_windows
from jhybrid.request import Request, SamplingParams

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens to generate; the first one given counts, as in the harness."""
SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Generation options of tasks that are called the same here."""

Messages = Sequence[dict[str, Any]]


class Respondent:
    """Answers by engines of its own. Raises ConfigError if the model has no tokenizer."""

    def __init__(
        self,
        engines: Engines,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ):
        """`max_length` tokens are read in one pass (None: one less than the engines' max_model_len).

        `add_bos_token` overrules the tokenizer's own configuration; texts without a context are scored after the
        prefix token, BOS or EOS unless told otherwise.
        """
        model, tokenizer = engines.model, engines.model.tokenizer
        if tokenizer is None:
            raise ConfigError("model", f"{model.name} has no tokenizer, which texts need")
        self.engines, self.tokenizer = engines, tokenizer
        self.max_length, self.max_gen_toks = window_length(model.max_model_len, max_length), max_gen_toks
        self.add_bos_token = add_bos_token
        self.prefix_token_id = prefix_token(model.vocab_size, tokenizer, prefix_token_id)
        self._chats = ChatTemplate.of(self.tokenizer)

    # scoring

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]], done: Done = nobody) -> list[Likelihood]:
        """Of each continuation after its context. RequestError for one that has no tokens or fills more than a pass."""
        windows = [continuation_window(*self.encode_pair(*pair), self.max_length) for pair in pairs]
        return self.engines.score(windows, done)

    def rolling(self, texts: Sequence[str], done: Done = nobody) -> list[float]:
        """Log-likelihood of each whole text in rolling windows. A tokenizer that adds BOS has it scored too."""
        windows = [list(rolling_windows(self.encode(t), self.prefix_token_id, self.max_length)) for t in texts]
        scores = iter(self.engines.score([window for own in windows for window in own], done))
        return [sum(next(scores).total for _ in own) for own in windows]

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Tokens of a text; whether special ones are added is the tokenizer's choice unless somebody made it."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token is not False
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of the context and of what follows: the whole text is encoded, and cut where the context's ends.

        White space at the end of the context goes to the continuation, where tokens begin with it.
        """
        if not context:
            tokens = self.encode(continuation, add_special_tokens=False)
            return [self.prefix_token_id], tokens[1:] if tokens[:1] == [self.prefix_token_id] else tokens
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before = self.encode(kept)
        after = self.encode(kept + continuation)[len(before) :]
        return before or [self.prefix_token_id], after

    # generating

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]], done: Done = nobody) -> list[str]:
        """Answers to prompts with the tasks' generation options. RequestError names an option that is not known."""
        requests = [self._request(i, context, options) for i, (context, options) in enumerate(prompts)]
        return self.engines.generate(requests, done)

    def _request(self, number: int, context: str, options: Mapping[str, Any]) -> Request:
        sampling = sampling_of(options, self.max_gen_toks)
        if sampling.seed is None:  # the answer is the same whatever runs beside it, and wherever
            sampling = replace(sampling, seed=fold_seed(self.engines.config.base_seed, number))
        assert sampling.max_tokens is not None
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise RequestError(
                "max_gen_toks", f"{sampling.max_tokens} leave no room for a prompt in the {self.max_length} of one pass"
            )
        tokens = self.encode(context)[-room:] or [self.prefix_token_id]
        return Request(prompt_token_ids=tokens, sampling=sampling)

    # chats

    def chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Without a generation prompt, its last message is left open, to be continued."""
        try:
            text = self._chats.render(messages, add_generation_prompt=add_generation_prompt)
        except RequestError:
            without = [message for message in messages if message["role"] != "system"]
            if len(without) == len(messages):
                raise
            text = self._chats.render(without, add_generation_prompt=add_generation_prompt)  # some know no system role
        return text if add_generation_prompt else left_open(text, messages[-1]["content"])

    def chat_template(self, name: str | None = None) -> str:
        """The template by its name, the default one without; it is the one that `chat` uses from now on."""
        templates = self.tokenizer.chat_templates
        name = name or "default"
        if name not in templates:
            known = ", ".join(sorted(templates)) or "none"
            raise ConfigError("chat_template", f"{name!r} is not among those of this model: {known}")
        self._chats = ChatTemplate({"default": templates[name]}, self.tokenizer.named_tokens)
        return templates[name]


def sampling_of(options: Mapping[str, Any], max_gen_toks: int) -> SamplingParams:
    """A task's generation options in the engine's terms: greedy unless it says `do_sample` or a temperature.

    Raises RequestError for an option that is not known, since an ignored one would give wrong figures.
    """
    unknown = sorted(set(options) - {"until", "do_sample", *LIMITS, *SHARED})
    if unknown:
        raise RequestError(unknown[0], f"{options[unknown[0]]!r} is no generation option that is known here; remove it")
    until = options.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    limits = [options[name] for name in LIMITS if options.get(name) is not None]
    given = {name: options[name] for name in SHARED if options.get(name) is not None}
    samples = options.get("do_sample")
    given["temperature"] = float(given.get("temperature", 1.0 if samples else 0.0)) if samples is not False else 0.0
    return SamplingParams(
        max_tokens=int(limits[0]) if limits else max_gen_toks, stop=[text for text in stop if text], **given
    )


def left_open(text: str, last: str) -> str:
    """A rendered conversation up to the end of its last message. RequestError if that is not in it as it was sent."""
    wanted = last.strip()
    at = text.rfind(wanted)
    if not wanted or at < 0:
        raise RequestError("messages", "the chat template changes the last message, so it cannot be continued")
    kept = last.lstrip()  # with the white space at its end, if the template left it there
    return text[: at + len(kept if text.startswith(kept, at) else wanted)]
