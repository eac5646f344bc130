"""Sequence: the host's mutable bookkeeping of one completion of one request. Owned by the scheduler."""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from jhybrid.cache.node import Node
from jhybrid.detokenizer import Detokenizer
from jhybrid.grammar import Constraint
from jhybrid.request import Request, TokenLogprobs

if TYPE_CHECKING:
    from jhybrid.cache.tiers.fetcher import Fetch


class Phase(Enum):
    """Where a sequence is; `prefill` and `decode` are both RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Fork(NamedTuple):
    """Where a sequence left another: its first step, from `position` on, reads the other's slot."""

    slot: int
    position: int


@dataclass
class Load:
    """What a holding gets from a lower tier: pages [first, depth) of its own, and a snapshot row with the state."""

    fetch: "Fetch"
    first: int
    snapshot: int | None
    age: int  # of the tiers, when it was taken

    @property
    def depth(self) -> int:
        return self.fetch.depth


@dataclass
class Holding:
    """What a running sequence holds of the caches. Given by `Ledger.reserve`, taken back by `Ledger.release`.

    A boundary is a position that is a multiple of the page size. The fields after `fork` are the prefix cache's.
    """

    row: int
    slot: int | None
    pages: list[int] = field(default_factory=list)
    fork: Fork | None = None  # until the step that reads that slot has landed
    node: Node | None = None  # of the prefix tree: the last page of this sequence that is in it
    published: int = 0  # pages up to that node; they are the tree's, but for `duplicates`
    duplicates: list[int] = field(default_factory=list)  # pages of its own of which the tree has another copy
    source: Node | None = None  # the node from whose snapshot its first step starts, until that has landed
    load: Load | None = None  # what is written into its rows before its first step, until that has landed
    keys: list[bytes] = field(default_factory=list)  # pages of the tokens known at admission
    targets: list[int] = field(default_factory=list)  # boundaries ahead at which a snapshot is wanted, ascending
    snapshots: dict[int, int] = field(default_factory=dict)  # boundary -> row that a step under way writes
    tails: list[Node] = field(default_factory=list)  # have its latest snapshots from decoding


@dataclass(eq=False)
class Sequence:
    """One completion. `token_ids` are the tokens the host knows: the prompt, then what was sampled.

    `dispatched` counts positions given to the device (the recurrence is over [0, dispatched) once those
    steps are done); `pending` counts tokens sampled on the device that the host has not seen yet.
    """

    request_id: str
    index: int
    request: Request
    prompt_len: int
    token_ids: list[int]
    max_total: int  # prompt and answer together
    eos_token_ids: frozenset[int]  # tokens that end it
    seed: int
    detokenizer: Detokenizer
    constraint: Constraint | None = None
    arrival: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None  # until it was first admitted; until given out, with the first delta
    phase: Phase = Phase.WAITING
    holding: Holding | None = None
    dispatched: int = 0
    pending: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    hit: Node | None = None  # of the prefix tree, from which it started last
    miss_cause: str | None = None  # why the prefix cache had keys and values of more tokens, but no state
    keys: list[bytes] = field(default_factory=list)  # full pages of `token_ids`, as the prefix tree knows them
    is_check: bool = False  # made by the guard or the profiler; not counted
    is_cold: bool = False  # neither uses the prefix cache nor adds to it
    awaited: "tuple[Sequence, Holding, int] | None" = None  # who computes a prefix of this one, up to which boundary
    num_waits: int = 0
    digests: list[bytes] = field(default_factory=list)  # names of those pages in the lower tiers
    fetch: "Fetch | None" = None  # its prefix, on the way from a lower tier
    num_fetches: int = 0
    num_deferrals: int = 0  # for want of a row for the state that was fetched
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # until they are given out
    computable: int = field(init=False)
    """Positions worth computing: the last allowed token is sampled, never read."""

    def __post_init__(self) -> None:
        self.computable = max(self.prompt_len, self.max_total - 1)

    @property
    def first_needed(self) -> int:
        """The position from which on all must be computed: a hit has no logits of the tokens that it skips."""
        if self.is_cold:
            return 0
        if self.prompt_logprobs is not None:  # the token at p + 1 is scored by the logits at p
            return max(0, min(self.request.sampling.prompt_logprobs_from, self.prompt_len) - 1)
        return len(self.token_ids) - 1

    @property
    def num_outputs(self) -> int:
        """Sampled tokens the host knows."""
        return len(self.token_ids) - self.prompt_len

    @property
    def total(self) -> int:
        """Tokens that exist, those the host has not seen yet included."""
        return len(self.token_ids) + self.pending

    @property
    def awaits_mask(self) -> bool:
        """Whether it is not known yet which tokens may follow: the last one is not, or its mask is being made."""
        return self.constraint is not None and (self.pending > 0 or not self.constraint.ready)

    @property
    def remaining(self) -> int:
        """Tokens that exist and can be given to the device now, except a last one that nothing follows."""
        known = len(self.token_ids) + self.pending - self.awaits_mask
        return min(known, self.computable) - self.dispatched

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.request.priority, self.arrival)
