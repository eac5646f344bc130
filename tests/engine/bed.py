"""Engines on the tiny models with golden numbers. One per model and test process: compiling is what takes time.

Tests change an engine's budget, pools and parameters at run time instead of building another, and must leave it
idle with everything given back, which the fixtures in conftest.py check.
"""

import contextlib
import dataclasses
import fcntl
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from jhybrid import Delta, Engine, EngineConfig, Output, Request, SamplingParams, compilations
from jhybrid.cache.prefix_tree import PrefixTree
from jhybrid.cache.tiers.tiers import Tiers
from jhybrid.weights.fingerprint import fingerprint
from jhybrid.weights.load import make_ledger, make_tiers, make_tuner

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = (
    "nemotron_h_moe",
    "llama",
    "lfm2",
    "qwen3_5_moe",
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("kimi_linear", marks=pytest.mark.slow),
    pytest.param("falcon_h1", marks=pytest.mark.slow),
    pytest.param("jamba", marks=pytest.mark.slow),
    pytest.param("granite_dense", marks=pytest.mark.slow),
    pytest.param("mamba2", marks=pytest.mark.slow),
    pytest.param("mamba", marks=pytest.mark.slow),
    pytest.param("falcon_mamba", marks=pytest.mark.slow),
    pytest.param("zamba2", marks=pytest.mark.slow),
    pytest.param("lfm2_moe", marks=pytest.mark.slow),
    pytest.param("lfm3", marks=pytest.mark.slow),
)
LITTLE = ("zamba2", "mamba", "falcon_mamba", "lfm2_moe", "lfm3")  # of which there are small engines, quick to compile
HYBRIDS = (
    "nemotron_h_moe",
    "lfm2",
    "qwen3_5_moe",
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("kimi_linear", marks=pytest.mark.slow),
    pytest.param("falcon_h1", marks=pytest.mark.slow),
    pytest.param("jamba", marks=pytest.mark.slow),
    pytest.param("granite_dense", marks=pytest.mark.slow),
    pytest.param("zamba2", marks=pytest.mark.slow),
    pytest.param("lfm2_moe", marks=pytest.mark.slow),
    pytest.param("lfm3", marks=pytest.mark.slow),
)
PROMPT_LEN = 97


@cache
def engine_of(model: str, max_num_seqs: int = 4, max_num_batched_tokens: int = 128) -> Engine:
    """One test process compiles at a time; the next finds the executables in the shared folder."""
    config = EngineConfig(
        model=str(GOLDEN / model),
        dtype="float32",
        max_num_seqs=max_num_seqs,
        max_model_len=256,
        page_size=8,
        max_num_batched_tokens=max_num_batched_tokens,
        chunk_size=16,
        enable_prefix_caching=True,
        snapshot_slots=12,
        host_cache_bytes=64 << 20,
    )
    folder = config.compilation_cache()
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        engine = Engine(config)
    assert engine.ledger.tiers is not None
    engine.ledger.tiers.close(engine.ledger.tree)
    engine.ledger.tree = engine.ledger.tiers = engine._tuner = None  # until a test asks for them with `caching`
    fingerprint(config, engine.model, engine.runner.executables)  # compiled now
    engine._compiled_before = compilations.count()
    return engine


@contextlib.contextmanager
def caching(engine: Engine, policy: str = "flop_aware") -> Iterator[Engine]:
    """With an empty prefix cache, which must hold nothing but cached prefixes in the end."""
    config = dataclasses.replace(engine.config, eviction_policy=policy)
    ledger = make_ledger(config, engine.model, engine.runner.memory)
    assert ledger.tree is not None
    tree = PrefixTree(ledger.tree.policy, engine.ledger.pages, engine.ledger.snapshots)
    engine.ledger.tree, engine.ledger.counts = tree, ledger.counts
    engine._tuner = make_tuner(config, engine.model, engine.runner.memory, tree)
    try:
        yield engine
        assert engine.ledger.tree is tree
        assert tree.num_idle == tree.num_nodes, "a node is still in use"
        assert engine.ledger.pages.used == (tree.num_nodes if engine.ledger.pages.size else 0)
    finally:
        engine.flush_cache()
        engine.ledger.tree = engine._tuner = None
    assert engine.ledger.snapshots.used == 0


