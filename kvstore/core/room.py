"""Making rows of host memory free: which chunks are evicted, and which are copied first."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.cascade import Cascades
from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool
from kvstore.core.step_budget import Budget

__all__ = ["Room"]


class Room:
    """Gets rows for those who need them.

    Where chunks are demoted, a chunk that the policy gives up leaves once it is copied; one
    that no tier wants leaves at once.

    Args:
        budget: how many chunks a step may give up ahead of need.
    """

    def __init__(
        self, pool: HostPool, victims: Victims, cascades: Cascades, budget: Budget
    ) -> None:
        self._pool = pool
        self._victims = victims
        self._cascades = cascades
        self._budget = budget
        self.demotes = bool(cascades.demoting)

    @property
    def sure(self) -> int:
        """Rows that are free, or surely will be when they are asked for one by one."""
        pool = self._pool
        return pool.free if self.demotes else pool.free + pool.leavable

    def make(
        self,
        count: int,
        now: float,
        *,
        shed_unsaved: bool,
        incoming: Sequence[bytes] = (),
    ) -> int:
        """Evict until `count` rows are free, as far as possible.

        Filling and pinned chunks never leave, nor do those that answered "hit"
        in this step. Chunks still waiting to be copied to a slower tier leave
        only when `shed_unsaved`, and only after all others.

        Args:
            incoming: the keys that the rows are for, tail first.

        Returns:
            How many of the `count` rows are free now.
        """
        pool = self._pool
        if pool.free < count:
            pool.reclaim(count, uncopied=False)
        if pool.free < count:
            self._evict(count, now, shed_unsaved=False, incoming=incoming)
            if shed_unsaved and pool.free < count:
                pool.reclaim(count, uncopied=True)
                self._evict(count, now, shed_unsaved=True, incoming=incoming)
        return min(count, pool.free)

    def make_ahead(self, now: float) -> None:
        """Let the policy give up chunks until as many rows as wanted are free or soon free."""
        pool = self._pool
        short = min(self._budget.given_up, pool.ahead - pool.free - pool.leaving)
        if short > 0:
            self._budget.give_up(short)
            victims = self._victims.choose(short, shed_unsaved=False)
            self._demote(victims, now)
            pool.give_up(victims)

    def _evict(
        self, count: int, now: float, *, shed_unsaved: bool, incoming: Sequence[bytes]
    ) -> None:
        pool = self._pool
        # What is leaving is on its way to be free.
        short = count - pool.free - pool.leaving
        victims = self._victims.choose(short, shed_unsaved=shed_unsaved, incoming=incoming)
        if not self.demotes:
            pool.leave(victims)
            return
        demoted = self._demote(victims, now)
        pool.give_up([key for key in victims if key in demoted])
        if len(demoted) < len(victims):
            pool.leave([key for key in victims if key not in demoted])

    def _demote(self, keys: Sequence[bytes], now: float) -> set[bytes]:
        """Queue chunks for the tiers that want them; returns the keys that were queued."""
        chunks = map(self._pool.chunks.__getitem__, keys)
        return self._cascades.demote([chunk for chunk in chunks if not chunk.unsaved], now)
