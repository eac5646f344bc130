"""Pages and slots as the host sees them: numbered rows that are free or held."""


class RowPool:
    """Numbers 0..size-1, each free or taken. The ledger keeps one for pages, one for slots, one for sampler rows."""

    def __init__(self, kind: str, size: int):
        self.kind = kind
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._taken = [False] * size

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` rows, or None (and nothing taken) when there are not enough."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for row in taken:
            assert not self._taken[row], f"{self.kind} {row} was on the free list while taken"
            self._taken[row] = True
        return taken

    def give(self, rows: list[int]) -> None:
        """Return rows. Returning a free row is a bug and says so."""
        for row in rows:
            assert self._taken[row], f"{self.kind} {row} given back twice"
            self._taken[row] = False
            self._free.append(row)

    def free_rows(self) -> list[int]:
        """The free rows, for tests that poison them."""
        return list(self._free)
