"""Occupancy: who holds what, as the engine itself knows it, and as cells that people can look at."""

from collections import Counter

import numpy as np
import pytest

from jhybrid import EngineConfig, Request, SamplingParams
from jhybrid.occupancy import CACHED, FREE, MAX_CELLS, SHARED, Holder, Occupancy
from tests.toy_model import toy_engine

CONFIG = EngineConfig(
    max_num_seqs=3, max_num_batched_tokens=16, page_size=4, enable_prefix_caching=True, snapshot_slots=8, num_pages=60
)
SHARED_PROMPT = [1, 9, 2, 7, 5, 3, 8, 4, 6]


def ask(name: str, *tail: int) -> Request:
    return Request(
        prompt_token_ids=[*SHARED_PROMPT, *tail],
        sampling=SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        request_id=name,
    )


def test_of_a_running_engine():
    engine, _ = toy_engine(CONFIG)
    assert engine.occupancy().describe()["sequences"] == []
    engine.generate([ask("before", 1)])
    for name in ("one", "two", "three", "waits"):
        engine.submit(ask(name, len(name)))
    for _ in range(6):
        engine.step()
    picture, status = engine.occupancy().describe(), engine.status()
    assert [sequence["name"] for sequence in picture["sequences"]] == ["one", "two", "three"]
    first = picture["sequences"][0]
    assert (first["prompt_tokens"], first["phase"], first["slots"]) == (10, "decode", 1)
    assert first["cached_tokens"] == 8 and 0 < first["output_tokens"] < 20
    pools = picture["pools"]
    assert set(pools) == {"slots", "pages", "snapshots"}
    for name, pool in pools.items():
        assert len(pool["cells"]) == pool["rows"] == status[name]["total"]
        seen = Counter(pool["cells"])
        assert seen[FREE] + seen[CACHED] == status[name]["free"] or name == "snapshots"
    assert sorted(pools["slots"]["cells"]) == [0, 1, 2]
    pages = Counter(pools["pages"]["cells"])
    assert pages[SHARED] == 2  # of the prefix that all three have
    assert pages[CACHED] > 0 and {0, 1, 2} <= set(pages)
    while engine.has_work:
        engine.step()
    picture = engine.occupancy().describe()
    assert picture["sequences"] == [] and set(picture["pools"]["pages"]["cells"]) == {FREE, CACHED}


@pytest.mark.parametrize("rows", [1, MAX_CELLS, MAX_CELLS + 1, 100_000])
def test_many_rows_are_merged(rows: int):
    held = [0, rows - 1]
    holder = Holder("a", 0, 1, 0, 0, 1, 0, 0, {"pages": held})
    taken = np.zeros(rows, bool)
    taken[[*held, rows // 2]] = True
    [pool] = Occupancy([holder], {"pages": taken.tobytes()}).describe()["pools"].values()
    cells = pool["cells"]
    assert len(cells) <= MAX_CELLS and len(cells) * pool["rows_per_cell"] >= pool["rows"] == rows
    assert cells[0] == cells[-1] == 0
    assert rows == 1 or cells[rows // 2 // pool["rows_per_cell"]] == CACHED
