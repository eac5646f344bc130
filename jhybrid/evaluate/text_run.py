"""TextRun: texts scored token by token in rolling windows. `jhybrid score` and `jhybrid perplexity` are one.

Work goes in blocks of windows; the engine is idle between blocks, so a run that was killed and goes on from its journal
gives the same log-probabilities to the last bit.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jhybrid.engine import Engine
from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate.documents import Document
from jhybrid.evaluate.identity import identity
from jhybrid.evaluate.journal import Journal
from jhybrid.evaluate.scorer import Scorer, window_length
from jhybrid.evaluate.windows import rolling_windows
from jhybrid.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScoredText:
    """A text's tokens, each with its log-probability (nats), the first one's given the prefix token."""

    document: Document
    token_ids: list[int]
    logprobs: list[float]


class TextRun:
    """One run over some texts. Raises ConfigError for a window or a prefix token that the model cannot have.

    RequestError if there is nothing to score.
    """

    def __init__(
        self,
        engine: Engine,
        documents: Sequence[Document],
        *,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
    ):
        """`max_length` tokens are read in one pass (None: as many as fit); the first token is scored given the prefix.

        The prefix is BOS, or EOS for a model without (None), as lm-evaluation-harness has it. The texts' own tokens
        are scored, none that the tokenizer would add.
        """
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise ConfigError("model", f"{engine.config.model} has no tokenizer, which texts need")
        self.engine, self.documents = engine, documents
        self.max_length = window_length(engine.model.max_model_len, max_length)
        self.prefix_token_id = prefix_token(engine.model.vocab_size, tokenizer, prefix_token_id)
        self.token_ids = [tokenizer.encode(document.text, add_special_tokens=False) for document in documents]
        if not any(self.token_ids):
            raise RequestError("text", "there are no tokens to score; give some text")
        self.windows = [
            window
            for tokens in self.token_ids
            for window in rolling_windows(tokens, self.prefix_token_id, self.max_length)
        ]
        self.resumed_windows = 0

    def identity(self) -> dict[str, Any]:
        """What must be the same for a journal to be continued."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.num_bytes}:".encode() + document.text.encode(errors="surrogatepass"))
        return identity(self.engine.config) | {
            "device": jax.devices()[0].device_kind,
            "texts": digest.hexdigest(),
            "max_length": self.max_length,
            "prefix_token_id": self.prefix_token_id,
            "block": self._block,
        }

    def journal(self, path: Path | None = None) -> Journal | None:
        """At a path, or in the folder of compiled executables under the run's name; None if there is no such folder."""
        identity, folder = self.identity(), self.engine.config.compilation_cache()
        if path is None and folder is not None:
            name = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:16]
            path = folder / "journals" / f"texts-{name}.jsonl"
        return None if path is None else Journal(path, identity)

    def scores(
        self, journal: Journal | None = None, done: Callable[[int], object] = lambda _count: None
    ) -> Iterator[ScoredText]:
        """The texts in their order, as they are known. `done` is told how many more windows are. Raises StepError."""
        coming = self._logprobs(journal, done)
        for document, token_ids in zip(self.documents, self.token_ids, strict=True):
            logprobs: list[float] = []
            while len(logprobs) < len(token_ids):
                logprobs += next(coming)
            yield ScoredText(document, token_ids, logprobs)

    def _logprobs(self, journal: Journal | None, done: Callable[[int], object]) -> Iterator[Sequence[float]]:
        """Of the scored tokens of each window."""
        for entry in [] if journal is None else journal.entries:
            self.resumed_windows += len(entry["logprobs"])
            done(len(entry["logprobs"]))
            yield from entry["logprobs"]
        scorer = Scorer(self.engine)
        for at in range(self.resumed_windows, len(self.windows), self._block):
            found = [likelihood.logprobs for likelihood in scorer.score(self.windows[at : at + self._block], done)]
            if journal is not None:
                journal.append({"logprobs": found})
            yield from found

    @property
    def _block(self) -> int:
        return self.engine.config.max_num_seqs


def prefix_token(vocab_size: int, tokenizer: Tokenizer, asked: int | None) -> int:
    """The token that stands before a text: what was asked, BOS, or EOS. Raises ConfigError."""
    if asked is not None:
        if not 0 <= asked < vocab_size:
            raise ConfigError("prefix_token_id", f"{asked} is not in [0, {vocab_size})")
        return asked
    for token in (tokenizer.bos_token_id, *tokenizer.eos_token_ids):
        if token is not None and token < vocab_size:
            return token
    raise ConfigError("prefix_token_id", "this model has neither BOS nor EOS; name a token to begin with")
