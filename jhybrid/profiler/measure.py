"""Measuring one point on a stage: fork the shadows, step, take times, give everything back."""

import statistics
from dataclasses import dataclass
from typing import Any

from jhybrid.errors import StepError
from jhybrid.profiler.config import ProfileConfig
from jhybrid.profiler.plan import Layout, Point, decode_room, prefill_room
from jhybrid.profiler.stage import Stage
from jhybrid.profiler.timing import Timing


@dataclass(frozen=True)
class Measurement:
    """The repeats of a point: the seconds of each, and the steps that the last one had."""

    samples: list[float]
    steps: list[Timing]
    context: tuple[int, int] | None = None  # first and last context of a decoding sequence that was measured

    def describe(self) -> dict[str, Any]:
        """What a row says of it. Sums are of the steps that `seconds` cover: one for decode, all for prefill."""
        low, high = min(self.samples), max(self.samples)
        median = statistics.median(self.samples)
        return {
            "seconds": median,
            "spread": [low, high],
            "samples": self.samples,
            "repeats": len(self.samples),
            "buckets": [step.bucket for step in self.steps],
            "steps": [{"decodes": step.decodes, "prefills": step.prefills} for step in self.steps],
            "scheduled": scheduled(self.steps),
            "context": self.context,
        }


def scheduled(steps: list[Timing]) -> dict[str, int]:
    """Sums over steps, in the names of the forward-pass metrics that NVIDIA Dynamo's planner reads."""
    return {
        "num_prefill_requests": sum(len(step.prefills) for step in steps),
        "sum_prefill_tokens": sum(new for step in steps for new, _ in step.prefills),
        "sum_prefill_kv_tokens": sum(cached for step in steps for _, cached in step.prefills),
        "num_decode_requests": sum(len(step.decodes) for step in steps),
        "sum_decode_kv_tokens": sum(sum(step.decodes) for step in steps),
    }


def measure(stage: Stage, point: Point, config: ProfileConfig, layout: Layout) -> Measurement:
    """Measure a point on a stage whose chains stand at its depth. All shadows are gone afterwards."""
    try:
        if point.kind == "decode":
            return _decode(stage, point, config, layout)
        if point.kind == "prefill":
            return _prefill(stage, point, config)
        return _mixed(stage, point, config, layout)
    finally:
        stage.end_shadows()


def _fork_batch(stage: Stage, point: Point, config: ProfileConfig, layout: Layout) -> None:
    """The decoding sequences, warmed up: their first step reads the chain's state."""
    room = decode_room(point, config, layout)
    for i in range(point.batch):
        stage.shadow(i, point.depth, 1, room, own=i)
    taken = 0
    while taken < config.warmup:
        timing = stage.step()
        if timing is not None:
            _expect(len(timing.decodes) == point.batch and not timing.prefills, point, timing)
            taken += 1


def _decode(stage: Stage, point: Point, config: ProfileConfig, layout: Layout) -> Measurement:
    _fork_batch(stage, point, config, layout)
    samples, steps = [], []
    for _ in range(config.repeats):
        steps = [_decode_step(stage, point) for _ in range(config.steps)]
        samples.append(statistics.fmean(step.seconds for step in steps))
    first = point.depth + config.warmup + 1
    last = first + config.repeats * config.steps - 1
    # Each repeat is a little deeper than the one before; the row stands for the middle.
    middle = Timing(steps[-1].bucket, ((first + last) // 2,) * point.batch, (), 0.0)
    return Measurement(samples, [middle], (first, last))


def _decode_step(stage: Stage, point: Point) -> Timing:
    timing = stage.step()
    if timing is None or len(timing.decodes) != point.batch or timing.prefills:
        raise _unexpected(point, timing)
    return timing


def _prefill(stage: Stage, point: Point, config: ProfileConfig) -> Measurement:
    """The first is not measured. Each starts on an idle device and ends with the prompt's first token."""
    samples, steps = [], []
    for repeat in range(config.repeats + 1):
        if stage.spent:
            stage.chain_to(point.cached)
        name = stage.shadow(0, point.cached, point.new, prefill_room(point), own=repeat)
        stage.timer.pause()
        steps = []
        while not stage.has_ended(name):
            timing = stage.step()
            if timing is not None:
                steps.append(timing)
        _expect(sum(_prompt_tokens(step, point) for step in steps) == point.new, point, steps)
        samples.append(sum(step.seconds for step in steps))
    return Measurement(samples[1:], steps)


def _mixed(stage: Stage, point: Point, config: ProfileConfig, layout: Layout) -> Measurement:
    """A prompt comes while a batch decodes; the steps that have a share of it are measured."""
    _fork_batch(stage, point, config, layout)
    samples, steps = [], []
    for repeat in range(config.repeats + 1):
        name = stage.shadow(point.batch, 0, point.new, prefill_room(point), own=repeat)
        stage.timer.pause()
        steps = []
        while not stage.has_ended(name):
            timing = stage.step()
            if timing is None:
                continue
            _expect(len(timing.decodes) >= point.batch, point, timing)
            if timing.prefills or len(timing.decodes) > point.batch:
                steps.append(timing)
        _expect(sum(new for step in steps for new, _ in step.prefills) + _odd(steps, point) == point.new, point, steps)
        samples.append(sum(step.seconds for step in steps))
    contexts = [context for step in steps for context in step.decodes]
    return Measurement(samples[1:], steps, (min(contexts), max(contexts)))


def _prompt_tokens(step: Timing, point: Point) -> int:
    return sum(new for new, _ in step.prefills) + len(step.decodes)


def _odd(steps: list[Timing], point: Point) -> int:
    """Prompts whose last piece was one token, which looks like decoding."""
    return sum(len(step.decodes) - point.batch for step in steps)


def _expect(holds: bool, point: Point, seen: object) -> None:
    if not holds:
        raise _unexpected(point, seen)


def _unexpected(point: Point, seen: object) -> StepError:
    return StepError(f"{point.key}: the engine ran other steps than this point has: {seen}")
