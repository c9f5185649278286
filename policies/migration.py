"""Migration: let another eviction policy take over while a tier is in use."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.policies.base import LATER, EvictionPolicy, Protected, UntilLater
from kvstore.policies.table import OrderedTable
from kvstore.policies.tenants import Tenants

__all__ = ["Migration", "TenantMigration", "dismantle"]


class Migration(EvictionPolicy):
    """Two policies as one: the keys of `old` go over to `new`, some at a time.

    A key that is inserted or used goes to `new` at once. The others first leave `old` for a queue,
    coldest first, and then the queue for `new`, hottest first, where each is cooled: in the end
    they leave before keys that were used since, in the order of `old`. Meanwhile eviction takes
    keys of the queue, coldest first, then keys of `old`, then others.

    It is not registered: a caller that changes a policy makes it, and calls `go_on`.
    """

    name = "migration"

    def __init__(self, old: EvictionPolicy, new: EvictionPolicy) -> None:
        super().__init__(new.capacity)
        self.old = old
        self.new = new
        self.effort = old.effort + new.effort
        self.declines = old.declines or new.declines
        self.spares_latest = new.spares_latest
        self.shared = old.shared or new.shared
        self._queue: OrderedTable[bytes, None] = OrderedTable()

    def owner_of(self, key: bytes) -> int:
        return self.new.owner_of(key)

    def tenant_of(self, key: bytes) -> str:
        return self.new.tenant_of(key)

    def tenants(self) -> dict[str, int]:
        found = Counter(self.new.tenants())
        found.update(map(self.tenant_of, self._queue) if found else ())
        found.update(self.old.tenants())
        return dict(found)

    @property
    def left(self) -> int:
        """How many moves of keys are still to come. With none, `new` can stand alone."""
        return 2 * len(self.old) + len(self._queue)

    def go_on(self, count: int) -> int:
        """Let up to `count` keys go on; returns how many did."""
        keys = self.old.evict_up_to(count, _nobody)
        for key in keys:
            self._queue[key] = None
        if keys:
            return len(keys)
        # Keys that are set aside.
        keys = list(itertools.islice(self.old.order(), count))
        for key in keys:
            self.old.remove(key)
            self.new.insert(key)
        moved = len(keys)
        while moved < count and len(self._queue):
            key, _ = self._queue.popitem()
            self.new.insert(key)
            self.new.cool((key,))
            moved += 1
        return moved

    @property
    def parts(self) -> list[EvictionPolicy]:
        return [self.old, self.new]

    def insert(self, key: bytes) -> None:
        self.new.insert(key)

    def touch(self, key: bytes) -> None:
        if self._take(key):
            self.new.insert(key)
        self.new.touch(key)

    def remove(self, key: bytes) -> None:
        if not self._take(key):
            self.new.remove(key)

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        if count > len(self):
            return None
        ask = UntilLater(protected)
        queued = self._evict_queued(count, ask)
        old = [] if ask.later else self.old.evict_up_to(count - len(queued), ask, incoming)
        short = count - len(queued) - len(old)
        new = [] if ask.later else self.new.evict_up_to(short, ask, incoming)
        if len(new) == short:
            return [*queued, *old, *new]
        for key in reversed(queued):
            self._come_first(key)
        for key in old:
            self.old.insert(key)
        for key in new:
            self.new.insert(key)
        return None

    def release(self, keys: Iterable[bytes]) -> None:
        known = [*keys]
        for key in known:
            if key in self.old:
                self.old.remove(key)
                self.new.insert(key)
        self.new.release(known)

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:
        self.new.link(keys, after)

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        self.new.settle(keys, ends)

    def cool(self, keys: Iterable[bytes]) -> None:
        for key in reversed([*keys]):
            if not self._take(key):
                self.new.remove(key)
            self._come_first(key)

    def clear(self) -> None:
        for each in (self.old, self.new, self._queue):
            each.clear()

    def __len__(self) -> int:
        return len(self.old) + len(self._queue) + len(self.new)

    def __contains__(self, key: object) -> bool:
        return key in self._queue or key in self.old or key in self.new

    def order(self) -> Iterable[bytes]:
        return itertools.chain(self._queue, self.old.order(), self.new.order())

    def _take(self, key: bytes) -> bool:
        """Take the key out if it has not gone over; returns whether that is so."""
        if key in self._queue:
            del self._queue[key]
            return True
        if key in self.old:
            self.old.remove(key)
            return True
        return False

    def _come_first(self, key: bytes) -> None:
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)

    def _evict_queued(self, count: int, protected: Protected) -> list[bytes]:
        """Take up to `count` keys out of the queue that may leave."""
        victims: list[bytes] = []
        while len(victims) < count and len(self._queue):
            key, _ = self._queue.popitem(last=False)
            answer = protected(key)
            if answer == LATER:
                self._come_first(key)
                break
            if answer:
                # It counts as just used.
                self.new.insert(key)
            else:
                victims.append(key)
        return victims


def dismantle(policy: EvictionPolicy, count: int) -> bool:
    """Free about `count` keys or numbers that a policy remembers and nobody uses any more.

    To free a million at once would take as long as many steps.

    Returns:
        Whether anything is left.
    """
    for each in policy.parts:
        if dismantle(each, count):
            return True
    for held in vars(policy).values():
        if isinstance(held, list) and held:
            del held[-count:]
            return True
        if isinstance(held, (OrderedTable, dict, set)) and len(held):
            take = held.pop if isinstance(held, set) else held.popitem
            for _ in range(min(count, len(held))):
                take()
            return True
    return False


def _nobody(key: bytes) -> bool:
    return False


class TenantMigration(Tenants):
    """Another policy for each partition takes over while a tier is in use: see `Migration`.

    Attributes:
        old, new: policies with the same partitions.
    """

    name = "migration"

    def __init__(self, old: Tenants, new: Tenants) -> None:
        EvictionPolicy.__init__(self, new.capacity)
        self.old, self.new = old, new
        self.clock, self.idle_s, self.places = new.clock, new.idle_s, new.places
        self.partitions = new.partitions
        self._moving = [
            Migration(before.policy, after.policy)
            for before, after in zip(old.partitions, new.partitions, strict=True)
        ]
        for before, after, moving in zip(old.partitions, new.partitions, self._moving, strict=True):
            after.policy, after.used_at = moving, before.used_at
        self.effort = old.effort + new.effort
        # What is on its way to the tier is in neither.
        self.take_peak(old)

    @property
    def left(self) -> int:
        """How many moves of keys are still to come."""
        return sum(each.left for each in self._moving)

    def go_on(self, count: int) -> int:
        """Let up to `count` keys go on; returns how many did."""
        moved = 0
        for each, partition in zip(self._moving, self.partitions, strict=True):
            if each.left and moved < count:
                moved += each.go_on(count - moved)
            if not each.left:
                partition.policy = each.new
        self.new.take_peak(self)
        return moved
