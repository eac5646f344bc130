"""Perplexity: how well a model predicts texts, each scored once from its first token to its last.

`jhybrid perplexity` calls it. Work goes in blocks of windows; the engine is idle between blocks, so a run that was
killed and goes on from its journal gives the same figures to the last bit.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jhybrid
from jhybrid.engine import Engine
from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate.documents import Document
from jhybrid.evaluate.journal import Journal
from jhybrid.evaluate.scorer import Scorer, window_length
from jhybrid.evaluate.windows import Window, rolling_windows
from jhybrid.tokenizer import Tokenizer
from jhybrid.weights.load import find_model


@dataclass(frozen=True)
class Perplexity:
    """The figures of a run. `loglikelihood` is in nats, over all texts; words and bytes are those of the texts."""

    loglikelihood: float
    documents: int
    windows: int
    tokens: int
    words: int
    bytes: int

    @property
    def token_perplexity(self) -> float:
        return _exp(-self.loglikelihood / self.tokens)

    @property
    def word_perplexity(self) -> float:
        return _exp(-self.loglikelihood / self.words)

    @property
    def byte_perplexity(self) -> float:
        return _exp(-self.loglikelihood / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return -self.loglikelihood / self.bytes / math.log(2)

    def figures(self) -> dict[str, Any]:
        """All of them by name."""
        names = ("bits_per_byte", "token_perplexity", "word_perplexity", "byte_perplexity")
        return asdict(self) | {name: getattr(self, name) for name in names}


class PerplexityRun:
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
        encoded = [tokenizer.encode(document.text, add_special_tokens=False) for document in documents]
        self.num_tokens = sum(len(tokens) for tokens in encoded)
        if not self.num_tokens:
            raise RequestError("file", "the texts have no tokens; give some text")
        self.windows = [
            window for tokens in encoded for window in rolling_windows(tokens, self.prefix_token_id, self.max_length)
        ]
        self.resumed_windows = 0

    def identity(self) -> dict[str, Any]:
        """What must be the same for a journal to be continued."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.num_bytes}:".encode() + document.text.encode(errors="surrogatepass"))
        config = self.engine.config
        return {
            "version": jhybrid.__version__,
            "model": config.model,
            "model_files": model_files(config.model),
            "texts": digest.hexdigest(),
            "max_length": self.max_length,
            "prefix_token_id": self.prefix_token_id,
            "block": self._block,
            "engine": {
                name: getattr(config, name)
                for name in ("dtype", "kv_cache_dtype", "state_dtype", "chunk_size", "max_num_batched_tokens")
            },
        }

    @property
    def _block(self) -> int:
        return self.engine.config.max_num_seqs

    def run(self, journal: Journal | None = None, done: Callable[[int], object] = lambda _count: None) -> Perplexity:
        """The figures. `done` is told how many more windows are known."""
        totals: list[float] = []
        if journal is not None:
            for entry in journal.entries:
                totals += entry["loglikelihoods"]
        self.resumed_windows = len(totals)
        done(len(totals))
        scorer = Scorer(self.engine)
        for block in self._blocks(len(totals)):
            scores = [likelihood.total for likelihood in scorer.score(block, done)]
            totals += scores
            if journal is not None:
                journal.append({"loglikelihoods": scores})
        assert len(totals) == len(self.windows), (len(totals), len(self.windows))
        return Perplexity(
            loglikelihood=math.fsum(totals),
            documents=len(self.documents),
            windows=len(self.windows),
            tokens=self.num_tokens,
            words=sum(document.num_words for document in self.documents),
            bytes=sum(document.num_bytes for document in self.documents),
        )

    def _blocks(self, first: int) -> Iterator[list[Window]]:
        for at in range(first, len(self.windows), self._block):
            yield self.windows[at : at + self._block]


def prefix_token(vocab_size: int, tokenizer: Tokenizer, asked: int | None) -> int:
    """The token that stands before a text: what was asked, BOS, or EOS. Raises ConfigError."""
    if asked is not None:
        if not 0 <= asked < vocab_size:
            raise ConfigError("prefix_token_id", f"{asked} is not in [0, {vocab_size})")
        return asked
    for token in (tokenizer.bos_token_id, *tokenizer.eos_token_ids):
        if token is not None:
            return token
    raise ConfigError("prefix_token_id", "this model has neither BOS nor EOS; name a token to begin with")


def default_journal(engine: Engine, identity: dict[str, Any]) -> Path | None:
    """Where a run's journal is kept unless told otherwise: beside the compiled executables, named after the run."""
    folder = engine.config.compilation_cache()
    if folder is None:
        return None
    name = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:16]
    return folder / "journals" / f"perplexity-{name}.jsonl"


def model_files(model: str) -> str:
    """A digest of the names, sizes and times of a model's files: another checkpoint in its place has another."""
    digest = hashlib.sha256()
    folder = find_model(model)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        facts = file.stat()
        digest.update(f"{file.relative_to(folder)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def measure(run: PerplexityRun, journal: Journal | None, done: Callable[[int], object]) -> dict[str, Any]:
    """Figures of a run with its facts and its speed, as `jhybrid perplexity --json` prints them."""
    started = time.perf_counter()
    figures = run.run(journal, done).figures()
    seconds = time.perf_counter() - started
    new = sum(window.num_scored for window in run.windows[run.resumed_windows :])
    return figures | {
        "model": run.engine.config.model,
        "max_length": run.max_length,
        "prefix_token_id": run.prefix_token_id,
        "resumed_windows": run.resumed_windows,
        "seconds": seconds,
        "tokens_per_second": new / seconds,
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
