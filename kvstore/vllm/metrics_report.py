"""Turns what the core has counted since its start into what vLLM is to be told in each step.

vLLM takes increments of counters, values of gauges, and every single observation of a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvstore.core import CoreStats, Durations
from kvstore.observe.metrics.series import Series
from kvstore.observe.metrics.table import METRICS, Metric
from kvstore.vllm.metrics import full_name

__all__ = ["TIERS_ALONE", "Reporter", "definitions", "observations"]

Sample = tuple[Metric, tuple[str, ...], Any]
"""A metric, the values of its labels, and its value."""


TIERS_ALONE = [
    metric for metric in METRICS if metric.of != "core" and metric.name != "loaded_disk_chunks"
]
"""What tiers have to tell where host memory, and who loads from it, are somebody else's."""


def definitions(metrics: Iterable[Metric]) -> dict[str, OffloadingMetricMetadata]:
    """What vLLM has to know of them before the first is reported, by full name."""
    return {full_name(metric): _definition(metric) for metric in metrics}


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind == "counter":
        return OffloadingCounterMetadata(metric.text, metric.labels)
    if metric.kind == "gauge":
        return OffloadingGaugeMetadata(metric.text, metric.labels)
    return OffloadingHistogramMetadata(metric.text, metric.labels, metric.bounds)


class Reporter:
    """Knows what was reported last."""

    def __init__(self, metrics: Sequence[Metric] = METRICS) -> None:
        self._counters = Series("counter", metrics)
        self._gauges = Series("gauge", metrics)
        self._histograms = Series("histogram", metrics)
        self._counted: list[int | None] = []
        self._observed: list[Durations | None] = []

    def report(self, stats: CoreStats) -> OffloadingConnectorStats:
        """All that is to be told since the last call, as vLLM takes it."""
        report = OffloadingConnectorStats()
        for metric, labels, more in self.increments(stats):
            report.increase_counter(full_name(metric), more, labels)
        for metric, labels, value in self.gauges(stats):
            report.set_gauge(full_name(metric), value, labels)
        for metric, labels, times in self.observed(stats):
            for seconds in times:
                report.observe_histogram(full_name(metric), seconds, labels)
        return report

    def increments(self, stats: CoreStats) -> list[Sample]:
        """What was counted since the last call.

        The first time every counter is told, so that Prometheus has seen it at 0 before it counts.
        """
        totals = self._counters.values(stats)
        before, self._counted = self._counted or [None] * len(totals), totals
        return [
            (*series, now - (then or 0))
            for series, now, then in zip(self._counters, totals, before, strict=True)
            if now != then
        ]

    def gauges(self, stats: CoreStats) -> list[Sample]:
        """The state now."""
        values = self._gauges.values(stats)
        return [(*series, now) for series, now in zip(self._gauges, values, strict=True)]

    def observed(self, stats: CoreStats) -> list[Sample]:
        """For each histogram what was observed since the last call, where anything was."""
        totals = self._histograms.values(stats)
        before, self._observed = self._observed or [None] * len(totals), totals
        return [
            (*series, observations(then or Durations(bounds=now.bounds), now))
            for series, now, then in zip(self._histograms, totals, before, strict=True)
            if (any(now.buckets) if then is None else now.buckets != then.buckets)
        ]


def observations(before: Durations, after: Durations) -> list[float]:
    """Times that turn the one into the other: in the same buckets, and with the same sum.

    One that came alone is told as it was. Of several it is known in which buckets they are and
    how long all together: within their buckets they are spread so that the sum is right.
    """
    edges = [0.0, *after.bounds, math.inf]
    lows: list[float] = []
    highs: list[float] = []
    for place, (new, old) in enumerate(zip(after.buckets, before.buckets, strict=True)):
        lows += [edges[place]] * (new - old)
        highs += [edges[place + 1]] * (new - old)
    above = max(after.seconds - before.seconds - sum(lows), 0.0)
    # One of the last bucket may be as long as the sum allows.
    widths = [min(high - low, above) for low, high in zip(lows, highs, strict=True)]
    share = above / (sum(widths) or 1.0)
    return [
        # A bound belongs to the bucket below it.
        min(max(low + share * width, math.nextafter(low, math.inf)), high)
        for low, width, high in zip(lows, widths, highs, strict=True)
    ]
