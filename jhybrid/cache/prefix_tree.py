"""PrefixTree: which token prefixes the caches hold. A node is one page of tokens after those of its parent.

A node has the page with the keys and values of its tokens, and, at some depths, a snapshot: a row with the recurrent
state after its last token. The ledger alone calls it; nothing here knows of sequences. What the tree holds is
immutable: a page gets into it when it is full, and nobody writes to it again.
"""

from collections.abc import Iterator

from jhybrid.cache.eviction import Candidates, Policy
from jhybrid.cache.node import Node, Salt
from jhybrid.cache.pages import RowPool


class PrefixTree:
    """Nodes by salt and tokens. Rows that it gives up go back to the pools that they came from.

    A sequence holds a reference on every node of its path, so a node without references has no descendant with any,
    and everything idle can be evicted, leaf after leaf.
    """

    def __init__(self, policy: Policy, pages: RowPool, snapshots: RowPool):
        """A model without attention has no pages; what holds its tree down is that nodes need a state to stay."""
        self.policy = policy
        self._version = policy.version
        self._pages, self._snapshots = pages, snapshots
        self.roots: dict[Salt, Node] = {}
        self.clock = 0  # of admissions; the unit of recency
        self.num_nodes = 0
        self.num_idle = 0  # nodes without references
        self.num_snapshots = 0  # that nodes have
        self.evicted_pages = 0
        self.evicted_snapshots = 0
        self._leaves = Candidates(1, policy.page_score, _is_idle_leaf)
        self._states = Candidates(2, policy.snapshot_score, _has_idle_snapshot)

    # reading

    def walk(self, salt: Salt, keys: list[bytes]) -> Iterator[Node]:
        """The nodes that match a sequence's pages, from the first on."""
        node = self.roots.get(salt)
        for key in keys:
            node = None if node is None else node.children.get(key)
            if node is None:
                return
            yield node

    def touch(self, path: list[Node], source: Node | None) -> None:
        """A sequence was admitted that uses these pages and this snapshot."""
        self.clock += 1
        for node in path:
            node.used = self.clock
        if source is not None:
            source.state_used = self.clock
            source.hits += 1

    # references

    def pin(self, path: list[Node]) -> None:
        """One reference more on each node of a path."""
        for node in path:
            self.num_idle -= not node.refs
            node.refs += 1

    def unpin(self, node: Node | None) -> None:
        """One reference less on a node and all its ancestors. What nobody can reach any more is freed."""
        while node is not None and node.parent is not None:
            node.refs -= 1
            node.used = self.clock
            assert node.refs >= 0, f"a node at depth {node.depth} was released more often than pinned"
            parent = node.parent
            if not node.refs:
                if node.alive:
                    self.num_idle += 1
                    self._settle(node)
                else:
                    self._free(node)
            node = parent

    def start_reading(self, node: Node) -> None:
        """Keep a node's snapshot until the step that starts from it has landed."""
        node.readers += 1

    def stop_reading(self, node: Node) -> None:
        """That step has landed, or will not come."""
        node.readers -= 1
        assert node.readers >= 0
        if node.readers:
            return
        if node.alive:
            self._states.push(node)
        elif not node.copying:
            self._drop_snapshot(node)

    # copying to lower tiers

    def start_copying(self, node: Node) -> None:
        """A copy reads a node's page or snapshot: neither is given to anybody until it has run."""
        node.copying += 1

    def stop_copying(self, node: Node) -> None:
        """It has run."""
        node.copying -= 1
        assert node.copying >= 0
        if node.copying:
            return
        if not node.alive:
            if not node.refs:
                self._free(node)
            elif not node.readers:
                self._drop_snapshot(node)
            return
        self._states.push(node)
        if not node.refs:
            self._settle(node)

    @property
    def is_short(self) -> bool:
        """Whether pages or snapshots will soon have to be given up for others."""
        return any(pool.size and pool.free <= pool.size // 8 for pool in (self._pages, self._snapshots))

    def next_to_go(self, count: int) -> list[Node]:
        """The ends of prefixes that are evicted next, if something has to be."""
        self._keep_up()
        ends: dict[Node, None] = {}
        for node in self._states.first(count) + (self._leaves.first(count) if self._pages.size else []):
            end: Node | None = node
            while self._snapshots.size and end is not None and end.snapshot is None:
                end = end.parent
            if end is not None:
                ends[end] = None
        return list(ends)

    def worth_keeping(self) -> list[Node]:
        """The ends of prefixes that a request may start from; without states, those of the longest."""
        ends, stack = [], list(self.roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            is_end = node.snapshot is not None if self._snapshots.size else not node.children
            if is_end and node.parent is not None:
                ends.append(node)
        return ends

    # growing

    def extend(self, salt: Salt, parent: Node | None, key: bytes, page: int | None) -> tuple[Node, bool]:
        """The child of a node (None: of the salt's root) with these tokens, with one reference more.

        True if `page` now belongs to the tree; False if other sequences use the page that the tree has already.
        """
        if parent is None:
            parent = self.roots.setdefault(salt, Node(None, b"", None, 0, salt))
        child = parent.children.get(key)
        if child is not None:
            is_ours = not child.refs and not child.copying
            if is_ours and page is not None:  # nobody uses its page: keep one of the two, not both
                assert child.page is not None
                self._pages.give([child.page])
                child.page = page
            child.used = self.clock
            self.pin([child])
            return child, is_ours
        child = Node(parent, key, page, parent.depth + 1)
        child.alive = parent.alive
        child.refs = 1
        child.used = self.clock
        if child.alive:
            self.num_nodes += 1
            parent.children[key] = child
        return child, True

    def attach(self, node: Node, row: int) -> bool:
        """Give a node its snapshot. False, and nothing is taken, if it has one or is no longer part of the tree."""
        if not node.alive or node.snapshot is not None:
            return False
        node.snapshot = row
        self.num_snapshots += 1
        node.had_snapshot = True
        node.state_used = self.clock
        self._states.push(node)
        return True

    # shrinking

    def evict_page(self) -> bool:
        """Free the least valuable idle leaf, its snapshot with it. False if nothing is idle."""
        self._keep_up()
        node = self._leaves.pop()
        if node is None:
            return False
        assert node.parent is not None
        self.evicted_pages += 1
        self.evicted_snapshots += node.snapshot is not None
        node.parent.had_snapshot |= node.had_snapshot  # what reached deeper is lost
        self._discard(node)
        self._settle(node.parent)
        return True

    def evict_snapshot(self) -> bool:
        """Free the least valuable snapshot that nobody is about to read; its pages stay. False if there is none."""
        self._keep_up()
        node = self._states.pop()
        if node is None:
            return False
        self.evicted_snapshots += 1
        self._drop_snapshot(node)
        self._settle(node)
        return True

    def supersede(self, node: Node) -> None:
        """Later snapshots of the same sequence make this one useless, unless others have started from it."""
        if node.alive and not node.readers and not node.copying and not node.hits and len(node.children) == 1:
            node.had_snapshot = False
            self._drop_snapshot(node)

    def _settle(self, node: Node) -> None:
        """If a node is an idle leaf now: it may be evicted, or, without pages, it goes unless it has a state."""
        while node.parent is not None and node.alive and not node.refs and not node.children:
            if self._pages.size:
                self._leaves.push(node)
                return
            if node.snapshot is not None:
                return
            parent = node.parent
            self._discard(node)
            node = parent

    def _discard(self, node: Node) -> None:
        """Take an idle leaf out of the tree."""
        self._cut(node)
        self.num_nodes -= 1
        self.num_idle -= 1
        self._free(node)

    def remove(self, node: Node) -> None:
        """Take a node and all that follows it out of the tree. What sequences still use is freed when they end."""
        parent = node.parent
        assert parent is not None
        parent.had_snapshot = True
        self._cut(node)
        doomed = [node]
        while doomed:
            node = doomed.pop()
            doomed.extend(node.children.values())
            node.children = {}
            node.alive = False
            self.num_nodes -= 1
            if not node.refs:
                self.num_idle -= 1
                self._free(node)
            elif not node.readers and not node.copying:
                self._drop_snapshot(node)
        self._settle(parent)

    def _keep_up(self) -> None:
        """Score everything anew if the policy weighs otherwise than before."""
        if self._version != self.policy.version:
            self._version = self.policy.version
            self._leaves.rescore()
            self._states.rescore()

    def clear(self) -> None:
        """Forget everything."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self.remove(child)

    def _cut(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and parent.children.get(node.key) is node
        del parent.children[node.key]
        node.alive = False
        if parent.parent is None and not parent.children:
            del self.roots[parent.salt]
            parent.alive = False

    def _free(self, node: Node) -> None:
        """Nobody uses a node that is out of the tree, unless a copy still reads from it."""
        if node.copying:
            return
        if node.page is not None:
            self._pages.give([node.page])
            node.page = None
        if not node.readers:
            self._drop_snapshot(node)

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot is not None:
            self._snapshots.give([node.snapshot])
            self.num_snapshots -= 1
            node.snapshot = None


def _is_idle_leaf(node: Node) -> bool:
    return node.alive and not node.refs and not node.children and not node.copying


def _has_idle_snapshot(node: Node) -> bool:
    return node.alive and node.snapshot is not None and not node.readers and not node.copying
