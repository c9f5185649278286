"""Settings: change policies and sizes of a core that is in use, a part in each step.

A policy is replaced by way of a `Migration`. Host memory gives up rows as they become free, and
evicts chunks for it; a tier that has too many segments empties the surplus ones (`Compactor`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.eviction import Room
from kvstore.core.host import HostPool
from kvstore.core.pins import Pins
from kvstore.core.residency.base import TierView
from kvstore.core.residency.index import Index
from kvstore.core.residency.owned import OwnedTier
from kvstore.core.step_budget import Budget
from kvstore.core.usage import Chains
from kvstore.policies.base import EvictionPolicy
from kvstore.policies.migration import Migration, TenantMigration, dismantle
from kvstore.policies.tenants import Tenants

__all__ = ["MOST_CHANGES", "Settings"]

MOST_CHANGES, MOST_ROWS = 1024, 128
"""Most keys that go over to another policy, and most rows that are given up, in one step, for
policies whose calls cost as much as LRU's."""

_MIGRATIONS = (Migration, TenantMigration)


class Settings:
    """What may be changed while the core is in use: see the module's text."""

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        room: Room,
        pins: Pins,
        chains: Chains,
        budget: Budget,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._room = room
        self._pins = pins
        self._chains = chains
        self._budget = budget
        self._rows = pool.rows
        self._migrating: list[HostPool | Index] = []
        self._next: dict[HostPool | Index, EvictionPolicy] = {}
        self._replaced: list[EvictionPolicy] = []
        self._progressed = False

    @property
    def under_way(self) -> bool:
        """Whether a change has not ended, surplus segments of tiers not counted."""
        return bool(self._migrating or self._replaced or self._pool.rows != self._rows)

    @property
    def behind(self) -> bool:
        """Whether the next step can go on with a change."""
        return self._progressed and self.under_way

    @property
    def left(self) -> int:
        """How many keys, rows and segments are still to change."""
        policies = [each.policy for each in self._migrating]
        keys = [each.left for each in policies if isinstance(each, _MIGRATIONS)]
        keys += [2 * len(place.policy) for place in self._next]
        surplus = [tier.owned.surplus for tier in self._tiers if tier.owned is not None]
        return sum(keys) + max(0, self._pool.rows - self._rows) + sum(surplus)

    def _place(self, tier: int | None) -> HostPool | Index:
        return self._pool if tier is None else self._tiers[tier].index

    def policy_capacity(self, tier: int | None) -> int:
        """Return for how many chunks the policy there is made, or the one that will follow it."""
        place = self._place(tier)
        return self._next.get(place, place.policy).capacity

    def set_policy(self, tier: int | None, policy: EvictionPolicy) -> None:
        """Let `policy` replace that of a tier, by its number, or of host memory (None).

        If one is being replaced there, `policy` follows when that is over, unless yet another one
        is set by then.
        """
        place = self._place(tier)
        if place in self._migrating:
            self._next[place] = policy
            return
        self._migrate(place, policy)
        self._progressed = True

    def _migrate(self, place: HostPool | Index, policy: EvictionPolicy) -> None:
        old = place.policy
        if isinstance(old, Tenants) and isinstance(policy, Tenants):
            place.follow(TenantMigration(old, policy))
        else:
            place.follow(Migration(old, policy))
        self._migrating.append(place)
        self._policies_changed()
        self._pins.resized()

    def limit_rows(self, rows: int) -> None:
        """Use only `rows` rows of host memory, of those that were allocated."""
        self._rows = max(1, min(rows, self._pool.allocated))
        self._pool.give_back(self._rows - self._pool.rows)
        self._pins.resized()
        self._progressed = True

    def owned(self, tier: int) -> OwnedTier:
        """Return the tier of that number, which this process owns."""
        owned = self._tiers[tier].owned
        assert owned is not None
        return owned

    def rewrite(self, tier: int, segments: Sequence[int]) -> None:
        """Copy the chunks of these segments of a tier to other slots."""
        owned = self.owned(tier)
        owned.compactor.rewrite(segments)
        if owned.health.closed:
            owned.compactor.close()

    def limit_segments(self, tier: int, most: Sequence[int], policy: EvictionPolicy) -> None:
        """Let a tier have so many segments on each device, and a policy for the chunks that fit."""
        self.owned(tier).slots.limit(most)
        self.set_policy(tier, policy)

    def go_on(self, now: float) -> None:
        """Go on with the changes under way. Hits of this step were kept before."""
        self._progressed = False
        most = max(1, int(MOST_ROWS / self._pool.policy.effort))
        surplus = min(most, self._pool.rows - self._rows)
        if surplus > 0:
            self._room.give_way(surplus - self._pool.free - self._pool.leavable, ())
            self._room.make(surplus, now, shed_unsaved=False)
            # What is pinned gives way once nothing else does.
            self._progressed = self._pool.withhold(surplus) > 0 or self._pins.let_go(self._rows)
            self._pins.resized()
        if self._replaced:
            if not dismantle(self._replaced[-1], MOST_CHANGES):
                self._replaced.pop()
            self._progressed = True
        for place in list(self._migrating):
            policy = place.policy
            if isinstance(policy, _MIGRATIONS):
                self._progressed |= policy.go_on(max(1, int(MOST_CHANGES / policy.effort))) > 0
                if policy.left:
                    continue
                place.follow(policy.new)
                self._replaced.append(policy.old)
            self._migrating.remove(place)
            self._policies_changed()
            following = self._next.pop(place, None)
            if following is not None:
                self._migrate(place, following)

    def reset(self) -> None:
        """Nothing is resident: what goes over has gone over. Sizes go on changing."""
        self._progressed = self.under_way

    def _policies_changed(self) -> None:
        self._chains.policies_changed()
        efforts = [tier.index.policy.effort for tier in self._tiers]
        self._budget.weigh(self._pool.policy.effort, efforts)
