"""A tier that others write to and this process only reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.core.flow import Flow
from kvstore.core.health import Health
from kvstore.core.in_flight import InFlight
from kvstore.core.index import Index
from kvstore.core.slots import RETRY_PAUSE
from kvstore.core.stats import TierStats
from kvstore.types import Changes, Completion, LogLine, Move, Op, RecoveredTier
from policies.admission import AdmissionFilter
from policies.base import EvictionPolicy, Protected

__all__ = ["PeerTier", "Unordered"]


class PeerTier:
    """See `TierView`. What it holds comes and goes by `learn`, at the will of its owners.

    An entry may be out of date: then its promotion fails, which is a miss. Clearing the
    tier means to ignore whatever its owners have stored so far.
    """

    target = None
    store = None
    admission: AdmissionFilter | None = None
    flow = Flow.WRITE_THROUGH
    copies_queued = copies_ended = 0

    def __init__(self, number: int, recovered: RecoveredTier, max_rows_in_flight: int) -> None:
        self.number = number
        self.name = recovered.name
        self.medium = recovered.medium
        self.max_rows_in_flight = max_rows_in_flight
        self.index = Index(recovered.entries, Unordered(1))
        self.entries = self.index.entries
        self.health = Health(self.name)
        self.clearing = False
        self._retry_after = 0.0
        self.in_flight = InFlight()
        self._counts: Counter[str] = Counter()

    def promoted(self, keys: Sequence[bytes]) -> None:
        """These chunks were read, whole and right."""
        self.index.read_well(keys)
        self.count("promoted", len(keys))

    def not_promoted(self, key: bytes, *, perhaps_whole: bool) -> None:
        """The chunk could not be read: the entry is out of date, if that is no passing error."""
        if not perhaps_whole or not self.index.unread(key):
            self.forget((key,))

    def forget(self, keys: Sequence[bytes]) -> None:
        """These entries are out of date."""
        self.index.disappear(keys)

    def learn(self, changes: Changes) -> None:
        """Take in what the owners have done."""
        if not (self.clearing or self.health.closed):
            self.index.disappear(changes.gone)
            self.index.appear(changes.appeared)

    # -- what it needs for itself --------------------------------------------------------

    @property
    def gave_up_clearing(self) -> bool:
        """Whether it failed to be cleared, and waits before it is tried again."""
        return self.clearing and self._retry_after > 0

    def due(self, now: float, *, after_owned: bool) -> Move | None:
        """A move that clears it, if it has to be cleared. Tiers of this process go first.

        Which chunks of others count after it depends on where the own lane stands then.
        """
        if not self.clearing or self.in_flight or now < self._retry_after or after_owned:
            return None
        return Move(-1, Op.CLEAR, self.number)

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
        """Never: its segments belong to others."""
        return None

    compaction_rate = 0.0

    def compact_at(self, chunks_per_second: float) -> None:
        """Its segments belong to others."""

    def compacted(self, move: Move, completion: Completion, now: float, overtaken: bool) -> None:
        """It is never compacted."""
        raise AssertionError(f"tier {self.name} is not this process's to compact")

    def watch(
        self, now: float, elapsed: float, deadline: float, max_wait: float, compute: float
    ) -> tuple[list[LogLine], bool]:
        """Notice how it does, once a step: see `Health.watch`."""
        reading = len(self.index.reading)
        return self.health.watch(
            now, elapsed, deadline, max_wait, self.in_flight, reading, False, compute
        )

    def reset(self) -> None:
        """Forget everything, and believe nothing until the tier is cleared."""
        self.index.reset()
        self.clearing = True
        self._retry_after = 0.0

    def close(self) -> None:
        """Forget everything and read nothing from it any more."""
        self.index.reset()
        self.health.close()

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of its counters in `TierStats`."""
        self._counts[what] += number

    def stats(self) -> TierStats:
        """Counters and gauges, up to date."""
        return TierStats(
            self.name,
            self.medium,
            owned=False,
            reads=self.in_flight.reads.copy(),
            writes=self.in_flight.writes.copy(),
            **self.index.counts(),
            **self.health.gauges() | self._counts,
        )


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
