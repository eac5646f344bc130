"""Detokenizer: deltas joined are the whole text, however tokens are cut, and stop strings cut where they begin."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jhybrid.detokenizer import Detokenizer
from jhybrid.tokenizer import ByteTokenizer, Tokenizer
from tests.tokenizer_fixtures import KINDS, make_tokenizer

BYTES = ByteTokenizer(263)
property_test = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(detokenizer: Detokenizer, groups: list[list[int]]) -> tuple[list[str], str | None]:
    """Push groups until a stop; the deltas, with finish's last, and the stop string."""
    deltas = []
    for group in groups:
        text, stop = detokenizer.push(group)
        deltas.append(text)
        if stop is not None:
            break
    return [*deltas, detokenizer.finish()], detokenizer.stopped


def cut(items: list[int], borders: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(border, len(items)) for border in borders), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, Tokenizer]:
    return {kind: make_tokenizer(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@property_test
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_joined_are_the_whole_text_of_any_tokens(kinds, kind: str, data, skip: bool):
    tokenizer = kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    groups = cut(ids, data.draw(st.lists(st.integers(0, 30), max_size=6)))
    deltas, stop = stream(Detokenizer(tokenizer, skip_special_tokens=skip), groups)
    assert stop is None
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@property_test
@given(text=st.text(max_size=30), lost=st.integers(0, 3))
@pytest.mark.parametrize("kind", ["byte", "byte_files", "byte_level_bpe", "byte_fallback"])
def test_no_half_character_is_given_out(kinds, kind: str, text: str, lost: int):
    tokenizer = kinds[kind]
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - lost]
    deltas, _ = stream(Detokenizer(tokenizer), [[token] for token in ids])
    assert all("\ufffd" not in delta for delta in deltas[:-1])
    assert deltas[-1] in ("", "\ufffd")
    assert text.startswith("".join(deltas[:-1]))
    if lost == 0:
        assert "".join(deltas) == text


@property_test
@given(
    text=st.text("abcé😀", max_size=30),
    stops=st.lists(st.text("abcé😀", min_size=1, max_size=4), min_size=1, max_size=3),
    borders=st.lists(st.integers(0, 60), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_cut_as_a_reader_of_single_characters_would(text: str, stops, borders, include: bool):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    end, start = min(ends, default=(len(text), len(text)))
    detokenizer = Detokenizer(BYTES, stop=stops, include_stop=include)
    deltas, stop = stream(detokenizer, cut(list(text.encode()), borders))
    assert "".join(deltas) == text[: end if include else start]
    assert (stop is not None) == bool(ends)
    if stop is not None:
        assert text[start:end] == stop
        assert detokenizer.token_count == len(text[:end].encode())


@pytest.mark.parametrize(("stops", "text"), [(["s", "os", "o"], "<e"), (["o", "eo"], "<"), (["os>", "e"], "<")])
def test_of_several_stop_strings_in_one_token_the_first_to_end_wins(stops: list[str], text: str):
    assert Detokenizer(BYTES, stop=stops, skip_special_tokens=False).push([257])[0] == text  # the token reads <eos>


def test_stop_string_over_four_tokens_never_shows():
    groups = [list(part) for part in (b"abcD", b"EF", b"GHI", b"Jxyz")]
    deltas, stop = stream(Detokenizer(BYTES, stop=["DEFGHIJ"]), groups)
    assert deltas == ["abc", "", "", "", ""]
    assert stop == "DEFGHIJ"


def test_near_miss_is_released_in_full():
    detokenizer = Detokenizer(BYTES, stop=["DEFGHIJ"])
    assert detokenizer.push(b"abDEFGH") == ("ab", None)
    assert detokenizer.push(b"X") == ("DEFGHX", None)
    assert detokenizer.push(b"DE") == ("", None)
    assert detokenizer.finish() == "DE"


def test_include_stop_keeps_it():
    assert Detokenizer(BYTES, stop=["."], include_stop=True).push(b"a.b") == ("a.", ".")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ".a"), (2, ".a"), (3, ".a.a"), (4, ".a.a")])
def test_min_tokens_come_before_any_stop_string(min_tokens: int, text: str):
    deltas, stop = stream(Detokenizer(BYTES, stop=["."], min_tokens=min_tokens), [[byte] for byte in b".a.a."])
    assert "".join(deltas) == text
    assert stop == "."


def test_special_tokens_do_not_break_a_stop_string():
    detokenizer = Detokenizer(BYTES, stop=["ab"])
    assert detokenizer.push([97, 257, 98]) == ("", "ab")
    shown = Detokenizer(BYTES, stop=["ab"], skip_special_tokens=False)
    assert shown.push([97, 257, 98]) == ("a<eos>b", None)


def test_without_tokenizer_there_is_no_text():
    detokenizer = Detokenizer(None, stop=["a"])
    assert detokenizer.push([1, 2]) == ("", None)
    assert detokenizer.finish() == ""
    assert detokenizer.token_count == 2


def test_work_per_token_does_not_grow():
    """Bytes decoded per token stay constant: the tokenizer is asked once per token, and nothing long is held."""
    calls = []

    class Counting(ByteTokenizer):
        def token_bytes(self, token: int, first: bool = False) -> bytes:
            calls.append(token)
            return super().token_bytes(token, first)

    detokenizer = Detokenizer(Counting(), stop=["zz"])
    for _ in range(2000):
        detokenizer.push([0xFF])  # broken bytes, which a window of tokens would have to keep
    assert len(calls) == 2000
    assert len(detokenizer._held) <= 1


def test_a_leading_space_after_a_special_token_stays(tmp_path: Path):
    tokenizer = make_tokenizer("byte_fallback", tmp_path)
    the = tokenizer.encode("the", add_special_tokens=False)[0]
    deltas, _ = stream(Detokenizer(tokenizer), [[1], [the], [2], [the]])
    assert deltas == ["", "the", "", " the", ""]


@property_test
@given(text=st.text("the dog é", max_size=20), more=st.text("the dog é", min_size=1, max_size=20), skip=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_from_its_prompt(kinds, kind: str, text: str, more: str, skip: bool):
    """Prompt and answer read as one text, with a space between them where there is one; BOS alone is no text."""
    tokenizer = kinds[kind]
    prompt = tokenizer.encode(text)
    answer = tokenizer.encode(more, add_special_tokens=False)
    deltas, _ = stream(Detokenizer(tokenizer, skip_special_tokens=skip, prompt=prompt), [answer])
    whole = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
    assert tokenizer.decode(prompt, skip_special_tokens=skip) + "".join(deltas) == whole


def test_the_first_word_of_an_answer_keeps_its_space(tmp_path: Path):
    tokenizer = make_tokenizer("byte_fallback", tmp_path)
    the = tokenizer.encode("the", add_special_tokens=False)
    assert Detokenizer(tokenizer, prompt=tokenizer.encode("dog")).push(the)[0] == " the"
    assert Detokenizer(tokenizer, prompt=tokenizer.encode("")).push(the)[0] == "the"  # nothing but BOS before
