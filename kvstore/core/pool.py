"""The rows of host memory and the chunks that live in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.core.chunk import FILLING, READY, Chunk, IllegalTransitionError
from policies.base import EvictionPolicy

__all__ = ["HostPool"]


class HostPool:
    """Which chunk is in which row, who may leave, and who came and went.

    A row is in exactly one place: free, under a chunk, or held by a move whose
    chunk is gone (after `reset`). `rows` is never exceeded.
    """

    def __init__(self, rows: int, policy: EvictionPolicy) -> None:
        self.rows = rows
        self.policy = policy
        self.chunks: dict[bytes, Chunk] = {}
        self.busy = 0
        """Chunks that are filling or pinned."""
        self.unsaved = 0
        """Chunks that are ready and wait for a copy to a slower tier."""
        self._held: Counter[int] = Counter()
        self.step = 0
        self.shed = 0
        """Chunks evicted before they had reached a tier that was to keep them."""
        self.history: list[tuple[bytes, bool]] = []
        """Keys that became ready or (True) left since events were taken, in order."""
        self._free = list(range(rows - 1, -1, -1))
        self._reserved = 0
        # Counts every change that could make a chunk evictable, so that a vain
        # search for victims is not repeated until there is a reason to.
        self._changes = 0
        self._vain: tuple[int, bool] = (-1, False)

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
        """Rows that belong to moves whose chunks are gone."""
        return len(self._held)

    def begin_step(self) -> None:
        """Chunks that answered "hit" in the step before may leave from now on."""
        self.step += 1
        self._changes += 1

    def make_room(self, count: int, *, shed_unsaved: bool) -> int:
        """Evict until `count` rows are free, as far as possible.

        Filling and pinned chunks never leave, nor do those that answered "hit"
        in this step. Chunks still waiting to be copied to a slower tier leave
        only when `shed_unsaved`, and only after all others.

        Returns:
            How many of the `count` rows are free now.
        """
        if len(self._free) < count:
            self._evict(count - len(self._free), shed_unsaved=False)
            if shed_unsaved and len(self._free) < count:
                self._evict(count - len(self._free), shed_unsaved=True)
        return min(count, len(self._free))

    def reserve(self, keys: Sequence[bytes], origin: int) -> list[Chunk]:
        """Give each of `keys` a row and a filling chunk. There must be room for all."""
        first = self._reserved
        self._reserved += len(keys)
        chunks = [
            Chunk(key, self._free.pop(), origin, first + index) for index, key in enumerate(keys)
        ]
        for chunk in reversed(chunks):
            self.chunks[chunk.key] = chunk
            self.policy.insert(chunk.key)
        self.busy += len(chunks)
        return chunks

    def fill(self, chunk: Chunk) -> None:
        """filling -> ready: the bytes of the chunk are whole."""
        if chunk.status != FILLING:
            raise IllegalTransitionError(f"fill of {chunk!r}")
        chunk.status = READY
        self.busy -= 1
        self._changes += 1
        self.history.append((chunk.key, False))

    def discard(self, chunk: Chunk) -> None:
        """filling -> absent: the bytes never came. The row is free again."""
        if chunk.status != FILLING:
            raise IllegalTransitionError(f"discard of {chunk!r}")
        del self.chunks[chunk.key]
        self.policy.remove(chunk.key)
        self.busy -= 1
        self._changes += 1
        self._free.append(chunk.row)

    def pin(self, chunk: Chunk) -> None:
        """ready or pinned -> pinned once more."""
        if chunk.status < READY:
            raise IllegalTransitionError(f"pin of {chunk!r}")
        if chunk.status == READY:
            self.busy += 1
            self.unsaved -= chunk.unsaved != 0
        chunk.status += 1

    def unpin(self, chunk: Chunk) -> None:
        """Take one pin back."""
        if chunk.status <= READY:
            raise IllegalTransitionError(f"unpin of {chunk!r}")
        chunk.status -= 1
        if chunk.status == READY:
            self.busy -= 1
            self.unsaved += chunk.unsaved != 0
            self._changes += 1

    def queued(self, chunk: Chunk, tier: int) -> None:
        """The chunk stands in the queue for `tier`."""
        self.unsaved += chunk.status == READY and not chunk.unsaved
        chunk.unsaved |= 1 << tier

    def dequeued(self, chunk: Chunk, tier: int) -> None:
        """The chunk stands no longer in the queue for `tier`."""
        chunk.unsaved &= ~(1 << tier)
        self.unsaved -= chunk.status == READY and not chunk.unsaved
        self._changes += 1

    def touch(self, keys: Iterable[bytes]) -> None:
        """Tell the policy that resident `keys` (tail first) were used."""
        for key in keys:
            if key in self.chunks:
                self.policy.touch(key)

    def release_held(self, rows: Sequence[int]) -> None:
        """A move whose chunks are gone has ended: its rows are free."""
        for row in rows:
            self._held[row] -= 1
            if not self._held[row]:
                del self._held[row]
                self._free.append(row)
        self._changes += 1

    def reset(self, rows_in_flight: Iterable[int]) -> None:
        """Forget every chunk; rows in flight stay held until `release_held`.

        A row that several moves are reading is given once for each.
        """
        self.history.extend(
            (key, True) for key, chunk in self.chunks.items() if chunk.status != FILLING
        )
        self.chunks.clear()
        self.policy.clear()
        self.busy = self.unsaved = 0
        self._held.update(rows_in_flight)
        self._free = [row for row in range(self.rows - 1, -1, -1) if row not in self._held]
        self._changes += 1

    def _evict(self, count: int, *, shed_unsaved: bool) -> None:
        may_leave = len(self.chunks) - self.busy - (0 if shed_unsaved else self.unsaved)
        count = min(count, may_leave)
        if count <= 0 or self._vain == (self._changes, shed_unsaved):
            return
        chunks, step = self.chunks, self.step

        def protected(key: bytes) -> bool:
            chunk = chunks[key]
            return (
                chunk.status != READY
                or chunk.step == step
                or (chunk.unsaved != 0 and not shed_unsaved)
            )

        victims = self.policy.evict(count, protected)
        if victims is None:
            victims = []
            while len(victims) < count:
                one = self.policy.evict(1, protected)
                if one is None:
                    self._vain = (self._changes, shed_unsaved)
                    break
                victims += one
        for key in victims:
            chunk = chunks.pop(key)
            if chunk.unsaved:
                self.shed += 1
                self.unsaved -= 1
            self._free.append(chunk.row)
            self.history.append((key, True))
