"""Prefills: the sequences that are just computing their prompts, for others that begin with the same tokens.

Requests that share a prefix and arrive together compute it once: the later ones wait until the first has published it.
"""

from jhybrid.cache.node import Salt
from jhybrid.sequence import Holding, Sequence

MAX_WAITS = 4
"""Times that a sequence waits for others, whose work may be evicted before it is used."""


class Prefills:
    """Sequences by salt and first page, from their admission until all pages known then are published."""

    def __init__(self, page_size: int, *, needs_state: bool):
        self._page_size = page_size
        self._needs_state = needs_state  # whether a prefix is of use only with a snapshot at its end
        self._sequences: dict[tuple[Salt, bytes], list[Sequence]] = {}

    def add(self, sequence: Sequence, holding: Holding) -> None:
        """A sequence was admitted."""
        if holding.keys:
            self._sequences.setdefault((sequence.request.cache_salt, holding.keys[0]), []).append(sequence)

    def discard(self, sequence: Sequence, holding: Holding) -> None:
        """It has published its prompt, or has ended. Harmless when it is not there."""
        if not holding.keys:
            return
        key = (sequence.request.cache_salt, holding.keys[0])
        others = self._sequences.get(key, [])
        if sequence in others:
            others.remove(sequence)
            if not others:
                del self._sequences[key]

    def wait(self, sequence: Sequence, keys: list[bytes], depth: int) -> bool:
        """Let a sequence with these pages wait for one that is going to publish more than `depth` of them.

        Whoever it is that shares most is asked to leave a snapshot where the two part, if it has not come there yet.
        """
        if len(keys) <= depth or sequence.num_waits == MAX_WAITS:
            return False
        for other in self._sequences.get((sequence.request.cache_salt, keys[0]), ()):
            holding = other.holding
            assert holding is not None
            if holding.node is not None and not holding.node.alive:
                continue  # what it publishes is no longer part of the tree
            shared = 0
            while shared < min(len(keys), len(holding.keys)) and keys[shared] == holding.keys[shared]:
                shared += 1
            boundary = self._ask_for(other, holding, shared * self._page_size)
            if boundary > depth * self._page_size:
                sequence.awaited = (other, holding, boundary)
                sequence.num_waits += 1
                return True
        return False

    def _ask_for(self, other: Sequence, holding: Holding, shared: int) -> int:
        """The deepest boundary of at most `shared` tokens that a sequence is still to publish; 0 for none."""
        if not self._needs_state:
            return shared if shared > holding.published * self._page_size else 0
        if other.dispatched < shared and shared not in holding.targets:
            holding.targets = sorted([*holding.targets, shared])
        return max((b for b in (*holding.targets, *holding.snapshots) if b <= shared), default=0)

    def still_waits(self, sequence: Sequence) -> bool:
        """Whether what a sequence waits for is still to come."""
        if sequence.awaited is None:
            return False
        other, holding, boundary = sequence.awaited
        if other.holding is not holding or holding.published * self._page_size >= boundary:
            return False
        if holding.node is not None and not holding.node.alive:
            return False
        return not self._needs_state or boundary in holding.snapshots or boundary in holding.targets
