"""Reuse threshold: admit keys that were looked up before."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.table import OrderedTable

__all__ = ["REUSE_TABLE", "ReuseThreshold"]

REUSE_TABLE = 64_000
"""Keys that are remembered by default."""


class ReuseThreshold(AdmissionFilter):
    """Admits a chunk that was looked up at least `threshold` times.

    The request that stores a chunk counts as one of them. Counts are exact, and kept
    for the `table` keys that were looked up last. This is the idea of the
    reuse-frequency gate in vLLM's offloading manager; unlike there, every key of a
    request counts.

    Args:
        threshold: number of lookups, at least 1.
        table: number of keys that are remembered, at least 1.
    """

    name = "reuse"

    def __init__(
        self, capacity: int, chunk_bytes: int, *, threshold: int = 2, table: int = REUSE_TABLE
    ) -> None:
        super().__init__(capacity, chunk_bytes)
        if threshold < 1:
            raise ValueError(f"threshold must be at least 1, not {threshold}")
        if table < 1:
            raise ValueError(f"table must be at least 1 key, not {table}")
        self.threshold = threshold
        self.table = table
        self._counts: OrderedTable[bytes, int] = OrderedTable()

    def asked(self, keys: Sequence[bytes]) -> None:
        counts = self._counts
        # Tail first, so that the head of a prompt longer than the table is remembered.
        for key in reversed(keys):
            counts[key] = counts.pop(key, 0) + 1
        while len(counts) > self.table:
            counts.popitem(last=False)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        counts, threshold = self._counts, self.threshold
        return [counts.get(key, 0) >= threshold for key in keys]

    def clear(self) -> None:
        self._counts.clear()

    def __len__(self) -> int:
        """Number of remembered keys."""
        return len(self._counts)
