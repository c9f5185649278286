"""Report the core's counters to vLLM: increments, gauges, observations of histograms.

vLLM labels each metric with its engine. What never changes while an engine runs goes into the
labels of `vllm:kv_offload_config_info`. vLLM 0.33 reads names in one process and values in another;
the first four metrics are those of its own host tier and mean the same.
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

from kvstore._version import __version__
from kvstore.config import DiskConfig
from kvstore.core import CoreStats, Durations
from kvstore.observe.metrics.series import Series
from kvstore.observe.metrics.table import METRICS, Metric
from kvstore.vllm.layout import EngineShape

__all__ = [
    "LABELS",
    "PREFIX",
    "TIERS_ALONE",
    "Reporter",
    "definitions",
    "facts_of",
    "full_name",
    "observations",
]

PREFIX = "vllm:kvstore_"


def full_name(metric: Metric) -> str:
    """As vLLM names it."""
    return PREFIX + metric.name


Sample = tuple[Metric, tuple[str, ...], Any]
"""A metric, the values of its labels, and its value."""


OF_LOADS = ("loaded_tier_chunks", "saved_tier_seconds")

TIERS_ALONE = [metric for metric in METRICS if metric.of != "core" and metric.name not in OF_LOADS]
"""Metrics of tiers for a server that has its own host memory and loads from it."""


def definitions(metrics: Iterable[Metric]) -> dict[str, OffloadingMetricMetadata]:
    """Return the metadata that vLLM needs before the first report, by full name."""
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
        """Return what was counted since the last call.

        The first call reports every counter, so that Prometheus sees it at 0 before it counts.
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


LABELS = (
    "cpu_num_chunks",
    "cpu_blocks_per_chunk",
    "cpu_kv_cache_size_bytes",
    "cpu_kv_cache_size_tokens",
    "kvstore_version",
    "kvstore_eviction_policy",
    "kvstore_tiers",
    "kvstore_disk_bytes",
)


def facts_of(spec: EngineShape) -> dict[str, str | int]:
    """The value of each label; `kvstore_tiers` is how many there are."""
    config = spec.store_config
    tokens = _tokens(spec)
    policy = config.host_policy
    disks = [tier for tier in config.tiers if isinstance(tier, DiskConfig)]
    values: Sequence[str | int] = (
        spec.region_shape.rows,
        spec.config.cache.blocks_per_chunk,
        spec.region_shape.size,
        "None" if tokens is None else tokens,
        __version__,
        policy if isinstance(policy, str) else policy.name,
        len(config.tiers),
        sum(tier.capacity_bytes for tier in disks),
    )
    return dict(zip(LABELS, values, strict=True))


def _tokens(spec: EngineShape) -> int | None:
    """Return how many tokens of the longest requests host memory holds; None if not known."""
    longest = int(spec.config.model.max_model_len)
    if longest <= 0:
        return None
    chunks = 0
    for group in spec.config.groups:
        its = -(-longest // (int(group.tokens_per_block) * spec.config.cache.blocks_per_chunk))
        window = group.sliding_window_size_in_chunks
        chunks += its if window is None else min(its, int(window))
    return spec.region_shape.rows * longest // chunks
