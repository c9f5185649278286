"""Time series: each metric with every set of labels that a store has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvstore.core import CoreStats, TierStats
from kvstore.core.statistics import tier_names
from kvstore.observe.metrics.table import Metric

__all__ = ["Series"]


_Known = tuple[Metric, tuple[str, ...], int | str]
"""A metric, its labels, and the index of its tier, -1 for the core, or the name of its tenant."""


class Series:
    """The metrics of one kind, each with every set of labels that it has.

    The tiers and tenants of a core are the same from its first statistics to its last.
    """

    def __init__(self, kind: str, metrics: Iterable[Metric]) -> None:
        self._metrics = [metric for metric in metrics if metric.kind == kind]
        # Set once it is complete: scrapes may come from several threads.
        self._known: list[_Known] = []

    def __iter__(self) -> Iterator[tuple[Metric, tuple[str, ...]]]:
        return ((metric, labels) for metric, labels, _ in self._known)

    def values(self, stats: CoreStats) -> list[Any]:
        """Return the current value of each series."""
        known = self._known
        if not known:
            known = self._known = list(self._found(stats))
        sources: dict[int | str, Any] = {-1: stats, **dict(enumerate(stats.tiers))}
        sources.update(stats.tenants)
        return [metric.take(sources[place]) for metric, _, place in known]

    def _found(self, stats: CoreStats) -> Iterator[_Known]:
        tiers = list(zip(tier_names(stats.tiers), map(_kinds, stats.tiers), strict=True))
        for metric in self._metrics:
            if metric.of == "core":
                yield metric, (), -1
            elif metric.of == "tenant":
                yield from ((metric, (name,), name) for name in stats.tenants)
            else:
                for place, (name, kinds) in enumerate(tiers):
                    if metric.of in kinds:
                        yield metric, (name,), place


def _kinds(tier: TierStats) -> set[str]:
    """Return which kinds of metrics, by `Metric.of`, this tier has."""
    more = ("target", "owned tier") if tier.owned else ("target", "store") if tier.store else ()
    return {"tier", *more}
