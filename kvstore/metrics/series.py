"""The series of a store: each metric with every set of labels that it has there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvstore.core import CoreStats, TierStats
from kvstore.core.stats import tier_names
from kvstore.metrics.table import Metric

__all__ = ["Series"]


class Series:
    """The metrics of one kind, each with every set of labels that it has.

    The tiers of a core are the same from its first statistics to its last.
    """

    def __init__(self, kind: str, metrics: Iterable[Metric]) -> None:
        self._metrics = [metric for metric in metrics if metric.kind == kind]
        self._known: list[tuple[Metric, tuple[str, ...]]] = []
        self._takes: list[tuple[Callable[[Any], Any], int]] = []

    def __iter__(self) -> Iterator[tuple[Metric, tuple[str, ...]]]:
        return iter(self._known)

    def values(self, stats: CoreStats) -> list[Any]:
        """Of each series the value now."""
        if not self._known:
            self._find(stats.tiers)
        sources = [*stats.tiers, stats]
        return [take(sources[place]) for take, place in self._takes]

    def _find(self, tiers: Sequence[TierStats]) -> None:
        names = tier_names(tiers)
        for metric in self._metrics:
            if metric.of == "core":
                self._known.append((metric, ()))
                self._takes.append((metric.take, -1))
                continue
            for place, tier in enumerate(tiers):
                if metric.of in _kinds(tier):
                    self._known.append((metric, (names[place],)))
                    self._takes.append((metric.take, place))


def _kinds(tier: TierStats) -> set[str]:
    """What metrics are of that this tier has."""
    kinds = {"tier"}
    if tier.owned:
        kinds |= {"target", "owned tier"}
    if tier.store:
        kinds |= {"target", "store"}
    return kinds
