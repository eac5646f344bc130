"""Ledger: the only host object that knows pages, slots and rows, and who holds them.

Four verbs: `match`, `reserve`, `commit`, `release`. `reserve` is all or nothing; `release` is the only way out,
whatever the reason, so that no way out can leak.
"""

from dataclasses import dataclass

from jhybrid.cache.pages import RowPool
from jhybrid.errors import SlotPoolEmptyError
from jhybrid.sequence import Holding, Sequence


@dataclass(frozen=True)
class Hit:
    """What the cache already holds of a sequence: its first `tokens` positions, resumed from `slot`."""

    tokens: int = 0
    slot: int | None = None


class Ledger:
    """Accounts for what the caches of one engine hold.

    `num_pages` is 0 for a model without attention, `num_slots` is 0 for one without recurrent layers.
    """

    def __init__(self, *, page_size: int, num_pages: int, num_slots: int, num_rows: int):
        self.page_size = page_size
        self.pages = RowPool("page", num_pages)
        self.slots = RowPool("slot", num_slots)
        self.rows = RowPool("row", num_rows)

    def match(self, _sequence: Sequence) -> Hit:
        """The longest prefix of a sequence that pages and state are held for. Nothing is shared yet."""
        return Hit()

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` positions need."""
        return -(-tokens // self.page_size) if self.pages.size else 0

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Make a sequence hold what positions [0, tokens) need: pages, and on admission a row and a slot.

        Returns False, with nothing changed, when there are not enough pages. Raises SlotPoolEmptyError,
        with nothing changed, when the pool of slots or rows is empty, which only a bug can cause.
        """
        holding = sequence.holding
        missing = self.pages_for(tokens) - (len(holding.pages) if holding else 0)
        if holding is not None and missing <= 0:
            return True
        pages = self.pages.take(missing)
        if pages is None:
            return False
        if holding is None:
            try:
                holding = sequence.holding = self._admit()
            except SlotPoolEmptyError:
                self.pages.give(pages)
                raise
        holding.pages.extend(pages)
        return True

    def _admit(self) -> Holding:
        """A row and, for a model with recurrent layers, a slot; both or neither."""
        row = self.rows.take(1)
        if row is None:
            raise SlotPoolEmptyError(f"no free row of {self.rows.size}; {self.rows.used} are held by sequences")
        if not self.slots.size:
            return Holding(row=row[0], slot=None)
        slot = self.slots.take(1)
        if slot is None:
            self.rows.give(row)
            raise SlotPoolEmptyError(f"no free slot of {self.slots.size}; {self.slots.used} are held by sequences")
        return Holding(row=row[0], slot=slot[0])

    def commit(self, sequence: Sequence, tokens: int) -> None:
        """Positions [0, tokens) of a sequence are now known to be computed."""
        holding = sequence.holding
        assert holding is not None, f"{sequence.request_id} committed {tokens} tokens and holds nothing"
        assert len(holding.pages) >= self.pages_for(tokens), (sequence.request_id, tokens, holding)

    def release(self, sequence: Sequence) -> None:
        """Give back everything a sequence holds; harmless when it holds nothing."""
        holding, sequence.holding = sequence.holding, None
        if holding is None:
            return
        self.pages.give(holding.pages)
        self.rows.give([holding.row])
        if holding.slot is not None:
            self.slots.give([holding.slot])
