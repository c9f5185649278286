"""What a slower tier holds, kept in memory so that existence costs no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvstore.core.chunk import Chunk
from kvstore.core.extents import ExtentAllocator
from kvstore.core.flow import Flow
from kvstore.types import Move, Op, TierOpening
from policies.admission import AdmissionFilter
from policies.base import HELD, LATER, EvictionPolicy
from policies.table import OrderedTable

__all__ = ["TierDirectory"]

STRIPE_CHUNKS = 8
"""Fewest chunks for which a further device is worth a call of its own."""

MOST_FAILURES = 3
"""Reads of a chunk that may fail in a row before it is given up."""
QUESTIONS = 500
"""Keys about which the policy may ask in vain in one search for victims. When they are spent, the
search goes on with the next copies, which wait meanwhile."""

SLOW_PAUSE = 30.0
"""Seconds without a slow move after which a tier is not slow any more."""

DEVICE_PAUSE = 30.0
"""Seconds for which a device that failed to store is passed over while others do not."""


class TierDirectory:
    """Keys, slots and traffic of one slower tier.

    A slot is in exactly one place: free, under an entry, or being written. An
    entry that is being read cannot be evicted, so its slot cannot be rewritten
    under the reader.
    """

    def __init__(
        self,
        index: int,
        opening: TierOpening,
        policy: EvictionPolicy,
        max_rows_in_flight: int,
        admission: AdmissionFilter | None = None,
        flow: Flow = Flow.WRITE_THROUGH,
    ) -> None:
        self.index = index
        self.name = opening.name
        self.medium = opening.medium
        self.policy = policy
        self.admission = admission
        """Decides which chunks may be copied to it; all, without one."""
        self.flow = flow
        self.entries: OrderedTable[bytes, int] = OrderedTable()
        self.entries.update(opening.entries)
        policy.restore(self.entries)
        self.reading: dict[bytes, int] = {}
        self._unread: dict[bytes, int] = {}
        """How often in a row entries could not be read."""
        self._aside: set[bytes] = set()
        """Those of `reading` that the policy has met, and waits to hear of again."""
        self.writing: dict[bytes, int] = {}
        self.queue: deque[bytes] = deque()
        """Keys of host chunks that wait for their copy to this tier, in order."""
        self.copies_queued = 0
        """Chunks that were ever put into `queue`."""
        self.in_flight: dict[int, tuple[Move, float]] = {}
        """Moves that the engine has, with the time at which they were handed over."""
        self.rows_in_flight = 0
        self.max_rows_in_flight = max_rows_in_flight
        self.segment_slots = opening.segment_slots
        self._segments = set(opening.segments)
        self._retired = -1
        """The segment that is being emptied: its free slots are given to nobody."""
        self._retired_free: set[int] = set()
        self.max_segments = opening.max_segments
        self.relocation_chunks = opening.relocation_chunks
        self.relocations_per_second = 0.0
        """Chunks that compaction may copy; 0 for none."""
        self.growing = False
        self.growing_since = 0.0
        self.cannot_grow = False
        """Growth failed, or never ends: new chunks displace old ones meanwhile."""
        self.growing_slowly = False
        """Growth takes too long: what finds no free slot meanwhile is not stored here."""
        self.slow = False
        """It answers, but copies to it or its growth take seconds: some of late did."""
        self._slow_since = 0.0
        self._unhindered = 0.0
        """Since when nobody slept and nothing was read that goes before copies."""
        self.clearing = False
        self.retry_after = 0.0
        """It is neither grown nor cleared before this time: that failed a short while ago."""
        self.stalled = False
        """Nothing came back for longer than a deadline: lookups treat its chunks as misses."""
        self.silent = 0.0
        """Seconds, as far as anybody watched, for which it has not answered."""
        self.heard = False
        """A move has ended in this step."""
        self.seconds_per_chunk = 0.0
        """Measured pace of promotions; 0 until the first has ended."""
        self.arrived = 0
        """Chunks whose promotion has ended in this step."""
        self.arrived_since = 0.0
        """When the first of those promotions was begun."""
        self._measured = 0.0
        self.congested = False
        """What is asked of it already takes longer than anybody would wait."""
        self.store_after = 0.0
        """No copy to this tier is started before this time: it failed a short while ago."""
        self.keeps_history = True
        """Whether anybody takes `history`."""
        self.history: list[tuple[bytes, bool]] = []
        """Keys that appeared or (True) left since events were taken, in order."""
        self.evicted = 0
        self._stripes = [ExtentAllocator(opening.segment_slots) for _ in range(opening.stripes)]
        self._faulty: dict[int, float] = {}
        """Devices to which a copy failed, and until when they are passed over."""
        self._now = 0.0
        used = set(self.entries.values())
        for segment in opening.segments:
            first = segment * self.segment_slots
            self._stripe_of(first).give(
                slot for slot in range(first, first + self.segment_slots) if slot not in used
            )

    @property
    def free(self) -> int:
        """Slots that are ready and hold nothing."""
        return sum(stripe.free for stripe in self._stripes)

    @property
    def segments(self) -> int:
        """Segments that it has."""
        return len(self._segments)

    @property
    def retired_free(self) -> int:
        """Slots that hold nothing in the segment that is being emptied."""
        return len(self._retired_free)

    @property
    def ailing(self) -> bool:
        """Whether every device failed to store a short while ago."""
        return len(self._faulty) == len(self._stripes)

    @property
    def _sound(self) -> list[ExtentAllocator]:
        """Devices that store; all of them when none does."""
        if not self._faulty or self.ailing:
            return self._stripes
        return [s for index, s in enumerate(self._stripes) if index not in self._faulty]

    @property
    def readable(self) -> bool:
        """Whether a promotion from here is worth waiting for."""
        return not self.stalled and not self.congested

    def accepts(self, now: float) -> bool:
        """Whether copies to it are wanted at present."""
        return (
            self.max_segments > 0
            and not self.stalled
            and not self.clearing
            and now >= self.store_after
            and not self.full_for_now
        )

    @property
    def full_for_now(self) -> bool:
        """Whether there is no room before a growth ends that takes long."""
        slowly = self.growing and self.growing_slowly and not self.cannot_grow
        return slowly and not self.free

    @property
    def wants_growth(self) -> bool:
        """Whether one more segment should be made ready, ahead of need."""
        return (
            not self.growing
            and not self.clearing
            and self.segments < self.max_segments
            and self.short
        )

    @property
    def short(self) -> bool:
        """Whether little is free."""
        return self.free < self._headroom

    @property
    def _headroom(self) -> int:
        return max(self.segment_slots // 2, 1) * len(self._stripes)

    @property
    def copies_ended(self) -> int:
        """Chunks of `copies_queued` that have arrived, or will not come."""
        return self.copies_queued - len(self.queue) - len(self.writing)

    def enqueue(self, keys: Sequence[bytes]) -> None:
        """The host chunks wait for their copies to this tier."""
        self.copies_queued += len(keys)
        self.queue.extend(keys)

    def lacks(self, key: bytes) -> bool:
        """Whether the chunk is neither here nor on its way here."""
        return key not in self.entries and key not in self.writing

    def lacking(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of `chunks` that it lacks."""
        entries, writing = self.entries, self.writing
        return [chunk for chunk in chunks if chunk.key not in entries and chunk.key not in writing]

    def take_slots(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Slots for `count` new chunks, as far as possible, neighbours together.

        Evicts only when no further segment can be had; while one is on its
        way, fewer slots are given and the rest waits.

        Args:
            incoming: keys of those chunks, tail first.
        """
        short = count - sum(stripe.free for stripe in self._sound)
        if self.flow is Flow.EXCLUSIVE:
            # What is being read is about to give its slots up.
            short -= len(self.reading)
        if short > 0 and (self.cannot_grow or self.segments >= self.max_segments):
            short = min(short, len(self.entries) - len(self.reading))
            if short > 0:
                self._evict(short, incoming)
        return self._take(count)

    def _take(self, count: int) -> list[int]:
        """Slots from as many devices as the chunks are worth, those with most room first."""
        slots: list[int] = []
        by_room = sorted(self._sound, key=lambda stripe: -stripe.free)
        shares = max(1, min(len(by_room), count // STRIPE_CHUNKS))
        for left, stripe in zip(range(shares, 0, -1), by_room, strict=False):
            slots += stripe.take(-(-(count - len(slots)) // left))
        for stripe in by_room:
            slots += stripe.take(count - len(slots))
        return slots

    def _give(self, slots: Sequence[int]) -> None:
        """These slots hold nothing any more."""
        if self._retired >= 0:
            gone = {slot for slot in slots if slot // self.segment_slots == self._retired}
            self._retired_free |= gone
            slots = [slot for slot in slots if slot not in gone]
        if len(self._stripes) == 1:
            self._stripes[0].give(slots)
            return
        of: dict[int, list[int]] = {}
        for slot in slots:
            of.setdefault(self._device_of(slot), []).append(slot)
        for index, its_slots in of.items():
            self._stripes[index].give(its_slots)

    def _device_of(self, slot: int) -> int:
        return slot // self.segment_slots % len(self._stripes)

    def _stripe_of(self, slot: int) -> ExtentAllocator:
        return self._stripes[self._device_of(slot)]

    def take_free(self, count: int) -> list[int]:
        """Up to `count` slots that are free; nobody is evicted for them."""
        return self._take(count)

    def give_slots(self, slots: Sequence[int]) -> None:
        """Give back what was taken and not used."""
        self._give(slots)

    def sparse_segment(self, most: float) -> int | None:
        """The segment that holds least, if the tier has enough room without it.

        Args:
            most: the part of its slots that may be in use.
        """
        if len(self._segments) <= len(self._stripes):
            return None
        size = self.segment_slots
        victim = max(self._segments, key=lambda s: self._stripe_of(s * size).free_in(s))
        its_free = self._stripe_of(victim * size).free_in(victim)
        live = size - its_free
        # Half a segment more than makes the tier grow again.
        enough = self.free - its_free >= live + self._headroom + max(size // 2, 1)
        return victim if live <= most * size and enough else None

    def retire(self, segment: int) -> None:
        """No slot of the segment is given to anybody from now on. There is one at a time."""
        self._retired = segment
        first = segment * self.segment_slots
        self._retired_free = set(self._stripe_of(first).withdraw(segment))

    def unretire(self, segment: int) -> None:
        """The segment is used as before."""
        free, self._retired, self._retired_free = self._retired_free, -1, set()
        self._stripe_of(segment * self.segment_slots).give(free)

    def relocated(self, key: bytes, source: int, target: int, ok: bool) -> bool:
        """A chunk was copied within the tier; whether the copy counts."""
        self.end_read(key)
        if not ok or self.entries.get(key) != source:
            # It failed, or the chunk has left meanwhile, and may even be back elsewhere.
            self._give((target,))
            return False
        self.entries[key] = target
        self._give((source,))
        return True

    def removed(self, segment: int) -> None:
        """The segment that was emptied is gone."""
        self._segments.discard(segment)
        self._retired, self._retired_free = -1, set()

    def noted(self, segments: Iterable[int]) -> None:
        """Segments were made that belong to the time before a reset: `cleared` will free them."""
        self._segments.update(segments)

    def grown(self, segment: int) -> None:
        """A segment is ready: all its slots are free."""
        self.cannot_grow = False
        self._segments.add(segment)
        self.give_segment(segment)

    def give_segment(self, segment: int) -> None:
        """All slots of the segment are free."""
        first = segment * self.segment_slots
        self._stripe_of(first).give_run(first, first + self.segment_slots)

    def written(self, places: Sequence[tuple[bytes, int]]) -> None:
        """The chunks, each with its slot and tail first, are on the tier, whole and findable."""
        writing, insert = self.writing, self.policy.insert
        self.entries.update(places)
        for key, _ in places:
            del writing[key]
            insert(key)
        if self._faulty:
            for _, slot in places:
                self._faulty.pop(self._device_of(slot), None)
        if self.keeps_history:
            self.history += [(key, False) for key, _ in places]

    def not_written(self, key: bytes, slot: int) -> None:
        """The copy failed; the slot is free again."""
        del self.writing[key]
        self._give((slot,))

    def refused(self, slots: Iterable[int]) -> None:
        """Copies to `slots` failed: their devices are passed over for a while."""
        for slot in slots:
            self._faulty[self._device_of(slot)] = self._now + DEVICE_PAUSE

    def forget(self, key: bytes) -> None:
        """The entry proved unreadable: it is gone, its slot is free."""
        self._unread.pop(key, None)
        self._forget_all((key,))

    def _forget_all(self, keys: Sequence[bytes]) -> None:
        """The entries are gone, their slots are free."""
        pop, remove = self.entries.pop, self.policy.remove
        slots = [pop(key) for key in keys]
        for key in keys:
            remove(key)
        self._give(slots)
        if self.keeps_history:
            self.history += [(key, True) for key in keys]

    def unread(self, key: bytes) -> bool:
        """The entry could not be read this time; whether it shall be tried again."""
        failures = self._unread[key] = self._unread.get(key, 0) + 1
        return failures < MOST_FAILURES

    def read_well(self, key: bytes) -> None:
        """The entry was read: what failed before has passed."""
        if self._unread:
            self._unread.pop(key, None)

    def all_read_well(self, keys: Sequence[bytes]) -> None:
        """Each of the entries was read. Where chunks move up, they are here no longer."""
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)
        if self.flow is Flow.EXCLUSIVE:
            self._forget_all(keys)

    def begin_read(self, key: bytes) -> int:
        """Protect the entry while it is read; returns its slot."""
        self.reading[key] = self.reading.get(key, 0) + 1
        return self.entries[key]

    def begin_reads(self, keys: Sequence[bytes]) -> list[int]:
        """`begin_read` of each of `keys`."""
        reading, entries = self.reading, self.entries
        slots: list[int] = []
        for key in keys:
            reading[key] = reading.get(key, 0) + 1
            slots.append(entries[key])
        return slots

    def end_reads(self, keys: Sequence[bytes]) -> None:
        """`end_read` of each of `keys`."""
        reading, aside = self.reading, self._aside
        for key in keys:
            if reading[key] == 1 and key not in aside:
                del reading[key]
            else:
                self.end_read(key)

    def end_read(self, key: bytes) -> None:
        """Undo one `begin_read`."""
        count = self.reading[key] - 1
        if count:
            self.reading[key] = count
        else:
            del self.reading[key]
            if key in self._aside:
                self._aside.discard(key)
                if key in self.entries:
                    self.policy.release((key,))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Tell the policy that `keys` (tail first) were used, where it has them."""
        entries, touch = self.entries, self.policy.touch
        for key in keys:
            if key in entries:
                touch(key)

    def watch(self, now: float, elapsed: float, patience: float, ceiling: float) -> bool:
        """Bring pace and silence up to date, once a step.

        When the step before lies further back than `patience`, `elapsed` says
        more of the caller than of the tier. Growth that takes longer than `ceiling`
        is taken for one that never ends.

        Returns:
            False if nothing is asked of the tier and nothing was amiss.
        """
        self._now = now
        if not (
            self.in_flight
            or self.arrived
            or self._faulty
            or self.silent
            or self.slow
            or self.stalled
            or self.congested
        ):
            self.heard = self.growing_slowly = False
            if elapsed >= patience:
                self._unhindered = now
            return False
        if self._faulty:
            self._faulty = {n: until for n, until in self._faulty.items() if until > now}
        if self.arrived:
            if elapsed < patience:
                pace = (now - max(self.arrived_since, self._measured)) / self.arrived
                old = self.seconds_per_chunk
                self.seconds_per_chunk = pace if not old else 0.8 * old + 0.2 * pace
            self.arrived = 0
            self._measured = now
        if self.heard or not self.rows_in_flight:
            self.silent = 0.0
        else:
            self.silent += min(elapsed, patience / 2)
        self.heard = False
        growing_for = now - self.growing_since if self.growing else 0.0
        self.growing_slowly = growing_for >= 2 * patience
        if growing_for >= max(ceiling, 2 * patience):
            self.cannot_grow = True
        if self.reading or elapsed >= patience:
            self._unhindered = now
        writing = bool(self.writing) or self.growing
        if writing and self.silent < patience and self.writing_for(now) >= 2 * patience:
            self.slow, self._slow_since = True, now
        elif self.slow and now - self._slow_since >= SLOW_PAUSE:
            self.slow = False
        return True

    def writing_for(self, now: float) -> float:
        """Seconds for which a copy to it, or its growth, has been under way for its own sake."""
        for move, started in self.in_flight.values():
            if move.op in (Op.CASCADE, Op.GROW):
                return now - max(started, self._unhindered)
        return 0.0

    def reset(self) -> None:
        """Forget everything. No slot is given until `cleared`."""
        if self.keeps_history:
            self.history.extend((key, True) for key in self.entries)
        self.entries.clear()
        self._unread.clear()
        self.policy.clear()
        self.reading.clear()
        self._aside.clear()
        self.writing.clear()
        self.queue.clear()
        self._stripes = [ExtentAllocator(self.segment_slots) for _ in self._stripes]
        self._retired, self._retired_free = -1, set()
        self.clearing = True
        self.retry_after = 0.0

    def cleared(self, segments: Iterable[int]) -> None:
        """The tier forgot everything durably: all slots of `segments` are free."""
        self._segments = set(segments)
        for segment in self._segments:
            self.give_segment(segment)
        self.clearing = False

    def _evict(self, count: int, incoming: Sequence[bytes]) -> None:
        reading, aside = self.reading, self._aside
        left = QUESTIONS + 2 * count

        def protected(key: bytes) -> int:
            nonlocal left
            if left <= 0:
                return LATER
            left -= 1
            if key in reading:
                aside.add(key)
                return HELD
            return False

        victims = self.policy.evict(count, protected, incoming)
        if victims is None:
            return
        entries = self.entries
        self._give([entries.pop(key) for key in victims])
        if self._unread:
            for key in victims:
                self._unread.pop(key, None)
        if self.keeps_history:
            self.history.extend((key, True) for key in victims)
        self.evicted += len(victims)
