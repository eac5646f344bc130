"""Replay: what a sequence of requests would have found in the prefix cache of a ledger. No device is needed.

The tuner replays recent requests under other policies; `benchmarks/prefix_cache.py` compares policies on traces.
"""

from typing import NamedTuple

from jhybrid.cache.ledger import Ledger
from jhybrid.detokenizer import Detokenizer
from jhybrid.request import Request
from jhybrid.sequence import Sequence


class Visit(NamedTuple):
    """One request as the cache sees it: its salt, its prompt and its answer."""

    salt: str | None
    prompt: list[int]
    answer: list[int]


def sequence_of(visit: Visit) -> Sequence:
    """A request's bookkeeping before anything of it is computed."""
    return Sequence(
        request_id="",
        index=0,
        request=Request(prompt_token_ids=visit.prompt, cache_salt=visit.salt),
        prompt_len=len(visit.prompt),
        token_ids=list(visit.prompt),
        max_total=len(visit.prompt) + len(visit.answer),
        eos_token_ids=frozenset(),
        seed=0,
        detokenizer=Detokenizer(None),
    )


def replay(ledger: Ledger, visit: Visit) -> int:
    """Let a request pass through a ledger alone, from admission to release. Returns the tokens that were a hit."""
    sequence = sequence_of(visit)
    total = sequence.max_total
    hit = ledger.match(sequence)
    if not ledger.reserve(sequence, total, hit):
        return 0
    _run(ledger, sequence, hit.tokens, len(visit.prompt))
    sequence.token_ids += visit.answer
    size = ledger.page_size
    computed = max(len(visit.prompt), total - 1)  # the last token is sampled and never read
    for end in range(len(visit.prompt) // size * size + size, computed + 1, size):
        _run(ledger, sequence, end - 1, end)
    ledger.commit(sequence, computed)
    ledger.release(sequence)
    return hit.tokens


def _run(ledger: Ledger, sequence: Sequence, start: int, end: int) -> None:
    """A step over positions [start, end)."""
    ledger.begin_step(1)
    ledger.snapshots_for(sequence, start, end - start)
    ledger.commit(sequence, end)
