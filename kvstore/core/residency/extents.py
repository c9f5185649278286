"""Free slots kept as extents, so that neighbours are handed out together.

Extents never cross a segment: a run of slots from `take` is one contiguous
range of one file, and can be moved by one vectored call.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

__all__ = ["ExtentAllocator"]


class ExtentAllocator:
    """Hands out integers in runs as long as the free space allows.

    Slots are grouped in segments of `segment_slots`; slot p lies in segment
    ``p // segment_slots``. `take` and `give` cost O(extents touched).
    """

    def __init__(self, segment_slots: int) -> None:
        self._segment_slots = segment_slots
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Extents by size class (bit length of the size): starts, in insertion order.
        # Not plain dicts, whose first item is behind the traces of all that were taken before.
        sizes = range(segment_slots.bit_length() + 1)
        self._classes: list[OrderedDict[int, None]] = [OrderedDict() for _ in sizes]
        self.free = 0
        self._free_in: Counter[int] = Counter()

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots, in few runs, in order within each run.

        The search for a free run that is long enough is not exhaustive: one is sure
        to be found when a free run is at least twice as long as `count`.

        Returns fewer slots than asked when fewer are free.
        """
        slots: list[int] = []
        while len(slots) < count and self.free:
            want = count - len(slots)
            start = self._choose(want)
            end = self._end_of[start]
            stop = start + want
            if stop < end:
                self._shorten(start, stop, end)
            else:
                stop = end
                self._remove(start, end)
            slots.extend(range(start, stop))
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Return slots; neighbours are merged. The caller gives each slot once."""
        run_start = run_end = -1
        for slot in sorted(slots):
            if slot == run_end and slot % self._segment_slots:
                run_end += 1
                continue
            if run_end > run_start:
                self._merge(run_start, run_end)
            run_start, run_end = slot, slot + 1
        if run_end > run_start:
            self._merge(run_start, run_end)

    def give_run(self, start: int, stop: int) -> None:
        """Return the slots from `start` to before `stop`, all of one segment."""
        self._merge(start, stop)

    def free_in(self, segment: int) -> int:
        """Free slots in a segment."""
        return self._free_in[segment]

    def withdraw(self, segment: int) -> list[int]:
        """Take every free slot of a segment."""
        if not self._free_in[segment]:
            return []
        first = segment * self._segment_slots
        last = first + self._segment_slots
        starts = [start for start in self._end_of if first <= start < last]
        slots: list[int] = []
        for start in starts:
            end = self._end_of[start]
            self._remove(start, end)
            slots.extend(range(start, end))
        return slots

    def _choose(self, want: int) -> int:
        classes = self._classes
        size_class = min(want.bit_length(), len(classes) - 1)
        for extents in classes[size_class:]:
            if extents:
                start = next(iter(extents))
                # Only in the first class can an extent be shorter than wanted.
                if extents is not classes[size_class] or self._end_of[start] - start >= want:
                    return start
        for extents in reversed(classes[: size_class + 1]):
            if extents:
                return next(iter(extents))
        raise AssertionError("no free extent although free > 0")

    def _merge(self, start: int, end: int) -> None:
        if start % self._segment_slots:
            left = self._start_of.get(start)
            if left is not None:
                self._remove(left, start)
                start = left
        if end % self._segment_slots:
            right_end = self._end_of.get(end)
            if right_end is not None:
                self._remove(end, right_end)
                end = right_end
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        self._classes[(end - start).bit_length()][start] = None
        self.free += end - start
        self._free_in[start // self._segment_slots] += end - start

    def _shorten(self, start: int, stop: int, end: int) -> None:
        """`_remove` the extent and `_insert` its rest from `stop` on, in half the time."""
        del self._end_of[start]
        self._end_of[stop] = end
        self._start_of[end] = stop
        del self._classes[(end - start).bit_length()][start]
        self._classes[(end - stop).bit_length()][stop] = None
        self.free -= stop - start
        self._free_in[start // self._segment_slots] -= stop - start

    def _remove(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._start_of[end]
        del self._classes[(end - start).bit_length()][start]
        self.free -= end - start
        self._free_in[start // self._segment_slots] -= end - start
