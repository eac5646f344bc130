"""Engines: what scores windows and answers requests for a respondent: one engine here, or the engines of a fleet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.errors import StepError
from jhybrid.evaluate.scorer import BLOCK, Likelihood, Scorer, Tally
from jhybrid.evaluate.windows import Window
from jhybrid.fleet import Fleet
from jhybrid.models import read_config
from jhybrid.request import Request
from jhybrid.tokenizer import Tokenizer, load_tokenizer
from jhybrid.weights.load import choose_max_model_len, find_model

Done = Callable[[int], object]


def nobody(_count: int) -> None:
    """Progress that nobody follows."""


class TextModel(Protocol):
    """What is to be known of a model to cut texts into windows."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


class Engines(Protocol):
    """One or several engines of one model. Both calls raise StepError for what a device could not do."""

    config: EngineConfig
    tally: Tally
    """What scoring has cost so far."""

    @property
    def model(self) -> TextModel: ...

    def facts(self) -> dict[str, Any]:
        """`num_parameters` and `dtype`, as far as they are known."""
        ...

    def score(self, windows: Sequence[Window], done: Done = nobody) -> list[Likelihood]:
        """Likelihoods in the order of the windows; `done` is told how many more are known."""
        ...

    def generate(self, requests: Sequence[Request], done: Done = nobody) -> list[str]:
        """Texts of the answers in the order of the requests."""
        ...


class OneEngine:
    """An engine in this process; nothing else may step it while it works."""

    def __init__(self, engine: Engine):
        self.engine, self.model, self.config = engine, engine.model, engine.config
        self.tally = Tally()

    def facts(self) -> dict[str, Any]:
        return {"num_parameters": self.model.num_parameters, "dtype": self.model.dtype}

    def score(self, windows: Sequence[Window], done: Done = nobody) -> list[Likelihood]:
        scorer = Scorer(self.engine)
        found = scorer.score(windows, done)
        self.tally += scorer.tally
        return found

    def generate(self, requests: Sequence[Request], done: Done = nobody) -> list[str]:
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i].prompt_token_ids or [])
        size = BLOCK * self.config.max_num_seqs
        for at in range(0, len(order), size):
            block = order[at : at + size]
            for i, output in zip(block, self.engine.generate([requests[i] for i in block]), strict=True):
                if output.error is not None:
                    raise StepError(output.error)
                texts[i] = output.text
                done(1)
        return texts


@dataclass(frozen=True)
class CheckpointText:
    """A model that others have in memory: what its folder says, without touching a device."""

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    @classmethod
    def of(cls, config: EngineConfig) -> "CheckpointText":
        """Raises ConfigError if there is no such model."""
        folder = find_model(config.model)
        model = read_config(folder)
        return cls(config.model, load_tokenizer(folder), model.vocab_size, choose_max_model_len(config, model))


class EngineFleet:
    """Engines of a cluster. Work is sorted before it is cut, so that what shares a prefix goes to one engine."""

    def __init__(self, fleet: Fleet, config: EngineConfig, model: TextModel):
        """The fleet's work is a Worker's."""
        self.config, self.model = config, model
        self.tally = Tally()
        self._fleet = fleet
        self._facts: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        return self._facts | {"num_engines": self._fleet.num_engines}

    def score(self, windows: Sequence[Window], done: Done = nobody) -> list[Likelihood]:
        return self._map(windows, lambda window: (window.tokens, window.start), done)

    def generate(self, requests: Sequence[Request], done: Done = nobody) -> list[str]:
        return self._map(requests, lambda request: request.prompt_token_ids or [], done)

    def _map(self, items: Sequence[Any], key: Callable[[Any], Any], done: Done) -> list[Any]:
        order = sorted(range(len(items)), key=lambda i: key(items[i]))
        places = self._fleet.pieces(order, BLOCK * self.config.max_num_seqs)
        pieces = [[items[i] for i in own] for own in places]
        found: list[Any] = [None] * len(items)
        for own, (answers, tally, facts) in zip(places, self._fleet.map(pieces), strict=True):
            for i, answer in zip(own, answers, strict=True):
                found[i] = answer
            self.tally += tally
            self._facts = facts
            done(len(answers))
        return found


class Worker:
    """What one engine of a fleet does: score the windows of a piece, or answer its requests."""

    def __init__(self, build: Callable[[], Engine]):
        self._engines = OneEngine(build())

    def __call__(self, piece: Sequence[Window] | Sequence[Request]) -> tuple[list[Any], Tally, dict[str, Any]]:
        self._engines.tally = Tally()
        windows = [item for item in piece if isinstance(item, Window)]
        requests = [item for item in piece if isinstance(item, Request)]
        answers: list[Any] = self._engines.score(windows) if windows else self._engines.generate(requests)
        return answers, self._engines.tally, self._engines.facts()
