"""The prefix tree's books by themselves: what is shared with whom, what is evicted first, what the reasons are."""

import pytest

from jhybrid.cache.eviction import Cost, Policy
from jhybrid.cache.ledger import Hit, Ledger
from jhybrid.cache.replay import Visit, replay, sequence_of
from jhybrid.cache.tuning import ALPHAS, MEMORY, Tuner

PAGE = 4


def books(
    pages: int = 100, snapshots: int = 20, alpha: float = 0.0, slots: int = 8, page_bytes: int = 1, **options
) -> Ledger:
    cost = Cost(flops_per_token=1.0, flops_per_position=0.0, page_size=PAGE, page_bytes=page_bytes, slot_bytes=slots)
    return Ledger(
        page_size=PAGE,
        num_pages=pages,
        num_slots=slots,
        num_rows=8,
        num_snapshots=snapshots,
        policy=Policy(cost, alpha=alpha, span=snapshots or pages),
        **options,
    )


def visit(prompt: list[int], answer: int = 1, salt: str | None = None) -> Visit:
    return Visit(salt, prompt, [99] * answer)


def match_of(ledger: Ledger, prompt: list[int]) -> Hit:
    return ledger.match(sequence_of(visit(prompt, 0)))


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_salts_share_nothing():
    ledger = books()
    for salt in (None, "a", "b"):
        assert replay(ledger, visit(tokens(20), salt=salt)) == 0
        assert replay(ledger, visit(tokens(20), salt=salt)) == 16
    assert ledger.pages.used == 3 * 5


def test_a_model_without_pages_keeps_no_more_nodes_than_its_snapshots_need():
    ledger = books(pages=0, snapshots=3, page_bytes=0)
    for i in range(200):
        replay(ledger, visit(tokens(40, start=1000 * i), 9))
    assert ledger.tree is not None
    assert ledger.tree.num_nodes <= 3 * 12
    assert ledger.snapshots.used <= 3
    assert replay(ledger, visit(tokens(40, start=199_000))) == 36


def test_lru_gives_up_the_oldest_and_flop_aware_the_cheapest():
    long, short = tokens(201), tokens(13, start=5000)
    for alpha, kept, lost in ((0.0, short, long), (4.0, long, short)):
        ledger = books(snapshots=2, alpha=alpha)
        replay(ledger, visit(long, 0))
        replay(ledger, visit(short, 0))
        replay(ledger, visit(tokens(13, start=9000), 0))  # needs one of the two snapshots
        assert match_of(ledger, kept).source is not None, alpha
        assert match_of(ledger, lost).source is None, alpha
        assert match_of(ledger, lost).cause == "evicted"


def test_pages_are_evicted_from_the_leaves_up():
    ledger = books(pages=12)
    replay(ledger, visit(tokens(40), 0))
    replay(ledger, visit(tokens(20, start=500), 0))
    assert match_of(ledger, tokens(40)).kv_tokens == 28  # its last three pages went, the first seven stay
    assert match_of(ledger, tokens(20, start=500)).kv_tokens == 16


def test_reasons():
    ledger = books()
    replay(ledger, visit(tokens(40), 0))
    assert match_of(ledger, tokens(40)).cause is None
    assert match_of(ledger, [*tokens(22), 7, 7, 7, 7]).cause == "no_branch"
    replay(ledger, visit(tokens(41, start=500), 8))
    assert match_of(ledger, tokens(40, start=500)).cause == "unaligned"
    assert ledger.tree is not None
    while ledger.tree.evict_snapshot():
        pass
    assert match_of(ledger, tokens(40)).cause == "evicted"


