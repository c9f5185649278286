"""Late writes: values that arrive although their write was given up, even after a removal.

A server that hangs may go on later, with what it was sent before. What it stores then may be what
was removed in the meantime, so for a while whatever the store has under such a key is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

__all__ = ["LASTS", "LateWrites"]

LASTS = 600.0
"""Seconds for which a write that was given up may still arrive."""

MOST_KEYS = 2**14
"""Most keys that are remembered; those that were given up first are forgotten first."""


class LateWrites:
    """Keys whose writes were given up, and which of them were removed since."""

    def __init__(self) -> None:
        # When its write cannot arrive any more, for each key; those given up last are last.
        self._until: dict[bytes, float] = {}
        self._removed: set[bytes] = set()

    def gave_up(self, keys: Iterable[bytes]) -> None:
        """Note that it is not known whether the store has these, or will have them."""
        now = time.monotonic()
        for key in keys:
            if self._until.pop(key, now) <= now:
                self._removed.discard(key)
            self._until[key] = now + LASTS
        for _ in range(len(self._until) - MOST_KEYS):
            oldest = next(iter(self._until))
            del self._until[oldest]
            self._removed.discard(oldest)

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that these are being removed."""
        now = time.monotonic()
        for key in keys:
            if self._until.get(key, now) > now:
                self._until[key] = now + LASTS
                self._removed.add(key)

    def may_return(self, key: bytes) -> bool:
        """Whether the value under this key may be one that was removed: it is to be a miss."""
        return key in self._removed and self._until[key] > time.monotonic()
