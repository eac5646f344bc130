"""Eviction: which page or snapshot to give up first.

`lru` goes by recency alone. `flop_aware` adds what recomputing would cost: recency plus alpha times the FLOPs saved
per byte held, each relative to its range (Pan et al. 2025, "Marconi: Prefix Caching for the Era of Hybrid LLMs").
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from jhybrid.cache.node import Node


@dataclass(frozen=True)
class Cost:
    """What a prefix costs to compute and to keep."""

    flops_per_token: float  # all that does not depend on the position
    flops_per_position: float  # attention: what each earlier position adds to a token
    page_size: int
    page_bytes: int
    slot_bytes: int  # 0 for a model without recurrent layers

    def flops(self, start: int, end: int) -> float:
        """FLOPs of computing the pages [start, end) of a sequence."""
        start, end = start * self.page_size, end * self.page_size
        return self.flops_per_token * (end - start) + self.flops_per_position * (end * end - start * start) / 2


class Policy:
    """Scores nodes; the lowest goes first. Scores are times, so that they need no update while time passes.

    They do when `version` changes: another alpha was set, or the range of FLOPs per byte has grown a lot.
    """

    def __init__(self, cost: Cost, *, alpha: float, span: int):
        """`alpha` weighs FLOPs per byte against recency (0: recency alone) over a range of `span` admissions."""
        self.cost = cost
        self.alpha = alpha
        self.version = 0
        self._span = max(1, span)
        self._best = 0.0  # most FLOPs per byte seen

    def set_alpha(self, alpha: float) -> None:
        self.alpha = alpha
        self.version += 1

    def page_score(self, node: Node) -> float:
        """Of an idle leaf: its page goes, and its snapshot with it."""
        hybrid = self.cost.slot_bytes > 0
        if node.snapshot is None:  # without a state at or after it, a hybrid's page saves nothing by itself
            return node.used if hybrid else node.used + self._worth(node.depth - 1, node.depth, self.cost.page_bytes)
        return max(node.used, node.state_used) + self._state_worth(node)

    def snapshot_score(self, node: Node) -> float:
        """Of a snapshot: it goes, its page stays."""
        return node.state_used + self._state_worth(node)

    def _state_worth(self, node: Node) -> float:
        if not self.alpha:
            return 0.0
        before = node.parent
        while before is not None and before.snapshot is None:
            before = before.parent
        return self._worth(before.depth if before else 0, node.depth, self.cost.slot_bytes + self.cost.page_bytes)

    def _worth(self, start: int, end: int, size: int) -> float:
        if not self.alpha:
            return 0.0
        efficiency = self.cost.flops(start, end) / max(1, size)
        if efficiency > self._best:
            self.version += self._best * 1.5 < efficiency
            self._best = efficiency
        return self.alpha * self._span * efficiency / self._best if self._best else 0.0


class Candidates:
    """A heap of nodes by score, checked when they come up: a node may have been used, or taken, since it was pushed."""

    def __init__(self, bit: int, score: Callable[[Node], float], is_candidate: Callable[[Node], bool]):
        """`bit` marks the nodes of this heap in `Node.queued`."""
        self._bit = bit
        self._score = score
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, Node]] = []
        self._order = itertools.count()
        self._kept = 0  # entries when dead ones were last thrown out

    def push(self, node: Node) -> None:
        """A node that may be taken from now on. Pushing it again is harmless."""
        if node.queued & self._bit or not self._is_candidate(node):
            return
        node.queued |= self._bit
        heapq.heappush(self._heap, (self._score(node), next(self._order), node))
        if len(self._heap) > 2 * self._kept + 64:  # perhaps mostly dead
            self.rescore()

    def rescore(self) -> None:
        """Throw out what is no candidate, and score the others anew."""
        nodes = [(order, node) for _, order, node in self._heap]
        for _, node in nodes:
            node.queued &= ~self._bit
        nodes = [(order, node) for order, node in nodes if self._is_candidate(node)]
        for _, node in nodes:
            node.queued |= self._bit
        self._heap = [(self._score(node), order, node) for order, node in nodes]
        heapq.heapify(self._heap)
        self._kept = len(self._heap)

    def first(self, count: int) -> list[Node]:
        """Up to `count` candidates of the lowest scores, which stay candidates."""
        nodes: list[Node] = []
        while len(nodes) < count and (node := self.pop()) is not None:
            nodes.append(node)
        for node in nodes:
            self.push(node)
        return nodes

    def pop(self) -> Node | None:
        """The candidate of the lowest score, or None."""
        while self._heap:
            pushed, order, node = heapq.heappop(self._heap)
            node.queued &= ~self._bit
            if not self._is_candidate(node):
                continue
            score = self._score(node)
            if score > pushed and self._heap and self._heap[0][0] < score:
                node.queued |= self._bit
                heapq.heappush(self._heap, (score, order, node))
                continue
            return node
        return None
