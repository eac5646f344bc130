"""Requirements A1 to A8: slots and pages are handed out, counted and given back as promised."""

import jax
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jhybrid import Engine, EngineConfig, OutOfMemoryError
from jhybrid.metrics import EngineCollector

from .bed import GOLDEN, alone, at_most, budget, drain, engine_of, greedy, prompts


def test_every_byte_of_the_caches_is_accounted(engine: Engine):
    memory = engine.status()["memory_bytes"]
    arrays = engine.runner.cache.arrays
    unit = {name: part.unit for name, (part, _) in engine.runner.router.arrays.items()}
    assert memory["kv"] == sum(a.nbytes for name, a in arrays.items() if unit[name] == "page")
    states = memory.get("state", 0) + memory.get("snapshots", 0)
    assert states == sum(a.nbytes for name, a in arrays.items() if unit[name] == "slot")
    assert memory["sampler"] == sum(a.nbytes for a in jax.tree.leaves(engine.runner.sampler))
    assert memory["weights"] == sum(a.nbytes for a in jax.tree.leaves(engine.runner.params))
    assert sum(memory.values()) == engine.status()["memory_total_bytes"]
    assert ("state" in memory) == ("slots" in engine.status()) == engine.runner.router.has_slots


def test_gauges_say_what_status_says(engine: Engine):
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.status))
    text = generate_latest(registry).decode()
    gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for kind, size in engine.status()["memory_bytes"].items():
        assert float(gauges[f'jhybrid_memory_bytes{{kind="{kind}"}}']) == size
    assert ('jhybrid_slots{state="free"}' in gauges) == engine.runner.router.has_slots


def test_five_requests_through_two_slots(hybrid: Engine, monkeypatch: pytest.MonkeyPatch):
    """A8: distinct slots within a batch, one slot for a sequence's lifetime, all free afterwards."""
    slots_of: dict[str, set[int]] = {}
    run = hybrid.runner.run

    def watch(batch):
        held = [item.sequence.holding.slot for item in batch.items]
        assert len(set(held)) == len(held) <= 2
        for item in batch.items:
            slots_of.setdefault(item.sequence.request_id, set()).add(item.sequence.holding.slot)
        return run(batch)

    requests = [greedy(p, 6) for p in prompts(hybrid, [30, 4, 17, 50, 9])]
    expected = [alone(hybrid, request).token_ids for request in requests]
    monkeypatch.setattr(hybrid.runner, "run", watch)
    with at_most(hybrid, 2), budget(hybrid, 16):
        outputs = hybrid.generate(requests)
    assert [output.token_ids for output in outputs] == expected
    assert len(slots_of) == 5
    assert all(len(slots) == 1 for slots in slots_of.values())


def test_an_empty_slot_pool_is_an_error_that_reaches_the_caller(hybrid: Engine):
    """A2: it is a bug; the sequence being admitted holds nothing afterwards and the others go on."""
    [a, b] = prompts(hybrid, [20, 20])
    expected = alone(hybrid, greedy(a, 6)).token_ids
    stolen = hybrid.ledger.slots.take(hybrid.ledger.slots.free - 1)
    assert stolen is not None
    try:
        names = [hybrid.submit(greedy(p, 6)) for p in (a, b)]
        deltas = drain(hybrid)
        ends = {d.request_id: d for d in deltas if d.finish_reason}
        assert ends[names[0]].finish_reason == "length"
        assert ends[names[1]].finish_reason == "error"
        assert "no free slot" in (ends[names[1]].error or "")
        assert [t for d in deltas if d.request_id == names[0] for t in d.token_ids] == expected
        assert hybrid.ledger.rows.used == hybrid.ledger.pages.used == 0
    finally:
        hybrid.ledger.slots.give(stolen)


def test_a_model_without_recurrent_layers_has_no_slots_in_the_batch():
    layouts = engine_of("llama").packer.layouts.values()
    assert not any("read_slot" in layout.ints or "chunk_snapshot" in layout.ints for layout in layouts)
    assert all("page_table" in layout.ints for layout in layouts)
    layouts = engine_of("falcon_mamba", 1, 16).packer.layouts.values()
    assert not any("page_table" in layout.ints for layout in layouts)
    assert all("read_slot" in layout.ints for layout in layouts)


def test_what_cannot_fit_is_refused_with_the_numbers():
    config = EngineConfig(model=str(GOLDEN / "llama"), max_model_len=256, num_pages=3, page_size=8, max_num_seqs=1)
    with pytest.raises(OutOfMemoryError, match=r"needs 32 pages.*num_pages is 3; raise it"):
        Engine(config)
    config = EngineConfig(model=str(GOLDEN / "mamba2"), max_model_len=256, max_num_seqs=2, memory_fraction=1e-9)
    with pytest.raises(OutOfMemoryError, match=r"max_num_seqs of at most|a smaller model"):
        Engine(config)
