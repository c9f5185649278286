"""Removal: remove chunks on request.

A key is *hidden* from the moment of its removal: a lookup misses it, nothing is read or copied
under it, and stores pass over it. Its row and slots become free as soon as they are no longer
read or written. When nothing under way can write a record of it any more, its records are
erased. Then it is an ordinary key again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from kvstore.core.chunk import FILLING, READY, Chunk
from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool
from kvstore.core.residency.base import CopyTarget, TierView
from kvstore.core.wait_queue import WaitQueue
from kvstore.types import NO_MOVE, Completion, Move, Op

__all__ = ["Removal", "Removals"]

MOST_TRIES = 256
"""Most keys that one step looks at."""

MOST_ERASED = 4096
"""Most keys of one erasure, whose end a step takes in."""


class Removal:
    """The progress of one call to remove keys.

    Attributes:
        found: how many of the keys were in host memory, or on a tier of this process.
        left: keys whose records are still to be erased.
        unerased: keys whose records could not be erased.
    """

    def __init__(self, found: int, keys: Collection[bytes]) -> None:
        self.found = found
        self.unerased: list[bytes] = []
        self.left = set(keys)

    @property
    def done(self) -> bool:
        """Whether erasing has ended for every record. Rows may still be in use."""
        return not self.left

    def end(self, keys: Collection[bytes], *, failed: bool = False) -> None:
        """Note that the records of these keys are erased, or could not be (`failed`)."""
        self.left.difference_update(keys)
        if failed:
            self.unerased += keys


class _Hidden:
    """One key that is being removed.

    Attributes:
        written: tiers that may still have it.
        recorded: tiers that may have records of it.
        failed: tiers that could not erase their records.
    """

    def __init__(self, removal: Removal, tiers: Collection[int]) -> None:
        self.removals = [removal]
        self.written = set(tiers)
        self.recorded = set(tiers)
        self.failed: set[int] = set()


class Removals:
    """The keys that are being removed: see the module's text.

    Attributes:
        hidden: the keys that are being removed.
        behind: whether the next step has work to do even if nothing new happens.
    """

    def __init__(
        self, pool: HostPool, tiers: Sequence[TierView], queue: WaitQueue, victims: Victims
    ) -> None:
        self._pool = pool
        self._victims = victims
        self._queue = queue
        self._targets = [target for tier in tiers if (target := tier.target) is not None]
        self.hidden: dict[bytes, _Hidden] = {}
        # Keys that still have a row or a slot, in turn; and keys whose records are to be erased.
        self._places: dict[bytes, None] = {}
        self._records: dict[int, dict[bytes, None]] = {t.number: {} for t in self._targets}
        self._erasing: set[int] = set()
        self.behind = False

    def begin(self, keys: Collection[bytes]) -> Removal:
        """Hide these keys, and remove them as steps allow."""
        keys = dict.fromkeys(keys)
        removal = Removal(sum(map(self._is_here, keys)), keys)
        if not self._targets:
            removal.end(keys)
        numbers = [target.number for target in self._targets]
        for key in keys:
            known = self.hidden.get(key)
            if known is None:
                self.hidden[key] = _Hidden(removal, numbers)
                self._places[key] = None
            elif known.recorded:
                known.removals.append(removal)
            else:
                removal.end((key,), failed=bool(known.failed))
        return removal

    def go_on(self) -> None:
        """Free rows and slots that are not in use any more. Hits of this step were kept before."""
        tries = list(islice(self._places, MOST_TRIES))
        leased = [key for key in tries if self._is_pinned(key)]
        if leased:
            self._queue.end_leases(frozenset(leased))
        moved = 0
        for key in tries:
            del self._places[key]
            hidden = self.hidden[key]
            if self._leave(key, hidden):
                moved += 1
                self._end_if_over(key, hidden)
            else:
                # Other keys have their turn before it is looked at again.
                self._places[key] = None
        self.behind = moved > 0 and len(self._places) > len(tries) - moved

    @property
    def erasing(self) -> bool:
        """Whether records are still to be erased, on tiers that do not wait to be cleared."""
        able = {target.number for target in self._targets if not target.clearing}
        return any(hidden.recorded & able for hidden in self.hidden.values())

    def due(self) -> list[Move]:
        """Return the erasures that are due, without numbers: one of each tier at a time."""
        moves: list[Move] = []
        for target in self._targets:
            records, number = self._records[target.number], target.number
            if records and number not in self._erasing and not target.clearing:
                self._erasing.add(number)
                keys = list(islice(records, MOST_ERASED))
                for key in keys:
                    del records[key]
                moves.append(Move(NO_MOVE, Op.ERASE, number, keys))
        return moves

    def erased(self, move: Move, completion: Completion) -> None:
        """Take in the end of an erasure; records it could not erase are reported, not retried."""
        self._erasing.discard(move.tier)
        (target,) = (one for one in self._targets if one.number == move.tier)
        for key, ok in zip(move.keys, completion.ok, strict=True):
            hidden = self.hidden[key]
            hidden.recorded.discard(move.tier)
            if not ok:
                hidden.failed.add(move.tier)
            if ok and key in target.entries and key not in target.index.writing:
                # A store has answered late what was so before.
                target.forget((key,))
            if not hidden.recorded:
                for removal in hidden.removals:
                    removal.end((key,), failed=bool(hidden.failed))
            self._end_if_over(key, hidden)

    def reset(self, *, close_tiers: bool = False) -> None:
        """End every removal, as all tiers forget everything.

        Records stay where others find them: in stores, and in tiers that are closed (`close_tiers`)
        for the next process. They count as not erased.
        """
        stay = {
            target.number
            for target in self._targets
            if close_tiers or target.health.closed or target.store is not None
        }
        for key, hidden in self.hidden.items():
            # Those without a record left have ended before.
            stays = bool(hidden.recorded) and stay & (hidden.recorded | hidden.failed)
            for removal in hidden.removals:
                removal.end((key,), failed=bool(stays))
        self.hidden.clear()
        self._places.clear()
        self._erasing.clear()
        for records in self._records.values():
            records.clear()

    # -- inside --------------------------------------------------------------------------

    def _is_here(self, key: bytes) -> bool:
        if key in self.hidden:
            return False
        chunk = self._pool.chunks.get(key)
        whole = chunk is not None and chunk.state >= READY
        return whole or any(key in target.entries for target in self._targets)

    def _is_pinned(self, key: bytes) -> bool:
        chunk = self._pool.chunks.get(key)
        return chunk is not None and chunk.state != FILLING and chunk.pins > 0

    def _leave(self, key: bytes, hidden: _Hidden) -> bool:
        """Free its row and slots as far as possible now; returns whether none is left."""
        chunk = self._pool.chunks.get(key)
        left_host = chunk is None or self._leave_host(chunk)
        for target in self._targets:
            if target.number in hidden.written and self._leave_tier(target, key):
                hidden.written.discard(target.number)
                self._records[target.number][key] = None
        return left_host and not hidden.written

    def _leave_host(self, chunk: Chunk) -> bool:
        if chunk.state == FILLING:
            return False
        for target in self._targets:
            # It must not be copied any more.
            if chunk.unsaved >> target.number & 1:
                self._pool.dequeue(chunk, target.number)
        return self._victims.take_away(chunk)

    def _leave_tier(self, target: CopyTarget, key: bytes) -> bool:
        index = target.index
        # The move that reads it may be copying it to another slot.
        if key in index.reading or key in index.writing:
            return False
        if (store := target.store) is not None and key in store.answers.asked:
            # The answer may tell what was so before.
            return False
        if key in index.entries:
            target.forget((key,))
        return True

    def _end_if_over(self, key: bytes, hidden: _Hidden) -> None:
        if not (key in self._places or hidden.recorded):
            del self.hidden[key]
