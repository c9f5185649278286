"""Metrics: what the server and its store count, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

import kvstore
from examples.http_server.generation import Counts
from kvstore.observe.metrics import Collector

__all__ = ["page"]

GAUGES = ("running", "saving")
"""What of the server's own counts may become less."""


class _ServerCollector:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for field in fields(self._counts):
            name, value = f"http_server_{field.name}", getattr(self._counts, field.name)
            family = GaugeMetricFamily if field.name in GAUGES else CounterMetricFamily
            yield family(name, f"{field.name} of the server", value=value)


def page(counts: Counts, store: kvstore.Store | None) -> bytes:
    """All metrics of server and store. Called on the store's loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServerCollector(counts))
    if store is not None:
        registry.register(Collector(store))
    return generate_latest(registry)
