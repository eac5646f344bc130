"""The scorer against the harness's own `hf` model; make_hf_likelihoods.py made its numbers."""

import json
from pathlib import Path

import pytest

from jhybrid.evaluate.scorer import Scorer
from jhybrid.evaluate.windows import continuation_window
from tests.engine.bed import caching, engine_of

GOLDEN = json.loads((Path(__file__).parent / "hf_likelihoods.json").read_text())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", GOLDEN["models"])
def test_totals_and_greedy_flags_are_those_of_hf(name: str, shared: bool):
    cases = GOLDEN["models"][name]
    windows = [continuation_window(c["context"], c["continuation"], GOLDEN["max_length"]) for c in cases]
    engine = engine_of(name)
    scorer = Scorer(engine)
    if shared:
        with caching(engine):
            found = scorer.score(windows)
        assert scorer.tally.cached > 100
    else:
        found = scorer.score(windows)
    for case, window, score in zip(cases, windows, found, strict=True):
        assert score.total == pytest.approx(case["total"], abs=1e-4 * window.num_scored), len(case["context"])
        assert score.is_greedy == case["is_greedy"]
    assert any(score.is_greedy and window.num_scored > 1 for window, score in zip(windows, found, strict=True))
