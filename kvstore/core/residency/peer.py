"""Peer tier: another process writes to it, and this one only reads."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.residency.base import TierView, Unordered
from kvstore.core.residency.index import Index
from kvstore.types import Changes, Move, RecoveredTier

__all__ = ["PeerTier"]


class PeerTier(TierView):
    """A tier that other processes own; `learn` takes in what they add and remove.

    An entry may be out of date: then its promotion fails, which is a miss. Clearing the
    tier means to ignore everything its owners have stored so far.
    """

    def __init__(self, number: int, recovered: RecoveredTier, max_rows_in_flight: int) -> None:
        index = Index(recovered.entries, Unordered(1))
        super().__init__(number, recovered, index, max_rows_in_flight)

    def forget(self, keys: Sequence[bytes]) -> None:
        self.index.disappear(keys)

    def learn(self, changes: Changes) -> None:
        if not (self.clearing or self.health.closed):
            self.index.disappear(changes.gone)
            self.index.appear(changes.appeared)

    def due(self, now: float, *, after_owned: bool) -> Move | None:
        # The state of this process's own lane then decides which chunks of others count after it.
        return self._clear(now) if self.clearing and not after_owned else None
