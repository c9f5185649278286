"""Draws the panels of a dashboard from what Prometheus answers to their queries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.dashboard.prometheus import Prometheus
from benchmarks.dashboard.queries import filled, legend

__all__ = ["draw"]

COLUMN, LINE = 0.85, 0.36
"""Inches of a cell of Grafana's grid, which is 24 wide."""

POINTS = 150


def draw(
    dashboard: dict[str, Any], prometheus: Prometheus, start: float, end: float, path: Path
) -> None:
    """Draw every panel over this time (seconds since the epoch) into a PNG."""
    mpl.rcParams.update({"font.size": 8, "axes.titlesize": 9, "legend.fontsize": 7})
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"])
    figure = Figure(figsize=(24 * COLUMN, height * LINE + 0.6), dpi=75)
    top = 0.6 / figure.get_figheight()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        above = 1 - top - grid["y"] / height * (1 - top)
        tall = grid["h"] / height * (1 - top)
        if panel["type"] == "row":
            figure.text(0.01, above - tall * 0.6, panel["title"], fontsize=12, weight="bold")
            continue
        axes = figure.add_axes(
            (
                (grid["x"] + 0.9) / 24,
                above - tall * 0.86,
                (grid["w"] - 1.2) / 24,
                tall * 0.68,
            )
        )
        _panel(axes, panel, prometheus, start, end)
    figure.text(0.01, 1 - top * 0.55, dashboard["title"], fontsize=15, weight="bold")
    figure.savefig(path, metadata={"Software": None})


def _panel(
    axes: Axes, panel: dict[str, Any], prometheus: Prometheus, start: float, end: float
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    times: list[float] = []
    lines: list[tuple[str, list[float]]] = []
    step = (end - start) / POINTS
    times = [index * step / 60 for index in range(POINTS + 1)]
    for target in panel["targets"]:
        for series in prometheus.range(filled(target["expr"]), start, end, step):
            values = [math.nan] * len(times)
            for moment, value in series["values"]:
                values[round((float(moment) - start) / step)] = float(value)
            lines.append((legend(target["legendFormat"], series["metric"]), values))
    if "stacking" in defaults["custom"]:
        known = [[0.0 if math.isnan(value) else value for value in each] for _, each in lines]
        axes.stackplot(times, *known, labels=[name for name, _ in lines], alpha=0.6)
    else:
        for name, values in lines:
            axes.plot(times, values, label=name, linewidth=1.2, clip_on=False)
    axes.set_title(panel["title"], loc="left")
    axes.set_xlim(0, times[-1])
    if "max" in defaults:
        axes.set_ylim(defaults["min"], defaults["max"] * 1.02)
    elif axes.get_ylim()[1] <= 0.06:
        # Where everything is 0 the axis shall not be of thousandths.
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0) if _all_zero(lines) else None)
    else:
        axes.set_ylim(bottom=0)
    unit = defaults["unit"]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _said(value, unit)))
    axes.grid(alpha=0.25)
    axes.set_xlabel("minutes", labelpad=1, fontsize=7)
    if lines:
        axes.legend(loc="best", framealpha=0.7, ncols=2 if len(lines) > 3 else 1)
    else:
        axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes, color="grey")


def _all_zero(lines: list[tuple[str, list[float]]]) -> bool:
    return all(value == 0 or math.isnan(value) for _, values in lines for value in values)


def _said(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    if unit == "s":
        return f"{value:g} s" if value >= 1 or value == 0 else f"{1000 * value:g} ms"
    if unit in ("Bps", "bytes"):
        tail = "/s" if unit == "Bps" else ""
        for factor, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value >= factor:
                return f"{value / factor:.3g} {name}{tail}"
        return f"{value:g} B{tail}"
    return f"{value:g}/s" if unit == "cps" else f"{value:g}"
