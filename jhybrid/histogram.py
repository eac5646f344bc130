"""Histogram: counts by upper bound, cheap enough for every token; written by one thread."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import HistogramMetricFamily


class Counted(NamedTuple):
    """What a histogram has seen so far."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Values up to each bound and above the one before; one more at the end, for those above all."""
    sum: float


class Histogram:
    """Counts values. `bounds` ascend."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def counted(self) -> Counted:
        """A copy."""
        return Counted(self._bounds, tuple(self._counts), self._sum)


def family(name: str, text: str, series: Iterable[tuple[dict[str, str], Counted]]) -> HistogramMetricFamily:
    """Prometheus' form of histograms with the same names of labels."""
    series = list(series)
    labels = list(series[0][0]) if series else []
    metric = HistogramMetricFamily(name, text, labels=labels)
    for values, counted in series:
        buckets: Any = zip((*map(str, counted.bounds), "+Inf"), accumulate(counted.counts), strict=True)
        metric.add_metric(list(values.values()), list(buckets), counted.sum)
    return metric
