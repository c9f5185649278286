"""Recency: uses of chunks that a tier has not recorded yet.

A process that is killed saves nothing. A tier that can do so records every minute which chunks
were used, so a kill loses at most about a minute of the eviction order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import repeat

from kvstore.policies.table import OrderedTable

__all__ = ["MOST_USED", "NOTE_SECONDS", "Recency"]

NOTE_SECONDS = 60.0
"""How long uses are gathered before they are recorded."""

MOST_USED = 2**14
"""Most used chunks that are recorded at a time; further ones are not recorded."""


class Recency:
    """Chunks used since uses were last recorded, in order of use; none are kept without `limit`."""

    def __init__(self) -> None:
        self._at_once = self._most = 0
        self._used: OrderedTable[bytes, None] = OrderedTable()
        self._noted: float | None = None
        # How many of the used chunks are still to be named by moves, one move after the other.
        self._left = 0
        self._under_way = False

    def limit(self, at_once: int) -> None:
        """Set how many chunks one move may name; 0: the tier does not record uses."""
        self._at_once = at_once
        self._most = MOST_USED if at_once else 0

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks were used."""
        if len(self._used) < self._most:
            self._used.update(zip(keys, repeat(None)))

    def due(self, entries: Collection[bytes], now: float) -> list[bytes]:
        """Return those of `entries` to be recorded by one move now; may be none."""
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

    @property
    def pending(self) -> bool:
        """Whether there are uses that are not recorded yet."""
        return bool(self._used)

    def ended(self) -> None:
        """Note that the move has ended. Uses that it could not record are not tried again."""
        self._under_way = False

    def clear(self) -> None:
        """Forget all uses."""
        self._used.clear()
        self._left = 0
        self._under_way = False
