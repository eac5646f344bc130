"""Scheduler: decides who runs how many tokens in the next step, and takes the results in.

Called by the engine alone. It sees memory only through the ledger. Nothing here costs time that grows with
the number of waiting sequences: the queue is a heap, and an abort leaves a tombstone in it.
"""

import bisect
import heapq
from dataclasses import dataclass, field

from jhybrid.cache.ledger import Hit, Ledger
from jhybrid.cache.node import Node
from jhybrid.errors import SlotPoolEmptyError
from jhybrid.sequence import Holding, Phase, Sequence


@dataclass(eq=False)
class Item:
    """One sequence's share of a step: `num_tokens` tokens from position `first_pos`, computed in `holding`.

    A sequence preempted and admitted again meanwhile has another holding by the time the step lands.
    """

    sequence: Sequence
    holding: Holding
    first_pos: int
    num_tokens: int
    samples: bool  # the last token's logits yield a token
    step: int  # index of that token in the answer
    source: int | None = None  # snapshot to start from, instead of the sequence's own slot
    read_slot: int | None = None  # running slot to start from, instead of the sequence's own
    snapshots: dict[int, int] = field(default_factory=dict)  # position -> snapshot that is to hold the state there


@dataclass(eq=False)
class Plan:
    """A step to be: its items, and the sequences that just got a row and must be set up on the device first."""

    items: list[Item]
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class Scheduler:
    """Continuous batching with chunked prefill under a token budget, priorities and preemption by recompute.

    Order is (priority, arrival) everywhere: the first in that order is never preempted for a later one, so it
    always finishes, and by induction so does everybody.
    """

    def __init__(self, ledger: Ledger, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.ledger = ledger
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.running: list[Sequence] = []  # by order
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        self.num_waiting = 0
        self.num_preemptions = 0
        self.failed: list[tuple[Sequence, SlotPoolEmptyError]] = []  # refused by the ledger; the engine reports them
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._enqueue(sequence)

    def adopt(self, sequence: Sequence, tokens: int) -> None:
        """Run a sequence that holds what it needs already; its first `tokens` positions count as computed."""
        assert sequence.holding is not None
        sequence.arrival = self._arrivals
        self._arrivals += 1
        sequence.phase = Phase.RUNNING
        sequence.dispatched = tokens
        bisect.insort(self.running, sequence, key=lambda s: s.order)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        heapq.heappush(self._queue, (sequence.order, sequence))
        if len(self._queue) > 2 * self.num_waiting + 64:  # mostly tombstones
            self._queue = [entry for entry in self._queue if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def finish(self, sequence: Sequence) -> None:
        """The one way a sequence ends, for whatever reason and in whatever phase."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.WAITING:
            self.num_waiting -= 1  # its entry in the heap is skipped when it comes up
        else:
            self.running.remove(sequence)
        sequence.phase = Phase.FINISHED
        self.ledger.release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence and queue it again; it is recomputed from position 0."""
        self.running.remove(sequence)
        self.ledger.release(sequence)
        sequence.dispatched = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def plan(self) -> Plan | None:
        """The next step, or None when nobody can run. Marks its tokens as dispatched."""
        shares: dict[Sequence, int] = {}
        budget = self.budget
        preempted = False
        wanted = [(sequence, sequence.remaining) for sequence in self.running]
        wanted.sort(key=lambda entry: entry[1] > 1)  # decodes before prefills, each in order
        for sequence, remaining in wanted:
            tokens = min(remaining, budget)
            if tokens <= 0 or sequence.phase is not Phase.RUNNING:
                continue
            while not self.ledger.reserve(sequence, sequence.dispatched + tokens):
                preempted = True
                victim = self.running[-1]
                budget += shares.pop(victim, 0)
                self.preempt(victim)
                if victim is sequence:
                    break
            else:
                shares[sequence] = tokens
                budget -= tokens
        admitted = [] if preempted else self._admit(shares, budget)
        if not shares:
            return None
        self.ledger.begin_step(len(shares))
        return Plan([self._dispatch(s, n) for s, n in shares.items()], admitted)

    def _admit(self, shares: dict[Sequence, int], budget: int) -> list[Sequence]:
        """Move sequences from the queue to running while rows, pages and budget last; adds their shares.

        A sequence enters when there is room for all its tokens beside those that the running ones already have, so
        that prefills under way do not preempt each other. One whose prefix another is just computing lets those
        behind it pass until that is done; as many may be passed over as may run.
        """
        admitted: list[Sequence] = []
        head = self._head()
        if head is None:
            return admitted
        if budget == 0 or len(self.running) == self.max_num_seqs:
            self.ledger.ask_ahead(head)
            return admitted
        passed_over: list[Sequence] = []
        spoken_for = sum(self._missing_pages(running, Hit()) for running in self.running)
        while budget > 0 and len(self.running) < self.max_num_seqs and (sequence := self._head()) is not None:
            hit = self.ledger.match(sequence)
            if hit.waits:
                if len(passed_over) == self.max_num_seqs:
                    break
                passed_over.append(heapq.heappop(self._queue)[1])
                continue
            room = self.ledger.available_pages - hit.idle - spoken_for
            if self.running and self._missing_pages(sequence, hit) > room:
                break
            tokens = min(sequence.remaining - hit.tokens, budget)
            try:
                if not self.ledger.reserve(sequence, hit.tokens + tokens, hit):
                    break
            except SlotPoolEmptyError as error:
                self.finish(sequence)
                self.failed.append((sequence, error))
                continue
            heapq.heappop(self._queue)
            self.num_waiting -= 1
            sequence.phase = Phase.RUNNING
            sequence.dispatched = hit.tokens
            bisect.insort(self.running, sequence, key=lambda s: s.order)
            admitted.append(sequence)
            shares[sequence] = tokens
            budget -= tokens
            spoken_for += self._missing_pages(sequence, hit)
        for sequence in passed_over:
            heapq.heappush(self._queue, (sequence.order, sequence))
        return admitted

    def _missing_pages(self, sequence: Sequence, hit: Hit) -> int:
        """Pages that a sequence's tokens and the next one need beyond those it holds, or would get from a hit."""
        held = len(sequence.holding.pages) if sequence.holding else len(hit.path)
        return max(0, self.ledger.pages_for(min(sequence.total + 1, sequence.max_total)) - held)

    def _head(self) -> Sequence | None:
        """First in the queue that is still waiting; None while its last token, sampled in another row, is under way,
        or the mask that follows from it."""
        while self._queue and self._queue[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._queue)
        head = self._queue[0][1] if self._queue else None
        return None if head is None or head.pending or head.awaits_mask else head

    def _dispatch(self, sequence: Sequence, tokens: int) -> Item:
        first_pos, total = sequence.dispatched, sequence.total
        sequence.dispatched += tokens
        samples = sequence.dispatched == total < sequence.max_total
        holding = sequence.holding
        assert holding is not None
        size, load, source = self.ledger.page_size, holding.load, None
        if load is not None and first_pos == load.depth * size:
            source = load.snapshot
        elif holding.source is not None and first_pos == holding.published * size:
            source = holding.source.snapshot
        item = Item(
            sequence,
            holding,
            first_pos,
            tokens,
            samples,
            total - sequence.prompt_len,
            source=source,
            read_slot=holding.fork.slot if holding.fork and first_pos == holding.fork.position else None,
            snapshots=self.ledger.snapshots_for(sequence, first_pos, tokens),
        )
        sequence.pending += samples
        return item

    def landed(self, item: Item) -> bool:
        """A step that had this item is over: its token is no longer pending. False if its sequence has ended."""
        item.sequence.pending -= item.samples
        return item.sequence.phase is not Phase.FINISHED

    def commit(self, item: Item) -> Node | None:
        """What an item computed is good: the ledger may share it. Not if the sequence was preempted since.

        Returns what `Ledger.commit` does.
        """
        if item.sequence.holding is item.holding:
            return self.ledger.commit(item.sequence, item.first_pos + item.num_tokens)
        return None

    def preempt_all(self) -> None:
        """Queue every running sequence again, because the cache was lost with a failed step."""
        for sequence in list(self.running):
            self.preempt(sequence)
