"""The statistics of server and store as Prometheus reads them."""

from __future__ import annotations

import itertools
from dataclasses import fields

import kvstore
from examples.http_server.generation import Counts

__all__ = ["page"]

NOW = {"running", "saving"}
"""What of the server's own counts may become less."""


def page(counts: Counts, store: kvstore.Store | None) -> str:
    """Everything that server and store count, by the names they give it."""
    page = _Page()
    page.add_all("http_server", counts)
    if store is not None:
        stats = store.stats()
        page.add_all("kvstore", stats)
        for medium, chunks in stats.loaded_from.items():
            page.add("kvstore_loaded_from", chunks, f'medium="{medium}"')
        for tier in stats.tiers:
            page.add_all("kvstore_tier", tier, f'tier="{tier.name}",medium="{tier.medium}"')
    return page.text()


class _Page:
    """Samples by metric: Prometheus wants those of one metric side by side."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[str]] = {}

    def add_all(self, prefix: str, stats: object, labels: str = "") -> None:
        """Every number of a dataclass, and how long things took."""
        for field in fields(stats):  # type: ignore[arg-type]
            value = getattr(stats, field.name)
            name = f"{prefix}_{field.name}"
            if isinstance(value, int):
                self.add(name, value, labels, now=field.name in NOW or "now" in field.metadata)
            elif isinstance(value, kvstore.Durations):
                self.add_durations(f"{name}_seconds", value, labels)

    def add(self, name: str, value: int, labels: str, *, now: bool = False) -> None:
        if not now:
            name += "_total"
        self._add(name, "gauge" if now else "counter", [_sample(name, labels, int(value))])

    def add_durations(self, name: str, durations: kvstore.Durations, labels: str) -> None:
        bounds = [*(f"{bound:g}" for bound in durations.bounds), "+Inf"]
        counts = itertools.accumulate(durations.buckets)
        samples = [
            _sample(f"{name}_bucket", ",".join(filter(None, [labels, f'le="{bound}"'])), count)
            for bound, count in zip(bounds, counts, strict=True)
        ]
        samples.append(_sample(f"{name}_sum", labels, durations.seconds))
        samples.append(_sample(f"{name}_count", labels, durations.count))
        self._add(name, "histogram", samples)

    def _add(self, name: str, kind: str, samples: list[str]) -> None:
        self._metrics.setdefault(name, [f"# TYPE {name} {kind}"]).extend(samples)

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)


def _sample(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
