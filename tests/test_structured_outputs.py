"""Answers bound by a schema, a regex, a choice or a grammar, on the toy model, which would say anything."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from jhybrid import grammar as grammar_module
from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.errors import RequestError
from jhybrid.grammar import Grammars
from jhybrid.request import Output, Request, SamplingParams
from jhybrid.structured_outputs import Reasoning, StructuredOutputs
from tests.toy_model import ToyRunner, expected_tokens, toy_engine
from tests.toy_tokenizer import CONTROL, END, TEXTS, ToyTokenizer, talking_engine

OPTIONS: dict = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
CONFIG = EngineConfig(
    max_num_seqs=3,
    page_size=4,
    max_num_batched_tokens=8,
    chunk_size=4,
    max_model_len=64,
    num_pages=20,
    enable_prefix_caching=True,
    snapshot_slots=8,
)
ANYTHING = StructuredOutputs(regex="(?s:.*)")
REGEXES = (
    r"[a-e]+",
    r"(yes|no)?[0-9]{2,5}",
    r'"[^"]{0,9}"',
    r"é{1,4}|😀+",
    r"(?s:.){3}",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
)


def bound(prompt: list[int], wanted: StructuredOutputs | None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 24, "seed": 1, "structured_outputs": wanted} | sampling)
    return Request(prompt_token_ids=prompt, sampling=params)


def answer(request: Request, config: EngineConfig = CONFIG, **options: Any) -> Output:
    """Of an engine that has nothing else to do."""
    engine, runner = talking_engine(config, **options)
    [output] = engine.generate([request])
    assert not runner.violations
    return output


def test_thousands_of_optional_properties():
    schema = {
        "type": "object",
        "properties": {f"a{at}": {"type": "boolean"} for at in range(3000)},
        "additionalProperties": False,
    }
    output = answer(bound([7, 8], StructuredOutputs(json=schema), max_tokens=40))
    assert output.error is None and output.text.startswith("{")


def test_a_schema_of_true_is_any_json():
    output = answer(bound([7, 8], StructuredOutputs(json=True), max_tokens=40))
    assert output.error is None and output.token_ids
    if output.finish_reason == "stop":
        json.loads(output.text)


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(150):
    DEEP = {"type": "array", "items": DEEP}
KEYS = {f"a{at}": {"type": "boolean"} for at in range(3001)}
MANY = {"type": "array", "prefixItems": [{"required": [f"a{at}" for at in range(1000)]}] * 6}
ENDLESS = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
OVERLAP = {"oneOf": [{"type": "integer"}, {"type": "number"}]}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"regex": "a(b"},
            r"^structured_outputs.regex: regex parse error:\n    a\(b\n     \^\nerror: unclosed group;",
        ),
        ({"json": False}, "the schema false allows no text"),
        ({"json": DEEP}, "^structured_outputs.json: is nested more than 100 levels deep; flatten"),
        (
            {"json": {"properties": {"b": {"properties": KEYS}}}},
            r"json: at properties\.b: an object has 3001 keys, at most",
        ),
        (
            {"json": {"patternProperties": {f"^{at}": {} for at in range(65)}}},
            "an object has 65 patternProperties, at most",
        ),
        ({"json": MANY}, "its objects have 6000 keys, at most 5000 allowed; leave some out"),
        ({"json": {"properties": {"a": OVERLAP, "b": {"$ref": "#"}}}}, r"at properties\.a: oneOf is not"),
        ({"json": ENDLESS}, r"^structured_outputs.json: at properties\.child: it requires itself, so no text ends; "),
        ({"grammar": f"start: %json {json.dumps(ENDLESS)}"}, r"grammar: at properties\.child: it requires itself"),
        (
            {"json": {"properties": {"a": OVERLAP}}},
            r"at properties\.a: oneOf is not .* overlap; use anyOf",
        ),
    ],
)
def test_refusals_say_what_their_author_can_change(wanted: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message) as refused:
        answer(bound([7, 8], StructuredOutputs(**wanted)))
    assert "start:" not in str(refused.value) and "coerce" not in str(refused.value)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    monkeypatch.setattr(grammar_module, "check_schema", lambda *_: None)
    grammars = Grammars(ToyTokenizer(), 64, frozenset([END]))
    grammars.guard()
    yield grammars
    assert grammars._guard is not None
    grammars._guard.close()


def test_a_grammar_that_kills_its_process_is_refused_and_no_other(guarded: Grammars):
    for _ in range(2):
        with pytest.raises(RequestError, match=r"json: the process that compiles it ended with -\d+"):
            guarded.of(StructuredOutputs(json={"type": "integer", "minimum": -1e30, "maximum": -1e30}))
        assert guarded.of(StructuredOutputs(json={"type": "integer"})).first.any()
        assert guarded.of(StructuredOutputs(regex="[a-e]+")).first.any()
        with pytest.raises(RequestError, match="unclosed group"):
            guarded.of(StructuredOutputs(regex="a(b"))


def test_a_grammar_that_takes_too_long_is_refused(guarded: Grammars, monkeypatch: pytest.MonkeyPatch):
    assert guarded.of(StructuredOutputs(regex="[a-e]+")).first.any()
    guard = guarded._guard
    assert guard is not None and guard._process is not None
    guard._process.send_signal(signal.SIGSTOP)  # as if it were busy
    monkeypatch.setattr("jhybrid.grammar_guard.SECONDS", 0.2)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"the process that compiles it takes more than 0\.2 s"):
            guarded.of(StructuredOutputs(regex="[a-d]+"))
    assert guard._process is None, "the second time it is known"
    monkeypatch.setattr(grammar_module, "REFUSAL_SECONDS", 0.0)
    assert guarded.of(StructuredOutputs(regex="[a-d]+")).first.any()


def test_options_that_do_not_overlap_are_taken():
    schema = {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
    output = answer(bound([7, 8], StructuredOutputs(json=schema)))
    assert allows({"anyOf": schema["oneOf"]}, json.loads(output.text))


# schemas and what they allow

Schema = dict[str, Any]


def schemas() -> st.SearchStrategy[Schema]:
    """Without null, which the toy's tokens can begin and, from there, not end."""
    leaves: st.SearchStrategy[Schema] = st.one_of(
        st.sampled_from([{"type": kind} for kind in ("boolean", "integer", "number")]),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 3)),
        st.builds(
            lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n}, st.integers(-9, 9), st.integers(0, 9)
        ),
        st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from(["a", "é", "ab", 1, True]), min_size=1)),
        st.builds(lambda v: {"const": v}, st.sampled_from(["a", 0, False])),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(
                lambda props, more: {
                    "type": "object",
                    "properties": props,
                    "required": sorted(props)[:more],
                    "additionalProperties": False,
                },
                st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
                st.integers(0, 3),
            ),
            st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 2)),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=5,
    )


