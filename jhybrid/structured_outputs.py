"""StructuredOutputs: what an answer must look like. The grammar's text, unparsed; `grammar.py` gives it its meaning."""

import json
from dataclasses import dataclass
from typing import Any

from jhybrid.errors import RequestError

MAX_GRAMMAR_CHARS = 256 * 2**10
MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Reasoning:
    """Free text before the structured part, closed by `end`. `is_open`: the prompt has begun it; else it may be absent
    and begins with `start`."""

    start: str
    end: str
    is_open: bool


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on the text of an answer. Exactly one kind; the names are those of vLLM."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """In the syntax of Rust's regex crate: the whole answer matches."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """In the syntax of Lark as llguidance reads it, or GBNF."""
    reasoning: Reasoning | None = None
    """What may come first. Servers set it for models that reason."""

    @property
    def kind(self) -> str:
        """The one that is given. RequestError unless it is exactly one."""
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.insert(0, "json")
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise RequestError("structured_outputs", f"has {what}; give exactly one of {', '.join(KINDS)}")
        return given[0]

    def validate(self) -> None:
        """Refuse what is of a wrong type or size. Raises RequestError naming the field."""
        kind = self.kind
        if kind == "json":
            _bounded("json", self.schema_text())
        elif kind == "choice":
            self._check_choice()
        elif kind == "json_object":
            if self.json_object is not True:
                raise RequestError(_name(kind), f"must be True or False, got {self.json_object!r}")
        else:
            text = getattr(self, kind)
            if not isinstance(text, str):
                raise RequestError(_name(kind), f"must be a string, got {type(text).__name__}")
            _bounded(kind, text)
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise RequestError(_name("reasoning"), f"must be Reasoning(...), got {self.reasoning!r}")

    def schema_text(self) -> str:
        """The schema of `json`, as JSON. Raises RequestError for what is none."""
        name = _name("json")
        try:
            if isinstance(self.json, str):
                _bounded("json", self.json)
                schema = json.loads(self.json)
            else:
                schema = self.json
            if not isinstance(schema, dict | bool):
                raise RequestError(name, f"must be a JSON schema, an object, got {type(schema).__name__}")
            return json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except RequestError:
            raise
        except RecursionError as error:
            raise RequestError(name, "is nested too deeply; flatten it with $defs and $ref") from error
        except (TypeError, ValueError) as error:
            raise RequestError(name, f"is no JSON: {error}") from error

    def _check_choice(self) -> None:
        name, choice = _name("choice"), self.choice
        if not isinstance(choice, list | tuple) or not choice:
            raise RequestError(name, f"must be a list of at least one text, got {choice!r}"[:200])
        if len(choice) > MAX_CHOICES:
            raise RequestError(name, f"has {len(choice)} texts, at most {MAX_CHOICES} allowed; use a regex")
        for at, text in enumerate(choice):
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name}[{at}]", f"must be a non-empty string, got {text!r}"[:200])
        _bounded("choice", "".join(choice))


def _name(kind: str) -> str:
    return f"structured_outputs.{kind}"


def _bounded(kind: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(_name(kind), f"has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} allowed; shorten it")
