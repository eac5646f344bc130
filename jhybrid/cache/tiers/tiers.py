"""Tiers: what the ledger and the engine know of the tiers below the device. See the package's docstring."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jhybrid.cache.node import Node
from jhybrid.cache.prefix_tree import PrefixTree
from jhybrid.cache.tiers.chain import Digest, extend, root
from jhybrid.cache.tiers.copies import Outgoing, Staged
from jhybrid.cache.tiers.disk import DiskTier
from jhybrid.cache.tiers.fetcher import TRIES, Crowded, Fetch, Fetcher, Tier, failure
from jhybrid.cache.tiers.form import Blob, Form
from jhybrid.cache.tiers.host import HostTier
from jhybrid.cache.tiers.price import Price
from jhybrid.cache.tiers.saver import Saver
from jhybrid.cache.tiers.store import Gone
from jhybrid.sequence import Load
from jhybrid.sequence import Sequence as SequenceOf

WritePolicy = Literal["write_through", "write_back"]

MOST_DEFERRALS = 16
"""Times that an admission is put off because no row can be had for the state that was fetched."""
AHEAD = 4  # evictions that `write_back` provides for
CLOSE_SECONDS = 5.0  # that closing waits for what is on its way to the disk


class Device(Protocol):
    """The part of the runner that copies rows."""

    @property
    def page_form(self) -> Form: ...
    @property
    def state_form(self) -> Form: ...
    @property
    def pages_per_copy(self) -> int: ...
    def copy_out(self, pages: Sequence[int], snapshot: int | None) -> Outgoing: ...
    def stage(self, pages: Sequence[Blob], state: Blob | None, until: float) -> Staged: ...


@dataclass(frozen=True)
class TierConfig:
    """What is kept below the device. Sizes in bytes; no `disk_url`: no disk."""

    host_bytes: int
    state_share: float | None
    policy: WritePolicy
    disk_url: str | None
    disk_bytes: int
    timeout: float  # seconds that an admission waits for a fetch


class Tiers:
    """Both ways of both tiers. The ledger asks on the way up and tells what is worth saving; the engine ticks."""

    def __init__(self, config: TierConfig, device: Device, fingerprint: bytes, *, page_size: int):
        """Raises ConfigError if the URL is none to write to."""
        page_bytes, state_bytes = device.page_form.bytes, device.state_form.bytes
        self.policy = config.policy
        self.host = HostTier(config.host_bytes, config.state_share)
        self.disk = None
        if config.disk_url is not None:
            self.disk = DiskTier(
                config.disk_url,
                config.disk_bytes,
                fingerprint,
                self.host.get,
                has_pages=page_bytes > 0,
                has_states=state_bytes > 0,
            )
        self._fingerprint = fingerprint
        self._changed = threading.Condition()
        self._happened = 0
        self.price, self._page_size = Price(config.timeout), page_size
        self._fetcher = Fetcher(
            self.host,
            self.disk,
            device.stage,
            page_bytes=page_bytes,
            state_bytes=state_bytes,
            timeout=config.timeout,
            landed=self._land,
        )
        self._saver = Saver(
            self.host,
            self.disk,
            device.copy_out,
            size=device.pages_per_copy,
            has_pages=page_bytes > 0,
            has_states=state_bytes > 0,
            landed=self._land,
        )
        self.age = 0  # grows when something is to be forgotten; what was fetched before is not shared after
        self._evicted = 0  # by the tree, when last looked at

    # up

    def digests(self, sequence: SequenceOf, keys: list[bytes]) -> list[Digest]:
        """The names of a sequence's full pages."""
        known = sequence.digests
        if len(known) < len(keys):
            last = known[-1] if known else root(self._fingerprint, sequence.request.cache_salt)
            known += extend(last, keys[len(known) :])
        return known

    def reach(self, sequence: SequenceOf, digests: list[Digest], held: int, depth: int) -> int:
        """How many of a sequence's pages can be had with the help of the tiers, if more than `depth`; else that.

        `held` is what the device has of keys and values.
        """
        if sequence.fetch is not None:
            return max(depth, sequence.fetch.depth)
        chosen = None if sequence.num_fetches >= TRIES else self._choose(digests, held, depth)[0]
        return depth if chosen is None else chosen[0]

    def _choose(self, digests: list[Digest], held: int, depth: int) -> tuple[tuple[int, Tier] | None, list[Tier]]:
        """How deep to fetch and from which tier, if it is worth it; and the tiers from which deeper was not."""
        declined: list[Tier] = []
        for reach, tier in self._fetcher.offers(digests, held):
            if reach <= depth:
                break
            size = self._fetcher.size(max(0, reach - held))
            if self.price.is_worth_it(tier.loads, size, (reach - depth) * self._page_size):
                return (reach, tier), declined
            declined.append(tier)
        return None, declined

    def still_wait(self, sequence: SequenceOf) -> bool:
        """Whether a sequence's fetch is still on its way, and worth waiting for."""
        fetch = sequence.fetch
        return fetch is not None and fetch.is_under_way and not fetch.is_void and time.monotonic() < fetch.deadline

    def fetch(self, sequence: SequenceOf, digests: list[Digest], held: int, depth: int) -> Fetch | None:
        """A fetch of a prefix deeper than `depth`: under way or here. None if there is nothing to be had.

        `held` is how many pages of keys and values the device has; a fetch brings those beyond.
        """
        if sequence.fetch is None:
            return self._start(sequence, digests, held, depth)
        fetch = sequence.fetch
        if fetch.is_void:
            return self._give_up(sequence, Gone("it was to be forgotten"))
        if fetch.is_under_way:
            late = TimeoutError if fetch.is_reading else Crowded
            return self._give_up(sequence, late("a fetch took longer than cache_load_timeout"))
        assert fetch.future is not None
        error = fetch.future.exception()
        if error is not None:
            return self._give_up(sequence, error)
        if fetch.depth <= depth:  # the device has as much by now
            return self.leave(sequence)
        if held < fetch.first:
            fetch.counts.miss("stale")
            return self.leave(sequence)
        return fetch

    def _start(self, sequence: SequenceOf, digests: list[Digest], held: int, depth: int) -> Fetch | None:
        if sequence.num_fetches >= TRIES:
            return None
        chosen, declined = self._choose(digests, held, depth)
        for tier in declined:
            tier.counts.miss("slow")
        if chosen is None:
            if declined:  # once and for all: computing begins
                sequence.num_fetches = TRIES
            return None
        reach, tier = chosen
        sequence.num_fetches += 1
        sequence.fetch = self._fetcher.start(digests[:reach], min(held, reach), tier)
        tier.counts.add(deferrals=1)
        return sequence.fetch

    def _give_up(self, sequence: SequenceOf, error: BaseException) -> None:
        fetch = sequence.fetch
        assert fetch is not None
        cause, is_fault = failure(error)
        fetch.counts.miss(cause)
        if is_fault and not fetch.is_told:
            fetch.is_told = True
            fetch.counts.add(failures=1)
            breaker = fetch.tier.reads if isinstance(fetch.tier, DiskTier) else fetch.tier.breaker
            breaker.failed(error)
        if cause == "timeout":
            sequence.num_fetches = TRIES
        self.leave(sequence)

    def no_room(self, sequence: SequenceOf) -> None:
        """No row can be had for the state of what was fetched: to be tried again, but not for ever."""
        fetch = sequence.fetch
        assert fetch is not None
        sequence.num_deferrals += 1
        if sequence.num_deferrals <= MOST_DEFERRALS:
            fetch.counts.add(deferrals=1)
            return
        fetch.counts.miss("no_room")
        sequence.num_fetches = TRIES
        self.leave(sequence)

    def leave(self, sequence: SequenceOf) -> None:
        """A sequence needs its fetch no more. Harmless when it has none."""
        fetch, sequence.fetch = sequence.fetch, None
        if fetch is not None:
            self._fetcher.leave(fetch)

    def loaded(self, load: Load) -> None:
        """What was fetched is in the caches, or is not wanted any more."""
        self._fetcher.leave(load.fetch)

    def admitted(self, fetch: Fetch | None, tokens: int, sequence: SequenceOf) -> None:
        """A sequence was admitted for the first time: a fetch provided for its first `tokens` tokens, or none did."""
        if fetch is not None:
            fetch.counts.add(hits=1, hit_tokens=tokens)
            if isinstance(fetch.tier, DiskTier):
                fetch.tier.reads.succeeded()
        elif not sequence.num_fetches and not sequence.cached_tokens:
            for tier in (self.host, self.disk):
                if tier is not None:
                    breaker = tier.reads if isinstance(tier, DiskTier) else tier.breaker
                    tier.counts.miss("absent" if breaker.is_in else "out")

    # down

    def save(self, node: Node) -> None:
        """A prefix has come to be that a later request may start from."""
        if self.policy == "write_through":
            self._saver.add(node)

    def tick(self, tree: PrefixTree) -> None:
        """Take in what has been copied, and copy some more: what was told, or what is about to be evicted."""
        if self.policy == "write_back":
            evicted = tree.evicted_pages + tree.evicted_snapshots
            if not self._saver.num_queued and tree.is_short:
                for node in tree.next_to_go(AHEAD + 2 * (evicted - self._evicted)):
                    self._saver.add(node)
            self._evicted = evicted
        self._saver.tick(tree)

    def wait_for_sources(self, tree: PrefixTree) -> bool:
        """Let go of everything that copies hold, when their gathers have run. False if there was nothing."""
        return self._saver.wait_for_sources(tree)

    # both

    @property
    def is_saving(self) -> bool:
        """Whether something is to be saved and can be."""
        return self._saver.num_queued > 0 and self.host.breaker.is_in

    def wait_for_fetch(self) -> None:
        """While nobody can run: until something has arrived, for a moment."""
        if self._fetcher.num_under_way:
            self.wait(0.005)

    def _land(self) -> None:
        with self._changed:
            self._happened += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until something has arrived, at most so long."""
        with self._changed:
            before = self._happened
            self._changed.wait_for(lambda: self._happened != before, timeout=seconds)

    def drain(self, tree: PrefixTree, seconds: float) -> bool:
        """Wait until everything worth saving is where it belongs. False if it took longer."""
        until = time.monotonic() + seconds
        self.tick(tree)
        while self.is_saving and time.monotonic() < until:
            self.wait(0.005)
            self.tick(tree)
        left = max(0.0, until - time.monotonic())
        return not self._saver.num_queued and (self.disk is None or self.disk.drain(left))

    def forget(self, digest: Digest) -> None:
        """A prefix was found to be wrong: drop it with all that goes on from it, and whatever is on its way."""
        self._drop_transfers()
        self.host.forget(digest)
        if self.disk is not None:
            self.disk.forget(digest)

    def clear(self) -> None:
        """Drop everything."""
        self._drop_transfers()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def _drop_transfers(self) -> None:
        self.age += 1
        self._saver.forget()
        self._fetcher.forget()

    def close(self, tree: PrefixTree) -> None:
        """Bring to the disk, in a few seconds, what is not there yet, and end the threads."""
        if self.disk is not None:
            until = time.monotonic() + CLOSE_SECONDS
            for node in tree.worth_keeping():
                self._saver.add(node)
            self.drain(tree, CLOSE_SECONDS)
            self.disk.close(until - time.monotonic())
        self._fetcher.close()
        self._saver.close()
        self._saver.wait_for_sources(tree)

    def status(self) -> dict:
        """Per tier: entries, bytes, hits, misses by cause, what waits, bandwidth, and why it is out, if it is."""
        status = {
            "host": self.host.status() | {"queued": self._saver.num_queued, "fetching": self._fetcher.num_under_way}
        }
        if self.disk is not None:
            status["disk"] = self.disk.status()
        return status

    def out(self) -> dict[str, str]:
        """Tiers that are taken out, and why. Any thread may ask."""
        breakers = {"host tier": [self.host.breaker]}
        if self.disk is not None:
            breakers["disk tier"] = [self.disk.reads, self.disk.writes]
        reasons = {name: [b.reason for b in some if not b.is_in and b.reason] for name, some in breakers.items()}
        return {name: "; ".join(found) for name, found in reasons.items() if found}