def allows(schema: Schema, value: Any) -> bool:
    """JSON Schema by its definition, for what `schemas` makes."""
    if "anyOf" in schema:
        return any(allows(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    if "const" in schema:
        return value == schema["const"] and type(value) is type(schema["const"])
    kind = schema["type"]
    if kind == "object":
        props = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(props)
            and all(allows(props[name], each) for name, each in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(allows(schema["items"], each) for each in value)
        )
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == "integer" and value != int(value):
        return False
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


@settings(max_examples=40, **OPTIONS)
@given(schemas(), st.integers(0, 2**31), st.floats(0.0, 5.0), st.lists(st.integers(6, 59), min_size=1, max_size=9))
def test_answers_follow_any_schema(schema: Schema, seed: int, temperature: float, prompt: list[int]):
    wanted = StructuredOutputs(json=schema)
    output = answer(bound(prompt, wanted, seed=seed, temperature=temperature, max_tokens=50))
    assert output.error is None and output.finish_reason in ("stop", "length")
    if output.finish_reason == "stop":
        assert allows(schema, json.loads(output.text)), output.text
        assert json.loads(output.text) == json.loads(b"".join(TEXTS[t] for t in output.token_ids if t != END))


@settings(max_examples=40, **OPTIONS)
@given(st.sampled_from(REGEXES), st.integers(0, 2**31), st.floats(0.0, 5.0), st.integers(0, 6), st.booleans())
def test_answers_match_any_regex(regex: str, seed: int, temperature: float, min_tokens: int, ignore_eos: bool):
    wanted = StructuredOutputs(regex=regex)
    request = bound([9], wanted, seed=seed, temperature=temperature, min_tokens=min_tokens, ignore_eos=ignore_eos)
    output = answer(request)
    assert output.error is None
    assert CONTROL not in output.token_ids and all(token <= CONTROL for token in output.token_ids)
    if ignore_eos:
        assert END not in output.token_ids
    if output.finish_reason == "stop":
        assert re.fullmatch(regex, output.text), output.text
    else:
        assert output.finish_reason == "length" and len(output.token_ids) == 24
    if len(output.token_ids) <= min_tokens and output.token_ids:  # complete before: nothing could follow
        assert output.token_ids[-1] != END


# many at once


@st.composite
def mixes(draw: st.DrawFn) -> list[Request]:
    """Requests of which some are bound. What is drawn of the toy depends on nothing but the request."""
    stem = draw(st.lists(st.integers(6, 59), min_size=12, max_size=12))
    kinds = [None, *(StructuredOutputs(regex=regex) for regex in REGEXES), StructuredOutputs(json_object=True)]
    requests = []
    for _ in range(draw(st.integers(2, 5))):
        prompt = stem[: draw(st.integers(0, 12))] + draw(st.lists(st.integers(6, 59), min_size=1, max_size=6))
        requests.append(
            bound(
                prompt,
                draw(st.sampled_from(kinds)),
                seed=draw(st.integers(0, 9)),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                n=draw(st.integers(1, 2)),
                max_tokens=draw(st.integers(0, 20)),
                logprobs=draw(st.sampled_from([None, 0])),
                stop=draw(st.sampled_from([None, "a", "12"])),
            )
        )
    return requests


@settings(max_examples=40, **OPTIONS)
@given(mixes(), st.booleans(), st.sampled_from(["hybrid", "attention", "recurrent"]), st.integers(16, 24))
def test_together_as_alone(requests: list[Request], ahead: bool, kind: str, pages: int):
    """Preempted, cut into chunks, from cached prefixes, beside others that are bound or free."""
    engine, runner = talking_engine(replace(CONFIG, async_scheduling=ahead, num_pages=pages), kind=kind)
    together = engine.generate(requests)
    assert not runner.violations
    assert engine.ledger.rows.used == 0
    for request, output in zip(requests, together, strict=True):
        alone = answer(request)
        for ours, its in zip(output.completions, alone.completions, strict=True):
            assert replace(ours, logprobs=None) == replace(its, logprobs=None)
            if request.sampling.structured_outputs is None and request.sampling.stop is None:
                assert ours.token_ids == expected_tokens(request.prompt_token_ids or [], request.sampling, ours.index)


def test_the_free_run_ahead_and_the_bound_wait():
    """A bound sequence is in every other step; the free one beside it in each."""
    seen: list[list[bool]] = []
    engine, _ = talking_engine(CONFIG, before_run=lambda batch: seen.append([i.samples for i in batch.items]))
    free = bound([7], None, ignore_eos=True, max_tokens=12)
    outputs = engine.generate([bound([8], StructuredOutputs(regex="[a-e]{12}"), max_tokens=12), free])
    assert [output.finish_reason for output in outputs] == ["stop", "length"]
    assert outputs[1].token_ids == expected_tokens([7], free.sampling)
    together = [items for items in seen[1:] if len(items) == 2]
    assert 0 < len(together) < len(seen) - 1


def test_what_allows_all_changes_nothing_but_control_tokens():
    request = bound([9, 8], None, ignore_eos=True, temperature=0.0, max_tokens=2)
    assert set(expected_tokens([9, 8], request.sampling)) <= set(TEXTS)
    free = bound([9, 8], ANYTHING, ignore_eos=True, temperature=0.0, max_tokens=2)
    assert answer(request).token_ids == answer(free).token_ids


def test_an_answer_cut_short_has_its_reason():
    output = answer(bound([9], StructuredOutputs(regex="[a-e]{40}"), max_tokens=3))
    assert output.finish_reason == "length" and re.fullmatch("[a-e]{3,9}", output.text)


def test_an_answer_ends_with_what_completes_it():
    [output] = [answer(bound([9], StructuredOutputs(choice=["yes", "no"]), min_tokens=9, ignore_eos=True))]
    assert output.finish_reason == "stop" and output.text in ("yes", "no")
    assert END not in output.token_ids


def test_half_characters_are_never_left_over():
    for seed in range(20):
        output = answer(bound([9], StructuredOutputs(regex="(é|😀){2}"), seed=seed))
        assert re.fullmatch("(é|😀){2}", output.text), output.token_ids


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_comes_first(is_open: bool):
    wanted = StructuredOutputs(choice=["yes", "no"], reasoning=Reasoning("[", "]", is_open))
    texts = {answer(bound([9], wanted, seed=seed, max_tokens=60)).text for seed in range(30)}
    ended = [text for text in texts if text.endswith(("yes", "no"))]
    assert ended
    head = r"[^\]]*\]" if is_open else r"(\[[^\]]*\])?"
    for text in ended:
        assert re.fullmatch(rf"(?s:{head})\s{{0,8}}(yes|no)", text), text


# what goes wrong


def test_a_dead_end_ends_its_request_with_a_reason_and_no_other():
    """Banning the only token that may go on leaves nothing to choose."""
    only = next(token for token, text in TEXTS.items() if text == b"z")
    wanted = StructuredOutputs(grammar='start: "a" /z{9}/')
    dead = bound([9], wanted, min_tokens=5, stop_token_ids=[only])
    engine, _ = talking_engine(CONFIG)
    outputs = engine.generate([dead, bound([7], None), bound([8], StructuredOutputs(regex="[ab]{9}"))])
    assert outputs[0].finish_reason == "error" and "grammar leaves nothing but end tokens" in (outputs[0].error or "")
    assert outputs[0].text == "a"
    assert outputs[1].token_ids == expected_tokens([7], bound([7], None).sampling)
    assert re.fullmatch("[ab]{9}", outputs[2].text)
    assert engine.ledger.rows.used == 0


def test_limits_that_are_exceeded_while_answering_end_the_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(step_max_items=200, verbose_errors=False))
    output = answer(bound([9], StructuredOutputs(grammar='start: s\ns: s s | "a" | "b"'), min_tokens=24))
    assert output.finish_reason == "error" and "grammar cannot be followed" in (output.error or "")


def test_a_slow_mask_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch):
    engine, _ = talking_engine(CONFIG)
    make = grammar_module._mask
    gate = threading.Event()

    def slow(*args: Any) -> np.ndarray:
        if threading.current_thread().name.startswith("jhybrid-grammar"):
            gate.wait(20)
        return make(*args)

    monkeypatch.setattr(grammar_module, "_mask", slow)
    engine.submit(replace(bound([9], StructuredOutputs(regex="[ab]{9}")), request_id="slow"))
    engine.submit(replace(bound([7], None, ignore_eos=True), request_id="free"))
    ended = {}
    started = time.monotonic()
    while "free" not in ended:
        ended |= {delta.request_id: delta for delta in engine.step() if delta.finish_reason}
    assert time.monotonic() - started < 2.0
    assert "slow" not in ended
    gate.set()
    while engine.has_work:
        ended |= {delta.request_id: delta for delta in engine.step() if delta.finish_reason}
    assert ended["slow"].finish_reason == "stop"


