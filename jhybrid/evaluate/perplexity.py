"""Perplexity: how well a model predicts texts, by token, word and byte. `jhybrid perplexity` and `score` print it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jhybrid.evaluate.text_run import ScoredText


@dataclass(frozen=True)
class Perplexity:
    """The figures of one text or of many. `loglikelihood` is in nats, over all of their tokens."""

    loglikelihood: float
    documents: int
    tokens: int
    words: int
    bytes: int

    @classmethod
    def of(cls, texts: Iterable[ScoredText]) -> "Perplexity":
        """Of texts that are scored meanwhile; none of them is kept. Sums are exact, whatever the order."""
        counts = dict.fromkeys(("documents", "tokens", "words", "bytes"), 0)

        def logprobs() -> Iterator[float]:
            for text in texts:
                counts["documents"] += 1
                counts["tokens"] += len(text.logprobs)
                counts["words"] += text.document.num_words
                counts["bytes"] += text.document.num_bytes
                yield from text.logprobs

        return cls(math.fsum(logprobs()), **counts)

    @property
    def token_perplexity(self) -> float:
        return self._per(self.tokens)

    @property
    def word_perplexity(self) -> float:
        return self._per(self.words)

    @property
    def byte_perplexity(self) -> float:
        return self._per(self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return -self.loglikelihood / self.bytes / math.log(2)

    def figures(self) -> dict[str, Any]:
        """All of them by name."""
        names = ("bits_per_byte", "token_perplexity", "word_perplexity", "byte_perplexity")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def _per(self, count: int) -> float:
        nats = -self.loglikelihood / max(1, count)  # a tokenizer may find no token in a text
        return math.exp(nats) if nats < 700 else math.inf
