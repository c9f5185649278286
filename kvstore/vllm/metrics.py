"""Names of kvstore's metrics in vLLM, which labels each with the engine, too."""

from __future__ import annotations

from kvstore.observe.metrics.table import Metric

__all__ = ["PREFIX", "full_name"]

PREFIX = "vllm:kvstore_"


def full_name(metric: Metric) -> str:
    """As vLLM names it."""
    return PREFIX + metric.name
