"""Doorkeeper: admit keys that were seen before, at a byte or two per key.

Gil Einziger, Roy Friedman and Ben Manes, "TinyLFU: A Highly Efficient Cache
Admission Policy", ACM Transactions on Storage 13 (4), 2017, sections 3.3 (reset)
and 3.4.2 (doorkeeper).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.sketch import Doorkeeper, FrequencySketch

__all__ = ["DoorkeeperFilter"]


class DoorkeeperFilter(AdmissionFilter):
    """Admits a chunk that was looked up about `threshold` times recently.

    The request that stores a chunk counts as one of them. While `reuse` keeps
    exact counts of a fixed number of keys, this filter keeps approximate counts of
    all keys in a window, in a few bytes per key. Occasionally a chunk is admitted
    too early. When a window is over the doorkeeper is emptied and all counts are
    halved: lookups before that count half at most. A window should be longer than
    the longest prompt.

    Args:
        threshold: number of lookups, from 1 to 16.
        window: number of keys looked up until counts are halved, as a multiple of the
            capacity; above 0.
    """

    name = "doorkeeper"

    def __init__(
        self, capacity: int, chunk_bytes: int, *, threshold: int = 2, window: float = 8.0
    ) -> None:
        super().__init__(capacity, chunk_bytes)
        if not 1 <= threshold <= 16:
            raise ValueError(f"threshold must be from 1 to 16, not {threshold}")
        if not 0 < window <= 1024:
            raise ValueError(f"window must be above 0 and at most 1024, not {window}")
        self.threshold = threshold
        self._window = max(1, int(capacity * window))
        self._door = Doorkeeper(self._window)
        self._again = FrequencySketch(max(1, self._window // 4))
        self._seen = 0

    def asked(self, keys: Sequence[bytes]) -> None:
        # Only now, so that the request that ended the last window could be admitted.
        if self._seen >= self._window:
            self._seen = 0
            self._door.clear()
            self._again.halve()
        for key in keys:
            if self._door.add(key):
                self._again.add(key)
        self._seen += len(keys)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        door, again, threshold = self._door, self._again, self.threshold
        return [(key in door) + again.count(key) >= threshold for key in keys]

    def clear(self) -> None:
        self._door.clear()
        self._again.clear()
        self._seen = 0
