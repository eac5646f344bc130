"""Fetcher: what a fetch comes to when it has to wait for others."""

import threading
from concurrent.futures import wait

import numpy as np

from jhybrid.cache.tiers.copies import IN, Staged
from jhybrid.cache.tiers.fetcher import Fetch, Fetcher, failure, parent_of
from jhybrid.cache.tiers.host import Entry, HostTier, Name

from .disk_writer import prefix

PAGES = 2


def held(prefixes: int) -> HostTier:
    host = HostTier(1 << 20)
    for digests in (prefix(stem, PAGES) for stem in range(prefixes)):
        names = [*(Name(digest, "kv") for digest in digests), Name(digests[-1], "state")]
        entries = [Entry(parent_of(digests, at), at + 1, np.zeros(8, np.uint8)) for at in (0, 1, 1)]
        host.put(zip(names, entries, strict=True), host.age)
    return host


def fetcher(host: HostTier, timeout: float) -> Fetcher:
    def stage(pages: object, state: object, until: float) -> Staged:
        return Staged([], None)

    return Fetcher(host, None, stage, page_bytes=8, state_bytes=8, timeout=timeout, landed=threading.Event().set)


def over(*fetches: Fetch) -> None:
    assert not wait([fetch.future for fetch in fetches if fetch.future is not None], 5).not_done


def test_a_crowd_that_keeps_each_other_waiting_does_not_speak_against_the_tier():
    host = held(IN + 4)
    one = fetcher(host, timeout=0.2)
    fetches = [one.start(prefix(stem, PAGES), 0, host) for stem in range(IN + 4)]
    over(*fetches)
    for fetch in fetches[:IN]:
        assert fetch.is_here
    for fetch in fetches[IN:]:
        assert fetch.future is not None
        error = fetch.future.exception()
        assert error is not None and failure(error) == ("timeout", False)
    for fetch in fetches:
        one.leave(fetch)
    again = [one.start(prefix(stem, PAGES), 0, host) for stem in range(IN)]
    over(*again)
    assert all(fetch.is_here for fetch in again), "the room of those that were here is free again"
    one.close()


def test_a_transfer_that_takes_too_long_is_ended_where_it_can_be():
    host, until = held(1), []

    def stage(pages: object, state: object, deadline: float) -> Staged:
        until.append(deadline)
        raise TimeoutError

    one = Fetcher(host, None, stage, page_bytes=8, state_bytes=8, timeout=9.0, landed=threading.Event().set)
    fetch = one.start(prefix(0, PAGES), 0, host)
    over(fetch)
    assert until == [fetch.deadline] and not fetch.is_here
    one.leave(fetch)
    assert all(one._room.acquire(timeout=0) for _ in range(IN)), "its room is free again"
    one.close()


def test_the_deepest_offer_comes_first_and_the_hosts_before_the_disks():
    class Disk:
        depth = 0

        def deepest(self, digests: list[bytes]) -> int:
            return self.depth

    host, disk = held(1), Disk()
    one = fetcher(host, timeout=1.0)
    one._disk = disk  # pyright: ignore[reportAttributeAccessIssue]
    for depth, expected in ((0, [host, disk]), (PAGES, [host, disk]), (PAGES + 1, [disk, host])):
        disk.depth = depth
        assert [tier for _, tier in one.offers(prefix(0, 5), 0)] == expected
    one.close()
