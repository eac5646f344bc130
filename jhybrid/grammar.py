"""Grammars: compiled constraints on answers, and the masks of tokens that they allow. Intake and engine use them.

llguidance reads schemas, regexes and grammars and walks the vocabulary. Compiling happens in whichever thread checks a
request, masks are made in threads of their own: neither holds up the engine. All of it is bounded, see LIMITS.
"""

import functools
import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from jhybrid.errors import JhybridError, RequestError
from jhybrid.expression_size import lark_size, regex_size, schema_size
from jhybrid.grammar_guard import GrammarGuard
from jhybrid.schema_limits import check_schema
from jhybrid.structured_outputs import Reasoning, StructuredOutputs
from jhybrid.tokenizer import Tokenizer

MAX_GRAMMARS = 128
"""Compiled grammars kept; those in use are kept besides."""
MAX_REFUSALS = 1024
REFUSAL_SECONDS = 300.0
"""How long it is known that a constraint was refused: what took too long may have done so on a busy machine."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    max_items_in_row=20_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
MAX_SIZE = 50_000
"""Of expressions once their counted repetitions are written out. With LIMITS, compiling takes at most about half a
second and a mask some tens of milliseconds; what needs more is refused or fails."""
SCHEMA_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
"""Whitespace between tokens of JSON is free, but not without end: models can lose themselves in it."""
STEPS_AHEAD = 3
"""Tokens that a grammar is followed for before it is taken: one that grows too large mostly does so at once."""
SEARCH_SECONDS = 0.2
"""How long the place of a fault is looked for in a schema."""
GAP = r"/[ \n\r\t]{0,8}/"
"""What may stand between reasoning and the structured part."""


class GrammarError(JhybridError):
    """A grammar that came to no end of its own: it allows no token, or its limits were exceeded."""


class Grammar:
    """A compiled constraint. Immutable; each answer has a copy of its state."""

    def __init__(self, matcher: LLMatcher, first: np.ndarray):
        self._matcher = matcher
        self.first = first
        """Tokens that an answer may begin with, [words] uint32."""

    def matcher(self) -> LLMatcher:
        return self._matcher.deep_copy()


class Grammars:
    """Compiles constraints for one vocabulary and keeps the latest. Safe to call from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._recent: OrderedDict[tuple, Grammar] = OrderedDict()
        self._live: WeakValueDictionary[tuple, Grammar] = WeakValueDictionary()
        self._refused: OrderedDict[bytes, tuple[float, RequestError]] = OrderedDict()
        self._underway: dict[tuple, Future[Grammar]] = {}
        self.pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="jhybrid-grammar")
        """Makes masks."""
        self._guard: GrammarGuard | None = None

    def guard(self) -> None:
        """From now on, have new constraints compiled in a process of its own first, as servers must."""
        self._guard = GrammarGuard(_Vocabulary(self._tokenizer, self._vocab_size, self._eos))

    def of(self, wanted: StructuredOutputs) -> Grammar:
        """The compiled form. RequestError names the field and what is wrong with it.

        Whoever asks for what another has compiled at the moment waits for that.
        """
        wanted.validate()
        kind = wanted.kind
        text = wanted.schema_text() if kind == "json" else getattr(wanted, kind)
        key = (kind, tuple(text) if kind == "choice" else text, wanted.reasoning)
        with self._lock:
            found = self._known(key)
            if found is not None:
                return found
            underway = self._underway.get(key)
            if underway is None:
                ours = self._underway[key] = Future()
        if underway is not None:
            return _result(underway)
        try:
            with self._building:
                vocabulary = self._vocabulary
            ours.set_result(self._compile(vocabulary, kind, text, wanted.reasoning))
        except BaseException as error:  # noqa: BLE001 - it is told below, to all who wait
            ours.set_exception(error)
        with self._lock:
            del self._underway[key]
            self._keep(key, ours)
        return _result(ours)

    def _known(self, key: tuple) -> Grammar | None:
        """What was compiled before; None for what was not. Raises the RequestError of before."""
        found = self._live.get(key)
        if found is not None:
            self._recent[key] = found
            self._recent.move_to_end(key)
            return found
        refused = self._refused.get(_digest(key)) if self._refused else None
        if refused is not None and time.monotonic() - refused[0] < REFUSAL_SECONDS:
            raise RequestError(*refused[1].args)
        return None

    def _keep(self, key: tuple, made: "Future[Grammar]") -> None:
        error = made.exception()
        if error is None:
            self._live[key] = self._recent[key] = made.result()
            while len(self._recent) > MAX_GRAMMARS:
                self._recent.popitem(last=False)
        elif isinstance(error, RequestError):
            digest = _digest(key)
            self._refused[digest] = time.monotonic(), RequestError(*error.args)
            self._refused.move_to_end(digest)
            while len(self._refused) > MAX_REFUSALS:
                self._refused.popitem(last=False)

    def _compile(self, vocabulary: LLTokenizer, kind: str, text: Any, reasoning: Reasoning | None) -> Grammar:
        field = f"structured_outputs.{kind}"
        source = _source(kind, text)
        if reasoning is not None:
            source = self._after(reasoning, source)
        if self._guard is not None and (fault := self._guard.fault(source)):
            raise RequestError(field, f"the process that compiles it {fault}; {REMEDIES[kind]}")
        matcher = compiled(vocabulary, source)
        if matcher.is_error():
            where = _place(text) if kind == "json" else ""
            raise RequestError(field, f"{where}{_cause(matcher, kind)}; {REMEDIES[kind]}")
        first = _mask(matcher, -(-self._vocab_size // 32))
        ahead = follow(matcher.deep_copy(), STEPS_AHEAD)
        for each in (matcher, ahead):
            if each.is_error():
                raise RequestError(field, f"{_cause(each, kind)}; {REMEDIES[kind]}")
        return Grammar(matcher, first)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The vocabulary as a trie, made when it is first asked for."""
        return vocabulary_of(_Vocabulary(self._tokenizer, self._vocab_size, self._eos))

    @functools.cached_property
    def opening(self) -> frozenset[int]:
        """Tokens that stand for other bytes where they open a text than elsewhere."""
        of = self._tokenizer.token_bytes
        return frozenset(i for i in range(self._vocab_size) if of(i, first=True) != of(i))

    def _after(self, reasoning: Reasoning, source: str) -> str:
        """The grammar of `source` after a section of free text."""
        end, start = self._literal(reasoning.end), self._literal(reasoning.start)
        is_token = end.startswith("<[")
        section = f"section: /(?s:.*)/ {end}" if is_token else f"section[suffix={end}]: /(?s:.*)/"
        begin = "section" if reasoning.is_open else f"({start} section)?"
        lark = f"start: {begin} gap @body\ngap: {GAP}\n{section}\n"
        body = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**body, "name": "body"}]})

    def _literal(self, text: str) -> str:
        return literal(self._tokenizer, text)


def _digest(key: tuple) -> bytes:
    """A constraint in few bytes: refused ones may be long."""
    return hashlib.sha256(repr(key).encode("utf-8", "surrogatepass")).digest()


def _result(made: "Future[Grammar]") -> Grammar:
    """What was compiled. A refusal is raised anew for each caller: tracebacks grow on the instance."""
    error = made.exception()
    if isinstance(error, RequestError):
        raise RequestError(*error.args) from error.__cause__
    return made.result()


def literal(tokenizer: Tokenizer, text: str) -> str:
    """A text in Lark: as its control token where it is one, which no other spelling can stand for."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) == 1 and tokenizer.is_special(ids[0]):
        return f"<[{ids[0]}]>"
    return json.dumps(text, ensure_ascii=False)


class Constraint:
    """What one answer may go on with. The engine's thread calls it, but for the making of masks."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        grammar: Grammar,
        *,
        first: frozenset[int],
        early: frozenset[int],
        least: int,
        never: frozenset[int],
    ):
        """Tokens that are not allowed as `first`, `early`, which is before `least` tokens, and `never`.

        RequestError if they leave nothing to begin with.
        """
        self._pool, self._matcher = pool, grammar.matcher()
        self._early, self._least, self._never = early, least, never
        self._made = 0
        self._next: Future[np.ndarray | None] | None = None
        self.mask = _without(self._restrict(grammar.first), first)
        """Bits of the tokens that may come next, [words] uint32. To be read once `ready`."""
        if not self.mask.any():
            raise RequestError("structured_outputs", "no first token is allowed with this min_tokens and ignore_eos")

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is there."""
        return self._next is None

    def take(self, token: int) -> "Future[np.ndarray | None]":
        """Go on with a token, and start making the mask of the next one."""
        self._made += 1
        self._next = self._pool.submit(self._make, token)
        return self._next

    def finish(self) -> bool:
        """Take in the mask that was made; whether the answer is complete, as nothing may follow. GrammarError."""
        assert self._next is not None
        mask, self._next = self._next.result(), None
        if mask is not None:
            self.mask = mask
        return mask is None

    def _make(self, token: int) -> np.ndarray | None:
        matcher = self._matcher
        matcher.consume_token(token)
        mask = _mask(matcher, len(self.mask))
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed after {self._made} tokens: {_cause(matcher)}")
        mask = self._restrict(mask)
        if matcher.is_stopped() or (matcher.is_accepting() and not mask.any()):
            return None
        if not mask.any():
            raise GrammarError(f"the grammar leaves nothing but end tokens after {self._made} tokens, too early")
        return mask

    def _restrict(self, mask: np.ndarray) -> np.ndarray:
        return _without(mask, self._never | self._early if self._made < self._least else self._never)


class _Vocabulary:
    """The tokenizer as llguidance reads it. Ids that the tokenizer has no bytes for are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        """End tokens are never text, also where the tokenizer has text for them: they end the answer."""
        self._tokenizer: Tokenizer | None = tokenizer
        self.eos_token_ids, self.eos_token_id = eos_token_ids, eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i) or i in eos_token_ids]
        special = set(self.special_token_ids)
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of text that a grammar prescribes: the tokenizer's, where they stand for just this text."""
        if self._tokenizer is None:
            return self._greedy(text)
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        exact = all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == text
        return ids if exact else self._greedy(text)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without the tokenizer: any tokens will do where grammars are only tried."""
        return self.__dict__ | {"_tokenizer": None}

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at each place, up to where there is none."""
        ids: list[int] = []
        while text:
            size = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


def vocabulary_of(vocabulary: _Vocabulary) -> LLTokenizer:
    """The vocabulary as a trie."""
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)


def compiled(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    """A grammar at its beginning, within LIMITS. Look at `is_error`."""
    return LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)


def follow(matcher: LLMatcher, steps: int) -> LLMatcher:
    """Have it go on with the first token that it allows, `steps` times or up to an end or an error."""
    for _ in range(steps):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not len(ids) or not matcher.consume_token(int(ids[0])):
            break
    if not (matcher.is_error() or matcher.is_stopped()):
        matcher.compute_bitmask()
    return matcher


def _mask(matcher: LLMatcher, words: int) -> np.ndarray:
    """Bits of the tokens that may come next, [words] uint32. Look at `matcher.is_error` before using it."""
    return np.frombuffer(matcher.compute_bitmask(), np.uint32)[:words]  # it may have a word too many


def _without(mask: np.ndarray, tokens: frozenset[int]) -> np.ndarray:
    if tokens:
        mask = mask.copy()
        ids = np.fromiter(tokens, np.int64, len(tokens))
        np.bitwise_and.at(mask, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return mask


REMEDIES = {
    "json": "correct or simplify the schema",
    "json_object": "use json",
    "regex": "use the syntax of Rust's regex crate, or a simpler expression",
    "choice": "give fewer or shorter texts",
    "grammar": "use Lark as llguidance reads it, or GBNF",
}


def _source(kind: str, text: Any) -> str:
    """What llguidance compiles."""
    try:
        if kind in ("json", "json_object"):
            if text == "false":
                raise RequestError("structured_outputs.json", "the schema false allows no text; leave it out")
            schema = '{"type": "object"}' if kind == "json_object" else "{}" if text == "true" else text
            check_schema("structured_outputs.json", json.loads(schema))
            _check_size(kind, schema_size(json.loads(schema)))
            return LLMatcher.grammar_from_json_schema(schema, defaults=SCHEMA_OPTIONS)  # pyright: ignore[reportArgumentType]
        if kind == "regex":
            _check_size(kind, regex_size(text))
            return LLMatcher.grammar_from_regex(text)
        if kind == "choice":
            lark = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in text)
            return LLMatcher.grammar_from_lark(lark)
        lark = any_to_lark(text)
        for embedded in lark.split("%json")[1:]:
            check_schema("structured_outputs.grammar", json.JSONDecoder().raw_decode(embedded.lstrip())[0])
        _check_size(kind, lark_size(lark))
        return LLMatcher.grammar_from_lark(lark)
    except RequestError:
        raise
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise RequestError(f"structured_outputs.{kind}", f"{_short(str(error))}; {REMEDIES[kind]}") from error


def _check_size(kind: str, size: int) -> None:
    if size > MAX_SIZE:
        field = f"structured_outputs.{kind}"
        raise RequestError(field, f"repetitions written out have {size} characters, at most {MAX_SIZE} allowed")


def _cause(matcher: LLMatcher, kind: str = "") -> str:
    """llguidance's own words, of which it has none where no token is allowed, but for what only its caller can know."""
    cause = matcher.get_error().replace("<non-verbose/>", "").strip()
    if kind == "regex":  # which it quotes first, and then once more in a grammar of its own making
        cause = re.sub(r"\n +1 \| start: .*", "", cause.partition("(in regex): ")[2] or cause, flags=re.DOTALL)
    if cause.startswith("oneOf"):
        cause = "oneOf is not supported where its options overlap; use anyOf"
    cause = _short(cause)
    return "it allows no text" if cause in ("", "NoExtension", "NoExtensionBias") else cause


def _short(cause: str) -> str:
    """As much of each line, some of which quote what was asked, as can be read."""
    return "\n".join(line[:160].rstrip() for line in cause.splitlines())[:500]


def _place(schema: str) -> str:
    """`at properties.age: ` for the deepest part of a schema that is refused by itself; empty for all of it."""
    root, path, deadline = json.loads(schema), "", time.monotonic() + SEARCH_SECONDS
    found, part = True, root
    while found:
        found = False
        for name, child in _children(part):
            if time.monotonic() > deadline:
                break
            if _is_refused(child, root):
                part, path, found = child, f"{path}.{name}", True
                break
    return f"at {path[1:]}: " if path else ""


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, by their path."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        for name, child in schema[key].items() if isinstance(schema.get(key), dict) else ():
            yield f"{key}.{name}", child
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for at, child in enumerate(schema[key] if isinstance(schema.get(key), list) else ()):
            yield f"{key}[{at}]", child
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]


def _is_refused(schema: Any, root: Any) -> bool:
    if not isinstance(schema, dict):
        return not isinstance(schema, bool)
    shared = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
    try:
        source = _source("json", json.dumps(shared | schema))
    except RequestError:  # what it refers to is not the same here
        return False
    return LLMatcher.validate_grammar(source, None, limits=LIMITS) != ""
