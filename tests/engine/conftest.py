"""Fixtures: an engine, handed out poisoned and checked when it comes back."""

from collections.abc import Iterator

import pytest

from jhybrid import Engine

from .bed import HYBRIDS, MODELS, engine_of, poison


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield from clean(engine_of(request.param))


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield from clean(engine_of(request.param))


@pytest.fixture
def nemotron() -> Iterator[Engine]:
    yield from clean(engine_of("nemotron_h_moe"))


def clean(engine: Engine) -> Iterator[Engine]:
    """Give an engine out with its free rows poisoned, and check that it comes back as it went."""
    poison(engine)
    compiled = engine.compilations_after_ready  # by other tests of this process
    yield engine
    assert not engine.has_work
    for pool in (engine.ledger.pages, engine.ledger.slots, engine.ledger.rows, engine.ledger.snapshots):
        assert pool.used == 0, pool.kind
    assert engine.compilations_after_ready == compiled
    assert not engine._sequences
