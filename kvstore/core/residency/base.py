"""The base class of tiers as the core sees them: entries, health, and the queue of copies.

There are three kinds. `OwnedTier`: this process assigns its slots. `PeerTier`: another process
writes to it, and this one only reads. `AskedTier`: a remote store that others write to as well,
and that has to be asked whether it has a key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvstore.core.chunk import Chunk
from kvstore.core.residency.breaker import Breaker
from kvstore.core.residency.health import Health, InFlight
from kvstore.core.residency.index import Index
from kvstore.core.residency.slots import RETRY_PAUSE
from kvstore.core.statistics import TierStats
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import EvictionPolicy, Protected
from kvstore.types import Changes, Flow, LogLine, Move, Op, RecoveredTier

if TYPE_CHECKING:
    from kvstore.core.residency.owned import OwnedTier
    from kvstore.core.residency.remote import AskedTier

__all__ = ["CopyTarget", "TierView", "Unordered"]


class TierView(ABC):
    """One slower tier.

    Attributes:
        number: its place among the tiers of the core, fastest first.
        flow: when chunks go to it.
        index: the chunks it holds. entries: the slots of its chunks, by key, as in `index`.
        health: whether it is worth asking. in_flight: its moves.
        admission: decides which chunks may be copied to it; without one, all may.
        max_rows_in_flight: most rows that one move, and all copies to it together, may name.
        copies_queued: total of chunks ever queued for a copy to it.
        clearing: whether it has forgotten everything, but not durably yet.
        payload_bytes: of a chunk there; 0 if they are those of host memory.
    """

    def __init__(
        self,
        number: int,
        recovered: RecoveredTier,
        index: Index,
        max_rows_in_flight: int,
        *,
        admission: AdmissionFilter | None = None,
        flow: Flow = Flow.WRITE_THROUGH,
    ) -> None:
        self.number = number
        self.name = recovered.name
        self.payload_bytes = recovered.payload_bytes
        self.medium = recovered.medium
        self.index = index
        self.entries = index.entries
        self.flow = flow
        self.admission = admission
        self.max_rows_in_flight = max_rows_in_flight
        self.health = Health(self.name, recovered.stripes)
        self.in_flight = InFlight()
        self.copies_queued = 0
        # Keys whose copies to it wait, where it is a target, by owner; the next one comes first.
        self._queues: dict[int, deque[bytes]] = {}
        self.clearing = False
        self._clearing_tries = Breaker(RETRY_PAUSE)
        self._counts: Counter[str] = Counter()

    @property
    def target(self) -> CopyTarget | None:
        """The tier itself if chunks are ever copied to it."""
        return None

    @property
    def store(self) -> AskedTier | None:
        """The tier itself if it has to be asked what it holds."""
        return None

    @property
    def owned(self) -> OwnedTier | None:
        """The tier itself if this process assigns its slots."""
        return None

    # -- moves -------------------------------------------------------------------------

    def promoted(self, keys: Sequence[bytes]) -> None:
        """Note that these chunks were read and verified."""
        self.index.read_well(keys)
        self.count("promoted", len(keys))

    def not_promoted(self, key: bytes, *, perhaps_whole: bool) -> None:
        """Note a failed read of the chunk, which is tried again a few times if it may be intact."""
        if not perhaps_whole or not self.index.unread(key):
            self.forget((key,))

    @abstractmethod
    def due(self, now: float, *, after_owned: bool) -> Move | None:
        """Return a move for the tier's own upkeep (growth or clearing), without its number.

        Args:
            after_owned: whether tiers that are written to are still to be cleared.
        """

    # -- entries -----------------------------------------------------------------------

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget these chunks, which are gone or may be gone."""

    def learn(self, changes: Changes) -> None:
        """Take in what has changed in it without the core, where that is reported."""
        return

    def reset(self) -> None:
        """Forget everything, and do not use the tier until it is cleared."""
        self._forget_all()
        self.clearing = True
        self._clearing_tries.close()

    def close(self) -> None:
        """Forget everything and stop using the tier; the chunks on it stay as they are."""
        self._forget_all()
        self.health.close()

    def _forget_all(self) -> None:
        self.index.reset()
        self._queues.clear()

    # -- clearing ----------------------------------------------------------------------

    @property
    def gave_up_clearing(self) -> bool:
        """Whether clearing has failed and waits to be tried again."""
        return self.clearing and not self._clearing_tries.closed

    def clear_ended(self, segments: Iterable[int], error: str | None, now: float) -> None:
        """Take in the end of a clearing move; without `error` these segments are empty."""
        if error is None:
            self.clearing = False
        else:
            self._clearing_tries.trip(now)

    def retry_clearing(self) -> None:
        """Try at once to clear it, if that has failed."""
        self._clearing_tries.close()

    def _clear(self, now: float) -> Move | None:
        """Return the move that clears it, unless a move is under way or one has just failed."""
        if self.in_flight or not self._clearing_tries.ready(now):
            return None
        return Move(-1, Op.CLEAR, self.number)

    # -- health ------------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        """Whether a copy to it, or its growth, is under way since the last reset."""
        return bool(self.index.writing)

    def watch(
        self, now: float, elapsed: float, deadline: float, max_wait: float, compute: float
    ) -> tuple[list[LogLine], bool]:
        """Update its health, once a step: see `Health.watch`."""
        moves, reading = self.in_flight, len(self.index.reading)
        return self.health.watch(
            now, elapsed, deadline, max_wait, moves, reading, self.writing, compute
        )

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of its counters in `TierStats`."""
        self._counts[what] += number

    def stats(self) -> TierStats:
        """Return its current counters and gauges."""
        return self._stats(owned=False)

    def _stats(self, **more: Any) -> TierStats:
        return TierStats(
            self.name,
            self.medium,
            reads=self.in_flight.reads.copy(),
            writes=self.in_flight.writes.copy(),
            **more,
            **self.index.counts(),
            **self.health.gauges() | self._counts,
        )


class CopyTarget(TierView):
    """A tier to which chunks are copied, and the queue of those copies."""

    @property
    def target(self) -> CopyTarget:
        return self

    @abstractmethod
    def accepts(self, now: float) -> bool:
        """Whether copies to it are wanted at present."""

    @property
    @abstractmethod
    def most(self) -> int:
        """Most chunks of one prompt that it may hold: deeper ones would displace the head."""

    @property
    def full_for_now(self) -> bool:
        """Whether chunks that find no room are to be dropped instead of kept waiting."""
        return False

    @abstractmethod
    def take_slots(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Assign slots for up to `count` new chunks, neighbours together.

        Args:
            incoming: keys of those chunks, tail first.
        """

    @abstractmethod
    def copied(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Note that these chunks, tail first, were copied to these slots."""

    @abstractmethod
    def not_copied(
        self, entries: Sequence[tuple[bytes, int]], copied: Sequence[int], now: float
    ) -> bool:
        """Note that copies to these slots failed; returns whether a whole device is at fault.

        Args:
            copied: slots that were written in the same move.
        """

    # -- queue -------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Number of keys in the queue, some of whose chunks may have left."""
        return sum(map(len, self._queues.values()))

    @property
    def owners(self) -> list[int]:
        """Those whose keys are in the queue, in turn: see `EvictionPolicy.owner_of`."""
        return list(self._queues)

    def unsaved_keys(self) -> set[bytes]:
        """Return the keys that `unsaved` counts."""
        return {*chain.from_iterable(self._queues.values()), *self.index.writing}

    @property
    def unsaved(self) -> int:
        """Number of chunks that wait for their copies to it, or are being copied."""
        return self.queued + len(self.index.writing)

    @property
    def copies_ended(self) -> int:
        """How many of `copies_queued` have arrived or will not arrive."""
        return self.copies_queued - self.unsaved

    def enqueue(self, keys: Sequence[bytes], owner: int = 0) -> None:
        """Queue these chunks of host memory for copies to it, in this order."""
        if keys:
            self.copies_queued += len(keys)
            self._queues.setdefault(owner, deque()).extend(keys)

    def dequeue(self, count: int, owner: int = 0) -> list[bytes]:
        """Take up to `count` keys of the owner that have waited longest; others are next."""
        queue = self._queues.pop(owner, None)
        if queue is None:
            return []
        if count >= len(queue):
            return list(queue)
        keys = [queue.popleft() for _ in range(count)]
        self._queues[owner] = queue
        return keys

    def requeue(self, keys: Sequence[bytes], owner: int = 0) -> None:
        """Put keys that were just taken from the queue of the owner back at its front."""
        if keys:
            self._queues.setdefault(owner, deque()).extendleft(reversed(keys))

    def lacking(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return those of `chunks` that are neither known to be here nor being written."""
        entries, writing = self.entries, self.index.writing
        lacking = [chunk for chunk in chunks if chunk.key not in entries]
        return [chunk for chunk in lacking if chunk.key not in writing] if writing else lacking


class Unordered(EvictionPolicy):
    """A policy that evicts nothing, for tiers whose chunks this process does not evict."""

    name = "none"

    def insert(self, key: bytes) -> None:
        return

    def touch(self, key: bytes) -> None:
        return

    def remove(self, key: bytes) -> None:
        return

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return None

    def clear(self) -> None:
        return

    def __len__(self) -> int:
        return 0

    def __contains__(self, key: object) -> bool:
        return False

    def restore(self, keys: Iterable[bytes]) -> None:
        return