@contextlib.contextmanager
def tiered(engine: Engine, policy: str = "write_through", **options: object) -> Iterator[Tiers]:
    """With empty tiers below an empty prefix cache; `options` are those of EngineConfig."""
    config = dataclasses.replace(engine.config, cache_write_policy=policy, **options)
    with caching(engine):
        tiers = engine.ledger.tiers = make_tiers(config, engine.model, engine.runner)
        tiers.price.is_worth_it = lambda *_: True  # these models compute as fast as anything is loaded
        try:
            yield tiers
            assert engine.ledger.tree is not None
            tiers.wait_for_sources(engine.ledger.tree)
            assert not tiers._fetcher._fetches
        finally:
            assert engine.ledger.tree is not None
            tiers.close(engine.ledger.tree)
            engine.ledger.tiers = None


def down(engine: Engine) -> None:
    """Everything to the lower tiers, and nothing left on the device."""
    assert not engine.has_work and engine.drain_tiers(20)
    engine.flush_cache(device_only=True)
    poison(engine)


@cache
def golden(model: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / model / "goldens.npz") as file:
        return dict(file)


def poison(engine: Engine) -> None:
    """NaN in every free slot and page and in the scratch rows. The engine must be between steps."""
    assert engine._flight is None
    ledger = engine.ledger
    for name, (part, layers) in engine.runner.router.arrays.items():
        array = np.array(engine.runner.cache.arrays[name])
        rows = array.shape[0] // layers
        staged = engine.runner.memory.num_staged
        snapshots = [ledger.slots.size + row for row in (range(staged) if staged else ledger.snapshots.free_rows())]
        free = ledger.slots.free_rows() + snapshots if part.unit == "slot" else ledger.pages.free_rows()
        for layer in range(layers):
            array[[layer * rows + row for row in (*free, rows - 1)]] = 0x7F if array.dtype == np.uint8 else np.nan
        engine.runner.cache.arrays[name] = jax.device_put(array)


@contextlib.contextmanager
def budget(engine: Engine, tokens: int) -> Iterator[None]:
    """A smaller token budget per step; the executables for larger ones serve it too."""
    before, engine.scheduler.budget = engine.scheduler.budget, tokens
    try:
        yield
    finally:
        engine.scheduler.budget = before


@contextlib.contextmanager
def only_pages(engine: Engine, count: int) -> Iterator[None]:
    """Leave `count` pages free."""
    taken = engine.ledger.pages.take(engine.ledger.pages.free - count)
    assert taken is not None
    try:
        yield
    finally:
        engine.ledger.pages.give(taken)


@contextlib.contextmanager
def at_most(engine: Engine, seqs: int) -> Iterator[None]:
    """Fewer sequences at once, with as many slots."""
    before, engine.scheduler.max_num_seqs = engine.scheduler.max_num_seqs, seqs
    slots = engine.ledger.slots.take(max(0, engine.ledger.slots.free - seqs)) or []
    try:
        yield
    finally:
        engine.scheduler.max_num_seqs = before
        engine.ledger.slots.give(slots)


@contextlib.contextmanager
def parameters(engine: Engine, change: Callable[[str, np.ndarray], np.ndarray]) -> Iterator[None]:
    """Other parameters of the same shapes: `change(path, array)` gives each one's new value."""
    before = engine.runner.params
    engine.runner.params = jax.tree_util.tree_map_with_path(
        lambda path, a: jax.device_put(change(jax.tree_util.keystr(path), np.array(a))), before
    )
    try:
        yield
    finally:
        engine.runner.params = before


def greedy(prompt: list[int], max_tokens: int | None = 16, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(prompt_token_ids=list(prompt), sampling=dataclasses.replace(params, **sampling))


def prompts(engine: Engine, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, engine.model.vocab_size, n).tolist() for n in lengths]


def alone(engine: Engine, request: Request) -> Output:
    """The reference: this request by itself, its prompt whole, nothing cached, step by step."""
    assert not engine.has_work
    tree, engine.ledger.tree = engine.ledger.tree, None
    poison(engine)
    [output] = engine.generate([request])
    engine.ledger.tree = tree
    return output


def drain(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def same(a: Output, b: Output, atol: float = 1e-4) -> None:
    """Equal tokens, and equal log-probabilities wherever there are any."""
    assert a.token_ids == b.token_ids
    assert a.finish_reason == b.finish_reason
    for left, right in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
        assert (left is None) == (right is None)
        for x, y in zip(left or [], right or [], strict=True):
            if x is None or y is None:
                assert x is y is None
                continue
            np.testing.assert_allclose([lp for _, lp in x], [lp for _, lp in y], atol=atol)
