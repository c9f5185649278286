"""The tier protocol of the core, and what its kinds share.

There are three kinds. `OwnedTier`: its slots are ours to give. `PeerTier`: another process writes
to it, and we only read. `AskedTier`: a remote engine that others write to as well, and that has to
be asked whether it has a key.

`SlotlessTier` is the common part of tiers in which this process gives no slots. `CopyQueue` holds
the host chunks that wait for their copy to one tier.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.core.chunk import Chunk
from kvstore.core.residency.health import Health, InFlight
from kvstore.core.residency.index import Index
from kvstore.core.residency.remote_answers import Answers, Patience
from kvstore.core.residency.slots import RETRY_PAUSE
from kvstore.core.statistics import TierStats
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import EvictionPolicy, Protected
from kvstore.policies.table import OrderedTable
from kvstore.types import Changes, Completion, Flow, LogLine, Move, Op, RecoveredTier

__all__ = ["CopyQueue", "CopyTarget", "SlotlessTier", "Store", "TierView", "Unordered"]


class TierView(Protocol):
    """One slower tier.

    Attributes:
        number: its place among the tiers of the core, fastest first.
        flow: when chunks go to it.
        index: what it holds. entries: the slots of its chunks, by key, as in `index`.
        health: whether it is worth asking. in_flight: its moves.
        admission: decides which chunks may be copied to it; all, without one.
        max_rows_in_flight: most rows that one move, and all copies to it together, may name.
    """

    number: int
    name: str
    medium: str
    flow: Flow
    index: Index
    entries: OrderedTable[bytes, int]
    health: Health
    in_flight: InFlight
    admission: AdmissionFilter | None
    max_rows_in_flight: int

    @property
    def target(self) -> CopyTarget | None:
        """The tier itself if chunks are ever copied to it."""

    @property
    def store(self) -> Store | None:
        """The tier itself if it has to be asked what it holds."""

    @property
    def copies_ended(self) -> int:
        """How many copies to it have arrived or will not come, since the beginning."""

    @property
    def copies_queued(self) -> int:
        """How many copies to it were wanted, since the beginning."""

    # -- moves -------------------------------------------------------------------------

    def promoted(self, keys: Sequence[bytes]) -> None:
        """These chunks were read, whole and right."""

    def not_promoted(self, key: bytes, *, perhaps_whole: bool) -> None:
        """The chunk could not be read; its bytes may be whole all the same."""

    def compaction(self, now: float) -> Move | None:
        """The next move that empties a sparse segment, without its number."""

    @property
    def compaction_rate(self) -> float:
        """Chunks that compaction may copy in a second; 0 without it."""

    def compact_at(self, chunks_per_second: float) -> None:
        """Set `compaction_rate`."""

    def compacted(self, move: Move, completion: Completion, now: float, overtaken: bool) -> None:
        """A move of `compaction` has ended; a reset may have overtaken it."""

    def due(self, now: float, *, after_owned: bool) -> Move | None:
        """A move that the tier needs for itself, without its number: to grow, to be cleared.

        Args:
            after_owned: whether tiers that are written to are still to be cleared.
        """

    def growth_ended(self, segments: Sequence[int], now: float, overtaken: bool) -> None:
        """A move that grows it has ended, and made these segments ready."""

    def clear_ended(self, segments: Iterable[int], error: str | None, now: float) -> None:
        """A move that clears it has ended, and these segments are empty."""

    # -- the rest ----------------------------------------------------------------------

    @property
    def clearing(self) -> bool:
        """Whether it has forgotten everything, and that is not durable yet."""

    @property
    def gave_up_clearing(self) -> bool:
        """Whether it failed to be cleared, and waits before it is tried again."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """These chunks, which it holds, are gone."""

    def watch(
        self, now: float, elapsed: float, deadline: float, max_wait: float, compute: float
    ) -> tuple[list[LogLine], bool]:
        """Notice how it does, once a step: see `Health.watch`."""

    def learn(self, changes: Changes) -> None:
        """Take in what others have done to it."""

    def reset(self) -> None:
        """Forget everything."""

    def close(self) -> None:
        """Forget everything and use the tier no more; what it holds stays as it is."""

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of its counters in `TierStats`."""

    def stats(self) -> TierStats:
        """Counters and gauges, up to date."""


