"""Ledger: the only host object that knows pages, slots, rows and the prefix tree, and who holds what.

Four verbs: `match`, `reserve`, `commit`, `release`; `fork` is how a sequence is reserved what another has computed.
`reserve` and `fork` are all or nothing; `release` is the only way out, whatever the reason, so that none can leak.
What a sequence computed enters the prefix tree in `commit`, when the step that wrote it is known to have succeeded,
and in no other place.
"""

from array import array
from dataclasses import asdict, dataclass, field
from typing import Literal

from jhybrid.cache.eviction import Policy
from jhybrid.cache.node import Node
from jhybrid.cache.pages import RowPool
from jhybrid.cache.prefills import Prefills
from jhybrid.cache.prefix_tree import PrefixTree
from jhybrid.cache.tiers.fetcher import Fetch
from jhybrid.cache.tiers.tiers import Tiers
from jhybrid.errors import SlotPoolEmptyError
from jhybrid.sequence import Fork, Holding, Load, Sequence

TAILS = 2
"""Snapshots kept of an answer: the last page may hold what a client trims off before it sends the answer back."""

MissCause = Literal["never_saved", "no_branch", "evicted", "unaligned", "disabled"]


@dataclass
class Hit:
    """What the cache holds of a sequence: its first `tokens` positions.

    `path` are the nodes of those positions, the last with the state to start from (`source`; None without recurrent
    layers). Keys and values alone reach to `kv_tokens`; where that is further, `cause` says why the state is not.
    `waits` is set when another sequence is just computing more of the same prefix, which was then asked to leave it, or
    when more of it is on its way from a lower tier. With a `fetch`, what `path` and `source` do not have of the first
    `tokens` positions lies ready on the device and is written into rows of the sequence's own.
    """

    tokens: int = 0
    path: list[Node] = field(default_factory=list)
    source: Node | None = None
    kv_tokens: int = 0
    cause: MissCause | None = None
    idle: int = 0  # nodes of the path that nobody uses yet
    waits: bool = False
    fetch: Fetch | None = None


