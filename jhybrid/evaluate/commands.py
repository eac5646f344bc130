"""The commands of offline evaluation: `jhybrid score`, `perplexity`, `eval`, `batch`. Their fields are their flags."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, arg

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate.documents import Document, read_documents
from jhybrid.fleet import RayOptions
from jhybrid.progress import progress

if TYPE_CHECKING:  # the engine takes seconds to import, and `--help` does not need it
    from jhybrid.evaluate.text_run import ScoredText, TextRun

Config = OmitArgPrefixes[EngineConfig]
SOME_FAILED = 1
"""Exit code of a batch that ran, but not every line was answered; 2 is for what could not be run."""


@dataclass(frozen=True)
class TextFlags:
    """How texts are read and cut."""

    text_key: str = "text"
    """Where the lines of a .jsonl file have their text."""
    max_length: int | None = None
    """Tokens that one pass reads. None: one less than max_model_len."""
    prefix_token_id: int | None = None
    """The token before the first one of each text. None: BOS, or EOS for a model without."""
    journal: Path | None = None
    """Where a killed run goes on from. None: a file in the compilation cache's folder, named after the run."""

    @contextlib.contextmanager
    def scored(
        self, config: EngineConfig, documents: Sequence[Document]
    ) -> Iterator["tuple[TextRun, Iterator[ScoredText]]"]:
        """The run and what it finds, behind a bar. Its journal goes once the caller is done with all of it."""
        from jhybrid.engine import Engine
        from jhybrid.evaluate.text_run import TextRun

        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(Engine(config))
            run = TextRun(engine, documents, max_length=self.max_length, prefix_token_id=self.prefix_token_id)
            journal = run.journal(self.journal)
            if journal is not None:
                stack.enter_context(journal)
            done = stack.enter_context(progress("windows", len(run.windows)))
            yield run, run.scores(journal, done)
            if journal is not None:
                journal.remove()


@dataclass(frozen=True)
class ScoreCommand:
    """Log-probability of each token of texts, and the perplexity of each text."""

    file: Positional[Path | None] = None
    """A text in UTF-8, or a .jsonl file with a text in each line."""
    text: Annotated[tuple[str, ...], arg(aliases=["-p"])] = ()
    """Texts instead of a file; `-` reads one from standard input."""
    engine: Config = field(default_factory=EngineConfig)
    texts: OmitArgPrefixes[TextFlags] = field(default_factory=TextFlags)
    json: bool = False
    """One JSON object per text, with all of its tokens."""

    def run(self) -> None:
        from jhybrid.evaluate.perplexity import Perplexity

        with self.texts.scored(self.engine, self._documents()) as (run, found):
            table = Table("line", "tokens", "log-likelihood", "bits per byte", "token perplexity", "word perplexity")
            for scored in found:
                figures = Perplexity.of([scored]).figures()
                if self.json:
                    print(json.dumps(self._record(scored, figures, run.prefix_token_id)), flush=True)
                elif self.text:
                    Console().print(_tokens(scored, run))
                else:
                    shown = ("loglikelihood", "bits_per_byte", "token_perplexity", "word_perplexity")
                    values = [f"{figures[name]:.6g}" for name in shown]
                    table.add_row(str(scored.document.line), str(figures["tokens"]), *values)
        if table.rows:
            Console().print(table)

    def _documents(self) -> list[Document]:
        if (self.file is None) == (not self.text):
            raise RequestError("file", "give either a file or --text")
        if self.file is not None:
            return read_documents(self.file, self.texts.text_key)
        texts = [sys.stdin.read() if text == "-" else text for text in self.text]
        if not any(texts):
            raise RequestError("text", "is empty; give some text")
        return [Document(text, n) for n, text in enumerate(texts, start=1)]

    def _record(self, scored: "ScoredText", figures: dict[str, Any], prefix: int) -> dict[str, Any]:
        where = {"text": scored.document.text} if self.text else {"line": scored.document.line}
        del figures["documents"]
        return where | figures | {"prefix_token_id": prefix, "token_ids": scored.token_ids, "logprobs": scored.logprobs}


def _tokens(scored: "ScoredText", run: "TextRun") -> Table:
    tokenizer = run.engine.tokenizer
    assert tokenizer is not None
    total = sum(scored.logprobs)
    title = f"total {total:.4f} over {len(scored.logprobs)} tokens, after the prefix {run.prefix_token_id}"
    table = Table("token", "id", "log-probability", title=title)
    for token, logprob in zip(scored.token_ids, scored.logprobs, strict=True):
        table.add_row(repr(tokenizer.decode([token], skip_special_tokens=False)), str(token), f"{logprob:.4f}")
    return table


