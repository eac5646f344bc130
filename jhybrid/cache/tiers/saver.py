"""Saver: the way down. Copies prefixes from the device to the host, and hands them on to the disk's thread.

`tick` runs on the engine's thread, behind every step: it takes in what has been copied and starts some more. Rows that
a copy reads are not given to anybody until the copy has run (`PrefixTree.start_copying`), and an entry is only there
when it is: what fails in between is lost, and nothing relies on it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from jhybrid.cache.node import Node
from jhybrid.cache.prefix_tree import PrefixTree
from jhybrid.cache.tiers.chain import Digest
from jhybrid.cache.tiers.copies import OUT, Outgoing
from jhybrid.cache.tiers.disk import DiskTier
from jhybrid.cache.tiers.fetcher import parent_of
from jhybrid.cache.tiers.host import Entry, HostTier, Name

log = logging.getLogger("jhybrid")

QUEUE = 256  # nodes that wait to be saved; of more, the oldest are let go


@dataclass
class Save:
    """A prefix that is being saved: the nodes of which the host lacks the page, and, of the last, the state."""

    digests: list[Digest]
    pages: list[Node]
    state: Node | None
    age: int  # of the host tier, before anything was read
    failed: bool = False


@dataclass
class Flight:
    """One gather and its way to the host. `nodes` cannot be evicted until it has run."""

    save: Save
    outgoing: Outgoing
    nodes: list[Node]
    is_last: bool
    future: Future[None] = field(init=False)


class Saver:
    """`copy` starts copying pages and a snapshot, given by their rows; at most `size` pages at a time."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        copy: Callable[[Sequence[int], int | None], Outgoing],
        *,
        size: int,
        has_pages: bool,
        has_states: bool,
        landed: Callable[[], None],
    ):
        self._host, self._disk, self._copy = host, disk, copy
        self._size, self._has_pages, self._has_states = size, has_pages, has_states
        self._landed = landed  # called in the thread when a copy is over
        self._queue: deque[Node] = deque()
        self._save: Save | None = None
        self._flights: list[Flight] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="jhybrid-save")

    @property
    def num_queued(self) -> int:
        return len(self._queue) + (self._save is not None) + len(self._flights)

    def add(self, node: Node) -> None:
        """A prefix ends here that is worth keeping: save it when there is time."""
        if len(self._queue) == QUEUE:
            self._queue.popleft()
            self._host.counts.add(dropped=1)
        self._queue.append(node)

    def tick(self, tree: PrefixTree) -> None:
        """Let go of what has been copied, and start copying more."""
        self._settle(tree)
        while len(self._flights) < OUT and self._host.breaker.is_in:
            if self._save is None:
                if not self._queue:
                    return
                self._save = self._begin(self._queue.popleft())
            if self._save is not None:
                self._launch(tree, self._save)

    def _begin(self, node: Node) -> Save | None:
        """What is to be copied of a node's path. None if it is all there, or the end has gone."""
        if not node.alive:
            self._host.counts.add(dropped=1)
            return None
        path, at = [], node
        while at.parent is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        digests = [n.digest for n in path]
        held = self._host.has
        lacking = [n for n in path if not held(Name(n.digest, "kv"))] if self._has_pages else []
        has_state = node.snapshot is not None
        is_held = held(Name(digests[-1], "state"))
        if self._has_states and not has_state and not is_held:
            self._host.counts.add(dropped=1)
            return None
        save = Save(digests, lacking, node if has_state and not is_held else None, self._host.age)
        if not lacking and save.state is None:
            self._hand_on(save)
            return None
        return save

    def _launch(self, tree: PrefixTree, save: Save) -> None:
        """Start the next gather of a save. One of whose nodes has been evicted meanwhile is given up."""
        pages, save.pages = save.pages[: self._size], save.pages[self._size :]
        is_last = not save.pages
        state = save.state if is_last else None
        nodes = pages if state is None else [*pages, state]
        is_gone = any(not node.alive for node in nodes) or (state is not None and state.snapshot is None)
        if is_gone or save.failed:
            self._host.counts.add(dropped=1)
            self._save = None
            return
        rows = [node.page for node in pages if node.page is not None]
        places = [(Name(save.digests[n.depth - 1], "kv"), parent_of(save.digests, n.depth - 1), n.depth) for n in pages]
        if state is not None:
            end = len(save.digests)
            places.append((Name(save.digests[-1], "state"), parent_of(save.digests, end - 1), end))
        try:
            outgoing = self._copy(rows, None if state is None else state.snapshot)
        except Exception as error:  # noqa: BLE001 - the caches are in a state that the next step will tell
            log.warning("a prefix could not be copied to the host: %r", error)
            self._host.counts.add(failures=1)
            self._save = None
            return
        flight = Flight(save, outgoing, nodes, is_last)
        for node in nodes:
            tree.start_copying(node)
        flight.future = self._pool.submit(self._store, flight, places)
        flight.future.add_done_callback(lambda _: self._landed())
        self._flights.append(flight)
        if is_last:
            self._save = None

    def _settle(self, tree: PrefixTree) -> None:
        """Let go of the sources of gathers that have run, and of flights that are over."""
        for flight in self._flights:
            if flight.nodes and flight.outgoing.is_ready:
                self._let_go(tree, flight)
        self._flights = [flight for flight in self._flights if flight.nodes or not flight.future.done()]

    def _let_go(self, tree: PrefixTree, flight: Flight) -> None:
        for node in flight.nodes:
            tree.stop_copying(node)
        flight.nodes = []

    def wait_for_sources(self, tree: PrefixTree) -> bool:
        """Wait until every gather under way has run, and let their sources go. False if there was none to let go."""
        held = [flight for flight in self._flights if flight.nodes]
        for flight in held:
            flight.outgoing.wait()
            self._let_go(tree, flight)
        return bool(held)

    def forget(self) -> None:
        """Nothing that waits or is under way will be entered."""
        self._queue.clear()
        for save in [flight.save for flight in self._flights] + ([self._save] if self._save else []):
            save.failed = True
        self._save = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # in the thread

    def _store(self, flight: Flight, places: list[tuple[Name, Digest, int]]) -> None:
        """Take one gather to the host and enter it there; after the last one of a prefix, hand that on."""
        save = flight.save
        try:
            pages, state = flight.outgoing.fetch()
            blobs = pages if state is None else [*pages, state]
            entries = [
                (name, Entry(parent, depth, blob)) for (name, parent, depth), blob in zip(places, blobs, strict=True)
            ]
            if save.failed:
                return
            self._host.put(entries, save.age)
        except Exception as error:  # noqa: BLE001 - whatever it was, this prefix is not saved, and that is all
            save.failed = True
            self._host.counts.add(failures=1)
            if isinstance(error, MemoryError):  # anything else is the device's fault, and the engine's to deal with
                self._host.breaker.failed(error)
            return
        self._host.breaker.succeeded()
        self._host.counts.add(write_seconds=flight.outgoing.seconds)
        if flight.is_last:
            self._hand_on(save)

    def _hand_on(self, save: Save) -> None:
        """The host has a whole prefix, unless it has given up some of it since."""
        if self._disk is not None and not save.failed:
            self._disk.write(save.digests)
