"""Owned tier: this process assigns its slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.core.residency.base import CopyTarget
from kvstore.core.residency.compactor import Compactor
from kvstore.core.residency.index import Index
from kvstore.core.residency.slots import Slots
from kvstore.core.statistics import TierStats
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import EvictionPolicy
from kvstore.types import Changes, Completion, Flow, LogLine, Move, Op, RecoveredTier

__all__ = ["OwnedTier"]

MOST_TRIMMED = 256
"""Most chunks that a step evicts because their tenants have more than their maximum."""


class OwnedTier(CopyTarget):
    """A tier whose slots this process assigns.

    A slot is in exactly one state: free, set aside, used by an entry, being written, or the
    target of a relocation.

    Attributes:
        compactor: empties its sparse segments.
    """

    def __init__(
        self,
        number: int,
        recovered: RecoveredTier,
        policy: EvictionPolicy,
        max_rows_in_flight: int,
        admission: AdmissionFilter | None = None,
        flow: Flow = Flow.WRITE_THROUGH,
    ) -> None:
        index = Index(recovered.entries, policy)
        super().__init__(
            number, recovered, index, max_rows_in_flight, admission=admission, flow=flow
        )
        self.index.recency.limit(recovered.note_chunks)
        self.slots = Slots(
            recovered.segment_slots,
            recovered.segments,
            recovered.max_segments,
            recovered.stripes,
            self.entries.values(),
        )
        self.compactor = Compactor(
            number,
            self.index,
            self.slots,
            recovered.relocation_chunks,
            self.count,
        )

    @property
    def owned(self) -> OwnedTier:
        return self

    def accepts(self, now: float) -> bool:
        slots = self.slots
        return (
            slots.max_segments > 0
            and not self.clearing
            and self.health.accepts(now)
            and not slots.full_for_now
        )

    @property
    def most(self) -> int:
        """Most chunks of one prompt that it may hold: all its slots that are not pinned."""
        return self.slots.most - len(self.index.pinned)

    @property
    def full_for_now(self) -> bool:
        """Whether there is no room until a slow growth has ended."""
        return self.slots.full_for_now

    # -- copies to it ------------------------------------------------------------------

    def take_slots(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Assign slots for up to `count` new chunks, neighbours together.

        Evicts only when the tier cannot grow any further; while it grows, fewer slots
        are assigned and the rest of the chunks waits.

        Args:
            incoming: keys of those chunks, tail first.
        """
        index, slots, passed_over = self.index, self.slots, self.health.passed_over
        short = count - slots.free_on(passed_over)
        if self.flow is Flow.EXCLUSIVE:
            # Chunks that are being read are about to give up their slots.
            short -= len(index.reading)
        if short > 0 and slots.at_its_end:
            self._fit_pins()
            # A chunk that is both being read and pinned counts twice until the read has ended.
            short = min(short, len(self.entries) - len(index.reading) - len(index.pinned))
            if short > 0:
                slots.give(index.evict(short, incoming))
            if not slots.free_on(passed_over):
                # No other slots are left; perhaps these can be written now.
                slots.give_aside(count)
        return slots.take(count, passed_over)

    def _fit_pins(self) -> None:
        """Let pins go where the tier is smaller than expected when chunks were pinned."""
        index, slots = self.index, self.slots
        if slots.cannot_grow and index.pinned:
            index.keep_pinned(index.most_pinned * slots.segments // slots.max_segments)

    def copied(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        self.index.written(keys)
        self.health.stored(map(self.slots.device_of, slots))
        self.count("written", len(keys))

    def not_copied(
        self, entries: Sequence[tuple[bytes, int]], copied: Sequence[int], now: float
    ) -> bool:
        """Set aside the slots to which copies failed; returns whether a device is at fault.

        A device that wrote other slots in the same move is not at fault.
        """
        for key, _ in entries:
            self.index.not_written(key)
        slots, device_of = [slot for _, slot in entries], self.slots.device_of
        self.slots.set_aside(slots, now)
        self.count("failed_writes", len(entries))
        failed = Counter(map(device_of, slots))
        for device in map(device_of, copied):
            failed.pop(device, None)
        at_fault = self.health.at_fault(failed)
        self.health.refused(at_fault, now)
        return bool(at_fault)

    # -- promotions from it --------------------------------------------------------------

    def promoted(self, keys: Sequence[bytes]) -> None:
        """Note that these chunks were read and verified; an exclusive tier forgets them."""
        super().promoted(keys)
        if self.flow is Flow.EXCLUSIVE:
            # The policy hears of the use while the chunks are here, and loses ends of chains first.
            tail_first = keys[::-1]
            self.index.touch(tail_first)
            self.forget(tail_first)

    def not_promoted(self, key: bytes, *, perhaps_whole: bool) -> None:
        super().not_promoted(key, perhaps_whole=perhaps_whole)
        self.count("failed_reads")
        self.count("corrupt", not perhaps_whole)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the entries, and free their slots."""
        self.slots.give(self.index.forget(keys))

    def learn(self, changes: Changes) -> None:
        index, entries = self.index, self.entries
        # What was stored anew meanwhile lies elsewhere.
        lost = [key for key, slot in changes.lost if entries.get(key) == slot]
        # A slot that is being read is not free.
        index.doubt([key for key in lost if key in index.reading])
        self.forget([key for key in lost if key not in index.reading])

    # -- upkeep --------------------------------------------------------------------------

    def due(self, now: float, *, after_owned: bool = False) -> Move | None:
        """Return a move for its own upkeep, without its number.

        It clears the tier, makes it grow, or records which chunks were used.
        """
        slots = self.slots
        if self.clearing:
            return self._clear(now)
        if slots.wants_growth(now) and not (self.health.stalled or self.health.closed):
            slots.begin_growth(now)
            return Move(-1, Op.GROW, self.number)
        # Records are not written while compaction reads them.
        if self.health.alive and not self.compactor.moving:
            entries = self.entries
            keys = self.index.recency.due(entries, now)
            if keys:
                slots_of = [entries[key] for key in keys]
                return Move(-1, Op.NOTE, self.number, keys, slots=slots_of)
        return None

    @property
    def unrecorded(self) -> bool:
        """Whether uses of chunks are still to be recorded."""
        return self.index.recency.pending and self.health.alive

    def clear_ended(self, segments: Iterable[int], error: str | None, now: float) -> None:
        super().clear_ended(segments, error, now)
        if error is None:
            self.slots.cleared(segments)

    def compaction(self, now: float) -> Move | None:
        """Return the next move that empties a sparse segment, without its number.

        Other moves have to wait for a copy under way, so one begins only while no other move
        is under way, except where the tier is to become smaller.
        """
        if self.compactor.idle or self.clearing:
            return None
        idle = not (self.in_flight or self.queued or self.slots.growing) or self.surplus > 0
        healthy = self.health.alive and self.health.copies.ready(now)
        return self.compactor.due(now, idle and healthy)

    @property
    def surplus(self) -> int:
        """Number of segments that are to be emptied; a closed tier is left as it is."""
        return 0 if self.health.closed else self.slots.surplus + self.compactor.rewrites

    def upkeep_ended(self, move: Move, completion: Completion, now: float, overtaken: bool) -> bool:
        """Take in the end of a move of `due` or `compaction`, which a reset may have overtaken.

        Returns:
            False if it is a move of another kind.
        """
        if move.op is Op.GROW:
            if overtaken:
                self.slots.growth_overtaken(completion.segments)
            else:
                self.slots.growth_ended(completion.segments, now)
                self._fit_pins()
                if completion.segments:
                    self.index.keep_pinned(self.index.most_pinned)
        elif move.op is Op.NOTE:
            if not overtaken:
                self.index.recency.ended()
        elif move.op in (Op.LIST, Op.RELOCATE, Op.SHRINK):
            if not overtaken:
                self.compactor.ended(move, completion, now)
            elif move.op is Op.SHRINK and completion.error is None:
                self.slots.segment_removed(move.segment)
        else:
            return False
        return True

    # -- moves and health ----------------------------------------------------------------

    @property
    def writing(self) -> bool:
        return self.slots.growing or bool(self.index.writing)

    def watch(
        self, now: float, elapsed: float, deadline: float, max_wait: float, compute: float
    ) -> tuple[list[LogLine], bool]:
        self.slots.end_aside(now)
        if self.index.policy.excess:
            self.slots.give(self.index.evict(MOST_TRIMMED, trims=True))
        if self.slots.growing:
            self.slots.watch_growth(now, deadline, max_wait)
        return super().watch(now, elapsed, deadline, max_wait, compute)

    def reset(self) -> None:
        super().reset()
        self.slots.reset()
        self.compactor.reset()

    def close(self) -> None:
        super().close()
        self.compactor.close()

    def stats(self) -> TierStats:
        return self._stats(
            free=self.slots.free,
            room=self.slots.room,
            set_aside=self.slots.aside,
            segments=self.slots.segments,
            max_segments=self.slots.max_segments,
            queued=self.queued,
            relocated=self.compactor.relocated,
            removed_segments=self.compactor.removed_segments,
        )
