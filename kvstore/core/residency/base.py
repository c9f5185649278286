"""What the core knows of a slower tier: one protocol for every kind of tier.

`OwnedTier`: its slots are ours to give. `PeerTier`: others write to it and it is only
read. `AskedTier`: a store, a remote engine that others write to as well and that has to be
asked whether it has a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.core.chunk import Chunk
from kvstore.core.residency.health import Health
from kvstore.core.residency.in_flight import InFlight
from kvstore.core.residency.index import Index
from kvstore.core.residency.patience import Patience
from kvstore.core.residency.remote_answers import Answers
from kvstore.core.statistics import TierStats
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.table import OrderedTable
from kvstore.types import Changes, Completion, Flow, LogLine, Move

__all__ = ["CopyTarget", "Store", "TierView"]


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
