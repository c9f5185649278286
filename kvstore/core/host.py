"""The rows of host memory and the chunks in them.

This module is long because every change of a chunk changes the same counts. They are
easier to keep right with all those changes side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from kvstore.core.chunk import (
    FILLING,
    HOST,
    LEAVING,
    LEAVING_PINNED,
    READY,
    Chunk,
    Life,
    keep_all,
    queue_all,
    start_copies,
)
from kvstore.core.reports import History
from kvstore.core.statistics import Ages
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import EvictionPolicy
from kvstore.policies.table import OrderedTable

__all__ = ["HostPool"]

MOST_COMPARED = 1024
"""Leaving chunks that are looked at to see which tenant has most of them."""


class HostPool:
    """The rows of host memory, the chunks in them, and the changes of both.

    A row is free, holds a chunk, or is held by moves and device transfers whose chunk is
    gone (after `reset`). There are never more than `rows`; other rows may be withheld.

    A chunk is known to the policy, or it is leaving: the policy gave it up, but it is to
    be copied first, or its row is not needed yet. A leaving chunk can still be read; a
    use brings it back to the policy.

    Attributes:
        rows: rows in use, or free.
        chunks: by key, all that are not absent.
        step: number of the step.
        busy: chunks that are filling or pinned.
        unsaved: chunks that are not being read and wait for a copy to a slower tier.
        marked: chunks that could leave if they were not kept until the step ends.
        leaving: chunks that the policy has given up.
        left: keys that have left in this step. history: keys that became ready and left.
        evicted: chunks that left to make room for others.
        shed: those of them that had not reached a tier that was to keep them.
        changes: counts every change that could make a chunk evictable.
        ages: of chunks that were evicted.

    Args:
        admission: decides which chunks of stores may enter; without one, all do.
        reserve: rows to be kept free, or soon free, ahead of need.
    """

    def __init__(
        self,
        rows: int,
        policy: EvictionPolicy,
        admission: AdmissionFilter | None = None,
        reserve: int = 0,
    ) -> None:
        self.rows = rows
        self.policy = policy
        self.admission = admission
        self._reserve = reserve
        self.life = Life(HOST)
        self.chunks: OrderedTable[bytes, Chunk] = OrderedTable()
        self.step = 0
        self.busy = self.unsaved = self.marked = self.leaving = 0
        self.left: list[bytes] = []
        self.evicted = self.shed = self.changes = 0
        self._free = list(range(rows - 1, -1, -1))
        self._withheld: list[int] = []
        self._of_row = [Chunk(row) for row in range(rows)]
        self._held: Counter[int] = Counter()
        self._reserved = 0
        # Chunks that the policy has set aside and that may have become free to leave.
        self._released: list[Chunk] = []
        # Leaving chunks without a reader: those that wait for a copy, and those that do not.
        self._uncopied: dict[bytes, Chunk] = {}
        self._copied: dict[bytes, Chunk] = {}
        self.history = History()
        self.ages = Ages()

    @property
    def allocated(self) -> int:
        """Rows that there are, those that are withheld included."""
        return len(self._of_row)

    @property
    def ahead(self) -> int:
        """Rows to be kept free, or soon free, ahead of need: the same part of those in use."""
        return -(-self._reserve * self.rows // self.allocated)

    @property
    def free(self) -> int:
        """Rows that hold nothing."""
        return len(self._free)

    @property
    def obtainable(self) -> int:
        """Rows that would be free if all chunks left that are neither filling nor pinned."""
        return len(self._free) + len(self.chunks) - self.busy

    @property
    def held(self) -> int:
        """Rows that belong to moves and device transfers whose chunks are gone."""
        return len(self._held)

    @property
    def soon_free(self) -> int:
        """Leaving chunks that nobody reads: their rows are free once they are needed."""
        return len(self._uncopied) + len(self._copied)

    @property
    def leavable(self) -> int:
        """Chunks that could leave now, one by one."""
        return len(self.chunks) - self.busy - self.unsaved - self.marked

    def reach(self, keys: Sequence[bytes]) -> int:
        """Return how many rows the chunks of one prompt may have together."""
        known = bool(keys) and self.policy.shared
        return min(self.rows, self.policy.reach(keys)) if known else self.rows

    def has_its_part(self, keys: Sequence[bytes]) -> bool:
        """Whether the tenant of a prompt gets rows for it from itself alone."""
        parts, owner = self.policy.parts, self.owner(keys)
        return owner < len(parts) and len(parts[owner]) >= self.policy.reach(keys[-1:])

    def owner(self, keys: Sequence[bytes]) -> int:
        """Return whose rows a prompt takes: see `EvictionPolicy.owner_of`."""
        return self.policy.owner_of(keys[-1]) if self.policy.shared and keys else 0

    def begin_step(self) -> None:
        """Begin a step: chunks that the last step has kept may leave from now on."""
        self.step += 1
        self.marked = 0
        self.left.clear()
        self.changes += 1

    def keep(self, keys: Iterable[bytes]) -> None:
        """Keep those of `keys` that are here until the step ends: they answered "hit"."""
        here = list(filter(None, map(self.chunks.get, keys)))
        self.marked += keep_all(here, self.step)

    def follow(self, policy: EvictionPolicy) -> None:
        """Follow another policy, which knows the same keys."""
        self.policy = policy
        self.changes += 1

    # -- rows ------------------------------------------------------------------------------

    def withhold(self, count: int) -> int:
        """Take up to `count` free rows out of use; returns how many."""
        count = min(count, len(self._free))
        for _ in range(count):
            self._withheld.append(self._free.pop())
        self.rows -= count
        self.changes += 1
        return count

    def give_back(self, count: int) -> None:
        """Use up to `count` rows again that were withheld."""
        for _ in range(min(count, len(self._withheld))):
            self._free.append(self._withheld.pop())
            self.rows += 1
        self.changes += 1

    def reserve(
        self, keys: Sequence[bytes], origin: int, stored_by: str | None = None
    ) -> list[Chunk]:
        """Assign a row and a filling chunk to each of `keys`. There must be room for all."""
        chunks = self.assign_rows(keys, origin, stored_by)
        insert = self.policy.insert
        for key in reversed(keys):
            insert(key)
        return chunks

    def assign_rows(
        self, keys: Sequence[bytes], origin: int, stored_by: str | None = None
    ) -> list[Chunk]:
        """Do as `reserve`, for keys that the policy knows already."""
        first = self._reserved
        self._reserved += len(keys)
        count, free = len(keys), self._free
        rows = free[len(free) - count :][::-1]
        del free[len(free) - count :]
        chunks = list(map(self._of_row.__getitem__, rows))
        self.life.begin(chunks, keys, origin, first, stored_by)
        self.chunks.update(zip(reversed(keys), reversed(chunks), strict=True))
        self.busy += count
        self.ages.come(keys)
        return chunks

    def fill(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Mark these chunks as complete; returns those that requests may have waited for."""
        step = self.step
        filled, noted = self.life.fill(chunks, step)
        for chunk in noted:
            if chunk.step == step and not chunk.unsaved:
                self.marked += 1
            if chunk.aside:
                self._released.append(chunk)
        self.busy -= filled
        self.changes += 1
        self.history.came(chunk.key for chunk in chunks if chunk.state != FILLING)
        return noted

    def fill_pinned(self, chunks: Sequence[Chunk]) -> None:
        """Mark these chunks as complete and pin them for the one request that waited."""
        filled = self.life.fill_pinned(chunks)
        self.history.came(chunk.key for chunk in filled)

    def discard(self, chunk: Chunk) -> None:
        """Drop a filling chunk whose bytes never came, and free its row."""
        if not self.life.apply("discard", (chunk,)):
            return
        del self.chunks[chunk.key]
        self.policy.remove(chunk.key)
        self.ages.forget((chunk.key,))
        chunk.end()
        self.busy -= 1
        self.changes += 1
        self._free.append(chunk.row)

    def release_held(self, rows: Sequence[int]) -> None:
        """Free the rows of a move or a transfer that has ended and whose chunks are gone."""
        for row in rows:
            self._held[row] -= 1
            if not self._held[row]:
                del self._held[row]
                self._free.append(row)
        self.changes += 1

    def reset(self, rows_in_flight: Iterable[int]) -> None:
        """Forget every chunk; rows in flight stay held until `release_held`.

        A row that several of them touch is given once for each.
        """
        chunks = list(self.chunks.values())
        self.history.left(chunk.key for chunk in chunks if chunk.state != FILLING)
        self.life.apply("reset", chunks)
        for chunk in chunks:
            chunk.end()
        self.chunks.clear()
        self.policy.clear()
        self.ages.reset()
        self._uncopied.clear()
        self._copied.clear()
        self._released.clear()
        self.busy = self.unsaved = self.leaving = self.marked = 0
        self._held.update(rows_in_flight)
        kept = self._held.keys() | set(self._withheld)
        self._free = [row for row in range(self.allocated - 1, -1, -1) if row not in kept]
        self.changes += 1

    # -- pins and copies -------------------------------------------------------------------

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Add one pin to each chunk."""
        step = self.step
        first = self.life.pin(chunks)
        self.busy += len(first)
        for chunk in first:
            if chunk.unsaved:
                self.unsaved -= 1
            elif chunk.step == step:
                self.marked -= 1
            if chunk.state == LEAVING_PINNED:
                self._copied.pop(chunk.key, None)
                self._uncopied.pop(chunk.key, None)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Drop one pin of each chunk."""
        step = self.step
        free = self.life.unpin(chunks)
        for chunk in free:
            if chunk.unsaved:
                self.unsaved += 1
            elif chunk.step == step:
                self.marked += 1
            if chunk.aside:
                self._released.append(chunk)
            if chunk.state == LEAVING:
                (self._uncopied if chunk.unsaved else self._copied)[chunk.key] = chunk
        self.busy -= len(free)
        self.changes += 1

    def queue(self, chunks: Sequence[Chunk], tier: int) -> None:
        """Mark these chunks as queued for `tier`."""
        step, bit = self.step, 1 << tier
        others = queue_all(chunks, bit, step)
        self.unsaved += len(chunks) - len(others)
        for chunk in others:
            if chunk.state in (READY, LEAVING) and not chunk.unsaved:
                self.unsaved += 1
                self.marked -= chunk.step == step
            chunk.queued(bit)
            if chunk.state == LEAVING and self._copied.pop(chunk.key, None) is not None:
                self._uncopied[chunk.key] = chunk

    def dequeue(self, chunk: Chunk, tier: int) -> None:
        """Mark the chunk as no longer queued for `tier`."""
        chunk.dequeued(1 << tier)
        if chunk.state in (READY, LEAVING) and not chunk.unsaved:
            self.unsaved -= 1
            self.marked += chunk.step == self.step
        self.changes += 1
        if chunk.aside and not chunk.unsaved:
            self._released.append(chunk)
        waited = chunk.state == LEAVING and not chunk.unsaved
        if waited and self._uncopied.pop(chunk.key, None) is not None:
            self._copied[chunk.key] = chunk

    def begin_copies(self, chunks: Sequence[Chunk], tier: int) -> None:
        """Take these chunks from the queue for `tier` and pin them: they are being copied."""
        others = start_copies(self.life, chunks, 1 << tier, self.step)
        simple = len(chunks) - len(others)
        self.unsaved -= simple
        self.busy += simple
        self.changes += 1
        for chunk in others:
            self.dequeue(chunk, tier)
        self.pin(others)

    # -- coming back and leaving -------------------------------------------------------------

    def touch(self, keys: Collection[bytes]) -> None:
        """Tell the policy that those of `keys` (tail first) that are here were used."""
        touch = self.policy.touch
        self.ages.use(keys)
        for chunk in filter(None, map(self.chunks.get, keys)):
            if chunk.state >= LEAVING:
                self.stay(chunk)
            else:
                touch(chunk.key)

    def stay(self, chunk: Chunk) -> None:
        """Give the chunk back to the policy if it was leaving, as it is used."""
        if chunk.state < LEAVING:
            return
        self.life.apply("use", (chunk,))
        self.leaving -= 1
        self._uncopied.pop(chunk.key, None)
        self._copied.pop(chunk.key, None)
        self.policy.insert(chunk.key)

    def give_up(self, keys: Iterable[bytes]) -> None:
        """Mark chunks that the policy gave up; each stays until it is copied and its row needed."""
        chunks = self.life.give_up(list(map(self.chunks.__getitem__, keys)), self.step)
        self.leaving += len(chunks)
        for chunk in chunks:
            (self._uncopied if chunk.unsaved else self._copied)[chunk.key] = chunk

    def take_out(self, key: bytes) -> Chunk:
        """Take out a chunk that the policy gave up; `put_back` or `leave` must follow."""
        return self.chunks.pop(key)

    def put_back(self, chunk: Chunk) -> None:
        """Put back a chunk that was taken out, and that the policy has taken again."""
        self.chunks[chunk.key] = chunk

    def leave(self, keys: Sequence[bytes]) -> None:
        """Evict these chunks, which the policy has forgotten, and free their rows."""
        gone = list(map(self.chunks.pop, keys))
        unsaved, staying = self.life.leave(gone)
        if staying:
            # A chunk that may not leave stays, and the policy keeps it.
            gone = [chunk for chunk in gone if chunk not in staying]
            keys = [chunk.key for chunk in gone]
            for chunk in staying:
                self.chunks[chunk.key] = chunk
                self.policy.insert(chunk.key)
        self.shed += unsaved
        self.unsaved -= unsaved
        self._free += [chunk.row for chunk in gone]
        self.evicted += len(gone)
        self.left += keys
        self.history.left(keys)
        self.ages.leave(keys)

    def take_away(self, chunk: Chunk) -> None:
        """Remove a chunk that is not being read or copied; it is not counted as evicted."""
        if chunk.state == LEAVING:
            self.leaving -= 1
            self._uncopied.pop(chunk.key, None)
            self._copied.pop(chunk.key, None)
        else:
            self.policy.remove(chunk.key)
        unsaved, _ = self.life.leave((chunk,))
        self.unsaved -= unsaved
        self.marked -= not unsaved and chunk.step == self.step
        del self.chunks[chunk.key]
        self.history.left((chunk.key,))
        self.ages.forget((chunk.key,))
        chunk.end()
        self.changes += 1
        self._free.append(chunk.row)

    def reclaim(self, count: int, *, uncopied: bool) -> None:
        """Let leaving chunks go until `count` rows are free.

        Args:
            uncopied: take chunks whose copies have been queued since an earlier step, instead of
                those that wait for no copy.
        """
        step = self.step
        those = self._uncopied if uncopied else self._copied
        oldest: Iterable[tuple[bytes, Chunk]] = those.items()
        if uncopied and self.policy.shared:
            oldest = self._of_whom_most_wait()
        keys: list[bytes] = []
        for key, chunk in oldest:
            if len(keys) >= count - len(self._free):
                break
            if chunk.step != step and not (uncopied and chunk.left_step == step):
                keys.append(key)
        for key in keys:
            del those[key]
        self.leaving -= len(keys)
        self.leave(keys)

    def _of_whom_most_wait(self) -> list[tuple[bytes, Chunk]]:
        """Return chunks that wait for copies, those of the tenant that has most of them first."""
        oldest = list(islice(self._uncopied.items(), MOST_COMPARED))
        owner = self.policy.owner_of
        counts = Counter(owner(key) for key, _ in oldest)
        return sorted(oldest, key=lambda each: -counts[owner(each[0])])

    def leaving_soon(self, most: int) -> int:
        """How many chunks leave as soon as their rows are needed and their copies have ended.

        Those that are kept in this step are not counted: they may be in the next one, too.

        Args:
            most: no more are counted.
        """
        soon = self.leaving - self.soon_free
        for those in (self._copied, self._uncopied):
            for chunk in those.values():
                if soon >= most:
                    return most
                soon += chunk.step != self.step
        return soon

    def take_released(self) -> list[Chunk]:
        """Return the chunks that were set aside and may have become free to leave."""
        released, self._released = self._released, []
        return released
