"""Recency: uses of chunks that a tier has not written down yet.

A process that is killed saves nothing. A tier that can do so writes down every minute which chunks
were used, so a kill costs a minute of the eviction order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import repeat

from kvstore.policies.table import OrderedTable

__all__ = ["MOST_USED", "NOTE_SECONDS", "Recency"]

NOTE_SECONDS = 60.0
"""How long uses are gathered until they are written down."""

MOST_USED = 2**14
"""Most chunks that are written down at a time; what else is used meanwhile is not."""


class Recency:
    """Chunks that were used since this was written down, first used first: none without `limit`."""

    def __init__(self) -> None:
        self._at_once = self._most = 0
        self._used: OrderedTable[bytes, None] = OrderedTable()
        self._noted: float | None = None
        # How many of those that were used are still to be named by moves, one after the other.
        self._left = 0
        self._under_way = False

    def limit(self, at_once: int) -> None:
        """One move names so many chunks at most; 0: the tier does not write down uses."""
        self._at_once = at_once
        self._most = MOST_USED if at_once else 0

    def use(self, keys: Iterable[bytes]) -> None:
        """These chunks were used."""
        if len(self._used) < self._most:
            self._used.update(zip(keys, repeat(None)))

    def due(self, entries: Collection[bytes], now: float) -> list[bytes]:
        """Those of `entries` that are to be written down with one move now, maybe none."""
        if self._under_way or not self._used:
            return []
        if not self._left:
            if self._noted is None:
                self._noted = now
            if now - self._noted < NOTE_SECONDS:
                return []
            self._noted, self._left = now, len(self._used)
        count = min(self._left, self._at_once)
        self._left -= count
        taken = [self._used.popitem(last=False)[0] for _ in range(count)]
        here = [key for key in taken if key in entries]
        self._under_way = bool(here)
        return here

    def ended(self) -> None:
        """The move has ended. What it could not write down is not tried again."""
        self._under_way = False

    def clear(self) -> None:
        """All chunks are gone."""
        self._used.clear()
        self._left = 0
        self._under_way = False
