"""Node: one page of tokens in the prefix tree, and what the caches hold of it."""

Salt = str | None


class Node:
    """A page of tokens after those of `parent`. A root has no parent, no page, and a salt.

    `refs` counts the sequences whose path leads through the node, `readers` those about to start from its snapshot,
    `copying` the copies to a lower tier that still read from it.
    """

    __slots__ = (
        "alive",
        "children",
        "copying",
        "depth",
        "digest",
        "had_snapshot",
        "hits",
        "key",
        "page",
        "parent",
        "queued",
        "readers",
        "refs",
        "salt",
        "snapshot",
        "state_used",
        "used",
    )

    def __init__(self, parent: "Node | None", key: bytes, page: int | None, depth: int, salt: Salt = None):
        self.parent = parent
        self.key = key  # the tokens, as 32-bit integers
        self.salt = salt
        self.page = page
        self.depth = depth  # pages from the root to the end of this one
        self.children: dict[bytes, Node] = {}
        self.digest = b""  # the name of the prefix in the lower tiers, where there are any
        self.refs = 0
        self.copying = 0  # copies under way that read the page or the snapshot
        self.snapshot: int | None = None
        self.had_snapshot = False  # itself, or an evicted node after it
        self.readers = 0
        self.hits = 0  # sequences that started from the snapshot
        self.used = 0  # when a sequence last used the page, by the tree's clock
        self.state_used = 0  # when one last started from the snapshot, or it was made
        self.alive = True  # part of the tree
        self.queued = 0  # bits of the candidate heaps that it lies in
