"""Random lives of a real engine with prefix caching: submit, cancel, flush, fail. The oracle caches nothing."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jhybrid import Completion, Engine, Output
from jhybrid.runner import StepHandle

from .bed import MODELS, alone, budget, caching, engine_of, greedy, only_pages, poison, prompts, same

prompt = st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(0, 3), st.integers(0, 12))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), prompt, st.integers(0, 24), st.sampled_from([1, 1, 2])),
        st.tuples(st.just("ask"), prompt, st.integers(0, 24), st.sampled_from([1, 1, 2])),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 6)),
        st.tuples(st.just("evict"), st.integers(1, 6)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("fail")),
    ),
    min_size=3,
    max_size=14,
)


@functools.cache
def stems(model: str) -> list[list[int]]:
    first, second = prompts(engine_of(model), [70, 70])
    return [first, first[:30] + second[:40]]


@functools.cache
def expected(model: str, tokens: tuple[int, ...], max_tokens: int) -> Output:
    return alone(engine_of(model), greedy(list(tokens), max_tokens, logprobs=1))


def tokens_of(model: str, what: tuple[int, int, int, int]) -> tuple[int, ...]:
    stem, length, seed, rest = what
    return tuple(stems(model)[stem][:length] + prompts(engine_of(model), [rest], seed=seed + 10)[0])


@contextlib.contextmanager
def next_step_fails() -> Iterator[None]:
    """The result of the next step is lost, though the step has run."""
    result, failed = StepHandle.result, False

    def fail(handle: StepHandle) -> object:
        nonlocal failed
        if not failed:
            failed = True
            raise RuntimeError("injected")
        return result(handle)

    StepHandle.result = fail  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        StepHandle.result = result


def live(model: str, script: list, chunk: int, pages: int) -> None:
    """Play a script and compare every answer that was neither cancelled nor failed with the oracle's."""
    asked = [action for action in script if action[0] == "ask"]
    for _, what, count, _ in asked:
        expected(model, tokens_of(model, what), count)
    engine = engine_of(model)
    outputs: dict[str, tuple[Output, Output]] = {}
    with caching(engine), budget(engine, chunk), only_pages(engine, pages):
        poison(engine)
        for action in script:
            act(engine, model, action, outputs)
        while engine.has_work:
            take(engine, outputs)
        engine.flush_cache()
    for output, oracle in outputs.values():
        for completion in output.completions:
            if completion.finish_reason in ("stop", "length"):
                same(Output(output.request_id, [], [completion]), Output("", [], oracle.completions))
            elif completion.finish_reason == "error":  # by no other fault than the one planted
                assert "injected" in (completion.error or "")


def act(engine: Engine, model: str, action: tuple, outputs: dict[str, tuple[Output, Output]]) -> None:
    match action:
        case ("ask", what, count, n):
            tokens = tokens_of(model, what)
            name = engine.submit(greedy(list(tokens), count, logprobs=1, n=n))
            answers = [Completion(i) for i in range(n)]
            outputs[name] = Output(name, list(tokens), answers), expected(model, tokens, count)
        case ("step", count):
            for _ in range(count):
                take(engine, outputs)
        case ("cancel", at):
            if at < len(outputs):
                engine.abort(list(outputs)[at])
        case ("evict", count):
            for _ in range(count):
                assert engine.ledger.tree is not None
                engine.ledger.tree.evict_page()
                engine.ledger.tree.evict_snapshot()
        case ("flush",):
            engine.flush_cache()
        case ("fail",):
            with next_step_fails():
                take(engine, outputs)
                take(engine, outputs)


def take(engine: Engine, outputs: dict[str, tuple[Output, Output]]) -> None:
    if engine._flight is None:
        poison(engine)
    if engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id][0].add(delta)


OPTIONS: dict = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=4, derandomize=True, **OPTIONS)
@given(script=actions, chunk=st.sampled_from([5, 16, 128]), pages=st.sampled_from([32, 40, 100]))
def test_any_life_is_the_cold_runs(model: str, script: list, chunk: int, pages: int):
    live(model, script, chunk, pages)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150, **OPTIONS)
@given(script=actions, chunk=st.sampled_from([3, 5, 16, 20, 128]), pages=st.sampled_from([32, 33, 40, 64, 100]))
def test_many_lives_are_the_cold_runs(model: str, script: list, chunk: int, pages: int):
    live(model, script, chunk, pages)
