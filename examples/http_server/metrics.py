"""The statistics of server and store as Prometheus reads them."""

from __future__ import annotations

from dataclasses import fields

import kvstore
from examples.http_server.generation import Counts

__all__ = ["page"]

NOW = {
    "running",
    "saving",
    # Of the store and of its tiers; all their other numbers are totals.
    "rows",
    "free_rows",
    "busy_rows",
    "pinned_rows",
    "watched_rows",
    "pins",
    "pinned",
    "chunk_bytes",
    "chunks",
    "waiting",
    "free",
    "segments",
    "max_segments",
    "queued",
    "stalled",
    "congested",
    "slow",
}


def page(counts: Counts, store: kvstore.Store | None) -> str:
    """Everything that server and store count, by the names they give it."""
    page = _Page()
    page.add_all("http_server", counts, "")
    if store is not None:
        stats = store.stats()
        page.add_all("kvstore", stats, "")
        for medium, chunks in stats.loaded_from.items():
            page.add("kvstore_loaded_from", chunks, f'{{medium="{medium}"}}')
        for tier in stats.tiers:
            page.add_all("kvstore_tier", tier, f'{{tier="{tier.name}",medium="{tier.medium}"}}')
    return page.text()


class _Page:
    """Samples by metric: Prometheus wants those of one metric side by side."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[str]] = {}

    def add_all(self, prefix: str, stats: object, labels: str) -> None:
        """Every number of a dataclass."""
        for field in fields(stats):  # type: ignore[arg-type]
            value = getattr(stats, field.name)
            if isinstance(value, int):
                self.add(f"{prefix}_{field.name}", value, labels, now=field.name in NOW)

    def add(self, name: str, value: int, labels: str, *, now: bool = False) -> None:
        if not now:
            name += "_total"
        kind = f"# TYPE {name} {'gauge' if now else 'counter'}"
        self._metrics.setdefault(name, [kind]).append(f"{name}{labels} {int(value)}")

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)
