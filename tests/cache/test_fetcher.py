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
    def stage(pages: object, state: object) -> Staged:
        return Staged([], None)

    return Fetcher(host, None, stage, has_pages=True, has_states=True, timeout=timeout, landed=threading.Event().set)


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
