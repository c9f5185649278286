"""Hit curve: hits of leaf-first LRU for every size at once.

LRU that inserts a prompt tail first is a stack algorithm (Mattson et al. 1970):
after a request its prompt is on top of the stack, head first, above all other
chunks in their old order. A cache of C chunks holds the topmost C. So a chunk is
a hit for every size above the greatest depth among the chunks of its prefix.

If every chunk has one parent, as hashes of prefixes have, the chunks of an
earlier request that remain in its place are always the end of its prompt. It is
then enough to know how many remain of each request. A Fenwick tree over requests
(Fenwick 1994) holds these numbers, with one query for each earlier request that a
prompt touches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvstore.simulation.trace import Trace

__all__ = ["LRUCurve"]


class LRUCurve:
    """The hits of leaf-first LRU over `trace` for every number of chunks.

    Raises:
        TraceError: if a chunk has two parents, and so is not a hash of a prefix.
    """

    def __init__(self, trace: Trace) -> None:
        self.accesses = trace.accesses
        trace.check_chained()
        depths = array("q", [0]) * (trace.unique + 1)
        owner = array("q", [-1]) * trace.unique
        left = _Counts(len(trace.requests))
        for number, chunks in enumerate(trace.requests):
            deepest = 0
            position, end = 0, len(chunks)
            while position < end and owner[chunks[position]] >= 0:
                # A run of chunks that belong to one earlier request.
                earlier = owner[chunks[position]]
                above = left.after(earlier)
                start = position
                while position < end and owner[chunks[position]] == earlier:
                    deepest = max(deepest, above + position - start)
                    depths[deepest] += 1
                    position += 1
                left.add(earlier, start - position)
                # These chunks stay above the next run, until the whole prompt is on top.
                left.add(number, position - start)
            if position < end:
                left.add(number, end - position)
            for chunk in chunks:
                owner[chunk] = number
        self._hits = array("q", [0]) * (trace.unique + 1)
        total = 0
        for depth in range(trace.unique):
            total += depths[depth]
            self._hits[depth + 1] = total

    def hits(self, capacity: int) -> int:
        """Return the hits with room for `capacity` chunks."""
        return self._hits[min(max(capacity, 0), len(self._hits) - 1)]

    def hit_ratio(self, capacity: int) -> float:
        """Return the hits per access with room for `capacity` chunks."""
        return self.hits(capacity) / self.accesses if self.accesses else 0.0


class _Counts:
    """A Fenwick tree: numbers that change, and their sum from any place on."""

    def __init__(self, size: int) -> None:
        self._tree = array("q", [0]) * (size + 1)
        self._total = 0

    def add(self, place: int, amount: int) -> None:
        self._total += amount
        place += 1
        while place < len(self._tree):
            self._tree[place] += amount
            place += place & -place

    def after(self, place: int) -> int:
        """Return the sum of all numbers after `place`."""
        total = self._total
        place += 1
        while place:
            total -= self._tree[place]
            place &= place - 1
        return total


def sizes_between(least: int, most: int, count: int) -> Sequence[int]:
    """Return `count` sizes from `least` to `most`, spaced by a constant factor."""
    if count < 2 or least >= most:
        return [most]
    factor = (most / least) ** (1 / (count - 1))
    return sorted({min(most, round(least * factor**step)) for step in range(count)})