@dataclass(frozen=True)
class PerplexityCommand:
    """Perplexity and bits per byte of a text file, or of the texts of a .jsonl file together."""

    file: Positional[Path]
    """A text in UTF-8, or a .jsonl file with a text in each line, each scored by itself."""
    engine: Config = field(default_factory=EngineConfig)
    texts: OmitArgPrefixes[TextFlags] = field(default_factory=TextFlags)
    json: bool = False
    """One JSON object."""

    def run(self) -> None:
        from jhybrid.evaluate.perplexity import Perplexity

        documents = read_documents(self.file, self.texts.text_key)
        with self.texts.scored(self.engine, documents) as (run, found):
            started = time.perf_counter()
            figures = Perplexity.of(found).figures()
            seconds = time.perf_counter() - started
        new = sum(window.num_scored for window in run.windows[run.resumed_windows :])
        figures |= {
            "model": self.engine.model,
            "max_length": run.max_length,
            "prefix_token_id": run.prefix_token_id,
            "windows": len(run.windows),
            "resumed_windows": run.resumed_windows,
            "seconds": seconds,
            "tokens_per_second": new / seconds,
        }
        if self.json:
            print(json.dumps({"file": str(self.file)} | figures))
            return
        table = Table("figure", "value", title=str(self.file))
        for name, value in figures.items():
            table.add_row(name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
        Console().print(table)


@dataclass(frozen=True)
class EvalCommand:
    """Run tasks of lm-evaluation-harness; its results are printed in its own format."""

    tasks: tuple[str, ...]
    """Names of tasks or groups."""
    engine: Config = field(default_factory=lambda: EngineConfig(enable_prefix_caching=True))
    cluster: OmitArgPrefixes[RayOptions] = field(default_factory=RayOptions)
    include_path: Path | None = None
    """A folder with tasks of your own."""
    num_fewshot: int | None = None
    """Examples before each question. None: as the task says."""
    limit: float | None = None
    """Questions per task; below 1, a share of them. None: all."""
    apply_chat_template: bool = False
    """Ask in the form of a chat."""
    system_instruction: str | None = None
    """Text before everything else."""
    max_length: int | None = None
    """Tokens that one pass reads. None: one less than max_model_len."""
    max_gen_toks: int = 256
    """Most tokens of an answer where the task does not say."""
    log_samples: bool = False
    """Keep every question and answer in the results."""
    output: Path | None = None
    """File for the results."""
    json: bool = False
    """The results on standard output instead of a table."""

    def run(self) -> None:
        from jhybrid.evaluate.tasks import Evaluation, as_json, as_table

        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Evaluation)}
        if self.output is not None:
            check_writable(self.output)
        results = Evaluation(**own).run(self.engine, self.cluster)
        print(as_json(results) if self.json else as_table(results))
        if self.output is not None:
            try:
                self.output.write_text(as_json(results) + "\n", encoding="utf-8")
            except OSError as error:
                why = f"{self.output} cannot be written: {error.strerror}; the results are on standard output alone"
                raise ConfigError("output", why) from error


def check_writable(path: Path) -> None:
    """Raises ConfigError before hours of work, not after them."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ConfigError("output", f"{path} cannot be written: {error.strerror}; name another file") from error
    if not there:
        path.unlink()


@dataclass(frozen=True)
class BatchCommand:
    """Answer a file of requests in OpenAI's batch format; a killed run goes on where it was.

    It leaves with 0 if every line is answered, 1 if some failed, 2 if it could not be run.
    """

    input: Positional[Path]
    """Lines with custom_id, method, url (/v1/completions or /v1/chat/completions) and body."""
    output: Positional[Path]
    """File for the answers, in the same order; those that are there already are kept."""
    engine: Config = field(default_factory=EngineConfig)
    cluster: OmitArgPrefixes[RayOptions] = field(default_factory=RayOptions)
    served_model_name: str | None = None
    """Name that the bodies use; the model argument unless given."""
    json: bool = False
    """How it went, as a JSON object."""

    def run(self) -> None:
        from jhybrid_server.batch_file import run_batch

        with contextlib.ExitStack() as stack:
            summary = run_batch(
                self.engine,
                self.input,
                self.output,
                self.served_model_name,
                lambda total: stack.enter_context(progress("lines", total)),
                cluster=self.cluster,
            )
        if self.json:
            print(json.dumps(dataclasses.asdict(summary)))
        else:
            print(f"{summary.lines} lines, {summary.resumed} resumed, {summary.failed} failed")
        for failure in summary.failures:
            print(f"line {failure.line} ({failure.custom_id}): {failure.message}", file=sys.stderr)
        if summary.failed > len(summary.failures):
            print(f"and {summary.failed - len(summary.failures)} more, told in {self.output}", file=sys.stderr)
        if summary.failed:
            sys.exit(SOME_FAILED)
