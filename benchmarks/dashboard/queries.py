"""The queries of a Grafana dashboard, as Prometheus takes them."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["filled", "legend", "metric_names", "panels"]

VARIABLES = {"$instance": ".*", "$__rate_interval": "30s", "${prefix}": "vllm:kvstore_"}
"""What Grafana puts in for its variables: every server; two seconds between scrapes; vLLM."""


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels but for the headings of rows, in reading order."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(expression: str) -> str:
    """The expression with values for Grafana's variables."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def legend(template: str, labels: dict[str, str]) -> str:
    """What Grafana writes beside a series."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), template)


def metric_names(expression: str) -> set[str]:
    """The names of vLLM's and kvstore's metrics in an expression."""
    return set(re.findall(r"\bvllm:\w+", filled(expression)))
