"""Slots of a tier: the free ones, kept in runs, and the growth of the tier.

A slot is free, retired (free, in the segment that is being emptied), set aside (free, but a write
to it failed), or in use. Segments are distributed over the tier's devices, its stripes: segment s
is on device ``s % stripes``. A tier grows segment by segment, ahead of need.

`ExtentAllocator` keeps free slots as runs. A run never crosses a segment: it is one contiguous
range of one file, and one vectored call moves it.

This module is long because the allocator of extents stands beside its only user.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, takewhile

from kvstore.core.residency.breaker import Breaker

__all__ = ["ASIDE_PAUSE", "RETRY_PAUSE", "STRIPE_CHUNKS", "ExtentAllocator", "Slots"]


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
        # Not plain dicts: there, finding the first item passes all that were deleted before it.
        sizes = range(segment_slots.bit_length() + 1)
        self._classes: list[OrderedDict[int, None]] = [OrderedDict() for _ in sizes]
        self.free = 0
        self._free_in: Counter[int] = Counter()

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots, in few runs, in order within each run.

        The search for a free run that is long enough is not exhaustive: one is certain
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
                self.give_run(run_start, run_end)
            run_start, run_end = slot, slot + 1
        if run_end > run_start:
            self.give_run(run_start, run_end)

    def free_in(self, segment: int) -> int:
        """Return the number of free slots in a segment."""
        return self._free_in[segment]

    def withdraw(self, segment: int, most: int | None = None) -> list[int]:
        """Take every free slot of a segment, or as many of them. Costs O(slots of a segment)."""
        count = self._free_in[segment] if most is None else min(most, self._free_in[segment])
        slots: list[int] = []
        at = segment * self._segment_slots
        while len(slots) < count:
            end = self._end_of.get(at)
            if end is None:
                at += 1
                continue
            stop = min(end, at + count - len(slots))
            if stop < end:
                self._shorten(at, stop, end)
            else:
                self._remove(at, end)
            slots.extend(range(at, stop))
            at = end
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

    def give_run(self, start: int, end: int) -> None:
        """Return the slots from `start` to before `end`, all of one segment."""
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
        """Do as `_remove` of the extent and `_insert` of its rest from `stop`, in half the time."""
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


STRIPE_CHUNKS = 8
"""Least number of chunks for which a further device is worth a call of its own."""

RETRY_PAUSE = 5.0
"""Seconds before a tier that could not grow or be cleared is asked again."""

ASIDE_PAUSE, MOST_ASIDE = 600.0, 4096
"""Seconds for which slots are set aside; and most such slots, or an eighth of all if less."""

FEW_ASIDE = 4
"""Of a small tier so many may be set aside, or half of all if less: with one bad slot more than
that, copies would go to bad ones again and again, as these are free."""


class Slots:
    """The slots of one tier.

    Attributes:
        segment_slots: slots of a segment. max_segments: most segments there may be.
        growing: a segment is being made ready.
        cannot_grow: growth failed, or does not end: new chunks displace old ones meanwhile.
        growing_slowly: growth takes too long: chunks without a free slot are not stored meanwhile.
        surplus: number of segments beyond the limits, which were lowered.
        upkeep: open while growth or clearing has failed: neither is tried again for a while.

    Args:
        segments: segments that are ready.
        stripes: number of devices.
        used: slots that are in use.
    """

    def __init__(
        self,
        segment_slots: int,
        segments: Sequence[int],
        max_segments: int,
        stripes: int,
        used: Iterable[int],
    ) -> None:
        self.segment_slots = segment_slots
        self.max_segments = max_segments
        self._segments = set(segments)
        self._stripes = [ExtentAllocator(segment_slots) for _ in range(stripes)]
        # The most segments of each device; none until they are limited anew.
        self._most_of: tuple[int, ...] = ()
        self._excess: dict[int, int] = {}
        self.surplus = 0
        self._retired = -1
        self._retired_free: set[int] = set()
        self._aside: dict[int, float] = {}  # When each comes back; the first comes first.
        self.growing = self.cannot_grow = self.growing_slowly = False
        self._growing_since = 0.0
        # Whether chunks are to be copied that find no room but in segments that are to go.
        self._wanted = False
        self.upkeep = Breaker(RETRY_PAUSE)
        in_use = set(used)
        for segment in segments:
            first = segment * segment_slots
            self._stripe_of(first).give(
                slot for slot in range(first, first + segment_slots) if slot not in in_use
            )

    @property
    def free(self) -> int:
        """Number of free slots."""
        return sum(stripe.free for stripe in self._stripes)

    @property
    def segments(self) -> int:
        """Number of segments that are ready."""
        return len(self._segments)

    @property
    def aside(self) -> int:
        """Number of free slots that are not used because a write to them failed."""
        return len(self._aside)

    @property
    def full_for_now(self) -> bool:
        """Whether there is no room until a slow growth has ended."""
        slowly = self.growing and self.growing_slowly and not self.cannot_grow
        return slowly and not self.free

    @property
    def short(self) -> bool:
        """Whether few slots are free."""
        return self.free < self._headroom

    @property
    def at_its_end(self) -> bool:
        """Whether new chunks have to displace old ones."""
        return self.cannot_grow or self.segments >= self.max_segments

    @property
    def most(self) -> int:
        """Most chunks that fit, as far as is known."""
        return self.segment_slots * (self.segments if self.at_its_end else self.max_segments)

    @property
    def room(self) -> int:
        """Number of chunks that still fit before others have to leave."""
        unmade = 0 if self.at_its_end else self.max_segments - self.segments
        return self.free + unmade * self.segment_slots

    @property
    def _headroom(self) -> int:
        return max(self.segment_slots // 2, 1) * len(self._stripes)

    def has(self, segment: int) -> bool:
        """Whether this segment is ready."""
        return segment in self._segments

    def device_of(self, slot: int) -> int:
        """Return the device of a slot."""
        return slot // self.segment_slots % len(self._stripes)

    def free_on(self, passed_over: Collection[int]) -> int:
        """Return the number of free slots on the devices that are not passed over."""
        return sum(stripe.free for stripe in self._without(passed_over))

    def limit(self, most: Sequence[int]) -> None:
        """Set the most segments of each device. Surplus segments stay until they were emptied."""
        self.max_segments = sum(most)
        self._most_of = tuple(most)
        self.cannot_grow = False
        self._segments_changed()

    def _segments_changed(self) -> None:
        """Count the surplus segments; to be called when segments came or went."""
        have = Counter(segment % len(self._stripes) for segment in self._segments)
        self._excess = {
            device: have[device] - most
            for device, most in enumerate(self._most_of)
            if have[device] > most
        }
        self.surplus = sum(self._excess.values())

    # -- give and take ---------------------------------------------------------------

    def take(self, count: int, passed_over: Collection[int] = ()) -> list[int]:
        """Take up to `count` free slots, neighbours together.

        The number of devices depends on `count`; those with the most room come first.
        """
        if len(self._stripes) == 1 and not passed_over:
            return self._stripes[0].take(count)
        slots: list[int] = []
        by_room = sorted(self._without(passed_over), key=lambda stripe: -stripe.free)
        shares = max(1, min(len(by_room), count // STRIPE_CHUNKS))
        for left, stripe in zip(range(shares, 0, -1), by_room, strict=False):
            slots += stripe.take(-(-(count - len(slots)) // left))
        for stripe in by_room:
            slots += stripe.take(count - len(slots))
        return slots

    def take_outside(self, segments: Collection[int], count: int) -> list[int]:
        """Take up to `count` free slots of other segments; if there are fewer, the tier grows."""
        slots: list[int] = []
        for segment in self._segments.difference(segments):
            if len(slots) == count:
                break
            if self._free_in(segment):
                its = self._stripe_of(segment * self.segment_slots)
                slots += its.withdraw(segment, count - len(slots))
        self._wanted = len(slots) < count
        return slots

    def give(self, slots: Sequence[int]) -> None:
        """Free these slots."""
        if self._retired >= 0:
            gone = {slot for slot in slots if slot // self.segment_slots == self._retired}
            self._retired_free |= gone
            slots = [slot for slot in slots if slot not in gone]
        if len(self._stripes) == 1:
            self._stripes[0].give(slots)
            return
        of: dict[int, list[int]] = {}
        for slot in slots:
            of.setdefault(self.device_of(slot), []).append(slot)
        for device, its_slots in of.items():
            self._stripes[device].give(its_slots)

    def set_aside(self, slots: Iterable[int], now: float) -> None:
        """Set aside slots to which writes failed, for a while or until there are too many."""
        self._aside.update(dict.fromkeys(slots, now + ASIDE_PAUSE))
        total = self.segments * self.segment_slots
        most = min(MOST_ASIDE, max(1, total // 8, min(FEW_ASIDE, total // 2)))
        self.give_aside(max(0, self.aside - most))

    def end_aside(self, now: float) -> None:
        """Free slots that were set aside long enough."""
        if self._aside:
            self.give_aside(sum(1 for _ in takewhile(now.__ge__, self._aside.values())))

    def give_aside(self, count: int) -> None:
        """Free the first `count` slots that were set aside."""
        slots = list(islice(self._aside, count))
        for slot in slots:
            del self._aside[slot]
        self.give(slots)

    # -- growth ----------------------------------------------------------------------

    def wants_growth(self, now: float) -> bool:
        """Whether one more segment should be made ready now, ahead of need."""
        return (
            not self.growing
            and self.segments < self.max_segments
            and (self.short or self._wanted)
            and self.upkeep.ready(now)
        )

    def begin_growth(self, now: float) -> None:
        """Note that one more segment is being made ready."""
        self.growing = True
        self._growing_since = now

    def watch_growth(self, now: float, deadline: float, max_wait: float) -> None:
        """Notice a growth that takes long; after `max_wait` it is treated as failed."""
        lasts = now - self._growing_since
        self.growing_slowly = lasts >= 2 * deadline
        if lasts >= max(max_wait, 2 * deadline):
            self.cannot_grow = True

    def growth_ended(self, segments: Sequence[int], now: float) -> None:
        """Add segments that are ready, with all slots free.

        There are none if growth failed, or if the tier may not grow any more since it began.
        """
        self.growing = self.growing_slowly = self._wanted = False
        # One that is in use is no growth: its slots hold chunks.
        segments = [segment for segment in segments if segment not in self._segments]
        for segment in segments:
            self.cannot_grow = False
            self._segments.add(segment)
            self._give_segment(segment)
        self._segments_changed()
        if not segments and self.segments < self.max_segments:
            self.cannot_grow = True
            self.upkeep.trip(now)

    def growth_overtaken(self, segments: Iterable[int]) -> None:
        """Add segments whose growth began before a reset: clearing will free their slots."""
        self.growing = self.growing_slowly = False
        self._segments.update(segments)
        self._segments_changed()

    # -- clearing --------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything. No slot is assigned until that is durable."""
        self._stripes = [ExtentAllocator(self.segment_slots) for _ in self._stripes]
        self._retired, self._retired_free, self._aside = -1, set(), {}
        self._wanted = False
        self.upkeep.close()

    def cleared(self, segments: Iterable[int]) -> None:
        """Free all slots of `segments`, as the tier is cleared durably."""
        self._segments = set(segments)
        for segment in self._segments:
            self._give_segment(segment)
        self._segments_changed()

    # -- emptying a segment ----------------------------------------------------------

    def sparse_segment(self, most: float, passed_over: Collection[int] = ()) -> int | None:
        """Return the segment that holds the fewest chunks, if there is enough room without it.

        Args:
            most: the share of its slots that may be in use.
            passed_over: segments that do not count.
        """
        if len(self._segments) <= len(self._stripes):
            return None
        size = self.segment_slots
        victim = self.emptiest_segment(passed_over)
        if victim is None:
            return None
        its_free = self._free_in(victim)
        live = size - its_free - self._aside_in(victim)
        # Half a segment beyond the point at which the tier would grow again.
        enough = self.free - its_free >= live + self._headroom + max(size // 2, 1)
        return victim if live <= most * size and enough else None

    def surplus_segment(self, passed_over: Collection[int] = ()) -> int | None:
        """Return the segment to empty next, of the device that has most beyond its limit.

        Args:
            passed_over: segments that do not count.
        """
        if not self._excess:
            return None
        stripes = len(self._stripes)
        device = max(self._excess, key=self._excess.__getitem__)
        its = (segment for segment in self._segments if segment % stripes == device)
        return max((one for one in its if one not in passed_over), key=self._free_in, default=None)

    def emptiest_segment(self, passed_over: Collection[int]) -> int | None:
        """Return the segment that holds the fewest chunks, of those not passed over."""
        rest = [segment for segment in self._segments if segment not in passed_over]
        return max(rest, key=self._free_in, default=None)

    def is_empty(self, segment: int) -> bool:
        """Whether no slot of the segment is in use."""
        free = len(self._retired_free) if segment == self._retired else self._free_in(segment)
        return free + self._aside_in(segment) == self.segment_slots

    def retire(self, segment: int) -> None:
        """Assign no slot of the segment from now on. Only one segment is retired at a time."""
        self._retired = segment
        first = segment * self.segment_slots
        self._retired_free = set(self._stripe_of(first).withdraw(segment))

    def take_retired(self, count: int) -> list[int]:
        """Take the first `count` free slots of the retired segment."""
        slots = sorted(self._retired_free)[:count]
        self._retired_free.difference_update(slots)
        return slots

    def unretire(self, segment: int) -> None:
        """Use the retired segment as before."""
        free, self._retired, self._retired_free = self._retired_free, -1, set()
        self._stripe_of(segment * self.segment_slots).give(free)

    def segment_removed(self, segment: int) -> None:
        """Forget the segment, which was emptied and removed."""
        self._segments.discard(segment)
        self._segments_changed()
        size, aside = self.segment_slots, self._aside
        self._aside = {slot: at for slot, at in aside.items() if slot // size != segment}
        self._retired, self._retired_free = -1, set()

    # -- inside ----------------------------------------------------------------------

    def _without(self, passed_over: Collection[int]) -> list[ExtentAllocator]:
        if not passed_over:
            return self._stripes
        return [s for device, s in enumerate(self._stripes) if device not in passed_over]

    def _free_in(self, segment: int) -> int:
        return self._stripes[segment % len(self._stripes)].free_in(segment)

    def _aside_in(self, segment: int) -> int:
        return sum(slot // self.segment_slots == segment for slot in self._aside)

    def _stripe_of(self, slot: int) -> ExtentAllocator:
        return self._stripes[self.device_of(slot)]

    def _give_segment(self, segment: int) -> None:
        first = segment * self.segment_slots
        self._stripe_of(first).give_run(first, first + self.segment_slots)
