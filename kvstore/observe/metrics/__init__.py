"""Metrics of a store, and their collector for Prometheus."""

from kvstore.observe.metrics.collector import Collector
from kvstore.observe.metrics.table import METRICS, TIER_LABEL, Metric

__all__ = ["METRICS", "TIER_LABEL", "Collector", "Metric"]
