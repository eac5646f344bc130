"""Pages and slots as the host sees them: numbered rows that are free or held, by one or by several."""

from collections import Counter


class RowPool:
    """Numbers 0..size-1, each free or held. The ledger keeps one for pages, slots, snapshots and sampler rows each."""

    def __init__(self, kind: str, size: int):
        self.kind = kind
        self.size = size
        self._returned: list[int] = []
        self._next = 0  # rows from here on were never taken
        self._taken = bytearray(size)
        self._sharers: Counter[int] = Counter()  # of taken rows: their holders beyond the first

    @property
    def free(self) -> int:
        return len(self._returned) + self.size - self._next

    @property
    def used(self) -> int:
        return self.size - self.free

    @property
    def references(self) -> int:
        """How often `give` must be told of a row until all are free."""
        return self.used + self._sharers.total()

    def take(self, count: int) -> list[int] | None:
        """`count` rows, or None (and nothing taken) when there are not enough."""
        if count > self.free:
            return None
        again = min(count, len(self._returned))
        taken = [self._returned.pop() for _ in range(again)]
        taken += range(self._next, self._next + count - again)
        self._next += count - again
        for row in taken:
            assert not self._taken[row], f"{self.kind} {row} was free while taken"
            self._taken[row] = True
        return taken

    def share(self, rows: list[int]) -> None:
        """One holder more for each of these rows, which others hold already."""
        for row in rows:
            assert self._taken[row], f"{self.kind} {row} is shared while free"
            self._sharers[row] += 1

    def give(self, rows: list[int]) -> None:
        """Return rows; the last holder's return frees them. Returning a free row is a bug and says so."""
        for row in rows:
            assert self._taken[row], f"{self.kind} {row} given back twice"
            if row in self._sharers:
                self._sharers[row] -= 1
                if not self._sharers[row]:
                    del self._sharers[row]
            else:
                self._taken[row] = False
                self._returned.append(row)

    def taken_rows(self) -> bytes:
        """For each row, whether it is taken."""
        return bytes(self._taken)

    def free_rows(self) -> list[int]:
        """The free rows, for tests that poison them."""
        return [*self._returned, *range(self._next, self.size)]