def test_aborted_while_its_mask_is_made():
    engine, _ = talking_engine(CONFIG)
    name = engine.submit(bound([9], ANYTHING, ignore_eos=True, max_tokens=40))
    while not engine._masking:
        engine.step()
    assert engine.abort(name)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["abort"]
    assert engine.ledger.rows.used == 0


REFUSED: dict[str, tuple[StructuredOutputs, str, str]] = {
    "none": (StructuredOutputs(), "structured_outputs", "nothing; give exactly one"),
    "two": (StructuredOutputs(regex="a", choice=["a"]), "structured_outputs", "regex and choice"),
    "type": (StructuredOutputs(regex=3), "structured_outputs.regex", "must be a string"),  # pyright: ignore[reportArgumentType]
    "no schema": (StructuredOutputs(json=[1]), "structured_outputs.json", "must be a JSON schema"),  # pyright: ignore[reportArgumentType]
    "no JSON": (StructuredOutputs(json="{"), "structured_outputs.json", "is no JSON"),
    "schema": (StructuredOutputs(json={"type": "foo"}), "structured_outputs.json", "Invalid type: foo"),
    "place": (
        StructuredOutputs(json={"properties": {"a": {"items": {"anyOf": [{}, {"type": "foo"}]}}}}),
        "structured_outputs.json",
        "at properties.a.items.anyOf[1]: Invalid type",
    ),
    "keyword": (
        StructuredOutputs(json={"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}),
        "structured_outputs.json",
        "at $defs.x: Unimplemented keys",
    ),
    "never": (
        StructuredOutputs(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "structured_outputs.json",
        "at $defs.a: it requires itself",
    ),
    "elsewhere": (StructuredOutputs(json={"$ref": "http://localhost/x"}), "structured_outputs.json", "does not fetch"),
    "file": (StructuredOutputs(json={"$ref": "file:///etc/passwd"}), "structured_outputs.json", "does not fetch"),
    "regex": (StructuredOutputs(regex="a("), "structured_outputs.regex", "unclosed group"),
    "look-around": (StructuredOutputs(regex="(?=a)"), "structured_outputs.regex", "look-around"),
    "choice": (StructuredOutputs(choice=[]), "structured_outputs.choice", "at least one"),
    "choices": (StructuredOutputs(choice=["a", ""]), "structured_outputs.choice[1]", "non-empty"),
    "grammar": (StructuredOutputs(grammar="start: nothing"), "structured_outputs.grammar", "nothing"),
    "gbnf": (StructuredOutputs(grammar="root ::= ["), "structured_outputs.grammar", "GBNF"),
    "large": (StructuredOutputs(regex="a" * 300_000), "structured_outputs.regex", "at most"),
    "huge": (StructuredOutputs(regex="(a{1000}){1000}"), "structured_outputs.regex", "written out"),
    "huge pattern": (
        StructuredOutputs(json={"items": {"pattern": "(a{1000}){1000}"}}),
        "structured_outputs.json",
        "written out",
    ),
    "huge names": (
        StructuredOutputs(grammar="start: A{40}\nA: B{40}\nB: /x{1,40}/"),
        "structured_outputs.grammar",
        "written out",
    ),
    "bounds": (  # llguidance overflows its stack on these, and rounds others
        StructuredOutputs(json={"properties": {"a": {"type": "integer", "minimum": -1e30, "maximum": -1e30}}}),
        "structured_outputs.json",
        "at properties.a: minimum -1e+30 is not in",
    ),
    "embedded bounds": (
        StructuredOutputs(grammar='start: %json {"type": "integer", "minimum": 9007199254740993}'),
        "structured_outputs.grammar",
        "minimum 9007199254740993 is not in",
    ),
    "wide": (StructuredOutputs(json={"enum": ["x" * i for i in range(1000)]}), "structured_outputs.json", "at most"),
    "deep": (StructuredOutputs(json="[" * 100_000), "structured_outputs.json", "nested too deeply"),
    "reasoning": (StructuredOutputs(regex="a", reasoning=3), "structured_outputs.reasoning", "Reasoning"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_field_the_place_and_the_remedy(name: str):
    wanted, field, message = REFUSED[name]
    engine, _ = talking_engine(CONFIG)
    started = time.monotonic()
    with pytest.raises(RequestError, match=re.escape(message)) as refused:
        engine.submit(bound([9], wanted))
    assert refused.value.field == field
    assert time.monotonic() - started < 5.0
    assert not engine.has_work


def test_nothing_to_begin_with_is_refused():
    engine, _ = talking_engine(CONFIG)
    with pytest.raises(RequestError, match="no first token"):
        engine.submit(bound([9], StructuredOutputs(regex="(a{0})"), ignore_eos=True))
    [output] = engine.generate([bound([9], StructuredOutputs(regex="(a{0})"))])
    assert output.text == "" and output.finish_reason == "stop"


def test_a_model_without_a_tokenizer_says_so():
    engine, _ = toy_engine(CONFIG)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.submit(bound([9], ANYTHING))


def test_grammars_are_kept_by_content_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 3)
    grammars = Grammars(ToyTokenizer(), 64, frozenset({END}))
    held = grammars.of(StructuredOutputs(json={"type": "integer"}))
    assert grammars.of(StructuredOutputs(json='{"type":\n"integer"}')) is held
    for length in range(1, 9):
        grammars.of(StructuredOutputs(regex="a" * length))
    assert len(grammars._recent) == 3 and len(grammars._live) <= 4
    assert grammars.of(StructuredOutputs(json={"type": "integer"})) is held, "what somebody holds is found again"


def test_refusals_are_known_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "MAX_REFUSALS", 3)
    grammars, compiled = Grammars(ToyTokenizer(), 64, frozenset({END})), []
    compile_ = grammars._compile

    def counted(vocabulary: Any, kind: str, text: str, reasoning: Any) -> grammar_module.Grammar:
        compiled.append(text)
        return compile_(vocabulary, kind, text, reasoning)

    monkeypatch.setattr(grammars, "_compile", counted)
    for _ in range(2):
        for length in range(1, 4):
            with pytest.raises(RequestError, match="unclosed group") as refused:
                grammars.of(StructuredOutputs(regex="(" * length))
            assert refused.value.field == "structured_outputs.regex"
    assert compiled == ["(", "((", "((("]
    for length in (4, 1, 4):
        with pytest.raises(RequestError, match="unclosed group"):
            grammars.of(StructuredOutputs(regex="(" * length))
    assert compiled[3:] == ["((((", "("] and len(grammars._refused) == 3


def test_what_many_ask_for_at_once_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    grammars, begun, go, compiled = Grammars(ToyTokenizer(), 64, frozenset({END})), Barrier(9), Event(), []
    compile_ = grammars._compile

    def slow(vocabulary: Any, kind: str, text: str, reasoning: Any) -> grammar_module.Grammar:
        compiled.append(text)
        assert go.wait(30)
        return compile_(vocabulary, kind, text, reasoning)

    monkeypatch.setattr(grammars, "_compile", slow)

    def ask(regex: str) -> object:
        begun.wait(30)
        try:
            return grammars.of(StructuredOutputs(regex=regex))
        except RequestError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, regex) for regex in ("a(b", "[a-e]+") * 4]
        begun.wait(30)
        time.sleep(0.1)
        go.set()
        answers = [each.result(30) for each in asked]
    assert sorted(compiled) == ["[a-e]+", "a(b"]
    assert len(set(answers)) == 2 and not grammars._underway


class OpeningTokenizer(ToyTokenizer):
    """A space is dropped where it opens the text, as sentencepiece does."""

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        piece = super().token_bytes(token)
        return piece.lstrip(b" ") if first else piece


def test_tokens_that_open_a_text_otherwise_do_not_begin_an_answer():
    runner = ToyRunner(CONFIG)
    engine, _ = talking_engine(CONFIG)
    model = replace(engine.model, tokenizer=OpeningTokenizer())
    engine = Engine.with_runner(CONFIG, model, runner)  # pyright: ignore[reportArgumentType]
    wanted = StructuredOutputs(regex="[ a]{2}")
    for seed in range(20):
        [output] = engine.generate([bound([CONTROL], wanted, seed=seed)])
        assert re.fullmatch("[ a]{2}", output.text), output.token_ids
