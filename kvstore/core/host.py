"""The rows of host memory and the chunks that live in them.

This module is long because every change of a chunk changes the same counts, and they
stay right only where all those changes stand side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

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


class HostPool:
    """Which chunk is in which row, what may happen to it, and who came and went.

    A row is in exactly one place: free, under a chunk, or held by moves and device
    transfers whose chunk is gone (after `reset`). `rows` is never exceeded.

    A chunk is known to the policy, or it is leaving: the policy gave it up, but it is to
    be copied first, or its row is not needed yet. A leaving chunk can still be read; a
    use brings it back to the policy.

    Attributes:
        chunks: by key, all that are not absent.
        step: counts steps.
        busy: chunks that are filling or pinned.
        unsaved: chunks that nobody reads and that wait for a copy to a slower tier.
        marked: chunks that could leave, were they not kept until the step ends.
        leaving: chunks that the policy has given up.
        left: keys that have left in this step. history: keys that became ready and left.
        evicted: chunks that left for others.
        shed: those of them that had not reached a tier that was to keep them.
        changes: counts every change that could make a chunk evictable.
        ages: of chunks that left for others.

    Args:
        admission: decides which chunks of stores may enter; all, without one.
        reserve: rows that are to be free or soon free ahead of need.
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
        self.ahead = reserve
        self.life = Life(HOST)
        self.chunks: OrderedTable[bytes, Chunk] = OrderedTable()
        self.step = 0
        self.busy = self.unsaved = self.marked = self.leaving = 0
        self.left: list[bytes] = []
        self.evicted = self.shed = self.changes = 0
        self._free = list(range(rows - 1, -1, -1))
        self._of_row = [Chunk(row) for row in range(rows)]
        self._held: Counter[int] = Counter()
        self._reserved = 0
        # Chunks that the policy has set aside and that may have become free to leave.
        self._released: list[Chunk] = []
        # Leaving chunks that nobody reads: those that wait for a copy, and those that do not.
        self._uncopied: dict[bytes, Chunk] = {}
        self._copied: dict[bytes, Chunk] = {}
        self.history = History()
        self.ages = Ages()

    @property
    def free(self) -> int:
        """Rows that hold nothing."""
        return len(self._free)

    @property
    def obtainable(self) -> int:
        """Rows that could be free if everybody left who is neither filling nor pinned."""
        return len(self._free) + len(self.chunks) - self.busy

    @property
    def held(self) -> int:
        """Rows that belong to moves and device transfers whose chunks are gone."""
        return len(self._held)

    @property
    def leavable(self) -> int:
        """Chunks that could leave now, one by one."""
        return len(self.chunks) - self.busy - self.unsaved - self.marked

    def begin_step(self) -> None:
        """Chunks that were kept until the end of the step before may leave from now on."""
        self.step += 1
        self.marked = 0
        self.left.clear()
        self.changes += 1

    def keep(self, keys: Iterable[bytes]) -> None:
        """Those of `keys` that are here stay until the step ends: they answered "hit"."""
        here = list(filter(None, map(self.chunks.get, keys)))
        self.marked += keep_all(here, self.step)

    # -- rows ------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[bytes], origin: int, stored_by: str | None = None
    ) -> list[Chunk]:
        """Give each of `keys` a row and a filling chunk. There must be room for all."""
        chunks = self.assign_rows(keys, origin, stored_by)
        insert = self.policy.insert
        for key in reversed(keys):
            insert(key)
        return chunks

    def assign_rows(
        self, keys: Sequence[bytes], origin: int, stored_by: str | None = None
    ) -> list[Chunk]:
        """`reserve` for keys that the policy knows already."""
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
        """The bytes of these chunks are whole; returns those that somebody may have waited for."""
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
        """The bytes of these chunks are whole, and the one who waited for them reads them."""
        filled = self.life.fill_pinned(chunks)
        self.history.came(chunk.key for chunk in filled)

    def discard(self, chunk: Chunk) -> None:
        """The bytes of a filling chunk never came. The row is free again."""
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
        """A move or a transfer whose chunks are gone has ended: its rows are free."""
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
        self._free = [row for row in range(self.rows - 1, -1, -1) if row not in self._held]
        self.changes += 1

    # -- pins and copies -------------------------------------------------------------------

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Somebody more reads these chunks, or holds a lease on them."""
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
        """Somebody less reads each of these chunks."""
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
        """These chunks stand in the queue for `tier` from now on."""
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
        """The chunk stands no longer in the queue for `tier`."""
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
        """These chunks stand no longer in the queue for `tier`: they are being read for it."""
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
        """Tell the policy that resident `keys` (tail first) were used."""
        touch = self.policy.touch
        self.ages.use(keys)
        for chunk in filter(None, map(self.chunks.get, keys)):
            if chunk.state >= LEAVING:
                self.stay(chunk)
            else:
                touch(chunk.key)

    def stay(self, chunk: Chunk) -> None:
        """The chunk is used: if it was leaving, it is the policy's again."""
        if chunk.state < LEAVING:
            return
        self.life.apply("use", (chunk,))
        self.leaving -= 1
        self._uncopied.pop(chunk.key, None)
        self._copied.pop(chunk.key, None)
        self.policy.insert(chunk.key)

    def give_up(self, keys: Iterable[bytes]) -> None:
        """The policy has given these up; they stay until they are copied and their rows needed."""
        chunks = self.life.give_up(list(map(self.chunks.__getitem__, keys)), self.step)
        self.leaving += len(chunks)
        for chunk in chunks:
            (self._uncopied if chunk.unsaved else self._copied)[chunk.key] = chunk

    def take_out(self, key: bytes) -> Chunk:
        """The policy has given the chunk up; it is back by `put_back`, or leaves by `leave`."""
        return self.chunks.pop(key)

    def put_back(self, chunk: Chunk) -> None:
        """The policy has taken the chunk again that was taken out."""
        self.chunks[chunk.key] = chunk

    def leave(self, keys: Sequence[bytes]) -> None:
        """These chunks, which the policy has forgotten, are gone: their rows are free."""
        gone = list(map(self.chunks.pop, keys))
        unsaved, staying = self.life.leave(gone)
        if staying:
            # Who may not leave stays, and the policy keeps it.
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
        """The chunk, which nobody reads or copies, is gone, and for no other's sake."""
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
            uncopied: take those whose copies have waited to begin since an earlier step,
                instead of those that wait for no copy.
        """
        step = self.step
        those = self._uncopied if uncopied else self._copied
        keys: list[bytes] = []
        for key, chunk in those.items():
            if len(keys) >= count - len(self._free):
                break
            if chunk.step != step and not (uncopied and chunk.left_step == step):
                keys.append(key)
        for key in keys:
            del those[key]
        self.leaving -= len(keys)
        self.leave(keys)

    def take_released(self) -> list[Chunk]:
        """Chunks that were set aside and may have become free to leave."""
        released, self._released = self._released, []
        return released
