"""Serves Prometheus metrics over HTTP: latest values of gauges, sums of counts.

The exporter's thread sets values; prometheus_client serves them from another thread.
"""

import re

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    start_http_server,
)

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


class PrometheusServer(Closing):
    """Serves /metrics until it is closed."""

    def __init__(self, host: str, port: int, settings: dict[str, float]) -> None:
        """Start the server. Raises OSError if it cannot listen.

        port: 0 for any. settings: configuration values for alerts, by key.
        """
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter | Gauge] = {}
        self._last = Gauge(
            LAST_ROW, "when a role wrote its last row", ["source"], registry=self._registry
        )
        setting = Gauge(SETTING, "a value of the configuration", ["key"], registry=self._registry)
        for key, value in settings.items():
            setting.labels(key).set(value)
        self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        self.port: int = self._server.server_port

    def add(self, rows: list[Row]) -> None:
        """Take in rows: add counts, replace gauges."""
        for row in rows:
            self._last.labels(row["source"]).set(row["time"])
            for name, value in numbers(row).items():
                family, what = self._family(name)
                sample = family.labels(row["source"], row.get("label", ""), what)
                if isinstance(sample, Counter):
                    sample.inc(value)
                else:
                    sample.set(value)

    def _family(self, name: str) -> tuple[Counter | Gauge, str]:
        """The counter or gauge of a metric, and its label `what`."""
        entry, what = find(name) or (None, "")
        key = family_name(entry.name if entry else name)
        if key not in self._families:
            kind = Counter if entry is not None and entry.kind == "count" else Gauge
            meaning = entry.meaning if entry else name
            self._families[key] = kind(key, meaning, _LABELS, registry=self._registry)
        return self._families[key], what

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
