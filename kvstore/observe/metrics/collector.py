"""Collector for `prometheus_client`: the metrics of a store, for any server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from kvstore._version import __version__
from kvstore.concurrency import running_loop
from kvstore.core import CoreStats
from kvstore.errors import KVStoreError
from kvstore.observe.metrics.series import Series
from kvstore.observe.metrics.table import METRICS, Metric
from kvstore.types import about

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["PREFIX", "Collector"]

logger = logging.getLogger("kvstore")

PREFIX = "kvstore_"

SECONDS = 5.0
"""How long a scrape waits for the event loop of an asyncio store."""


class _Counted(Protocol):
    def stats(self) -> CoreStats: ...


class Collector:
    """Reports the statistics of a store to Prometheus, at each scrape.

        prometheus_client.REGISTRY.register(Collector(store))

    Scrapes may come from any thread. The loop of an asyncio store reads the statistics; that of a
    manager is the one on which its collector is created, if any. If the loop is closed, or does
    not answer within 5 s, the metrics are left out of the scrape, and the first time a warning is
    logged.

    Args:
        store: a `Store`, a `SyncStore`, or a manager of a connector.
        prefix: prefix of all metric names. Stores that share a registry need different ones.

    Raises:
        ImportError: without the package `prometheus_client`.
    """

    def __init__(self, store: _Counted, *, prefix: str = PREFIX) -> None:
        try:
            from prometheus_client import metrics_core
        except ImportError as error:
            raise ImportError(
                "kvstore.observe.metrics needs prometheus_client: "
                "pip install 'kvstore-offload[metrics]'"
            ) from error
        self._families = metrics_core
        self._store = store
        self._prefix = prefix
        self._failing = False
        self._series = {kind: Series(kind, METRICS) for kind in ("counter", "gauge", "histogram")}
        self._loop: asyncio.AbstractEventLoop | None = getattr(store, "loop", running_loop())

    def describe(self) -> Iterator[Family]:
        """Yield the metrics without values, so that registering does not query the store."""
        yield self._info()
        for metric in METRICS:
            yield self._family(metric)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics with their current values."""
        try:
            stats = self._stats()
        except (KVStoreError, RuntimeError, TimeoutError, CancelledError) as error:
            if not self._failing:
                logger.warning(
                    "metrics are not available: %s",
                    str(error) or type(error).__name__,
                    extra=about("metrics.failed", error=error),
                )
            self._failing = True
            return
        self._failing = False
        families: dict[str, Any] = {metric.name: self._family(metric) for metric in METRICS}
        for series in self._series.values():
            values = series.values(stats)
            for (metric, labels), value in zip(series, values, strict=True):
                family = families[metric.name]
                if metric.kind == "histogram":
                    # The cumulative count up to each bound.
                    bounds = [*map(str, value.bounds), "+Inf"]
                    buckets = list(zip(bounds, accumulate(value.buckets), strict=True))
                    family.add_metric(labels, buckets, value.seconds)
                else:
                    family.add_metric(labels, value)
        yield self._info()
        yield from families.values()

    def _info(self) -> Family:
        """What never changes while the store is open, as `kvstore_info`."""
        # A path may have what is no text, and then there would be no metrics at all.
        description = str(getattr(self._store, "description", ""))
        told = {
            "version": __version__,
            "chunk_bytes": str(getattr(self._store, "chunk_bytes", "")),
            "description": description.encode(errors="backslashreplace").decode(),
        }
        family: Family = self._families.InfoMetricFamily(
            self._prefix.rstrip("_"),
            "The version of kvstore, the bytes of a chunk, and what host memory and tiers are.",
            value=told,
        )
        return family

    def _family(self, metric: Metric) -> Family:
        kinds = {
            "counter": self._families.CounterMetricFamily,
            "gauge": self._families.GaugeMetricFamily,
            "histogram": self._families.HistogramMetricFamily,
        }
        family: Family = kinds[metric.kind](
            self._prefix + metric.name, metric.text, labels=metric.labels
        )
        return family

    def _stats(self) -> CoreStats:
        loop = self._loop
        if loop is None or running_loop() is loop:
            return self._store.stats()
        asked = self._asked()
        try:
            answer = asyncio.run_coroutine_threadsafe(asked, loop)
        except RuntimeError:
            asked.close()
            raise
        try:
            return answer.result(SECONDS)
        finally:
            answer.cancel()

    async def _asked(self) -> CoreStats:
        return self._store.stats()
