"""The chunks of host memory that wait for their copies to one tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvstore.core.chunk import Chunk
from kvstore.core.residency.index import Index

__all__ = ["CopyQueue"]


class CopyQueue:
    """The part of a `CopyTarget` that is the same for every tier: who waits, who is on the way.

    Attributes:
        index: what the tier has. entries: its entries.
        copies_queued: chunks that ever waited for their copies to it.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.entries = index.entries
        self.copies_queued = 0
        self._queue: deque[bytes] = deque()

    @property
    def queued(self) -> int:
        """Chunks that wait for their copies to it, and keys of some that have left."""
        return len(self._queue)

    def unsaved_keys(self) -> set[bytes]:
        """The keys of `unsaved`."""
        return {*self._queue, *self.index.writing}

    @property
    def unsaved(self) -> int:
        """Chunks that wait for their copies to it, or are being copied."""
        return len(self._queue) + len(self.index.writing)

    @property
    def copies_ended(self) -> int:
        """Chunks of `copies_queued` that have arrived, or will not come."""
        return self.copies_queued - self.unsaved

    def enqueue(self, keys: Sequence[bytes]) -> None:
        """These chunks of host memory wait for their copies to it, in this order."""
        self.copies_queued += len(keys)
        self._queue.extend(keys)

    def dequeue(self, count: int) -> list[bytes]:
        """Up to `count` keys that wait longest; they wait no longer."""
        queue = self._queue
        if count < len(queue):
            return [queue.popleft() for _ in range(count)]
        keys = list(queue)
        queue.clear()
        return keys

    def requeue(self, keys: Sequence[bytes]) -> None:
        """These, just taken from the queue, are the first in it again."""
        self._queue.extendleft(reversed(keys))

    def lacking(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of `chunks` that are not known to be here, nor on their way here."""
        entries, writing = self.entries, self.index.writing
        lacking = [chunk for chunk in chunks if chunk.key not in entries]
        return [chunk for chunk in lacking if chunk.key not in writing] if writing else lacking
