"""Ledger: everything or nothing on the way in, everything on the way out (requirements A1, A2, B3)."""

import pytest

from jhybrid.cache.ledger import Ledger
from jhybrid.cache.pages import RowPool
from jhybrid.detokenizer import Detokenizer
from jhybrid.errors import SlotPoolEmptyError
from jhybrid.request import Request
from jhybrid.sequence import Sequence


def sequence(prompt_len: int = 10) -> Sequence:
    tokens = list(range(prompt_len))
    return Sequence(
        request_id="a",
        index=0,
        request=Request(prompt_token_ids=tokens),
        prompt_len=prompt_len,
        token_ids=tokens,
        max_total=prompt_len + 4,
        eos_token_ids=frozenset(),
        seed=0,
        detokenizer=Detokenizer(None),
    )


def ledger(pages: int = 6, slots: int = 2, rows: int = 2) -> Ledger:
    return Ledger(page_size=4, num_pages=pages, num_slots=slots, num_rows=rows)


def free(book: Ledger) -> tuple[int, int, int]:
    return book.pages.free, book.slots.free, book.rows.free


def test_reserve_grows_by_whole_pages_and_release_gives_all_back():
    book, a = ledger(), sequence()
    assert book.reserve(a, 1)
    assert free(book) == (5, 1, 1)
    assert book.reserve(a, 4)
    assert free(book) == (5, 1, 1)
    assert book.reserve(a, 13)
    assert free(book) == (2, 1, 1)
    assert a.holding is not None
    assert len(set(a.holding.pages)) == 4
    book.release(a)
    assert free(book) == (6, 2, 2)
    assert a.holding is None
    book.release(a)
    assert free(book) == (6, 2, 2)


def test_too_few_pages_change_nothing():
    book, a, b = ledger(), sequence(), sequence()
    assert book.reserve(a, 16)
    before = free(book)
    assert not book.reserve(b, 12)
    assert free(book) == before
    assert b.holding is None
    assert not book.reserve(a, 28)
    assert free(book) == before


@pytest.mark.parametrize(("slots", "rows"), [(1, 2), (2, 1)])
def test_an_empty_pool_raises_and_changes_nothing(slots: int, rows: int):
    book, a, b = ledger(slots=slots, rows=rows), sequence(), sequence()
    assert book.reserve(a, 4)
    before = free(book)
    with pytest.raises(SlotPoolEmptyError, match="no free"):
        book.reserve(b, 4)
    assert free(book) == before
    assert b.holding is None
    book.release(a)
    assert book.reserve(b, 4)


def test_two_sequences_share_nothing():
    book, a, b = ledger(), sequence(), sequence()
    assert book.reserve(a, 12)
    assert book.reserve(b, 12)
    assert a.holding is not None and b.holding is not None
    assert not set(a.holding.pages) & set(b.holding.pages)
    assert a.holding.slot != b.holding.slot
    assert a.holding.row != b.holding.row


def test_models_without_pages_or_slots():
    recurrent, attention = ledger(pages=0), ledger(slots=0)
    a, b = sequence(), sequence()
    assert recurrent.reserve(a, 10_000)
    assert a.holding is not None and a.holding.pages == []
    assert attention.reserve(b, 4)
    assert b.holding is not None and b.holding.slot is None


def test_a_commit_without_a_holding_is_a_bug():
    with pytest.raises(AssertionError, match="holds nothing"):
        ledger().commit(sequence(), 4)


def test_a_pool_notices_rows_given_twice():
    pool = RowPool("page", 2)
    taken = pool.take(2)
    assert taken is not None and sorted(taken) == [0, 1]
    assert pool.take(1) is None
    pool.give([0])
    with pytest.raises(AssertionError, match="page 0 given back twice"):
        pool.give([0])
