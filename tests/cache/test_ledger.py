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


def test_a_shared_row_is_free_after_its_last_holder():
    pool = RowPool("page", 3)
    assert pool.take(2) is not None
    pool.share([0, 1])
    pool.share([1])
    assert (pool.used, pool.references) == (2, 5)
    pool.give([1, 0, 1])
    assert (pool.used, pool.references) == (2, 2)
    pool.give([1])
    assert (pool.used, pool.free_rows()) == (1, [1, 2])
    with pytest.raises(AssertionError, match="page 1 given back twice"):
        pool.give([1])
    with pytest.raises(AssertionError, match="page 1 is shared while free"):
        pool.share([1])
    pool.give([0])
    assert (pool.used, pool.references) == (0, 0)


def parked(book: Ledger, tokens: int) -> Sequence:
    parent = sequence()
    assert book.reserve(parent, tokens)
    parent.dispatched = tokens
    return parent


def cold() -> Sequence:
    child = sequence()
    child.is_cold = True
    return child


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_fork_shares_full_pages_and_copies_the_partial_one(parent_first: bool):
    book, child = ledger(), cold()
    parent = parked(book, 10)
    assert parent.holding is not None
    moves = book.fork(parent, child, 10, 17)
    assert child.holding is not None
    pages = parent.holding.pages
    assert child.holding.pages[:2] == pages[:2] and len(child.holding.pages) == 5
    assert moves == [(pages[2], child.holding.pages[2])] and child.holding.pages[2] != pages[2]
    assert child.holding.fork == (parent.holding.slot, 10) and child.holding.slot != parent.holding.slot
    assert free(book) == (0, 0, 0)
    assert book.references() == {"page": 8, "slot": 3, "row": 2, "snapshot": 0}
    first, second = (parent, child) if parent_first else (child, parent)
    book.release(first)
    book.release(second)
    assert free(book) == (6, 2, 2)
    assert set(book.references().values()) == {0}


def test_a_fork_reads_the_slot_of_another_until_its_first_step_has_landed():
    book, child = ledger(), cold()
    parent = parked(book, 8)
    assert book.fork(parent, child, 8, 9) == []
    book.release(parent)
    assert book.slots.free == 0  # the parent's is still to be read
    book.commit(child, 9)
    assert book.slots.free == 1
    book.release(child)
    assert free(book) == (6, 2, 2)


def test_a_fork_in_place_has_the_slot_of_another():
    book, child = ledger(slots=1), cold()
    parent = parked(book, 8)
    assert book.fork(parent, child, 8, 9, shares_slot=True) == []
    assert parent.holding is not None and child.holding is not None
    assert (child.holding.slot, child.holding.fork) == (parent.holding.slot, None)
    book.release(parent)
    book.release(child)
    assert free(book) == (6, 1, 2)


def test_a_fork_takes_all_or_nothing():
    for pool, error in (("pages", None), ("slots", SlotPoolEmptyError), ("rows", SlotPoolEmptyError)):
        book, child = ledger(), cold()
        parent = parked(book, 10)
        taken = getattr(book, pool).take(getattr(book, pool).free)
        before = free(book), book.references()
        if error is None:
            assert book.fork(parent, child, 10, 17) is None
        else:
            with pytest.raises(error):
                book.fork(parent, child, 10, 17)
        assert (free(book), book.references()) == before
        assert child.holding is None and taken
