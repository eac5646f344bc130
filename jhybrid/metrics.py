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
                gauge.add_metric(["free"], status[pool]["free"])
                gauge.add_metric(["used"], status[pool]["used"])
                yield gauge
        yield GaugeMetricFamily(
            "jhybrid_compilations_after_ready",
            "Executables compiled since ready; anything but 0 is a fault",
            value=status["compilations_after_ready"],
        )
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jhybrid_{name}", text, value=status[name])
