"""Snapshots stored in fewer bits: hits as deep as ever, log-probabilities within a stated distance of the cold run."""

import dataclasses

import numpy as np
import pytest

from jhybrid import Engine

from .bed import alone, caching, engine_of, greedy, poison, prompts


@pytest.mark.parametrize(("dtype", "worst"), [pytest.param("bfloat16", 0.02, marks=pytest.mark.slow), ("int8", 0.05)])
def test_a_hit_from_a_packed_snapshot_is_close_to_the_cold_run(dtype: str, worst: float):
    template = engine_of("granite_dense").config
    config = dataclasses.replace(
        template,
        snapshot_dtype=dtype,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_pages=80,
        host_cache_bytes=0,  # tiers belong to the tree that `caching` replaces
    )
    with Engine(config) as engine, caching(engine):
        whole = engine_of("granite_dense").runner.memory
        memory = engine.runner.memory
        per_snapshot = (memory.snapshots - memory.num_staged * engine.model.router.bytes_per_slot) / 12
        assert per_snapshot < (0.51 if dtype == "bfloat16" else 0.4) * whole.snapshots / whole.num_snapshots
        assert memory.snapshots + memory.state == sum(
            array.nbytes
            for array in (
                *(a for name, a in engine.runner.cache.arrays.items() if name != "kv"),
                *(a for packed in engine.runner.store.values() for a in packed if a is not None),
            )
        )
        [prefix, *suffixes] = prompts(engine, [60, 5, 9, 17])
        distances = []
        for suffix in (suffixes[0], *suffixes):
            request = greedy(prefix + suffix, 1, logprobs=5)
            expected = alone(engine, request)
            poison(engine)
            [output] = engine.generate([request])
            assert output.logprobs and expected.logprobs
            cold = dict(expected.logprobs[0])
            distances += [abs(value - cold[token]) for token, value in output.logprobs[0] if token in cold]
        assert output.cached_tokens == 56
        assert 0 < max(distances) < worst, np.round(distances, 4)
