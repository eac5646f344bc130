"""Prometheus metrics of an engine, read from its status when scraped, so that the two can never disagree.

Names are those that vLLM has for the same, where it has them.
"""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jhybrid.histogram import Counted, family

COUNTERS = {
    "requests": ("requests_accepted", "Requests accepted"),
    "steps": ("steps", "Steps run on the device"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed"),
    "output_tokens": ("generation_tokens", "Tokens sampled"),
    "scheduled_tokens": ("scheduled_tokens", "Positions that steps were made for"),
    "padding_tokens": ("padding_tokens", "Positions that steps computed beside those, to fill their buckets"),
    "preemptions": ("num_preemptions", "Sequences preempted to make room"),
    "failed_steps": ("failed_steps", "Steps that failed"),
    "failed_sequences": ("failed_sequences", "Sequences that ended in an error"),
    "nan_events": ("nan_events", "Of these, sequences whose logits were NaN or infinite"),
}

PREFIX_COUNTERS = {
    "query_tokens": ("queries", "Prompt tokens that were looked up in the prefix cache"),
    "hit_tokens": ("hits", "Of these, tokens taken from it"),
    "queries": ("lookups", "Admissions that looked for a cached prefix"),
    "hits": ("lookup_hits", "Admissions that found one"),
    "snapshots_taken": ("snapshots_taken", "Snapshots of recurrent state taken"),
    "snapshots_skipped": ("snapshots_skipped", "Snapshots not taken because none could be evicted"),
    "evicted_pages": ("evicted_pages", "Cached pages given up for others"),
    "evicted_snapshots": ("evicted_snapshots", "Snapshots given up for others"),
    "verified": ("verified", "Hits computed again, cold, to check them"),
    "quarantined": ("quarantined", "Cached prefixes forgotten because a check found them wrong"),
}


TIER_GAUGES = {
    "entries": "Entries of cached prefixes in a tier",
    "bytes": "Bytes of them",
    "capacity": "Bytes that a tier may have",
    "queued": "Prefixes that wait to be written to a tier",
}
TIER_COUNTERS = {
    "hits": "Admissions that started from a tier",
    "hit_tokens": "Prompt tokens that it provided for",
    "deferrals": "Admissions put off to wait for a tier",
    "writes": "Entries written",
    "written_bytes": "Bytes written",
    "write_seconds": "Time spent writing",
    "read_bytes": "Bytes read",
    "read_seconds": "Time spent reading",
    "evicted": "Entries given up for others",
    "dropped": "Prefixes that were to be written and were not",
    "failures": "Operations that failed",
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
            yield GaugeMetricFamily(f"jhybrid_num_requests_{name}", f"Sequences {name}", value=status[name])
        pages = status["pages"]
        share = pages["used"] / pages["total"] if pages["total"] else 0.0
        yield GaugeMetricFamily("jhybrid_kv_cache_usage_perc", "Share of pages in use, 1 is all", value=share)
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
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"jhybrid_{name}", text, value=status[field])
        if status["step_seconds"]:
            series = (({"bucket": bucket}, Counted(**seen)) for bucket, seen in status["step_seconds"].items())
            yield family("jhybrid_step_seconds", "Time of a step on the device and of waiting for it", series)
        if "prefix_cache" in status:
            yield from _prefix_cache(status["prefix_cache"])
        if "tiers" in status:
            yield from _tiers(status["tiers"])


def _tiers(tiers: dict[str, dict]) -> Iterable[Metric]:
    for kind, table in ((GaugeMetricFamily, TIER_GAUGES), (CounterMetricFamily, TIER_COUNTERS)):
        for name, text in table.items():
            metric = kind(f"jhybrid_tier_{name}", text, labels=["tier"])
            for tier, counts in tiers.items():
                metric.add_metric([tier], counts[name])
            yield metric
    out = GaugeMetricFamily("jhybrid_tier_out", "1 if a tier is out of use after failures", labels=["tier"])
    text = "Prefixes that a tier did not serve, by cause"
    misses = CounterMetricFamily("jhybrid_tier_misses", text, labels=["tier", "cause"])
    for tier, counts in tiers.items():
        out.add_metric([tier], counts["out"] is not None)
        for cause, count in counts["misses"].items():
            misses.add_metric([tier, cause], count)
    yield out
    yield misses


def _prefix_cache(counts: dict) -> Iterable[Metric]:
    for field, (name, text) in PREFIX_COUNTERS.items():
        yield CounterMetricFamily(f"jhybrid_prefix_cache_{name}", text, value=counts[field])
    for name, text in (
        ("misses", "Admissions whose cached state reached less deep than their keys and values, by cause"),
        ("missed_tokens", "Tokens computed again for want of a state, by cause"),
    ):
        metric = CounterMetricFamily(f"jhybrid_prefix_cache_{name}", text, labels=["cause"])
        for cause, count in counts[name].items():
            metric.add_metric([cause], count)
        yield metric
