"""Scorer: equal to the toy's table whatever is shared, and sharing what can be."""

import random

import pytest

from jhybrid.errors import ConfigError, StepError
from jhybrid.evaluate.scorer import Scorer, branch_points, common_prefix, window_length
from jhybrid.evaluate.windows import Window, continuation_window
from tests.evaluate.toy_text import by_hand, text_engine
from tests.toy_model import Fault, hash_of, next_token


def few_shot(rng: random.Random) -> list[Window]:
    """8 questions with 3 answers each behind the same examples, in a random order, some asked twice."""
    examples = [rng.randrange(8, 40) for _ in range(21)]
    windows = []
    for _ in range(8):
        question = [rng.randrange(8, 40) for _ in range(9)]
        for _ in range(3):
            answer = [rng.randrange(8, 40) for _ in range(rng.randrange(1, 5))]
            windows.append(continuation_window(examples + question, answer, 63))
    windows += windows[:5]
    rng.shuffle(windows)
    return windows


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("caching", [True, False])
def test_scores_are_the_table_s(kind: str, caching: bool):
    engine, runner = text_engine(caching=caching, kind=kind)
    windows = few_shot(random.Random(3))
    known = []
    scores = Scorer(engine).score(windows, known.append)
    assert [(s.total, s.is_greedy) for s in scores] == [by_hand(w.tokens, w.start) for w in windows]
    assert sum(known) == len(windows)
    assert not runner.violations


def test_every_length_up_to_the_window():
    engine, _ = text_engine()
    length = window_length(engine.model.max_model_len, None)
    assert length == 63
    rng = random.Random(5)
    windows = []
    for context in range(1, length + 4):
        for continuation in (1, 2, 30, length):
            before = [rng.randrange(64) for _ in range(context)]
            windows.append(continuation_window(before, [rng.randrange(64) for _ in range(continuation)], length))
    assert max(len(w.tokens) for w in windows) == 64
    scores = Scorer(engine).score(windows)
    assert [(s.total, s.is_greedy) for s in scores] == [by_hand(w.tokens, w.start) for w in windows]


def test_greedy_continuations_are_known_as_such():
    engine, _ = text_engine()
    tokens = [9, 10, 11]
    for _ in range(6):
        tokens.append(next_token(hash_of(tokens), temperature=0, seed=0, step=0, banned=frozenset()))
    wrong = [*tokens[:-1], (tokens[-1] + 1) % 64]
    found = Scorer(engine).score([Window(tokens, 3), Window(wrong, 3)])
    assert [score.is_greedy for score in found] == [True, False]


def test_a_shared_prefix_is_computed_once():
    windows = few_shot(random.Random(3))
    reports = []
    for caching in (True, False):
        engine, _ = text_engine(caching=caching)
        scorer = Scorer(engine)
        scorer.score(windows)
        reports.append(scorer.tally.report())
    shared, alone = reports
    asked = sum(len(w.tokens) for w in windows)
    assert shared["tokens_asked"] == alone["tokens_asked"] == asked
    for report in reports:
        assert report["tokens_computed"] + report["tokens_cached"] + report["tokens_repeated"] == asked
        assert 0 <= report["padding"] < 1
    distinct = {(*w.tokens, w.start): w for w in windows}.values()
    assert alone["tokens_cached"] == 0
    assert alone["tokens_computed"] == sum(len(w.tokens) for w in distinct)
    assert shared["tokens_computed"] == least_work(list(distinct), page=4)
    assert shared["reuse"] > 0.7


def least_work(windows: list[Window], page: int) -> int:
    """Tokens to compute if each window starts from the best whole page that an earlier one can have left."""
    ordered = sorted(windows, key=lambda w: w.tokens)
    total = 0
    for i, window in enumerate(ordered):
        known = [min(common_prefix(window.tokens, other.tokens), window.start - 1) for other in ordered[:i]]
        total += len(window.tokens) - max(known, default=0) // page * page
    return total


def test_branch_points_are_where_a_later_window_leaves():
    a, b = list(range(10)), [*range(6), 50, 51, 52, 53]
    c = [*range(3), 60, 61, 62]
    windows = [Window(a, 9), Window(b, 9), Window(c, 5)]
    assert branch_points(windows) == [[3, 6], [], []]
    # A state beyond the token before the first scored one is of no use to the second window.
    assert branch_points([Window(a, 9), Window(b, 5)]) == [[4], []]
    assert branch_points([Window(a, 9)]) == [[]]


def test_common_prefix():
    assert [common_prefix([1, 2, 3], other) for other in ([], [2], [1], [1, 2, 3], [1, 2, 4, 5])] == [0, 0, 1, 3, 2]


def test_a_failed_step_is_told():
    engine, runner = text_engine()
    runner.faults[0] = Fault("before")
    with pytest.raises(StepError, match="injected"):
        Scorer(engine).score([Window([9, 10, 11], 1)])


def test_a_window_that_does_not_fit_is_refused():
    assert window_length(64, 10) == 10
    for length in (0, 64):
        with pytest.raises(ConfigError, match=rf"max_length: {length} is not in 1 to 63"):
            window_length(64, length)
