"""What every request has used, in the order of its prompt, for policies and filters.

A server shows a prompt in pieces: what it loads, then what it stores, portion
by portion. Here the pieces are put together, for each KV cache group (the last
four bytes of a key) on its own, and told to those who care: filters hear of a
key once per request, policies learn which key follows which before they see it,
and how the whole prompt went when its request has ended.

All of it is advice. What is kept is bounded, also when a server never tells the end of its
requests: past `MAX_KEYS` keys or `MAX_REQUESTS` requests the oldest are taken for ended, and of
those that have only asked so far, `MAX_ASKED` keys are kept.

What the policies hear of the use of chunks: whole prompts, tail first, a bit in each step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import methodcaller

from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool
from kvstore.core.request import Positions
from kvstore.core.residency.base import TierView
from kvstore.core.step_budget import Budget
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import EvictionPolicy
from kvstore.types import Flow, group_of

__all__ = ["MAX_ASKED", "MAX_KEYS", "MAX_REQUESTS", "MOST_UNTOLD", "Chains", "Uses"]

MOST_UNTOLD = 1000
"""Requests whose loads the policies have not heard of."""

Loaded = tuple[list[bytes], list[bytes]]
"""What a request has loaded: what was used in host memory, what was used on tiers."""


class Uses:
    """Tells the policies of uses, later than they happen but before the policies decide.

    Attributes:
        queued: prompts of which a tier was to hear as steps allow. told: those of which it has.

    Args:
        budget: how many uses a step tells.
    """

    def __init__(
        self, pool: HostPool, tiers: Sequence[TierView], victims: Victims, budget: Budget
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._victims = victims
        self._budget = budget
        self._exclusive = [tier for tier in tiers if tier.flow is Flow.EXCLUSIVE]
        self._untold: dict[str, Loaded] = {}
        # What was used on tiers, of prompts of which host memory's policy has heard.
        self._due: deque[tuple[TierView, list[bytes]]] = deque()
        self._due_keys = 0
        self.queued = self.told = 0

    def __bool__(self) -> bool:
        """Whether there are uses of which the policies have not heard."""
        return bool(self._untold or self._due)

    @property
    def due(self) -> bool:
        """Whether there are uses whose requests bring nothing that should be told with them."""
        return bool(self._due)

    def loaded(self, request_id: str, host_keys: list[bytes], tier_keys: list[bytes]) -> None:
        """The request has used these. Its store may come, and then they are told as one prompt."""
        self.end(request_id)
        self._untold[request_id] = (host_keys, tier_keys)
        if len(self._untold) > MOST_UNTOLD:
            self.tell_all()

    def take(self, request_id: str) -> Loaded:
        """What the request has used and the policies have not heard of: the caller tells them."""
        return self._untold.pop(request_id, ([], []))

    def end(self, request_id: str) -> None:
        """The policies hear of what the request has used."""
        loaded = self._untold.pop(request_id, None)
        if loaded is not None:
            self.tell(*loaded)

    def tell_host(self, host_keys: Collection[bytes], tier_keys: Sequence[bytes]) -> None:
        """As `tell`, but the policies of tiers hear as steps allow."""
        self._tell_host(host_keys)
        for tier in self._tiers:
            # What comes to it later is not used by this.
            here = list(filter(tier.entries.__contains__, tier_keys))
            if here:
                self._due.append((tier, here))
                self._due_keys += len(here)
                self.queued += 1

    def tell_all(self) -> None:
        """The policies hear of every use so far."""
        self._tell_due(self._due_keys)
        if self._untold:
            untold, self._untold = self._untold, {}
            for host_keys, tier_keys in untold.values():
                self.tell(host_keys, tier_keys)

    def tell_some(self) -> None:
        """The policies hear of as many uses as this step may tell, of each prompt tail first."""
        untold = self._untold
        if not untold and not self._due:
            return
        many = self._due_keys + sum(len(tier_keys) for _, tier_keys in untold.values())
        left = self._budget.told
        most = max(left, many // 8 if left > 0 else 0)
        if self._due and most > 0:
            told = self._tell_due(most)
            most -= told
            self._budget.tell(told)
        while untold and most > 0:
            request_id = next(iter(untold))
            host_keys, tier_keys = untold.pop(request_id)
            if len(tier_keys) > most:
                head = len(tier_keys) - most
                tail = frozenset(tier_keys[head:])
                later = [key for key in host_keys if key not in tail]
                # It stays the first in turn.
                self._untold = untold = {request_id: (later, tier_keys[:head]), **untold}
                host_keys, tier_keys = host_keys[len(later) :], tier_keys[head:]
            self.tell(host_keys, tier_keys)
            most -= len(tier_keys)
            self._budget.tell(len(tier_keys))

    def tell(self, host_keys: Collection[bytes], tier_keys: Collection[bytes]) -> None:
        """The policies hear that these, in prefix order, were used in host memory and on tiers."""
        self._tell_host(host_keys)
        tail_first = [*tier_keys][::-1]
        for tier in self._tiers:
            tier.index.touch(tail_first)

    def _tell_host(self, host_keys: Collection[bytes]) -> None:
        pool = self._pool
        tail_first = [*host_keys][::-1]
        for tier in self._exclusive:
            for key in tail_first:
                if key in tier.entries and key in pool.chunks and key not in tier.index.reading:
                    tier.forget((key,))
        self._victims.let_loose()
        pool.touch(tail_first)

    def _tell_due(self, most: int) -> int:
        """Tiers hear of what is due, up to `most` keys, of each prompt tail first; how many."""
        left = most
        due = self._due
        while due and left > 0:
            tier, keys = due[0]
            tail = keys[-left:]
            tier.index.touch(reversed(tail))
            left -= len(tail)
            if len(tail) == len(keys):
                due.popleft()
                self.told += 1
            else:
                del keys[-len(tail) :]
        self._due_keys -= most - left
        return most - left

    def reset(self) -> None:
        """Forget what was not told."""
        self._untold.clear()
        self._due.clear()
        self._due_keys = 0
        self.told = self.queued


MAX_KEYS = 2**20
"""Most keys that are kept of requests that have not ended, and of those that have."""

MAX_REQUESTS = 2**14
"""Most requests of either kind, and most that have used nothing so far."""

MAX_ASKED = 2**16
"""Most keys that are kept of requests that have asked and used nothing so far."""


class _Chain:
    """One request's keys.

    Attributes:
        groups: for each KV cache group its keys, in prompt order.
        prompts: what policies hear at its end, in prompt order: one for each group, or one for
            all, whose ends are `ends`.
        known: all keys in `groups`, each with how many were known before it.
        counted: keys of which the filters have heard.
        storing: chunks of this request that are being written by the device.
    """

    __slots__ = ("counted", "ends", "groups", "known", "prompts", "storing")

    def __init__(self, counted: set[bytes]) -> None:
        self.groups: dict[bytes, list[bytes]] = {}
        # Not a set, through whose keys the garbage collector would look again and again.
        self.known: dict[bytes, int] = {}
        self.counted = counted
        self.storing = 0
        self.prompts: list[list[bytes]] = []
        self.ends: list[bytes] | None = None


class Chains:
    """Tells policies the uses of chunks: whole prompts, tail first, a part in each step."""

    def __init__(
        self, pool: HostPool, tiers: Sequence[TierView], positions: Positions, uses: Uses
    ) -> None:
        self._positions = positions
        self._uses = uses
        policies = [pool.policy, *(tier.index.policy for tier in tiers)]
        filters = [pool.admission, *(tier.admission for tier in tiers)]
        self._host = pool.policy
        self._tiers = [tier for tier in tiers if _overrides(tier.index.policy, "settle")]
        self._linked = [policy.link for policy in policies if _overrides(policy, "link")]
        self.filters: list[AdmissionFilter] = [each for each in filters if each is not None]
        self._listener: Callable[[Sequence[Sequence[bytes]]], None] | None = None
        self._chains: dict[str, _Chain] = {}
        self._keys = 0
        self._asked: dict[str, set[bytes]] = {}
        """Keys of which the filters have heard, of requests that have used nothing so far."""
        self._asked_keys = 0
        self._ended: dict[str, _Chain] = {}
        """Requests that have ended while chunks of theirs were being written."""
        self._ended_keys = 0
        self._settling: deque[tuple[list[int], int, _Chain]] = deque()
        """Those whose chunks are on their way to slower tiers, with the copies to wait for, and
        the uses of which tiers shall have heard before."""
        self._settling_keys = 0

    def listen(self, listener: Callable[[Sequence[Sequence[bytes]]], None]) -> None:
        """Tell it the keys of each request that ends, one sequence for each group."""
        self._listener = listener

    def count(self, request_id: str, keys: Sequence[bytes]) -> None:
        """The request asked for `keys`: the filters hear of those that are new for it."""
        chain = self._chains.get(request_id)
        counted = chain.counted if chain is not None else self._asked.get(request_id, set())
        fresh = [key for key in dict.fromkeys(keys) if key not in counted]
        if not fresh:
            return
        counted.update(fresh)
        if chain is None:
            self._remember_asked(request_id, counted, len(fresh))
        for each in self.filters:
            each.asked(fresh)

    def _remember_asked(self, request_id: str, counted: set[bytes], fresh: int) -> None:
        asked = self._asked
        asked.pop(request_id, None)
        asked[request_id] = counted
        self._asked_keys += fresh
        while len(asked) > MAX_REQUESTS or (self._asked_keys > MAX_ASKED and len(asked) > 1):
            self._asked_keys -= len(asked.pop(next(iter(asked))))

    def extend(self, request_id: str, keys: Sequence[bytes]) -> None:
        """The request is about to use `keys`, in prompt order."""
        if not keys:
            return
        if self.filters:
            self.count(request_id, keys)
        chain = self._chains.get(request_id)
        if chain is None:
            counted = self._asked.pop(request_id, set())
            self._asked_keys -= len(counted)
            chain = self._chains[request_id] = _Chain(counted)
        known = chain.known
        fresh = [key for key in keys if key not in known] if known else list(keys)
        if not fresh:
            return
        known.update(zip(fresh, itertools.count(len(known))))
        self._keys += len(fresh)
        group = group_of(fresh[0])
        if all(map(methodcaller("endswith", group), keys)):
            self._append(chain, group, keys, fresh)
        else:
            for group in dict.fromkeys(group_of(key) for key in fresh):
                self._append(
                    chain,
                    group,
                    [key for key in keys if group_of(key) == group],
                    [key for key in fresh if group_of(key) == group],
                )
        chains = self._chains
        while len(chains) > MAX_REQUESTS or (self._keys > MAX_KEYS and len(chains) > 1):
            self.end(next(iter(chains)))

    def depths(self, request_id: str) -> Mapping[bytes, int]:
        """For each key that the request has used, how many it had used before."""
        chain = self._chains.get(request_id)
        return chain.known if chain is not None else {}

    def storing(self, request_id: str, count: int) -> None:
        """`count` more chunks of the request are being written (less, when negative)."""
        chain = self._chains.get(request_id) or self._ended.get(request_id)
        if chain is None:
            return
        chain.storing += count
        if chain.storing <= 0 and self._ended.get(request_id) is chain:
            self._take_ended(request_id)
            self._settle_later(chain)

    def end(self, request_id: str) -> None:
        """The request uses nothing any more."""
        self._asked_keys -= len(self._asked.pop(request_id, ()))
        chain = self._chains.pop(request_id, None)
        if chain is None:
            return
        self._keys -= len(chain.known)
        groups = list(chain.groups.values())
        chain.prompts = groups
        if groups and self._positions.known(request_id):
            # One prompt, so that the tails of all groups leave together.
            groups = [self._positions.sorted(request_id, keys) for keys in groups]
            prompt = self._positions.sorted(request_id, itertools.chain.from_iterable(groups))
            chain.prompts, chain.ends = [prompt], [keys[-1] for keys in groups]
        if self._listener is not None:
            self._listener(groups)
        for keys in chain.prompts:
            self._host.settle(keys, chain.ends)
        if self._tiers:
            if chain.storing > 0:
                self._end_later(request_id, chain)
            else:
                self._settle_later(chain)

    def settle(self, most: int) -> None:
        """Tell slower tiers of requests whose chunks have arrived there, or will not come.

        Args:
            most: keys of such requests to tell of now; the rest is told later.
        """
        tiers, settling = self._tiers, self._settling
        while settling and most > 0:
            marks, used, chain = settling[0]
            if self._settling_keys <= MAX_KEYS:
                if self._uses.told < used:
                    return
                for tier, mark in zip(tiers, marks, strict=True):
                    if tier.copies_ended < mark:
                        return
            settling.popleft()
            self._settling_keys -= len(chain.known)
            most -= len(chain.known)
            for tier in tiers:
                for keys in chain.prompts:
                    tier.index.policy.settle(keys, chain.ends)

    def reset(self) -> None:
        """Forget every request."""
        for each in (self._chains, self._asked, self._ended, self._settling):
            each.clear()
        self._keys = self._asked_keys = self._ended_keys = self._settling_keys = 0
        for filter in self.filters:
            filter.clear()

    def _end_later(self, request_id: str, chain: _Chain) -> None:
        """The request has ended, the writing of its chunks has not."""
        ended = self._ended
        self._take_ended(request_id)
        ended[request_id] = chain
        self._ended_keys += len(chain.known)
        while len(ended) > MAX_REQUESTS or (self._ended_keys > MAX_KEYS and len(ended) > 1):
            self._take_ended(next(iter(ended)))

    def _take_ended(self, request_id: str) -> None:
        chain = self._ended.pop(request_id, None)
        if chain is not None:
            self._ended_keys -= len(chain.known)

    def _settle_later(self, chain: _Chain) -> None:
        marks = [tier.copies_queued for tier in self._tiers]
        self._settling.append((marks, self._uses.queued, chain))
        self._settling_keys += len(chain.known)

    def _append(
        self, chain: _Chain, group: bytes, keys: Sequence[bytes], fresh: list[bytes]
    ) -> None:
        """Put `fresh`, the unknown ones of `keys`, where they belong in the group's chain."""
        old = chain.groups.get(group)
        if old is None:
            chain.groups[group] = fresh
            self._link(fresh, None)
            return
        first = old[0]
        if keys[0] == fresh[0] and first in keys:
            # A load may begin in the middle of a prompt whose head is stored later.
            front = list(keys[: list(keys).index(first)])
            self._link([*front, first], None)
            old[:0] = front
            fresh = fresh[len(front) :]
        if fresh:
            self._link(fresh, old[-1])
            old += fresh

    def _link(self, keys: Sequence[bytes], after: bytes | None) -> None:
        for link in self._linked:
            link(keys, after)


def _overrides(policy: EvictionPolicy, hook: str) -> bool:
    return getattr(type(policy), hook) is not getattr(EvictionPolicy, hook)
