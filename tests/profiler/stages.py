"""Profiles on the toy model, whose answers tell any mix-up of pages, slots and positions."""

from pathlib import Path

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.run import Profile, run_profile

from ..toy_model import ToyRunner, expected_tokens, toy_engine

GRID = ProfileConfig(
    batches=(1, 3),
    depths=(5, 8),
    new_tokens=(1, 7, 20),
    cached_tokens=(0, 6),
    mixed_batches=(2,),
    mixed_new_tokens=(9,),
    repeats=2,
    steps=3,
    warmup=1,
    burn_in=0.0,
    bandwidth=1.0,
)


def toy(*, kind: str = "hybrid", max_parked: int = 1, **settings: object) -> tuple[Engine, ToyRunner]:
    """An engine of four sequences and pages of four tokens; free rows are poisoned before every step."""
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 4, "chunk_size": 4} | settings
    config = EngineConfig(**given)  # pyright: ignore[reportArgumentType]
    engine, runner = toy_engine(config, kind=kind, max_parked=max_parked)

    def poison(_: object) -> None:
        ledger = engine.ledger
        runner.poison_free(ledger.pages.free_rows(), ledger.slots.free_rows(), ledger.snapshots.free_rows())

    runner.before_run = poison
    return engine, runner


def profiled(engine: Engine, folder: Path, config: ProfileConfig = GRID) -> Profile:
    return run_profile(engine, config, folder)


def is_as_new(engine: Engine, runner: ToyRunner) -> bool:
    """Nothing is held, and the engine answers as the definition of the toy says."""
    assert not engine.has_work and not engine._sequences
    assert set(engine.ledger.references().values()) == {0}
    before = len(runner.violations)
    prompts = [[3, 9, 27, 1, 2], [8] * 11, [7, 6]]
    sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    outputs = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
    answers = [output.token_ids for output in outputs]
    return answers == [expected_tokens(prompt, sampling) for prompt in prompts] and len(runner.violations) == before
