"""Watching a store: what is counted, and how Prometheus hears of it."""

from kvstore.metrics.collector import Collector
from kvstore.metrics.table import METRICS, TIER_LABEL, Metric

__all__ = ["METRICS", "TIER_LABEL", "Collector", "Metric"]
