"""Price: a load that takes longer than computing is not made, on no other ground than what was measured."""

import pytest

from jhybrid.cache.tiers import price
from jhybrid.cache.tiers.price import STALE, Price, Rate

MB = 1 << 20


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(price, "time", clock)
    return clock


def measured(mb_per_second: float, tokens_per_second: float, timeout: float = 2.0) -> tuple[Price, Rate]:
    one, loads = Price(timeout), Rate(price.BYTES)
    loads.saw(mb_per_second * MB, 1.0)
    one.computed(int(tokens_per_second), 1.0)
    return one, loads


@pytest.mark.parametrize(
    ("size", "tokens", "is_worth_it"),
    [
        (11 * MB, 4000, True),  # 0.11 s to load, 8 s to compute
        (100 * MB, 4000, True),
        (100 * MB, 400, False),  # 1 s, and 0.8 s
        (100 * MB, 600, True),
        (300 * MB, 40000, False),  # more than a load may take
        (4 * MB, 1, True),  # a trifle
    ],
)
def test_a_load_must_take_less_than_computing_and_than_the_time_limit(size: int, tokens: int, is_worth_it: bool):
    one, loads = measured(100, 500)
    assert one.is_worth_it(loads, size, tokens) == is_worth_it


def test_what_is_not_known_is_tried():
    one, loads = measured(1, 500)
    assert Price(2.0).is_worth_it(Rate(price.BYTES), 1 << 40, 1)
    assert one.is_worth_it(Rate(price.BYTES), 1 << 40, 1)
    assert Price(2.0).is_worth_it(loads, MB, 1), "nothing has been computed"
    assert not Price(2.0).is_worth_it(loads, 3 * MB, 1), "it would be given up"


def test_a_tier_that_was_slow_is_tried_again_and_forgiven(clock: Clock):
    one, loads = measured(1, 500)
    assert not one.is_worth_it(loads, MB, 100)
    clock.now += STALE + 1
    assert one.is_worth_it(loads, MB, 100)
    loads.saw(MB, 0.001)
    assert one.is_worth_it(loads, MB, 100), "what was measured so long ago weighs nothing"
    assert loads.seconds_for(1000 * MB) == pytest.approx(1.0)


def test_a_rate_is_that_of_late():
    rate = Rate(1000)
    rate.saw(5000, 5.0)
    for _ in range(10):
        rate.saw(1000, 10.0)
    assert rate.seconds_for(1000) == pytest.approx(10.0, rel=0.01)
    rate.saw(10, 10.0)  # a little of it says little
    assert rate.seconds_for(1000) == pytest.approx(15.0, rel=0.1)
