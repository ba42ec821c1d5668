"""Serves Prometheus metrics over HTTP: latest values of gauges, sums of counts.

| thread | does | shares |
|---|---|---|
| the exporter's | `add` replaces values | one dict of numbers, under a lock |
| prometheus_client's HTTP server | `collect` at each scrape | the same |
"""

import re
import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_rl.observe.exporters.follow import Row, numbers
from megatron_rl.observe.metrics_table import find
from megatron_rl.protocol.closing import Closing

PREFIX = "megatron_rl_"
LAST_ROW = f"{PREFIX}last_row_time_seconds"
SETTING = f"{PREFIX}setting"
_LABELS = ("source", "label", "what")


def family_name(name: str) -> str:
    """Prometheus' name of a metric, without `*` and the `_total` of counters."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", name.replace("*", "")).strip("_")


class Values(Collector):
    """The values of a scrape."""

    def __init__(self, settings: dict[str, float]) -> None:
        """settings: configuration values for alerts, by key."""
        self._settings = settings
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, str, str], float]] = {}
        self._documents: dict[str, tuple[str, bool]] = {}
        self._last: dict[str, float] = {}

    def add(self, rows: list[Row]) -> None:
        """Take in rows: add counts, replace gauges."""
        with self._lock:
            for row in rows:
                self._last[row["source"]] = row["time"]
                for name, value in numbers(row).items():
                    self._add(name, value, row["source"], row.get("label", ""))

    def _add(self, name: str, value: float, source: str, label: str) -> None:
        found = find(name)
        known, what = found if found is not None else (None, "")
        family = family_name(known.name if known else name)
        is_count = known is not None and known.kind == "count"
        self._documents[family] = (known.meaning if known else name, is_count)
        samples = self._values.setdefault(family, {})
        key = (source, label, what)
        samples[key] = samples.get(key, 0.0) + value if is_count else value

    def collect(self) -> Iterator[Metric]:
        """The families, for prometheus_client."""
        with self._lock:
            values = {family: dict(samples) for family, samples in self._values.items()}
            last = dict(self._last)
        for family, samples in values.items():
            meaning, is_count = self._documents[family]
            kind = CounterMetricFamily if is_count else GaugeMetricFamily
            metric = kind(family, meaning, labels=_LABELS)
            for key, value in samples.items():
                metric.add_metric(key, value)
            yield metric
        times = GaugeMetricFamily(LAST_ROW, "when a role wrote its last row", labels=["source"])
        for source, time_s in last.items():
            times.add_metric([source], time_s)
        yield times
        settings = GaugeMetricFamily(SETTING, "a value of the configuration", labels=["key"])
        for name, setting in self._settings.items():
            settings.add_metric([name], setting)
        yield settings


class PrometheusServer(Closing):
    """Serves /metrics until it is closed."""

    def __init__(self, host: str, port: int, settings: dict[str, float]) -> None:
        """port: 0 for any. Raises OSError if it cannot listen."""
        self._values = Values(settings)
        self.registry = CollectorRegistry()
        self.registry.register(self._values)
        self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        self.port: int = self._server.server_port

    def add(self, rows: list[Row]) -> None:
        """Take in rows."""
        self._values.add(rows)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
