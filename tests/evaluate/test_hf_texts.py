"""Texts against the harness's own `hf` model, from their encoding on; make_hf_texts.py made its numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jhybrid.evaluate.engines import OneEngine
from jhybrid.evaluate.respondent import Respondent
from jhybrid.tokenizer import load_tokenizer
from tests.engine.bed import engine_of

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "hf_texts.json").read_text())


def respondent(name: str) -> Respondent:
    """The tiny model has no tokenizer of its own."""
    engines = OneEngine(engine_of(name))
    engines.model = replace(engines.model, tokenizer=load_tokenizer(HERE / "byte_tokenizer"))
    return Respondent(engines, max_length=GOLDEN["max_length"])


@pytest.mark.parametrize("name", GOLDEN["models"])
def test_continuations_are_those_of_hf(name: str):
    cases, asker = GOLDEN["models"][name]["pairs"], respondent(name)
    found = asker.loglikelihoods([(case["context"], case["continuation"]) for case in cases])
    for case, likelihood in zip(cases, found, strict=True):
        _, continuation = asker.encode_pair(case["context"], case["continuation"])
        assert likelihood.total == pytest.approx(case["total"], abs=1e-4 * len(continuation)), case["continuation"]
        assert likelihood.is_greedy == case["is_greedy"], case["continuation"]
    assert any(case["is_greedy"] for case in cases)


@pytest.mark.parametrize("name", GOLDEN["models"])
def test_rolling_totals_are_those_of_hf(name: str):
    cases, asker = GOLDEN["models"][name]["rolling"], respondent(name)
    found = asker.rolling([case["text"] for case in cases])
    for case, total in zip(cases, found, strict=True):
        assert total == pytest.approx(case["total"], abs=1e-4 * max(1, len(asker.encode(case["text"])))), case["text"]
