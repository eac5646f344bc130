"""The latency model: it finds what is there, says how wrong it is, and comes back from its file as it was."""

import json
from pathlib import Path

import numpy as np
import pytest

from jhybrid.batch import make_buckets
from jhybrid.errors import ConfigError
from jhybrid.profiler.latency import LatencyModel, Observation

BUCKETS = make_buckets(8, 64)
CHUNK = 24  # more than the smallest bucket of prompts has


def true_seconds(decodes: list[int], prefills: list[tuple[int, int]]) -> float:
    blank = LatencyModel({}, {}, tuple(BUCKETS), 64, CHUNK, {})
    bucket = blank.bucket(decodes, prefills)
    base = 1e-3 + 2e-4 * bucket.tokens
    prompt = 0.0
    for new, cached in prefills:
        for at in range(0, new, CHUNK):
            prompt += 3e-4 + 2e-8 * min(CHUNK, bucket.tokens) * (cached + min(new, at + CHUNK))
    beside = 3.0 if prefills else 1.0
    return base + beside * (1e-4 * len(decodes) + 1e-6 * sum(decodes)) + prompt


def observed(*steps: tuple[list[int], list[tuple[int, int]]], noise: float = 1.0) -> Observation:
    seconds = sum(true_seconds(*step) for step in steps) * noise
    return Observation(tuple((tuple(d), tuple(p)) for d, p in steps), seconds)


def grid() -> list[Observation]:
    found = [observed(([depth] * batch, [])) for batch in (1, 2, 3, 4, 6, 8) for depth in (10, 100, 1000)]
    found += [observed(([], [(new, cached)])) for new in (3, 10, 16, 40, 64) for cached in (0, 100, 1000)]
    return found


def mixed() -> list[Observation]:
    found = [observed(([depth] * batch, [(12, 0)])) for batch in (2, 5) for depth in (10, 300)]
    return [*found, observed(([50] * 3, [(20, 0)]), ([51] * 3, [(9, 20)]))]


def test_a_linear_truth_is_found_again():
    held = [observed(([70, 500, 3], [(12, 40)])), observed(([400] * 5, []))]
    model = LatencyModel.fit(grid() + mixed(), held, BUCKETS, 64, CHUNK)
    assert model.errors["fitted"]["largest"] < 1e-6
    assert model.errors["held_out"]["largest"] < 1e-6
    assert model.itl(8, 2000) == pytest.approx(true_seconds([2000] * 8, []))
    assert model.ttft(30, 7) == pytest.approx(true_seconds([], [(30, 7)]))
    two = true_seconds([], [(64, 100)]) + true_seconds([], [(36, 164)])
    assert model.ttft(100, 100) == pytest.approx(two)


def test_without_mixed_points_mixed_steps_are_guessed_from_decoding():
    model = LatencyModel.fit(grid(), [], BUCKETS, 64, CHUNK)
    assert model.slopes["mixed_token"] == model.slopes["decode_token"] > 0
    alone = model.predict(prefills=[(12, 40)])
    assert model.predict([300], [(12, 40)]) == pytest.approx(alone + 1e-4 + 300 * 1e-6)


def test_errors_are_those_of_points_that_it_did_not_see():
    rng = np.random.default_rng(0)
    noisy = [Observation(o.steps, o.seconds * rng.uniform(0.98, 1.02)) for o in grid()]
    wrong = [observed(([100] * 2, []), noise=2.0)]
    model = LatencyModel.fit(noisy, wrong, BUCKETS, 64, CHUNK)
    assert model.errors["fitted"]["largest"] < 0.04
    assert model.errors["held_out"]["mean"] == pytest.approx(0.5, abs=0.05)
    assert model.errors["held_out"]["of_total"] == pytest.approx(-0.5, abs=0.05)
    assert min(model.slopes.values()) >= 0 and min(model.bases.values()) >= 0


def test_a_bucket_without_points_lies_between_its_neighbours():
    seen = [o for o in grid() if not any(len(d) in (3, 4) and not p for d, p in o.steps)]
    model = LatencyModel.fit(seen, [], BUCKETS, 64, CHUNK)
    assert "decode[T=4,S=4]" not in model.bases
    assert model.itl(4, 100) == pytest.approx(true_seconds([100] * 4, []), rel=0.01)
    assert model.errors["held_out"] == {"points": 0}


def test_it_comes_back_from_its_file(tmp_path: Path):
    model = LatencyModel.fit(grid(), [], BUCKETS, 64, CHUNK)
    model.save(tmp_path / "latency_model.json")
    assert LatencyModel.load(tmp_path) == model == LatencyModel.load(tmp_path / "latency_model.json")
    fields = json.loads((tmp_path / "latency_model.json").read_text())
    assert {
        "format",
        "unit",
        "bases",
        "slopes",
        "buckets",
        "max_num_batched_tokens",
        "chunk_size",
        "errors",
    } == fields.keys()
    (tmp_path / "latency_model.json").write_text(json.dumps(fields | {"format": 2}))
    with pytest.raises(ConfigError, match="format 2"):
        LatencyModel.load(tmp_path)
    (tmp_path / "latency_model.json").write_text("{}")
    with pytest.raises(ConfigError, match="no latency model"):
        LatencyModel.load(tmp_path)


def test_a_prompt_of_one_token_costs_what_a_decoding_sequence_does():
    model = LatencyModel.fit(grid() + mixed(), [], BUCKETS, 64, CHUNK)
    assert model.predict([50, 60], [(1, 70)]) == pytest.approx(model.predict([50, 60, 71]))
    beside = model.predict([50, 71], [(20, 0)])
    assert model.predict([50], [(20, 0), (1, 70)]) == pytest.approx(beside)


def test_what_no_bucket_holds_is_refused():
    model = LatencyModel.fit(grid(), [], BUCKETS, 64, CHUNK)
    with pytest.raises(ConfigError, match="9 sequences"):
        model.itl(9, 10)
    only = LatencyModel.fit([observed(([5], []))], [], BUCKETS, 64, CHUNK)
    with pytest.raises(ConfigError, match="no ragged points"):
        only.ttft(10)
