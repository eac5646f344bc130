"""Planning: every point of a grid with what it needs of pages, slots and rows, counted before anything starts.

A point that cannot run is skipped, with a reason from `Reason` and the numbers. Nothing is replaced by something else.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from jhybrid.config import EngineConfig
from jhybrid.profiler.config import Axes, Kind, ProfileConfig, StateMode

Reason = Literal[
    "pool_shortfall",  # pages, slots or rows
    "state_mode_invalid",  # a state mode for a model that has no recurrent state
    "state_copy_unsupported",  # the engine has no slot beside the chains'
    "state_inplace_unsupported",  # fewer chains than sequences: several would update one slot in one step
    "model_len_exceeded",
    "batch_exceeded",  # more sequences than run at once, or than a step has tokens
]


@dataclass(frozen=True, order=True)
class Point:
    """A place on a grid. `cached` tokens are there already, of the `batch` that decodes or of the prompt."""

    kind: Kind
    batch: int  # sequences that decode; 0 for prefill
    depth: int  # their context
    new: int  # prompt tokens; 0 for decode
    cached: int  # context of the prompt

    @property
    def chain_depth(self) -> int:
        """Tokens that a chain is prefilled to."""
        return max(self.depth, self.cached)

    @property
    def key(self) -> str:
        if self.kind == "decode":
            return f"decode batch={self.batch} depth={self.depth}"
        beside = f" batch={self.batch} depth={self.depth}" if self.kind == "mixed" else ""
        return f"{self.kind}{beside} new={self.new} cached={self.cached}"


@dataclass(frozen=True)
class Layout:
    """What planning knows of an engine. Nothing of it depends on how much memory is free, but `pages`."""

    page_size: int
    has_pages: bool
    has_state: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pages: int  # that can be had
    slots: int  # 0 without recurrent layers
    rows: int


@dataclass(frozen=True)
class Needs:
    """What a point holds at its most. Each of its sequences has `room` tokens."""

    chain_pages: int
    forks: int  # private copies of partial last pages
    blanks: int  # pages for the tokens to come
    slots: int
    rows: int

    @property
    def pages(self) -> int:
        return self.chain_pages + self.forks + self.blanks


@dataclass(frozen=True)
class Planned:
    """A point, and why it is skipped if it is."""

    point: Point
    needs: Needs
    reason: Reason | None = None
    detail: str = ""

    def describe(self) -> dict[str, object]:
        return {"needs": asdict(self.needs) | {"pages": self.needs.pages}}


def resolve_state_mode(asked: StateMode, layout: Layout, chains: int) -> Literal["copy", "inplace", "none"]:
    """What `auto` means: a function of the layout and the configuration alone, so that all hosts agree.

    copy where there is a slot beside those of the chains, else inplace; none for a model without recurrent state.
    """
    if not layout.has_state:
        return "none"
    if asked != "auto":
        return asked
    return "copy" if layout.slots > chains else "inplace"


def points_of(config: ProfileConfig, axes: Axes) -> Iterator[Point]:
    """The grid, each point once."""
    if "decode" in config.kinds:
        yield from (Point("decode", batch, depth, 0, 0) for depth in axes.depths for batch in axes.batches)
    if "prefill" in config.kinds:
        yield from (Point("prefill", 0, 0, new, cached) for cached in axes.cached_tokens for new in axes.new_tokens)
    if "mixed" in config.kinds:
        for depth in axes.depths:
            yield from (
                Point("mixed", batch, depth, new, 0) for batch in axes.mixed_batches for new in axes.mixed_new_tokens
            )


def plan(config: ProfileConfig, engine: EngineConfig, layout: Layout) -> list[Planned]:
    """Every point in the order of measuring: by depth of the chain, so that chains only grow."""
    points = points_of(config, config.axes(engine, layout.max_model_len))
    planned = [_plan_point(point, config, layout) for point in points]
    return sorted(planned, key=lambda p: (p.point.chain_depth, p.point))


def decode_room(point: Point, config: ProfileConfig, layout: Layout) -> int:
    """Tokens that a decoding sequence of a point may come to have; it must not end before the point does."""
    steps = config.decode_steps
    if point.kind == "mixed":
        per_step = max(1, layout.max_num_batched_tokens - point.batch)
        steps = config.warmup + (config.repeats + 1) * (-(-point.new // per_step) + 2)
    return point.depth + 2 + steps


def prefill_room(point: Point) -> int:
    """The prompt and the token after it."""
    return point.cached + point.new + 1


def _plan_point(point: Point, config: ProfileConfig, layout: Layout) -> Planned:
    needs = _needs(point, config, layout)
    room = max(decode_room(point, config, layout) if point.batch else 0, prefill_room(point) if point.new else 0)
    running = point.batch + (point.new > 0)
    state = resolve_state_mode(config.state_mode, layout, config.chains)
    skip = None
    if config.state_mode != "auto" and not layout.has_state:
        skip = "state_mode_invalid", f"{config.state_mode} with a model that has no recurrent state; use auto"
    elif running > layout.max_num_seqs or point.batch >= layout.max_num_batched_tokens + (not point.new):
        limits = f"max_num_seqs={layout.max_num_seqs}, max_num_batched_tokens={layout.max_num_batched_tokens}"
        skip = "batch_exceeded", f"{running} sequences in a step; {limits}"
    elif room > layout.max_model_len:
        skip = "model_len_exceeded", f"{room} tokens with those to be decoded; max_model_len={layout.max_model_len}"
    elif point.batch and point.depth < 1:
        skip = "model_len_exceeded", f"{point.depth} tokens of context; max_model_len={layout.max_model_len}"
    elif state == "copy" and layout.slots <= config.chains:
        skip = "state_copy_unsupported", f"{config.chains} chains and {layout.slots} slots leave none to copy to"
    elif state == "inplace" and running > config.chains:
        skip = "state_inplace_unsupported", f"{running} sequences would update the slots of {config.chains} chains"
    else:
        skip = _shortfall(needs, layout)
    return Planned(point, needs) if skip is None else Planned(point, needs, *skip)


def _needs(point: Point, config: ProfileConfig, layout: Layout) -> Needs:
    size = layout.page_size if layout.has_pages else 0
    pages = lambda tokens: -(-tokens // size) if size else 0  # noqa: E731
    shadows = [(point.depth, decode_room(point, config, layout))] * point.batch
    if point.new:
        shadows.append((point.cached, prefill_room(point)))
    forks = sum(bool(size and start % size) for start, _ in shadows)
    blanks = sum(pages(room) - pages(start) for start, room in shadows)
    own = 0 if resolve_state_mode(config.state_mode, layout, config.chains) == "inplace" else len(shadows)
    return Needs(
        chain_pages=config.chains * pages(point.chain_depth),
        forks=forks,
        blanks=blanks,
        slots=config.chains + own if layout.has_state else 0,
        rows=config.chains + len(shadows),
    )


def _shortfall(needs: Needs, layout: Layout) -> tuple[Reason, str] | None:
    if needs.pages > layout.pages:
        parts = f"chains {needs.chain_pages}, forks {needs.forks}, blanks {needs.blanks}"
        return "pool_shortfall", f"{needs.pages} pages ({parts}), {layout.pages} can be had"
    if needs.slots > layout.slots:
        return "pool_shortfall", f"{needs.slots} slots, there are {layout.slots}"
    if needs.rows > layout.rows:
        return "pool_shortfall", f"{needs.rows} rows, there are {layout.rows}"
    return None
