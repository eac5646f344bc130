"""Tiers: cached prefixes in host memory and on disk, the recurrent state included.

Three places hold a prefix: the device (`PrefixTree`), host memory (`HostTier`) and a key-value store (`DiskTier`).
What the lower two hold is named by digests: that of a page is the hash of the one before it and of the page's tokens,
and it begins with the hash of the model's fingerprint and the salt (`chain.py`). Under the digest of its last page a
prefix has two kinds of entry, `kv` with that page's keys and values and `state` with the recurrent state after it; a
hit needs `kv` of every page that the device has not, and `state` of the last. KV without a state is never used.

**Down** (`Saver`). A node worth keeping is saved with the pages before it that the host has not: a gather, dispatched
behind the step, into arrays of its own; once that has run, the source rows are let go (until then nobody else can get
them: `Node.copying`); a thread takes the arrays to the host and enters them there, and hands the finished prefix on to
the disk's thread. An entry counts when it is there, so a copy that fails loses that entry and no other.

**Up** (`Fetcher`). A sequence at the head of the queue is looked up. If a lower tier reaches deeper than the device,
a thread collects the entries and transfers them to arrays of their own on the device, while the sequence lets others
pass ("not now"). When they are there, admission takes a page for each loaded page and a row for the node's snapshot,
besides what every sequence takes, all or nothing, and the rows are written on the device just before the sequence's
first step, which starts from the snapshot like any hit. That step's commit enters them into the tree.

What cannot happen, by construction:

- A row that a pending copy is going to write has been given to somebody else: rows are taken at the moment when the
  write into them is dispatched, not while the data are on their way, and the device runs what is dispatched in order.
  A cancelled sequence has either no rows at all, or rows whose write precedes whatever their next owner dispatches.
- A slot is forgotten in the price: the snapshot of the node is taken in `Ledger.reserve` with pages, slot and row.
- Stale cursors: a fetched hit is admitted by the same lines as one on the device, and everything that belongs to a
  state (every part of unit `slot`) is in the entry; positions, pages and sampler rows are set at admission in any case.
- What was fetched is shared without having been used: only `commit` publishes.
- A slow or broken tier holds up a request: it is given up after `cache_load_timeout`, and the prefix is recomputed; nor
  is it begun when, by what was measured, computing would be sooner (`price.py`).
"""