@dataclass
class PrefixCounts:
    """What the prefix cache did since the engine was ready. Tokens are those of first admissions."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)  # admissions whose state reached less deep than their KV
    missed_tokens: dict[str, int] = field(default_factory=dict)
    snapshots_taken: int = 0
    snapshots_skipped: int = 0  # no row could be had
    verified: int = 0  # hits computed again, cold
    quarantined: int = 0  # cached prefixes that gave something else


class Ledger:
    """Accounts for what the caches of one engine hold.

    `num_pages` is 0 for a model without attention, `num_slots` is 0 for one without recurrent layers. With a `policy`,
    prefixes are shared; a model with recurrent layers and no snapshots has no tree, whatever is passed. A step may
    leave `max_per_step` snapshots; None: any number.
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        num_slots: int,
        num_rows: int,
        num_snapshots: int = 0,
        max_per_step: int | None = None,
        snapshot_interval: int | None = None,
        policy: Policy | None = None,
    ):
        self.page_size = page_size
        self.pages = RowPool("page", num_pages)
        self.slots = RowPool("slot", num_slots)
        self.rows = RowPool("row", num_rows)
        self.snapshots = RowPool("snapshot", num_snapshots)
        self.snapshot_interval = snapshot_interval
        self._max_per_step = max_per_step if max_per_step is not None else num_snapshots
        self._quota, self._sequences_to_come = self._max_per_step, 1
        self.tree: PrefixTree | None = None
        if policy is not None and (num_snapshots or not num_slots):
            self.tree = PrefixTree(policy, self.pages, self.snapshots)
        self.tiers: Tiers | None = None
        """Where prefixes go on from the tree, if anywhere."""
        self.counts = PrefixCounts()
        self._prefills = Prefills(page_size, needs_state=num_slots > 0)

    # match

    def match(self, sequence: Sequence) -> Hit:
        """The longest prefix that pages and state are held for. Whatever gives wanted logits is left to compute."""
        if self.tree is None or sequence.is_cold:
            return Hit()
        if self._prefills.still_waits(sequence) or (self.tiers is not None and self.tiers.still_wait(sequence)):
            return Hit(waits=True)
        sequence.awaited = None
        keys, most = self._keys(sequence), sequence.first_needed // self.page_size
        path = list(self.tree.walk(sequence.request.cache_salt, keys))
        beyond = path[most] if len(path) > most else None  # a page of which every token is asked for again
        path = path[:most]
        depth, source = len(path), None
        if self.slots.size:
            while depth and path[depth - 1].snapshot is None:
                depth -= 1
            source = path[depth - 1] if depth else None
        hit = Hit(depth * self.page_size, path[:depth], source, len(path) * self.page_size)
        if depth < len(path):
            hit.cause = self._cause(path, beyond)
        elif beyond is not None and sequence.prompt_logprobs is not None:
            hit.cause = "disabled"
        if self.tiers is None:
            hit.waits = self._prefills.wait(sequence, keys[:most], depth)
        else:
            self._match_below(self.tiers, sequence, hit, path, most)
        hit.idle = sum(not node.refs for node in hit.path)
        return hit

    def _match_below(self, tiers: Tiers, sequence: Sequence, hit: Hit, path: list[Node], most: int) -> None:
        """Go on in the lower tiers, unless another sequence is about to publish as much as they have."""
        keys, depth = self._keys(sequence), hit.tokens // self.page_size
        digests, held = tiers.digests(sequence, keys)[:most], len(path) if self.pages.size else 0
        hit.waits = self._prefills.wait(
            sequence, keys[:most], max(depth, tiers.reach(sequence, digests, held, depth) - 1)
        )
        if hit.waits:
            return
        fetch = tiers.fetch(sequence, digests, held, depth)
        if fetch is None:
            return
        if not fetch.is_here:
            hit.waits = True
            return
        hit.fetch, hit.source, hit.path, hit.tokens = fetch, None, path[: fetch.depth], fetch.depth * self.page_size
        if hit.kv_tokens <= hit.tokens:
            hit.kv_tokens, hit.cause = hit.tokens, None

    def _cause(self, path: list[Node], beyond: Node | None) -> MissCause:
        """Why the deepest node of a path has no snapshot."""
        if beyond is not None and beyond.snapshot is not None:
            return "unaligned"
        if path[-1].had_snapshot:
            return "evicted"
        return "no_branch" if path[-1].children else "never_saved"

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """The full pages of a sequence's known tokens, as the tree knows them."""
        keys, size, width = sequence.keys, self.page_size, 4 * self.page_size
        ids = sequence.token_ids[len(keys) * size : len(sequence.token_ids) // size * size]
        tokens = array("i", ids).tobytes()
        keys += [tokens[at : at + width] for at in range(0, len(tokens), width)]
        return keys

    def ask_ahead(self, sequence: Sequence) -> None:
        """A sequence that cannot be admitted yet tells who computes its prefix, before that has gone past its end."""
        if self.tree is not None and not self._prefills.still_waits(sequence):
            self._prefills.wait(sequence, self._keys(sequence)[: sequence.first_needed // self.page_size], 0)

    # reserve

    @property
    def idle_pages(self) -> int:
        """Pages that hold nothing but cached prefixes that nobody uses."""
        return self.tree.num_idle if self.tree and self.pages.size else 0

    @property
    def available_pages(self) -> int:
        """Pages that are free or that can be had by evicting."""
        return self.pages.free + self.idle_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` positions need."""
        return -(-tokens // self.page_size) if self.pages.size else 0

    def reserve(self, sequence: Sequence, tokens: int, hit: Hit | None = None) -> bool:
        """Make a sequence hold what positions [0, tokens) need: pages, and on admission a row and a slot.

        On admission its first `hit.tokens` positions are the tree's. Returns False, with nothing changed, when there
        are not enough pages. Raises SlotPoolEmptyError, with nothing held, when the pool of slots or rows is empty,
        which only a bug can cause.
        """
        holding = sequence.holding
        if holding is not None:
            if tokens <= len(holding.pages) * self.page_size:
                return True
            missing = self.pages_for(tokens) - len(holding.pages)
            pages = self._take_pages(missing) if missing > 0 else []
            if pages is None:
                return False
            holding.pages.extend(pages)
            return True
        hit = hit or Hit()
        if self.tree:
            self.tree.pin(hit.path)
        load = None
        try:
            pages = self._take_pages(self.pages_for(tokens) - (len(hit.path) if self.pages.size else 0))
            if pages is not None and hit.fetch is not None:
                load = self._take_load(sequence, hit, hit.fetch)
                if load is None:
                    self.pages.give(pages)
                    pages = None
            holding = None if pages is None else self._admit(pages)
        except SlotPoolEmptyError:
            self._unpin(hit)
            if load is not None and load.snapshot is not None:
                self.snapshots.give([load.snapshot])
            raise
        if holding is None:
            self._unpin(hit)
            return False
        sequence.holding, holding.load = holding, load
        if self.tree and not sequence.is_cold:
            self._start(sequence, holding, hit)
        return True

    def _take_load(self, sequence: Sequence, hit: Hit, fetch: Fetch) -> Load | None:
        """The row that the state of a fetched prefix needs besides the sequence's slot. None: not now."""
        assert self.tiers is not None and self.tree is not None
        row = None
        if self.slots.size:
            if not self.snapshots.free and not self.tree.evict_snapshot() and self.tiers.wait_for_sources(self.tree):
                self.tree.evict_snapshot()
            rows = self.snapshots.take(1)
            if rows is None:
                self.tiers.no_room(sequence)
                return None
            row = rows[0]
        return Load(fetch, len(hit.path), row, self.tiers.age)

    def _unpin(self, hit: Hit) -> None:
        if self.tree is not None and hit.path:
            self.tree.unpin(hit.path[-1])

    def _take_pages(self, count: int) -> list[int] | None:
        if count > self.available_pages:
            return None
        while self.pages.free < count:
            assert self.tree is not None
            if not self.tree.evict_page():
                copied = self.tiers is not None and self.tiers.wait_for_sources(self.tree)
                assert copied, f"{self.tree.num_idle} nodes are idle and none can be evicted"
        return self.pages.take(count)

    def _admit(self, pages: list[int], slot_of: Holding | None = None) -> Holding:
        """A row and, for a model with recurrent layers, a slot; both or neither, and then not the pages either.

        The slot is one of its own, or the one of `slot_of`.
        """
        row = self.rows.take(1)
        slot = None
        if row and self.slots.size:
            if slot_of is not None and slot_of.slot is not None:
                slot = [slot_of.slot]
                self.slots.share(slot)
            else:
                slot = self.slots.take(1)
        if row is None or (self.slots.size and slot is None):
            if row is not None:
                self.rows.give(row)
            self.pages.give(pages)
            pool = self.rows if row is None else self.slots
            raise SlotPoolEmptyError(f"no free {pool.kind} of {pool.size}; {pool.used} are held by sequences")
        return Holding(row=row[0], slot=slot[0] if slot else None, pages=pages)

    def fork(
        self, parent: Sequence, child: Sequence, tokens: int, room: int, *, shares_slot: bool = False
    ) -> list[tuple[int, int]] | None:
        """Make `child`, which is cold, hold positions [0, tokens) of `parent`, and pages of its own up to `room`.

        Full pages are shared. A partial last one must be copied: returned are the moves (from page, to page) to make
        before the child's first step. With `tokens` 0 only pages and slot of its own are taken. The child's first step
        reads the parent's slot, which is kept until it has landed, and writes its own; with `shares_slot` the parent's
        slot is its own, and the parent's state is spent. Returns None, with nothing changed, when there are not enough
        pages. Raises SlotPoolEmptyError, with nothing held, when there is no row or slot.
        """
        holding = parent.holding
        assert child.is_cold and child.holding is None and holding is not None, (parent.request_id, child.request_id)
        assert tokens in (0, parent.dispatched), f"{parent.request_id} is at {parent.dispatched}, not at {tokens}"
        full = tokens // self.page_size if self.pages.size else 0
        pages = self._take_pages(self.pages_for(room) - full)
        if pages is None:
            return None
        shared = holding.pages[:full]
        child.holding = self._admit(pages, holding if shares_slot else None)
        self.pages.share(shared)
        child.holding.pages = shared + pages
        if tokens and holding.slot is not None and not shares_slot:
            self.slots.share([holding.slot])
            child.holding.fork = Fork(holding.slot, tokens)
        return [(holding.pages[full], pages[0])] if self.pages.size and tokens % self.page_size else []

    def _end_fork(self, holding: Holding) -> None:
        if holding.fork is not None:
            self.slots.give([holding.fork.slot])
            holding.fork = None

    def references(self) -> dict[str, int]:
        """Pool -> references on its rows. What comes and goes leaves them as they were."""
        return {pool.kind: pool.references for pool in (self.pages, self.slots, self.rows, self.snapshots)}

    def _start(self, sequence: Sequence, holding: Holding, hit: Hit) -> None:
        """Let an admitted sequence begin where the cache ends."""
        assert self.tree is not None
        if self.pages.size:
            holding.pages = [node.page for node in hit.path if node.page is not None] + holding.pages
        holding.published = len(hit.path)
        holding.node = hit.path[-1] if hit.path else None
        holding.source = hit.source
        sequence.hit = holding.node if holding.load is None else None
        self.tree.touch(hit.path, hit.source)
        if hit.source is not None:
            self.tree.start_reading(hit.source)
        holding.keys = list(self._keys(sequence))
        if self.slots.size:
            holding.targets = self._targets(sequence, hit)
        if holding.load is not None:
            if holding.load.snapshot is not None:
                holding.snapshots[hit.tokens] = holding.load.snapshot
            sequence.fetch = None  # the load has it now
        elif self.tiers is not None:
            self.tiers.leave(sequence)
        self._prefills.add(sequence, holding)
        self._count(sequence, hit)

    def _targets(self, sequence: Sequence, hit: Hit) -> list[int]:
        """Boundaries of a prompt where its pass leaves snapshots.

        The last one before its end, for who asks the same again or goes on from there; where another prompt's KV was
        found to reach deeper than any state, because others will branch off there too; every so many tokens, and
        where the request says.
        """
        size = self.page_size
        last = (len(sequence.token_ids) - 1) // size * size
        wanted = {last, hit.kv_tokens, *(at // size * size for at in sequence.request.snapshot_at)}
        if self.snapshot_interval:
            wanted |= set(range(self.snapshot_interval, last, self.snapshot_interval))
        return sorted(at for at in wanted if at > hit.tokens)

    def _count(self, sequence: Sequence, hit: Hit) -> None:
        if sequence.preemptions:
            return
        sequence.cached_tokens, sequence.miss_cause = hit.tokens, hit.cause
        if sequence.is_check or sequence.index:  # the answers to one prompt count once, as in its usage
            return
        counts = self.counts
        counts.queries += 1
        counts.hits += hit.tokens > 0
        counts.query_tokens += sequence.prompt_len
        counts.hit_tokens += hit.tokens
        if self.tiers is not None:
            self.tiers.admitted(hit.fetch, hit.tokens, sequence)
        if hit.cause is not None:
            counts.misses[hit.cause] = counts.misses.get(hit.cause, 0) + 1
            counts.missed_tokens[hit.cause] = counts.missed_tokens.get(hit.cause, 0) + hit.kv_tokens - hit.tokens

    def begin_step(self, sequences: int) -> None:
        """A new step is planned, of so many sequences: it may leave `max_per_step` snapshots."""
        self._quota, self._sequences_to_come = self._max_per_step, sequences

    def snapshots_for(self, sequence: Sequence, first_pos: int, num_tokens: int) -> dict[int, int]:
        """Boundary -> snapshot row, for the snapshots that the step over these positions is to leave.

        Besides the prompt's own, one at every page that decoding fills, of which the latest are kept, so that the
        next turn of a chat finds the end of this one. Without a row to be had, none is left, and it is counted. Of a
        step's quota, one is kept for every sequence that is still to be asked.
        """
        self._sequences_to_come -= 1
        holding = sequence.holding
        if self.tree is None or not self.slots.size or holding is None or sequence.is_cold:
            return {}
        end = first_pos + num_tokens
        targets = []
        while holding.targets and holding.targets[0] <= end:
            targets.append(holding.targets.pop(0))
        is_tail = end > len(holding.keys) * self.page_size and end % self.page_size == 0
        if is_tail:
            targets.append(end)
        rows = {}
        for boundary in reversed(targets):  # if they cannot all be had, the deepest are worth most
            row = self._take_snapshot(holding if is_tail else None)
            if row is not None:
                rows[boundary] = row
        holding.snapshots |= rows
        return rows

    def _keep_tails(self, holding: Holding, count: int) -> None:
        """Of the snapshots that decoding has left, keep the latest few."""
        assert self.tree is not None
        while len(holding.tails) > count:
            self.tree.supersede(holding.tails.pop(0))

    def _take_snapshot(self, decoding: Holding | None) -> int | None:
        """A row, evicting if need be; for a sequence that is decoding rather its own oldest than somebody else's."""
        assert self.tree is not None
        if self._quota <= max(0, self._sequences_to_come):
            self.counts.snapshots_skipped += 1
            return None
        if not self.snapshots.free and decoding is not None:
            self._keep_tails(decoding, TAILS - 1)
        if not self.snapshots.free:
            self.tree.evict_snapshot()
        row = self.snapshots.take(1)
        self.counts.snapshots_skipped += row is None
        self.counts.snapshots_taken += row is not None
        self._quota -= row is not None
        return row[0] if row else None

    # commit

    def commit(self, sequence: Sequence, tokens: int) -> Node | None:
        """Positions [0, tokens) of a sequence are now known to be computed: its full pages and snapshots are shared.

        Returns the node from which it started, if what came from a lower tier has just been shared with the rest.
        """
        holding = sequence.holding
        assert holding is not None, f"{sequence.request_id} committed {tokens} tokens and holds nothing"
        assert len(holding.pages) * self.page_size >= tokens or not self.pages.size, (sequence.request_id, tokens)
        self._end_fork(holding)
        if self.tree is None or sequence.is_cold:
            return None
        self._stop_reading(holding)
        started = self._finish_load(sequence, holding)
        if sequence.is_cold:
            return None
        full, before = tokens // self.page_size, holding.published
        while holding.published < full:
            self._publish(sequence, holding)
            self._attach(holding)
        if full >= len(holding.keys):
            self._prefills.discard(sequence, holding)
            if self.tiers is not None and not self.slots.size and before < len(holding.keys) and holding.node:
                self.tiers.save(holding.node)
        return started

    def _finish_load(self, sequence: Sequence, holding: Holding) -> Node | None:
        """Share what came from a lower tier, now that a step has used it; the node that it ends at.

        If it was to be forgotten meanwhile, neither it nor what follows is shared.
        """
        load, holding.load = holding.load, None
        if load is None or self.tiers is None:
            return None
        self.tiers.loaded(load)
        if load.age != self.tiers.age:
            self._prefills.discard(sequence, holding)
            sequence.is_cold = True
            return None
        self._attach(holding)  # where the tree has had the page all along
        while holding.published < load.depth:
            self._publish(sequence, holding)
            self._attach(holding)
        sequence.hit = holding.node
        return holding.node

    def _publish(self, sequence: Sequence, holding: Holding) -> None:
        """The next full page of a sequence enters the tree; or stays its own, if the tree has the same already."""
        assert self.tree is not None
        at, keys = holding.published, self._keys(sequence)
        assert at < len(keys), (sequence.request_id, at, len(sequence.token_ids))
        page, key = holding.pages[at] if self.pages.size else None, keys[at]
        node, is_taken = self.tree.extend(sequence.request.cache_salt, holding.node, key, page)
        if self.tiers is not None:
            node.digest = self.tiers.digests(sequence, keys)[at]
        if page is not None and not is_taken:
            holding.duplicates.append(page)
        holding.node, holding.published = node, at + 1

    def _attach(self, holding: Holding) -> None:
        """Give the node just published the snapshot that was taken there."""
        assert self.tree is not None
        boundary = holding.published * self.page_size
        row = holding.snapshots.pop(boundary, None)
        if row is None:
            return
        assert holding.node is not None
        if not self.tree.attach(holding.node, row):
            self.snapshots.give([row])
        elif boundary > len(holding.keys) * self.page_size:
            holding.tails.append(holding.node)
            self._keep_tails(holding, TAILS)
        elif self.tiers is not None:
            self.tiers.save(holding.node)

    def _stop_reading(self, holding: Holding) -> None:
        if holding.source is not None and self.tree is not None:
            self.tree.stop_reading(holding.source)
            holding.source = None

    # release

    def release(self, sequence: Sequence) -> None:
        """Give back everything a sequence holds; harmless when it holds nothing. What it published stays cached."""
        if self.tiers is not None:
            self.tiers.leave(sequence)
        holding, sequence.holding = sequence.holding, None
        if holding is None:
            return
        own = holding.pages if self.tree is None else holding.pages[holding.published :] + holding.duplicates
        self.pages.give(own)
        self.rows.give([holding.row])
        if holding.slot is not None:
            self.slots.give([holding.slot])
        self._end_fork(holding)
        if self.tree is not None:
            self.snapshots.give(list(holding.snapshots.values()))
            if holding.load is not None and self.tiers is not None:
                self.tiers.loaded(holding.load)
            self._prefills.discard(sequence, holding)
            self._stop_reading(holding)
            self._save_answer(holding)
            self.tree.unpin(holding.node)

    def _save_answer(self, holding: Holding) -> None:
        """Tell the lower tiers of the last prefix that an answer has left, for the next turn of a chat."""
        end = holding.tails[-1] if holding.tails else None if self.slots.size else holding.node
        if self.tiers is not None and end is not None and end.alive:
            self.tiers.save(end)

    def prefix_status(self) -> dict:
        """What the prefix cache holds, and what it has done so far."""
        assert self.tree is not None
        return asdict(self.counts) | {
            "cached_pages": self.tree.num_nodes,
            "idle_pages": self.tree.num_idle,
            "evicted_pages": self.tree.evicted_pages,
            "evicted_snapshots": self.tree.evicted_snapshots,
            "alpha": self.tree.policy.alpha,
        }

    def flush(self) -> None:
        """Forget every prefix that the device has. What sequences still use is freed when they end."""
        if self.tree is not None:
            self.tree.clear()

    def computed(self, tokens: list[int], seconds: float) -> None:
        """A step over so many tokens of each of its sequences took so long."""
        prompt = sum(count for count in tokens if count > 1)
        if self.tiers is not None and 2 * prompt > sum(tokens):  # most of the time went on prompts
            self.tiers.price.computed(prompt, seconds)

    def tick(self) -> None:
        """Behind every step: go on copying to the lower tiers."""
        if self.tiers is not None and self.tree is not None:
            self.tiers.tick(self.tree)

    def keep_copying(self) -> bool:
        """While nothing else is to be done: whether there is, or was until now, something on its way to lower tiers."""
        if self.tiers is None or self.tree is None or not self.tiers.is_saving:
            return False
        self.tiers.tick(self.tree)
        self.tiers.wait(0.005)
        return True

    def drain(self, seconds: float) -> bool:
        """Wait until the lower tiers have what is worth keeping. False if it took longer."""
        return self.tiers is None or self.tree is None or self.tiers.drain(self.tree, seconds)

    def close(self) -> None:
        """Bring what is worth keeping to the disk tier, and forget every prefix."""
        if self.tiers is not None and self.tree is not None:
            self.tiers.close(self.tree)
        self.flush()

    def quarantine(self, node: Node) -> None:
        """Forget a node that was found to be wrong, and all that was built on it."""
        if self.tree is not None and node.alive:
            self.tree.remove(node)
            self.counts.quarantined += 1
        if self.tiers is not None:
            self.tiers.forget(node.digest)

    def distrust(self, sequence: Sequence) -> None:
        """A sequence has failed in the step that started from a lower tier: forget what that gave."""
        load = sequence.holding.load if sequence.holding else None
        if load is not None and self.tiers is not None:
            self.tiers.forget(load.fetch.digests[min(load.first, load.depth - 1)])
