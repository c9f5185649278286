"""Tenants: a policy that gives each tenant a share of a tier, and a policy of its own.

Each tenant has a partition, its own or one with others: see `shares`.

Room for a chunk is taken, in this order,

1. from partitions that have more than their maximum,
2. from partitions that have not been used for a while, down to what is guaranteed to them,
3. from the others, down to what is guaranteed to them, so that what they have beyond that becomes
   proportional to their weights (max-min fairness). The one that asks counts with what it asks for.

Tenants without a name have one share together, divided among those of their partitions that have
chunks.

So a tenant may fill what nobody else wants, and gives it back when they do. A partition never gives
to one that would have more than it, by weight, nor below its guarantee to any other: rather than
that, nothing is evicted. Only who has nothing gets one chunk in any case.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import groupby

from kvstore.policies.base import EvictionPolicy, Protected, UntilLater
from kvstore.policies.shares import OTHERS, TAG_BYTES, Places, Shares, level, part_of

__all__ = ["Tenants"]

MOST_PLANS = 4
"""How often a search for chunks is planned anew because a partition had fewer than it seemed."""

PEAK_SECONDS = 60.0
"""Guarantees are parts of what was there at most in the last one or two periods of this length."""

MOST_COUNTED = 64
"""Keys of which each is looked at, to find how many of them there is room for."""


class _Partition:
    """The chunks of one tenant, or of several.

    Attributes:
        guaranteed: chunks that others do not take. most: chunks beyond which it has too many.
        weight: of the rest. All three are as `Tenants` has shared them out last.
    """

    __slots__ = ("guaranteed", "most", "policy", "used_at", "weight")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.guaranteed = self.most = 0
        self.weight = 1.0
        self.used_at = float("-inf")


class Tenants(EvictionPolicy):
    """See the module's text. It is not registered: `build_policy` makes it.

    Attributes:
        partitions: the chunks of each tenant. places: which of them a key belongs to.

    Args:
        make: makes the policy of one partition, for a capacity.
        clock: seconds since whenever.
    """

    name = "tenants"
    shared = True
    # The most chunks that there were in this period, and in the one before.
    _peak = _peak_before = 0
    _peak_until = -math.inf
    # What `_kept` has returned last, and for which total.
    _kept_of: tuple[int, list[int]] = (-1, [])

    def __init__(
        self,
        capacity: int,
        make: Callable[[int], EvictionPolicy],
        shares: Shares,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(capacity)
        self.clock = clock
        self.idle_s = shares.idle_s
        self.places = Places(shares)
        self.partitions = [
            _Partition(make(self.places.expected(place, capacity)))
            for place in range(len(self.places.shares))
        ]
        self.effort = 1.2 * self.partitions[0].policy.effort

    def _partition(self, key: bytes) -> _Partition:
        return self.partitions[self.places.of(key)]

    def owner_of(self, key: bytes) -> int:
        return self.places.of(key)

    def tenant_of(self, key: bytes) -> str:
        return self.places.names.get(key[:TAG_BYTES], OTHERS)

    def tenants(self) -> dict[str, int]:
        names = list(self.places.names.values())
        sizes = [len(each.policy) for each in self.partitions]
        return {**dict(zip(names, sizes, strict=False)), OTHERS: sum(sizes[len(names) :])}

    def _runs(self, keys: Iterable[bytes]) -> Iterator[tuple[_Partition, list[bytes]]]:
        """Split `keys` where the partition changes."""
        for partition, run in groupby(keys, self._partition):
            yield partition, list(run)

    @property
    def excess(self) -> int:
        sizes = [len(each.policy) for each in self.partitions]
        return sum(sizes) - sum(self._limited(sizes))

    @cached_property
    def _maximal(self) -> list[int]:
        """Chunks of each share at most; asked for in every step."""
        return [max(1, part_of(share.maximal, self.capacity)) for share, _ in self.places.shares]

    def _limited(self, sizes: Sequence[int]) -> list[int]:
        """Return how many of its chunks each partition may have."""
        return self.places.within(self._maximal, sizes)

    def _share_out(
        self, total: int, asker: _Partition | None = None, coming: int = 0
    ) -> dict[_Partition, int]:
        """Set what each partition may have; returns how many chunks it has, or is to get.

        Args:
            total: of what guarantees are parts. coming: how many chunks the asker is to get.
        """
        places, partitions = self.places, self.partitions
        sizes = [len(each.policy) for each in partitions]
        if asker is not None:
            sizes[partitions.index(asker)] += coming
        guaranteed = places.within(self._kept(total), sizes)
        limited, weights = self._limited(sizes), places.weights(sizes)
        for place, each in enumerate(partitions):
            each.guaranteed, each.most = guaranteed[place], limited[place]
            each.weight = weights[place]
        return dict(zip(partitions, sizes, strict=True))

    def _kept(self, total: int) -> list[int]:
        """Return how many of `total` chunks are guaranteed to each share."""
        if self._kept_of[0] != total:
            shares = self.places.shares
            self._kept_of = total, [part_of(share.guaranteed, total) for share, _ in shares]
        return self._kept_of[1]

    @property
    def parts(self) -> list[EvictionPolicy]:
        return [each.policy for each in self.partitions]

    def reach(self, keys: Sequence[bytes]) -> int:
        count = len(keys)
        if count > MOST_COUNTED:
            # What is public comes first, and the rest is of one tenant.
            first = self.places.of(keys[0])
            public = bisect_left(keys, True, key=lambda key: self.places.of(key) != first)
            of_first = self._reach(self.partitions[first])
            if public == count or of_first < public:
                return of_first
            return public + self._reach(self._partition(keys[-1]))
        left: dict[_Partition, int] = {}
        for reached, key in enumerate(keys):
            partition = self._partition(key)
            if partition not in left:
                left[partition] = self._reach(partition)
            if not left[partition]:
                return reached
            left[partition] -= 1
        # What follows would be of the last one.
        return count + left[self._partition(keys[-1])]

    def _reach(self, asker: _Partition) -> int:
        sizes = {each: len(each.policy) for each in self.partitions}
        free = max(0, self.capacity - sum(sizes.values()))
        others = sum(sizes.values()) - sizes[asker]
        total = sum(sizes.values()) + free
        plan = self._plan(others, asker, others + free, (), total=total)
        given = sum(count for each, count in plan if each is not asker)
        wanted = [self.capacity if each is asker else len(each.policy) for each in self.partitions]
        most = self._limited(wanted)[self.partitions.index(asker)]
        reach = min(most, sizes[asker] + free + given)
        # Chunks are not divided: of fewer that come each of the others gives one less.
        while given and reach > free:
            plan = self._plan(reach - free, asker, reach, (), total=self._total())
            short = reach - free - sum(count for _, count in plan)
            if short <= 0:
                break
            reach -= short
        return max(1, reach)

    # -- uses ------------------------------------------------------------------------------

    def insert(self, key: bytes) -> None:
        partition = self._partition(key)
        partition.used_at = self.clock()
        partition.policy.insert(key)

    def touch(self, key: bytes) -> None:
        partition = self._partition(key)
        partition.used_at = self.clock()
        partition.policy.touch(key)

    def remove(self, key: bytes) -> None:
        self._partition(key).policy.remove(key)

    def release(self, keys: Iterable[bytes]) -> None:
        for partition, run in self._runs(keys):
            partition.policy.release(run)

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:
        for partition, run in self._runs(keys):
            partition.policy.link(run, after)
            after = run[-1]

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        for partition, run in self._runs(keys):
            its = None if ends is None else [key for key in ends if key in run]
            partition.policy.settle(run, its)

    def cool(self, keys: Iterable[bytes]) -> None:
        for partition, run in self._runs(keys):
            partition.policy.cool(run)

    # -- eviction ----------------------------------------------------------------------------

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        victims = self._take(count, protected, incoming)
        if sum(len(found) for _, found in victims) == count:
            return [key for _, found in victims for key in found]
        for partition, found in victims:
            for key in found:
                partition.policy.insert(key)
            partition.policy.cool(found)
        return None

    def evict_up_to(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        victims = self._take(count, protected, incoming)
        return [key for _, found in victims for key in found]

    def _take(
        self, count: int, protected: Protected, incoming: Sequence[bytes]
    ) -> list[tuple[_Partition, list[bytes]]]:
        """Evict up to `count` keys; returns those of each partition."""
        # One for all: what is taken must not make guarantees smaller.
        total = self._total() if incoming else len(self)
        of: dict[_Partition, list[bytes]] = {}
        for key in incoming:
            of.setdefault(self._partition(key), []).append(key)
        if len(of) < 2:
            asker = next(iter(of), None)
            return self._take_for(asker, count, protected, incoming, total)
        victims: list[tuple[_Partition, list[bytes]]] = []
        short = count
        for asker, its in of.items():
            found = self._take_for(asker, min(short, len(its)), protected, its, total)
            victims += found
            short -= sum(len(keys) for _, keys in found)
        if count > len(incoming):
            # Nobody asks for these.
            victims += self._take_for(None, min(short, count - len(incoming)), protected, (), total)
        return victims

    def _total(self) -> int:
        """Return how many chunks there were at most of late, of which guarantees are parts.

        Chunks that are being stored are not among those that are there now.
        """
        now, size = self.clock(), len(self)
        if now >= self._peak_until:
            fresh = now < self._peak_until + PEAK_SECONDS
            self._peak_before = self._peak if fresh else 0
            self._peak, self._peak_until = size, now + PEAK_SECONDS
        self._peak = max(self._peak, size)
        return min(self.capacity, max(self._peak, self._peak_before))

    def take_peak(self, other: Tenants) -> None:
        """Have the guarantees of a policy in whose place this one comes."""
        self._peak, self._peak_before = other._peak, other._peak_before
        self._peak_until = other._peak_until

    def _take_for(
        self,
        asker: _Partition | None,
        count: int,
        protected: Protected,
        incoming: Sequence[bytes],
        total: int,
    ) -> list[tuple[_Partition, list[bytes]]]:
        ask = UntilLater(protected)
        victims: list[tuple[_Partition, list[bytes]]] = []
        exhausted: set[_Partition] = set()
        # No more can come than there is room for, whatever is offered.
        short, free = count, max(0, self.capacity - len(self))
        coming = max(count, min(len(incoming), count + free))
        for attempt in range(MOST_PLANS):
            if short <= 0 or ask.later:
                break
            # The last plan names all that may give anything.
            wide = attempt == MOST_PLANS - 1
            plan = self._plan(short, asker, coming, exhausted, wide=wide, total=total)
            if not plan:
                break
            for partition, most in plan:
                wanted = min(most, short)
                if wanted <= 0 or ask.later:
                    break
                known = incoming if partition is asker else ()
                found = partition.policy.evict_up_to(wanted, ask, known)
                victims.append((partition, found))
                short -= len(found)
                if len(found) < wanted:
                    exhausted.add(partition)
        nothing = count > 0 and short == count
        if nothing and asker is not None and not (ask.later or len(asker.policy)):
            # One chunk may be more than its part, where there are few; nobody gets none at all.
            victims += self._take_one(asker, ask, total)
        return victims

    def _take_one(
        self, asker: _Partition, protected: Protected, total: int
    ) -> list[tuple[_Partition, list[bytes]]]:
        """Evict one chunk of the other that has most beyond its guarantee, by weight."""
        self._share_out(total, asker, 1)
        spare = {
            each: (len(each.policy) - each.guaranteed) / each.weight
            for each in self.partitions
            if each is not asker
        }
        for each in sorted(spare, key=spare.__getitem__, reverse=True):
            found = each.policy.evict_up_to(1, protected) if spare[each] > 0 else []
            if found:
                return [(each, found)]
        return []

    def _plan(
        self,
        short: int,
        asker: _Partition | None,
        coming: int,
        exhausted: Collection[_Partition],
        *,
        wide: bool = False,
        total: int,
    ) -> list[tuple[_Partition, int]]:
        """Say how many of `short` chunks each partition gives; together they may be fewer.

        Args:
            coming: how many chunks the asker gets if it gets all.
            exhausted: those that have no more to give.
            wide: say instead how many each may give at most, in that order.
            total: of what guarantees are parts.
        """
        plan: dict[_Partition, int] = {}
        left = sys.maxsize if wide else short

        def give(partition: _Partition, most: int) -> None:
            nonlocal left
            there = len(partition.policy) - plan.get(partition, 0)
            wanted = min(left, most, there)
            if wanted > 0:
                plan[partition] = plan.get(partition, 0) + wanted
                left -= wanted

        able = [each for each in self.partitions if each not in exhausted]
        sizes = self._share_out(total, asker, coming)
        spare = {each: sizes[each] - each.guaranteed for each in self.partitions}
        for each in able:
            if sizes[each] > each.most:
                give(each, sizes[each] - each.most)
        since = self.clock() - self.idle_s
        idle = [each for each in able if each.used_at < since and each is not asker]
        for each in sorted(idle, key=lambda each: each.used_at):
            give(each, spare[each] - plan.get(each, 0))
        if left:
            floor = 0.0
            if asker is not None and (wide or asker in exhausted):
                floor = max(0.0, spare[asker] / asker.weight)
            rest = {each: more for each in able if (more := spare[each] - plan.get(each, 0)) > 0}
            weights = {each: each.weight for each in rest}
            for each, amount in level(rest, weights, total if wide else left, floor):
                give(each, amount)
        if left and asker is not None and asker not in exhausted:
            # A guarantee protects from others alone.
            give(asker, left)
        return list(plan.items())

    def trim(self, count: int, protected: Protected) -> list[bytes]:
        victims: list[bytes] = []
        sizes = [len(each.policy) for each in self.partitions]
        for each, most in zip(self.partitions, self._limited(sizes), strict=True):
            excess = min(len(each.policy) - most, count - len(victims))
            if excess > 0:
                victims += each.policy.evict_up_to(excess, protected)
        return victims

    # -- the rest ----------------------------------------------------------------------------

    def clear(self) -> None:
        for each in self.partitions:
            each.policy.clear()

    def __len__(self) -> int:
        return sum(len(each.policy) for each in self.partitions)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._partition(key).policy

    def order(self) -> Iterable[bytes]:
        """Coldest first within each partition; partitions are mixed evenly."""

        def placed(policy: EvictionPolicy) -> Iterator[tuple[float, bytes]]:
            most = max(1, len(policy))
            return ((at / most, key) for at, key in enumerate(policy.order()))

        return (key for _, key in merge(*map(placed, self.parts)))
