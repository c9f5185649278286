"""Sketch: approximate counts of recent uses of keys.

Gil Einziger, Roy Friedman and Ben Manes, "TinyLFU: A Highly Efficient Cache
Admission Policy", ACM Transactions on Storage 13 (4), 2017, section 3: a count-min
sketch of small counters that are halved at regular intervals, behind a doorkeeper, a
Bloom filter that records the first occurrence of each key.
"""

from __future__ import annotations

from zlib import crc32

__all__ = ["Doorkeeper", "FrequencySketch"]

_MOST = 15
"""Highest count."""

_HALF = bytes(count // 2 for count in range(256))

_SLICE = 4096
"""Counters that are halved at a time; each key that is added halves one more slice."""


def _mixed(key: bytes) -> int:
    """Return a hash that is the same in every process, unlike `hash`."""
    return crc32(key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


class FrequencySketch:
    """Approximate counts up to 15.

    A count is at least the true count since the last halving began, or half of that for
    keys added before their slice was halved.

    Args:
        keys: number of different keys to distinguish; takes four to eight bytes for each.
    """

    def __init__(self, keys: int) -> None:
        self._counts = bytearray(_power_of_two(max(64, 4 * keys)))
        self._mask = len(self._counts) - 1
        self._halved = len(self._counts)
        """Index of the first counter that the present halving has not reached yet."""

    def add(self, key: bytes) -> None:
        """Count one occurrence: increment the lowest of the key's four counters."""
        counts, mask = self._counts, self._mask
        if self._halved <= mask:
            self._halve_slice()
        mixed = _mixed(key)
        step = mixed >> 40 | 1
        # Unrolled for speed: this is the whole cost of a use.
        a, b, c, d = (
            mixed & mask,
            mixed + step & mask,
            mixed + 2 * step & mask,
            mixed + 3 * step & mask,
        )
        m, n, o, p = counts[a], counts[b], counts[c], counts[d]
        least = min(m, n, o, p)
        if least < _MOST:
            if m == least:
                counts[a] = least + 1
            if n == least:
                counts[b] = least + 1
            if o == least:
                counts[c] = least + 1
            if p == least:
                counts[d] = least + 1

    def count(self, key: bytes) -> int:
        """Return how often `key` was added; too high if others share all its counters."""
        counts, mask = self._counts, self._mask
        mixed = _mixed(key)
        step = mixed >> 40 | 1
        return min(
            counts[mixed & mask],
            counts[mixed + step & mask],
            counts[mixed + 2 * step & mask],
            counts[mixed + 3 * step & mask],
        )

    def halve(self) -> None:
        """Halve all counts, slice by slice."""
        while self._halved <= self._mask:
            # Finish the previous halving first, which may be incomplete in a tiny sketch.
            self._halve_slice()
        self._halved = 0
        self._halve_slice()

    def _halve_slice(self) -> None:
        counts, begin = self._counts, self._halved
        self._halved = end = begin + _SLICE
        counts[begin:end] = counts[begin:end].translate(_HALF)

    def clear(self) -> None:
        """Forget everything."""
        self._counts = bytearray(len(self._counts))
        self._halved = len(self._counts)


class Doorkeeper:
    """A Bloom filter: finds every key that was added, and about one in forty of the others.

    Args:
        keys: number of keys to hold; takes one to two bytes for each.
    """

    def __init__(self, keys: int) -> None:
        self._bits = bytearray(_power_of_two(max(64, keys)))
        self._mask = 8 * len(self._bits) - 1

    def add(self, key: bytes) -> bool:
        """Add `key`; return whether it was found before."""
        bits, mask = self._bits, self._mask
        mixed = _mixed(key)
        step = mixed >> 40 | 1
        known = True
        for place in (mixed & mask, mixed + step & mask, mixed + 2 * step & mask):
            bit = 1 << (place & 7)
            if not bits[place >> 3] & bit:
                bits[place >> 3] |= bit
                known = False
        return known

    def __contains__(self, key: bytes) -> bool:
        bits, mask = self._bits, self._mask
        mixed = _mixed(key)
        step = mixed >> 40 | 1
        return all(
            bits[place >> 3] >> (place & 7) & 1
            for place in (mixed & mask, mixed + step & mask, mixed + 2 * step & mask)
        )

    def clear(self) -> None:
        """Forget everything."""
        self._bits = bytearray(len(self._bits))
