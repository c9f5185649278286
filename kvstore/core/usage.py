"""Usage: tell policies and filters which keys each request has used, in prompt order.

A server shows a prompt in pieces: what it loads, then what it stores, portion
by portion. `Chains` joins the pieces, separately for each KV cache group (the last
four bytes of a key). Filters are told of a key once per request. Policies learn
which key follows which before they see the chunks, and the whole prompt
when its request has ended.

All of it is advice. What is kept is bounded, even if a server never reports the end of its
requests: past `MAX_KEYS` keys the oldest requests are taken as ended, and of those that have
only asked so far, `MAX_ASKED` keys are kept.

`Uses` tells the policies of used chunks: whole prompts, tail first, a part in each step.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import methodcaller

from kvstore.core.chunk import READY
from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool
from kvstore.core.request import Chain, Request, Requests
from kvstore.core.residency.base import TierView
from kvstore.core.step_budget import Budget
from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import EvictionPolicy
from kvstore.policies.table import OrderedTable
from kvstore.types import Flow, group_of

__all__ = ["MAX_ASKED", "MAX_KEYS", "MOST_UNTOLD", "Chains", "Uses", "link"]

MOST_UNTOLD = 1000
"""Most requests whose loads the policies were not told of yet."""


def link(policy: EvictionPolicy, keys: Sequence[bytes]) -> None:
    """Tell the policy that `keys` follow one another in a prompt, each KV cache group by itself."""
    groups = dict.fromkeys(map(group_of, keys))
    for group in groups:
        policy.link(keys if len(groups) == 1 else [key for key in keys if group_of(key) == group])


class Uses:
    """Tells the policies of uses, later than they happen but before the policies decide.

    Attributes:
        queued: prompts that were queued to be told to a tier. told: those of them that were told.

    Args:
        budget: bounds the uses that a step tells.
    """

    def __init__(
        self, pool: HostPool, tiers: Sequence[TierView], victims: Victims, budget: Budget
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._victims = victims
        self._budget = budget
        self._exclusive = [tier for tier in tiers if tier.flow is Flow.EXCLUSIVE]
        # What requests have loaded, oldest first: keys in host memory, keys on tiers.
        self._loaded: OrderedDict[Request, tuple[list[bytes], list[bytes]]] = OrderedDict()
        # Keys used on tiers, of prompts that host memory's policy was told of.
        self._due: deque[tuple[TierView, list[bytes]]] = deque()
        self._due_keys = 0
        self.queued = self.told = 0

    def __bool__(self) -> bool:
        """Whether there are uses that the policies were not told of."""
        return bool(self._loaded or self._due)

    @property
    def due(self) -> bool:
        """Whether uses are due that need not wait for the rest of their prompts."""
        return bool(self._due)

    def loaded(self, request: Request, host_keys: list[bytes], tier_keys: list[bytes]) -> None:
        """Note keys that the request has used, to be told as one prompt with its store, if any."""
        self.end(request)
        self._loaded[request] = host_keys, tier_keys
        if len(self._loaded) > MOST_UNTOLD:
            self.tell_all()

    def take(self, request: Request) -> tuple[list[bytes], list[bytes]]:
        """Take the request's uses that were not told yet, for the caller to tell the policies."""
        return self._loaded.pop(request, ([], []))

    def end(self, request: Request) -> None:
        """Tell the policies what the request has used."""
        host_keys, tier_keys = self.take(request)
        if tier_keys:
            self.tell(host_keys, tier_keys)

    def tell_host(self, host_keys: Collection[bytes], tier_keys: Sequence[bytes]) -> None:
        """Do as `tell`, but tell the policies of tiers as steps allow."""
        self._tell_host(host_keys)
        for tier in self._tiers:
            # Chunks that reach the tier later are not used by this.
            here = list(filter(tier.entries.__contains__, tier_keys))
            if here:
                self._due.append((tier, here))
                self._due_keys += len(here)
                self.queued += 1

    def tell_all(self) -> None:
        """Tell the policies every use so far."""
        self._tell_due(self._due_keys)
        while self._loaded:
            _, (host_keys, tier_keys) = self._loaded.popitem(last=False)
            self.tell(host_keys, tier_keys)

    def tell_some(self) -> None:
        """Tell the policies as many uses as this step may, tail first for each prompt."""
        if not self:
            return
        many = self._due_keys + sum(len(tier_keys) for _, tier_keys in self._loaded.values())
        left = self._budget.told
        most = max(left, many // 8 if left > 0 else 0)
        if self._due and most > 0:
            told = self._tell_due(most)
            most -= told
            self._budget.tell(told)
        while self._loaded and most > 0:
            request, (host_keys, tier_keys) = next(iter(self._loaded.items()))
            count = len(tier_keys)
            if count > most:
                # Its rest stays first in the queue.
                count = most
                rest, tail = tier_keys[:-most], tier_keys[-most:]
                among = frozenset(tail)
                later = [key for key in host_keys if key not in among]
                self._loaded[request] = later, rest
                self.tell(host_keys[len(later) :], tail)
            else:
                self.tell(*self.take(request))
            most -= count
            self._budget.tell(count)

    def tell(self, host_keys: Collection[bytes], tier_keys: Collection[bytes]) -> None:
        """Tell the policies that these, in prefix order, were used in host memory and on tiers."""
        self._tell_host(host_keys)
        tail_first = [*tier_keys][::-1]
        for tier in self._tiers:
            tier.index.touch(tail_first)

    def _tell_host(self, host_keys: Collection[bytes]) -> None:
        pool = self._pool
        tail_first = [*host_keys][::-1]
        for tier in self._exclusive:
            for key in tail_first:
                chunk = pool.chunks.get(key)
                # The store that fills it may fail.
                here = chunk is not None and chunk.state >= READY
                if here and key in tier.entries and key not in tier.index.reading:
                    tier.forget((key,))
        self._victims.let_loose()
        pool.touch(tail_first)

    def _tell_due(self, most: int) -> int:
        """Tell tiers up to `most` keys that are due, each prompt tail first; returns how many."""
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
        """Forget uses that were not told."""
        self._loaded.clear()
        self._due.clear()
        self._due_keys = 0
        self.told = self.queued


MAX_KEYS = 2**20
"""Most keys that are kept of requests that have not ended, or whose chunks are being written."""

MAX_ASKED = 2**16
"""Most keys that are kept of requests that have asked and used nothing so far."""

MOST_FOLLOWED = 2**17
"""Most chunks of which it is known what follows them: those that were used last."""

_SEVERAL = 0
"""In the place of the hash of the key that follows: there are several."""


class Chains:
    """The chains of keys that requests use, for policies and filters: see the module's text."""

    def __init__(
        self, pool: HostPool, tiers: Sequence[TierView], requests: Requests, uses: Uses
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._uses = uses
        self._all_tiers = tiers
        self._targets = [target for tier in tiers if (target := tier.target) is not None]
        filters = [pool.admission, *(tier.admission for tier in tiers)]
        self.filters: list[AdmissionFilter] = [each for each in filters if each is not None]
        self._listener: Callable[[Sequence[Sequence[bytes]]], None] | None = None
        # Keys of chains, and of requests that have used nothing so far.
        self._keys = self._asked_keys = 0
        self._settling: deque[tuple[list[int], int, Chain]] = deque()
        """Chains whose chunks are on their way to slower tiers, with the copies to wait for and
        the uses that tiers must be told of before."""
        self._settling_keys = 0
        # By the hash of a key that of the key which follows it; None until somebody asks for it.
        self._followers: OrderedTable[int, int] | None = None
        self.policies_changed()

    def policies_changed(self) -> None:
        """Take in that a policy was replaced. Advice that waits is dropped."""
        self._settling.clear()
        self._settling_keys = 0
        policies = [self._pool.policy, *(tier.index.policy for tier in self._all_tiers)]
        self._tiers = [t for t in self._targets if t.index.policy.overrides("settle")]
        self._linked = [policy.link for policy in policies if policy.overrides("link")]

    def listen(self, listener: Callable[[Sequence[Sequence[bytes]]], None]) -> None:
        """Tell it the keys of each request that ends, one sequence for each group."""
        self._listener = listener

    def in_order(self, request: Request) -> list[bytes]:
        """Return what its hints speak of in prompt order: a load may begin in the middle."""
        if not request.named:
            return []
        if request.reordered:
            return request.sorted(request.named)
        chain = request.chain
        groups = [] if chain is None else chain.groups.values()
        place = {key: number for keys in groups for number, key in enumerate(keys)}
        return sorted(request.named, key=lambda key: place.get(key, len(place)))

    def unshared(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of a prompt without those that other prompts are known to share.

        Where another goes on differently after a chunk, or after the last, they share it and what
        is before it, in its KV cache group. What follows what is noted from the first call on.
        """
        if self._followers is None:
            self._followers = OrderedTable()
        shared: dict[bytes, int] = {}
        after: dict[bytes, int] = {}
        for place in range(len(keys) - 1, -1, -1):
            key, group = keys[place], group_of(keys[place])
            known = self._followers.get(hash(key))
            # Another prompt goes on differently, or after the end of this one.
            if known is not None and known != after.get(group):
                shared.setdefault(group, place)
            after[group] = hash(key)
        return [key for place, key in enumerate(keys) if place > shared.get(group_of(key), -1)]

    def count(self, request: Request, keys: Sequence[bytes]) -> None:
        """Tell the filters which of `keys`, which the request asked for, are new for it."""
        fresh = request.count(keys)
        if not fresh:
            return
        if request.chain is None:
            self._asked_keys += len(fresh)
            while self._asked_keys > MAX_ASKED:
                oldest = self._requests.oldest(lambda one: one.chain is None and one.counted)
                if oldest is None or oldest is request:
                    break
                self._asked_keys -= oldest.forget_counted()
                self._drop(oldest)
        for each in self.filters:
            each.asked(fresh)

    def extend(self, request: Request, keys: Sequence[bytes]) -> None:
        """Add `keys`, in prompt order, which the request is about to use."""
        if not keys:
            return
        if self.filters:
            self.count(request, keys)
        chain = request.chain
        if chain is None:
            self._asked_keys -= len(request.counted)
            chain = request.begin_chain()
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
        while self._keys > MAX_KEYS:
            oldest = self._requests.oldest(lambda one: one.chain or one.ended)
            if oldest is None or oldest is request:
                break
            self._forget_ended(oldest)
            self.end(oldest)
            self._drop(oldest)

    def depths(self, request: Request) -> Mapping[bytes, int]:
        """Return for each key that the request has used how many it had used before it."""
        return request.chain.known if request.chain is not None else {}

    def storing(self, request: Request, count: int) -> None:
        """Add `count`, which may be negative, to the request's chunks that are being written."""
        request.store(count)
        ended = request.ended
        if ended is not None and request.storing <= 0:
            self._forget_ended(request)
            self._settle_later(ended)

    def end(self, request: Request) -> None:
        """End the request's chain, and tell the policies of it."""
        chain = request.chain
        if chain is None:
            self._asked_keys -= request.forget_counted()
            return
        self._forget_ended(request)
        groups = list(chain.groups.values())
        prompts, ends = groups, None
        if groups and request.reordered:
            # One prompt, so that the tails of all groups leave together.
            groups = [request.sorted(keys) for keys in groups]
            prompts = [request.sorted(itertools.chain.from_iterable(groups))]
            ends = [keys[-1] for keys in groups]
        chain.end(prompts, ends)
        if self._listener is not None:
            self._listener(groups)
        for keys in prompts:
            self._pool.policy.settle(keys, ends)
        # Some of its chunks may still be being written.
        waits = bool(self._tiers) and request.storing > 0
        request.end_chain(chain if waits else None)
        if not waits:
            self._keys -= len(chain.known)
            if self._tiers:
                self._settle_later(chain)

    def settle(self, most: int) -> None:
        """Tell slower tiers of ended requests whose chunks have arrived there, or will not arrive.

        Args:
            most: about how many keys to tell now; the rest is told later.
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
        self._settling.clear()
        self._keys = self._asked_keys = self._settling_keys = 0
        if self._followers is not None:
            self._followers.clear()
        for filter in self.filters:
            filter.clear()

    def _drop(self, request: Request) -> None:
        # One that was looked up in this step is dropped at its end.
        if request.asked_step != self._pool.step:
            self._requests.drop_if_idle(request)

    def _forget_ended(self, request: Request) -> None:
        if request.ended is not None:
            self._keys -= len(request.ended.known)
            request.forget_ended()

    def _settle_later(self, chain: Chain) -> None:
        marks = [tier.copies_queued for tier in self._tiers]
        self._settling.append((marks, self._uses.queued, chain))
        self._settling_keys += len(chain.known)

    def _append(
        self, chain: Chain, group: bytes, keys: Sequence[bytes], fresh: list[bytes]
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
        if self._followers is not None:
            self._note_followers(self._followers, keys if after is None else [after, *keys])

    def _note_followers(self, followers: OrderedTable[int, int], keys: Sequence[bytes]) -> None:
        for above, key in itertools.pairwise(map(hash, keys)):
            known = followers.pop(above, key)
            followers[above] = key if known == key else _SEVERAL
        while len(followers) > MOST_FOLLOWED:
            followers.popitem(last=False)