class CopyTarget(TierView, Protocol):
    """A tier to which chunks are copied."""

    def accepts(self, now: float) -> bool:
        """Whether copies to it are wanted at present."""

    @property
    def most(self) -> int:
        """How many chunks one prompt may have on it: what lies deeper would displace its head."""

    @property
    def full_for_now(self) -> bool:
        """Whether chunks that find no room are not stored rather than kept waiting."""

    @property
    def unsaved(self) -> int:
        """Chunks that wait for their copies to it, or are being copied."""

    @property
    def queued(self) -> int:
        """Chunks that wait for their copies to it, and keys of some that have left."""

    def unsaved_keys(self) -> set[bytes]:
        """The keys of `unsaved`."""

    def enqueue(self, keys: Sequence[bytes]) -> None:
        """These chunks of host memory wait for their copies to it, in this order."""

    def dequeue(self, count: int) -> list[bytes]:
        """Up to `count` keys that wait longest; they wait no longer."""

    def requeue(self, keys: Sequence[bytes]) -> None:
        """These, just taken from the queue, are the first in it again."""

    def lacking(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of `chunks` that are neither here nor on their way here."""

    def take_slots(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Slots for `count` new chunks, as far as possible, neighbours together.

        Args:
            incoming: keys of those chunks, tail first.
        """

    def copied(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Copies of these chunks to these slots, tail first, went well."""

    def not_copied(
        self, entries: Sequence[tuple[bytes, int]], copied: Sequence[int], now: float
    ) -> bool:
        """Copies of these chunks to these slots failed; whether a whole device is at fault.

        Args:
            copied: slots that were written in the same move.
        """


class Store(TierView, Protocol):
    """A tier that has to be asked what it holds.

    Attributes:
        answers: what it has said, and what it is being asked.
        patience: how long that is worth waiting for.
    """

    answers: Answers
    patience: Patience

    @property
    def worth_asking(self) -> bool:
        """Whether it is to be asked, and its answers waited for."""

    def unknown(self, key: bytes) -> bool:
        """Whether nobody knows if it has the chunk."""

    def ask(self, keys: Sequence[bytes], now: float) -> Move:
        """The question whether it has these, without its number."""

    def ended(self, move: Move, completion: Completion, now: float) -> LogLine | None:
        """A question or a promotion has ended. Returns a line for the log, if there is one."""


class SlotlessTier:
    """The part of a `TierView` that is the same for tiers of others.

    They are cleared as a whole, never grow and are never compacted.
    """

    compaction_rate = 0.0

    def __init__(self, number: int, recovered: RecoveredTier, max_rows_in_flight: int) -> None:
        self.number = number
        self.name = recovered.name
        self.medium = recovered.medium
        self.max_rows_in_flight = max_rows_in_flight
        self.health = Health(self.name)
        self.in_flight = InFlight()
        self.clearing = False
        self._retry_after = 0.0
        self._counts: Counter[str] = Counter()

    @property
    def gave_up_clearing(self) -> bool:
        """Whether it failed to be cleared, and waits before it is tried again."""
        return self.clearing and self._retry_after > 0

    def clear_ended(self, segments: Iterable[int], error: str | None, now: float) -> None:
        """A move that clears it has ended."""
        if error is None:
            self.clearing = False
        else:
            self._retry_after = now + RETRY_PAUSE

    def growth_ended(self, segments: Sequence[int], now: float, overtaken: bool) -> None:
        """It never grows."""
        raise AssertionError(f"tier {self.name} is not this process's to grow")

    def compaction(self, now: float) -> Move | None:
        """Never: it has no segments of this process's."""
        return None

    def compact_at(self, chunks_per_second: float) -> None:
        """It has no segments of this process's."""

    def compacted(self, move: Move, completion: Completion, now: float, overtaken: bool) -> None:
        """It is never compacted."""
        raise AssertionError(f"tier {self.name} is not this process's to compact")

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of its counters in `TierStats`."""
        self._counts[what] += number

    def _clear(self, now: float) -> Move | None:
        """The move that clears it, unless something is under way or it has just failed."""
        if self.in_flight or now < self._retry_after:
            return None
        return Move(-1, Op.CLEAR, self.number)

    def _begin_clearing(self) -> None:
        """Nothing of it is believed until it is cleared."""
        self.clearing = True
        self._retry_after = 0.0


class Unordered(EvictionPolicy):
    """Stands where a policy is asked for and nobody is ever evicted."""

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