def test_what_is_left_after_a_quarantine_can_be_evicted():
    ledger = books(pages=12)
    replay(ledger, visit(tokens(41), 0))
    node = match_of(ledger, [*tokens(40), 1]).path[-1]
    ledger.quarantine(node)
    assert ledger.pages.used == 9
    assert replay(ledger, visit(tokens(48, start=500), 0)) == 0
    assert ledger.pages.used == 12
    without_pages = books(pages=0, page_bytes=0)
    replay(without_pages, visit(tokens(41), 0))
    assert without_pages.tree is not None
    without_pages.quarantine(match_of(without_pages, [*tokens(40), 1]).path[-1])
    assert without_pages.tree.num_nodes == without_pages.snapshots.used == 0


@pytest.mark.parametrize(("pages", "snapshots"), [(0, 3), (30, 1000)])
def test_what_is_forgotten_leaves_nothing_behind(pages: int, snapshots: int):
    ledger = books(pages=pages, snapshots=snapshots, page_bytes=min(pages, 1))
    for i in range(500):
        replay(ledger, visit(tokens(40, start=1000 * i), 9))
    assert ledger.tree is not None
    for heap in (ledger.tree._leaves, ledger.tree._states):
        assert len(heap._heap) < 300


@pytest.mark.parametrize("options", [{"snapshots": 3}, {"max_per_step": 3}])
def test_when_snapshots_are_short_the_deepest_are_taken(options: dict):
    ledger = books(**options, snapshot_interval=PAGE)
    replay(ledger, visit(tokens(41), 0))
    assert replay(ledger, visit(tokens(41), 0)) == 40
    assert ledger.counts.snapshots_skipped > 0


def test_another_alpha_counts_for_what_is_there_already():
    ledger = books(snapshots=4, alpha=4.0)
    replay(ledger, visit(tokens(201), 0))
    assert ledger.tree is not None
    ledger.tree.policy.set_alpha(0.0)
    for i in range(11):
        replay(ledger, visit(tokens(9, start=1000 * i), 0))
    assert match_of(ledger, tokens(201)).source is None


def test_nobody_waits_for_what_is_no_longer_part_of_the_tree():
    ledger = books()
    first = sequence_of(visit(tokens(40), 0))
    assert ledger.reserve(first, 40, ledger.match(first))
    first.dispatched = 8
    ledger.snapshots_for(first, 0, 8)
    ledger.commit(first, 4)
    second = sequence_of(visit(tokens(40), 0))
    assert ledger.match(second).waits
    ledger.flush()
    assert not ledger.match(second).waits
    assert not ledger.match(sequence_of(visit(tokens(40), 0))).waits
    ledger.release(first)
    assert ledger.pages.used == ledger.snapshots.used == 0


def test_a_flushed_prefix_is_gone():
    ledger = books()
    replay(ledger, visit(tokens(40)))
    ledger.flush()
    assert (ledger.pages.used, ledger.snapshots.used) == (0, 0)
    assert replay(ledger, visit(tokens(40))) == 0


@pytest.mark.parametrize("wanted", ["recency", "cost"])
def test_the_tuner_finds_the_better_alpha(wanted: str):
    """Long prompts that come back seldom among short ones of which each comes back at once, or never again."""
    ledger = books(pages=400, snapshots=4, alpha=1.0)
    assert ledger.tree is not None
    tuner = Tuner(ledger.tree.policy, lambda alpha: books(pages=400, snapshots=4, alpha=alpha))
    for i in range(MEMORY):
        if wanted == "cost":
            prompt = tokens(200) if i % 8 == 0 else tokens(8, start=1000 * i)
        else:
            prompt = tokens(400 if i % 2 else 200, start=1000 * (i // 4 if i % 2 else i))
        tuner.saw(None, prompt, len(prompt))
    turns = 0
    while tuner.turn(has_evicted=True):
        turns += 1
    assert turns == len(ALPHAS) * MEMORY + 1
    assert tuner.tunings == 1
    saved = {a: sum(replay(fresh, v) for v in tuner._visits) for a in ALPHAS for fresh in [books(400, 4, a)]}
    assert saved[tuner.policy.alpha] == max(saved.values())
    if wanted == "cost":
        assert tuner.policy.alpha > 0
        assert saved[0.0] == 0
