"""Compaction: empty segments, then remove them or fill them with chunks in order.

While serving, a tier whose chunks need far fewer segments than it has gives some
back. The emptiest segment takes no new chunks, and its live chunks are copied to
slots of other segments, in the order in which they were stored. When nothing refers
to the segment any more its file is removed. Copies are made on the tier itself, a few at
a time, within a budget of chunks per second, and only while nothing is being
promoted or stored. Compaction can be stopped at any moment: a copied chunk has two
valid copies, and either may be used.

A tier that was made smaller empties its surplus segments in the same way, at any time and without
a budget; where other segments have no room, the coldest chunks are evicted. Chunks of the segment
that are being read or written meanwhile are waited for: their slots, and the file, stay until then.
Those that could not be copied several times, while others could, are forgotten.

Segments that hold what is encrypted with outdated keys are emptied in the same way (`rewrite`), as
copies are encrypted with the newest keys. Their files are removed, and others grow in their place.
A segment that could not be emptied several times, as a slot cannot be read, is left as it is.

A tier that is not in use can be laid out anew by the same steps (`lay_out`): an
emptied segment is filled with the chunks that come next in a given order, and
segments that are empty in the end are removed.

This module is long because all of them empty a segment by the same steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvstore.core.residency.breaker import Breaker
from kvstore.core.residency.index import Index
from kvstore.core.residency.slots import Slots
from kvstore.types import Completion, Move, Op

__all__ = ["TRIES", "Compactor"]

SPARSE = 0.5
"""A segment is worth emptying when at most this share of its slots is in use."""

REWRITES = 32
"""Moves in a second while segments are rewritten; with moves of 2 MiB, 64 MiB/s."""

TRIES = 3
"""How often it is tried to rewrite a segment before it is left as it is, and to empty one of a tier
that becomes smaller before what cannot be copied is forgotten, if other chunks can."""

MOST_TRIES = 10
"""How often it is tried at most, whatever else can be copied."""

FAILURE_PAUSE = 60.0
"""Seconds without compaction after a copy or a removal failed."""


class Compactor:
    """Plans the compaction moves of one tier. At most one of them is under way.

    Attributes:
        rate: chunks that may be copied in a second; 0 without compaction.
        moving: whether one of its moves is under way.
        relocated: chunks copied within the tier. removed_segments: segments given back.
        unrewritten: segments of the last `rewrite` that were left as they were.

    Args:
        tier: the number of the tier.
        batch: most chunks that one move may copy; 0 if the tier cannot copy.
        count: adds to a counter of the tier.
    """

    def __init__(
        self,
        tier: int,
        index: Index,
        slots: Slots,
        batch: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._tier = tier
        self._index = index
        self._slots = slots
        self._batch = batch
        self._count = count
        self.rate = 0.0
        self.moving = False
        self.relocated = 0
        self.removed_segments = 0
        self._victim = -1
        self._pending: deque[tuple[bytes, int]] | None = None
        self._groups: deque[Sequence[bytes]] | None = None
        """Chunks that are to lie side by side, a segment's worth each; None while serving."""
        self._filling: deque[bytes] | None = None
        """Chunks to fill the victim with once it is empty; None if it is to be removed then."""
        self._emptied = False
        self._looks = 0
        """How often the victim was listed."""
        self._unlisted: list[bytes] | None = None
        """Chunks of the victim that the tier does not list; None: not known."""
        self._settled: set[int] = set()
        """Segments whose chunks are in order."""
        self._stuck: set[int] = set()
        """Segments that could not be emptied: others are tried before them."""
        self._failures: dict[int, tuple[int, int]] = {}
        """How often chunks of a segment could not be copied, and `relocated` at the last time."""
        self._rewrites: deque[int] = deque()
        self._tries: Counter[int] = Counter()
        self.unrewritten = 0
        self._rewriting = False
        self._allowance = 0.0
        self._counted: float | None = None
        self._copying = Breaker(FAILURE_PAUSE)

    @property
    def idle(self) -> bool:
        """Whether compaction is off and no segment is being emptied."""
        return not (self.rate or self._slots.surplus or self._rewrites) and self._victim < 0

    def set_rate(self, chunks_per_second: float) -> None:
        """Set `rate`."""
        self.rate = chunks_per_second

    @property
    def rewrites(self) -> int:
        """Segments that are still to be rewritten."""
        return len(self._rewrites)

    def rewrite(self, segments: Iterable[int]) -> None:
        """Copy the chunks of these segments to other slots, one segment after the other."""
        self._rewrites = deque(segments)
        self._tries.clear()
        self.unrewritten = 0

    def lay_out(self, order: Sequence[bytes]) -> None:
        """Put the chunks into this order, and give back every segment that is empty then.

        For a tier that is not otherwise in use. It needs as many free slots as a segment has:
        with fewer there is nothing to give back either, and chunks stay where they are. So do
        those of a segment that lie in order, where that costs no segment in the end.
        """
        size, entries = self._slots.segment_slots, self._index.entries
        self._groups, self._settled = deque(), set()
        if self._slots.free < size:
            return
        slots = [entries[key] for key in order]
        ends = _ends_of_runs(slots, size)
        spare, start = -len(order) % size, 0
        while start < len(order):
            end = ends[start]
            unused = size - (end - start)
            if end - start > size // 2 and unused <= spare:
                self._settled.add(slots[start] // size)
            else:
                # Up to where a segment begins that may stay as it is.
                end = min(start + size, len(order))
                whole = (at for at in range(start + 1, end) if ends[at] - at == size)
                end = next((at for at in whole if size - (at - start) <= spare), end)
                unused = size - (end - start)
            spare -= unused
            self._groups.append(order[start:end])
            start = end

    @property
    def laid_out(self) -> bool:
        """Whether `lay_out` has finished."""
        return self._groups is None

    def due(self, now: float, idle: bool) -> Move | None:
        """Return the next move, without its number, or None.

        Args:
            idle: whether the tier is healthy and has nothing else to do.
        """
        elapsed = now - self._counted if self._counted is not None else 0.0
        self._counted = now
        if self.moving:
            return None
        rate, surplus = self.rate if self._batch else 0.0, self._shrinks
        if not surplus:
            self._failures.clear()
        while self._rewrites and not self._slots.has(self._rewrites[0]):
            self._rewrites.popleft()
        rewrites = bool(self._batch and self._rewrites) and not surplus
        rate = max(rate, REWRITES * self._batch) if rewrites else rate
        if not (rate or surplus):
            self._stop()
            return None
        whole = float(self._batch)
        self._allowance = whole if surplus else min(whole, self._allowance + elapsed * rate)
        short = self._groups is None and self._slots.short and not (surplus or self._rewriting)
        if self._victim >= 0 and short:
            self._stop()  # The free slots are needed again.
        if not idle or not self._copying.ready(now):
            return None
        if self._victim >= 0:
            move = self._go_on(now)
        elif rewrites:
            self._rewriting = True
            move = self._begin(self._rewrites[0])
        elif self._groups is None:
            move = self._begin(self._worth_emptying(surplus))
        else:
            move = self._begin_next(self._groups)
        self.moving = move is not None
        return move

    @property
    def _shrinks(self) -> bool:
        return bool(self._batch and self._groups is None and self._slots.surplus)

    def ended(self, move: Move, completion: Completion, now: float) -> None:
        """Take in the end of a move of `due`."""
        self.moving = False
        if move.op is Op.LIST:
            self._pending = deque(completion.found)
        elif move.op is Op.RELOCATE:
            if not self._relocated(move, completion, now):
                self._give_up(now)
            return
        elif move.op is Op.SHRINK and completion.error is None:
            self._slots.segment_removed(move.segment)
            with suppress(ValueError):
                self._rewrites.remove(move.segment)
            self.removed_segments += 1
            self._failures.pop(move.segment, None)
            self._end()
        if completion.error is not None:
            self._give_up(now)

    def reset(self) -> None:
        """Forget everything, as every segment is being cleared."""
        self._end()
        self.moving = False
        self._groups, self._settled = None, set()
        self._stuck.clear()
        self._failures.clear()
        self.rewrite(())

    def close(self) -> None:
        """Forget everything; the segments that were to be rewritten stay as they are."""
        left = self.unrewritten + len(self._rewrites)
        self.reset()
        self.unrewritten = left

    def _relocated(self, move: Move, completion: Completion, now: float) -> bool:
        """Take in copies; returns whether none is left that may be intact."""
        index, slots = self._index, self._slots
        index.end_reads(move.keys)
        unread, left = set(completion.unread), False
        # A tier becomes smaller in the end, whatever cannot be copied while others can.
        tries, copied = self._failures.get(self._victim, (0, 0))
        works = any(completion.ok) or self.relocated > copied or tries >= MOST_TRIES
        gives_way = self._shrinks and tries >= TRIES - 1 and works
        copies = zip(move.keys, move.slots, move.targets, completion.ok, strict=True)
        for place, (key, source, target, ok) in enumerate(copies):
            # The chunk may have left meanwhile, and may even be back in another slot.
            here = index.entries.get(key) == source
            if place in unread:
                slots.set_aside((target,), now)
                if not (here and gives_way) or key in index.reading:
                    left = True
                    continue
                slots.give(index.forget((key,)))
                continue
            if here and key in index.reading:
                # The slot must not be used for others before that read has ended.
                slots.give((target,))
                if self._pending is not None:
                    self._pending.append((key, source))
                continue
            if ok and here:
                index.relocate(key, target)
                slots.give((source,))
                self.relocated += 1
                continue
            slots.give((target,))
            if here:
                slots.give(index.forget((key,)))
        if left and self._shrinks:
            self._failures[self._victim] = (tries + 1, self.relocated)
        return not left

    def _begin(self, victim: int | None) -> Move | None:
        if victim is None:
            return None
        self._victim = victim
        self._slots.retire(victim)
        return self._list()

    def _worth_emptying(self, surplus: bool) -> int | None:
        """Return a segment to empty; those that could not be emptied come last."""
        slots, stuck = self._slots, self._stuck
        found = slots.surplus_segment(stuck) if surplus else slots.sparse_segment(SPARSE, stuck)
        if found is None:
            self._stuck.clear()
        return found

    def _list(self) -> Move:
        self._looks += 1
        return self._move(Op.LIST, segment=self._victim)

    def _begin_next(self, groups: deque[Sequence[bytes]]) -> Move | None:
        """Begin to make room for the next chunks that are not in order."""
        entries = self._index.entries
        while groups:
            group = [key for key in groups.popleft() if key in entries]
            if group and not self._in_order([entries[key] for key in group]):
                victim = self._slots.emptiest_segment(self._settled)
                if victim is not None:
                    self._filling = deque(group)
                    self._settled.add(victim)
                    return self._begin(victim)
        empty = self._slots.emptiest_segment(())
        if empty is not None and self._slots.is_empty(empty):
            return self._begin(empty)
        self._groups = None
        return None

    def _in_order(self, slots: Sequence[int]) -> bool:
        """Whether these slots are consecutive in one segment, which then counts as settled."""
        size = self._slots.segment_slots
        if _ends_of_runs(slots, size)[0] < len(slots):
            return False
        self._settled.add(slots[0] // size)
        return True

    def _go_on(self, now: float) -> Move | None:
        assert self._pending is not None
        if self._pending:
            return self._copy_out(now)
        if not self._emptied:
            if not self._slots.is_empty(self._victim):
                # It still has chunks that the tier did not list, as their records are damaged.
                if self._groups is None:
                    return self._clear_rest()
                self._give_up(now)
                return None
            self._emptied = True
        if self._filling is None:
            return self._move(Op.SHRINK, segment=self._victim)
        return self._fill(self._filling)

    def _clear_rest(self) -> Move | None:
        """Let chunks leave the victim that the tier has not listed."""
        index, size, victim = self._index, self._slots.segment_slots, self._victim
        if any(slot // size == victim for slot in index.writing.values()):
            return None
        if self._looks < 2:
            # Some were being written when it was listed.
            return self._list()
        if self._unlisted is None:
            self._unlisted = [key for key, slot in index.entries.items() if slot // size == victim]
        gone = [
            key
            for key in self._unlisted
            if index.entries.get(key, -1) // size == victim and key not in index.reading
        ]
        self._slots.give(self._index.forget(gone))
        self._count("corrupt", len(gone))
        return None

    def _fill(self, filling: deque[bytes]) -> Move | None:
        """Copy the next chunks into the emptied segment, which is in use once all are there."""
        entries = self._index.entries
        count = min(self._batch, int(self._allowance))
        keys: list[bytes] = []
        while filling and len(keys) < count:
            key = filling.popleft()
            if key in entries:
                keys.append(key)
        if not keys:
            if not filling:
                self._stop()
            return None
        self._allowance -= len(keys)
        self._index.begin_reads(keys)
        sources = [entries[key] for key in keys]
        return self._move(Op.RELOCATE, keys, sources, self._slots.take_retired(len(keys)))

    def _copy_out(self, now: float) -> Move | None:
        """Copy the next chunks of the segment that is being emptied."""
        assert self._pending is not None
        count = min(self._batch, int(self._allowance))
        if count <= 0:
            return None
        here: list[tuple[bytes, int]] = []
        busy: list[tuple[bytes, int]] = []
        entries, reading = self._index.entries, self._index.reading
        before = len(entries)
        while self._pending and len(here) < count:
            key, slot = self._pending.popleft()
            if entries.get(key) == slot:
                (busy if key in reading else here).append((key, slot))
        self._pending.extend(busy)
        if self._rewriting:
            # What is copied to a segment that is to be rewritten is copied again.
            targets = self._slots.take_outside(self._rewrites, len(here))
            if self._slots.at_its_end:
                targets += self._slots.take(len(here) - len(targets))
        else:
            targets = self._slots.take(len(here))
        if len(targets) < len(here) and self._rewriting and not self._slots.at_its_end:
            # The rest waits until the tier has grown.
            self._pending.extendleft(reversed(here[len(targets) :]))
            here = here[: len(targets)]
        if len(targets) < len(here) and (self._shrinks or self._rewriting):
            here = self._evict_for(here, targets)
            self._slots.give(targets[len(here) :])
            targets = targets[: len(here)]
            # What finds no room now has to wait: all others are in use or pinned.
            self._pending.extend(here[len(targets) :])
            here = here[: len(targets)]
        if len(targets) < len(here):
            self._slots.give(targets)
            self._give_up(now)
            return None
        if not here:
            waits = reading or self._index.writing or len(entries) < before
            if self._pending and self._rewriting and self._slots.at_its_end and not waits:
                # Nothing but pins is left: without these slots nothing could be stored.
                self._give_up(now)
            return None
        self._allowance -= len(here)
        keys = [key for key, _ in here]
        self._index.begin_reads(keys)
        return self._move(Op.RELOCATE, keys, [slot for _, slot in here], targets)

    def _evict_for(
        self, here: Sequence[tuple[bytes, int]], targets: list[int]
    ) -> list[tuple[bytes, int]]:
        """Evict chunks until `targets` has a slot for each of `here`, as far as possible.

        Returns:
            Those that have not been evicted themselves.
        """
        entries, before = self._index.entries, -1
        while True:
            left = [(key, slot) for key, slot in here if entries.get(key) == slot]
            short = len(left) - len(targets)
            if short <= 0 or len(entries) == before:
                return left
            before = len(entries)
            self._slots.give(self._index.evict(short, ()))
            targets += self._slots.take(short)

    def _give_up(self, now: float) -> None:
        self._copying.trip(now)
        if self._rewriting:
            # The next one first: this one may never go well.
            self._rewrites.rotate(-1)
            self._tries[self._victim] += 1
            if self._tries[self._victim] >= TRIES and self._victim in self._rewrites:
                self._rewrites.remove(self._victim)
                self.unrewritten += 1
        elif self._groups is None:
            self._stuck.add(self._victim)
        self._stop()

    def _stop(self) -> None:
        if self._victim >= 0:
            self._slots.unretire(self._victim)
            self._end()

    def _end(self) -> None:
        """Forget the victim."""
        self._victim, self._pending, self._filling, self._emptied = -1, None, None, False
        self._looks, self._unlisted, self._rewriting = 0, None, False

    def _move(
        self,
        op: Op,
        keys: Iterable[bytes] = (),
        sources: Iterable[int] = (),
        targets: Iterable[int] = (),
        segment: int = -1,
    ) -> Move:
        return Move(-1, op, self._tier, list(keys), [], list(sources), list(targets), segment)


def _ends_of_runs(slots: Sequence[int], size: int) -> list[int]:
    """For each place, where the run of slots ends that lie side by side in one segment from there.

    A run may go up or down: the engine fills segments from their ends.

    Args:
        size: slots of a segment.
    """
    ends = list(range(1, len(slots) + 1))
    for place in range(len(slots) - 2, -1, -1):
        step = slots[place + 1] - slots[place]
        if abs(step) == 1 and slots[place + 1] // size == slots[place] // size:
            after = place + 2
            goes_on = ends[place + 1] > after and slots[after] - slots[place + 1] == step
            ends[place] = ends[place + 1] if goes_on else after
    return ends
