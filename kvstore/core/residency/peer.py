"""Peer tier: another process writes to it, and this one only reads."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.residency.base import SlotlessTier, Unordered
from kvstore.core.residency.index import Index
from kvstore.core.statistics import TierStats
from kvstore.policies.admission import AdmissionFilter
from kvstore.types import Changes, Flow, LogLine, Move, RecoveredTier

__all__ = ["PeerTier"]


class PeerTier(SlotlessTier):
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
        super().__init__(number, recovered, max_rows_in_flight)
        self.index = Index(recovered.entries, Unordered(1))
        self.entries = self.index.entries

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

    def due(self, now: float, *, after_owned: bool) -> Move | None:
        """A move that clears it, if it has to be cleared. Tiers of this process go first.

        Which chunks of others count after it depends on where the own lane stands then.
        """
        return self._clear(now) if self.clearing and not after_owned else None

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
        self._begin_clearing()

    def close(self) -> None:
        """Forget everything and read nothing from it any more."""
        self.index.reset()
        self.health.close()

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
