"""Prometheus metrics of an engine, read from its status when scraped, so that the two can never disagree."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

COUNTERS = {
    "requests": "Requests accepted",
    "steps": "Steps run on the device",
    "prompt_tokens": "Prompt tokens computed",
    "output_tokens": "Tokens sampled",
    "preemptions": "Sequences preempted to make room",
    "failed_steps": "Steps that failed",
    "failed_sequences": "Sequences that ended in an error",
}

PREFIX_COUNTERS = {
    "queries": "Admissions that looked for a cached prefix",
    "hits": "Admissions that found one",
    "query_tokens": "Prompt tokens of those admissions",
    "hit_tokens": "Of these, tokens taken from the cache",
    "snapshots_taken": "Snapshots of recurrent state taken",
    "snapshots_skipped": "Snapshots not taken because none could be evicted",
    "evicted_pages": "Cached pages given up for others",
    "evicted_snapshots": "Snapshots given up for others",
    "verified": "Hits computed again, cold, to check them",
    "quarantined": "Cached prefixes forgotten because a check found them wrong",
}


class EngineCollector(Collector):
    """Turns a status dictionary into metrics. `status` is called at each scrape."""

    def __init__(self, status: Callable[[], dict]):
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        memory = GaugeMetricFamily("jhybrid_memory_bytes", "Bytes held on the device, by kind", labels=["kind"])
        for kind, size in status["memory_bytes"].items():
            memory.add_metric([kind], size)
        yield memory
        for name in ("running", "waiting"):
            yield GaugeMetricFamily(f"jhybrid_sequences_{name}", f"Sequences {name}", value=status[name])
        for pool in ("pages", "slots", "snapshots"):
            if pool in status:
                gauge = GaugeMetricFamily(f"jhybrid_{pool}", f"{pool.capitalize()} by state", labels=["state"])
                for state in ("free", "used", "cached"):  # cached ones are free as well
                    gauge.add_metric([state], status[pool][state])
                yield gauge
        yield GaugeMetricFamily(
            "jhybrid_compilations_after_ready",
            "Executables compiled since ready; anything but 0 is a fault",
            value=status["compilations_after_ready"],
        )
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jhybrid_{name}", text, value=status[name])
        if "prefix_cache" in status:
            yield from _prefix_cache(status["prefix_cache"])


def _prefix_cache(counts: dict) -> Iterable[Metric]:
    for name, text in PREFIX_COUNTERS.items():
        yield CounterMetricFamily(f"jhybrid_prefix_cache_{name}", text, value=counts[name])
    for name, text in (
        ("misses", "Admissions whose cached state reached less deep than their keys and values, by cause"),
        ("missed_tokens", "Tokens computed again for want of a state, by cause"),
    ):
        metric = CounterMetricFamily(f"jhybrid_prefix_cache_{name}", text, labels=["cause"])
        for cause, count in counts[name].items():
            metric.add_metric([cause], count)
        yield metric
