"""Sketch: approximate counts of recent uses of keys.

Gil Einziger, Roy Friedman and Ben Manes, "TinyLFU: A Highly Efficient Cache
Admission Policy", ACM Transactions on Storage 13 (4), 2017, section 3: a count-min
sketch of small counters whose counts are halved at regular intervals, behind a
doorkeeper, a Bloom filter that takes the first sight of each key.
"""

from __future__ import annotations

from zlib import crc32

__all__ = ["Doorkeeper", "FrequencySketch"]

_MOST = 15
"""Counts do not go beyond."""

_HALF = bytes(count // 2 for count in range(256))

_SLICE = 4096
"""Counters that are halved at once; the rest follows, a slice with each key that is added."""


def _mixed(key: bytes) -> int:
    """A hash that is the same in every process, unlike `hash`."""
    return crc32(key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


class FrequencySketch:
    """Counts up to 15: at least the true count since the last halving began, or half of that for
    what was added before its slice was halved.

    Args:
        keys: how many different keys are to be told apart; takes between four
            and eight bytes for each.
    """

    def __init__(self, keys: int) -> None:
        self._counts = bytearray(_power_of_two(max(64, 4 * keys)))
        self._mask = len(self._counts) - 1
        self._halved = len(self._counts)
        """Counters before this place are halved; the others are still to be."""

    def add(self, key: bytes) -> None:
        """Count one sight; of the key's four counters only the lowest rise."""
        counts, mask = self._counts, self._mask
        if self._halved <= mask:
            self._halve_slice()
        mixed = _mixed(key)
        step = mixed >> 40 | 1
        # Written for speed: this is all that a use costs.
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
        """How often `key` was seen; too high where others share all its counters."""
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
        """Let what was seen so far weigh half as much as what comes."""
        while self._halved <= self._mask:
            # The time before has hardly begun to be halved: that is a tiny sketch.
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
    """A Bloom filter: finds every key that was added, and about one in forty of the rest.

    Args:
        keys: how many keys it is to hold; takes one to two bytes for each.
    """

    def __init__(self, keys: int) -> None:
        self._bits = bytearray(_power_of_two(max(64, keys)))
        self._mask = 8 * len(self._bits) - 1

    def add(self, key: bytes) -> bool:
        """Let `key` in; whether it was in already."""
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
        """Let nobody have been in."""
        self._bits = bytearray(len(self._bits))
