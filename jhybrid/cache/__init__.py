"""The cache: device arrays of pages and slots, and the host ledger that knows who holds what."""
