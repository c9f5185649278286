"""What every request has used, in the order of its prompt, for policies and filters.

A server shows a prompt in pieces: what it loads, then what it stores, portion
by portion. Here the pieces are put together, for each KV cache group (the last
four bytes of a key) on its own, and told to those who care: filters hear of a
key once per request, policies learn which key follows which before they see it,
and how the whole prompt went when its request has ended.

All of it is advice. What is kept is bounded: past `MAX_KEYS` keys the oldest
requests are taken for ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvstore.core.directory import TierDirectory
from kvstore.core.pool import HostPool
from kvstore.types import group_of
from policies.admission import AdmissionFilter
from policies.base import EvictionPolicy

__all__ = ["MAX_KEYS", "Chains"]

MAX_KEYS = 2**20
"""Most keys that are kept of requests that have not ended, and of those that have."""


class _Chain:
    """One request's keys.

    Attributes:
        groups: for each KV cache group its keys, in prompt order.
        known: all keys in `groups`.
        counted: keys of which the filters have heard.
        storing: chunks of this request that are being written by the device.
    """

    __slots__ = ("counted", "groups", "known", "storing")

    def __init__(self) -> None:
        self.groups: dict[bytes, list[bytes]] = {}
        self.known: set[bytes] = set()
        self.counted: set[bytes] = set()
        self.storing = 0


class Chains:
    """See the module's text."""

    def __init__(self, pool: HostPool, tiers: Sequence[TierDirectory]) -> None:
        places: list[HostPool | TierDirectory] = [pool, *tiers]
        self._host = pool.policy
        self._tiers = [tier for tier in tiers if _overrides(tier.policy, "settle")]
        self._linked = [place.policy.link for place in places if _overrides(place.policy, "link")]
        self.filters: list[AdmissionFilter] = [
            place.admission for place in places if place.admission is not None
        ]
        self.on_end: Callable[[Sequence[Sequence[bytes]]], None] | None = None
        """Told the keys of each request that has ended, one sequence for each group."""
        self._chains: dict[str, _Chain] = {}
        self._keys = 0
        self._ended: dict[str, _Chain] = {}
        """Requests that have ended while chunks of theirs were being written."""
        self._settling: deque[tuple[list[int], _Chain]] = deque()
        """Those whose chunks are on their way to slower tiers, with the copies to wait for."""
        self._settling_keys = 0

    def count(self, request_id: str, keys: Sequence[bytes]) -> None:
        """The request asked for `keys`: the filters hear of those they do not know from it yet."""
        counted = self._chain(request_id).counted
        fresh = [key for key in dict.fromkeys(keys) if key not in counted]
        if fresh:
            counted.update(fresh)
            for each in self.filters:
                each.asked(fresh)

    def extend(self, request_id: str, keys: Sequence[bytes]) -> None:
        """The request is about to use `keys`, in prompt order."""
        chain = self._chain(request_id)
        if self.filters:
            self.count(request_id, keys)
        known = chain.known
        fresh = [key for key in keys if key not in known]
        if not fresh:
            return
        known.update(fresh)
        self._keys += len(fresh)
        group = group_of(fresh[0])
        if all(key.endswith(group) for key in keys):
            self._append(chain, group, keys, fresh)
        else:
            for group in dict.fromkeys(group_of(key) for key in fresh):
                self._append(
                    chain,
                    group,
                    [key for key in keys if key.endswith(group)],
                    [key for key in fresh if key.endswith(group)],
                )
        while self._keys > MAX_KEYS and len(self._chains) > 1:
            self.end(next(iter(self._chains)))

    def storing(self, request_id: str, count: int) -> None:
        """`count` more chunks of the request are being written (less, when negative)."""
        chain = self._chains.get(request_id) or self._ended.get(request_id)
        if chain is None:
            return
        chain.storing += count
        if chain.storing <= 0 and self._ended.get(request_id) is chain:
            del self._ended[request_id]
            self._settle_later(chain)

    def end(self, request_id: str) -> None:
        """The request uses nothing any more."""
        chain = self._chains.pop(request_id, None)
        if chain is None or not chain.known:
            return
        self._keys -= len(chain.known)
        groups = list(chain.groups.values())
        if self.on_end is not None:
            self.on_end(groups)
        for keys in groups:
            self._host.settle(keys)
        if self._tiers:
            if chain.storing > 0:
                self._ended[request_id] = chain
                if len(self._ended) > MAX_KEYS // 256:
                    del self._ended[next(iter(self._ended))]
            else:
                self._settle_later(chain)

    def settle(self) -> None:
        """Tell slower tiers of requests whose chunks have arrived there, or will not come."""
        tiers, settling = self._tiers, self._settling
        while settling:
            marks, chain = settling[0]
            if self._settling_keys <= MAX_KEYS and any(
                tier.copies_ended < mark for tier, mark in zip(tiers, marks, strict=True)
            ):
                return
            settling.popleft()
            self._settling_keys -= len(chain.known)
            for tier in tiers:
                for keys in chain.groups.values():
                    tier.policy.settle(keys)

    def reset(self) -> None:
        """Forget every request."""
        self._chains.clear()
        self._ended.clear()
        self._settling.clear()
        self._keys = self._settling_keys = 0
        for each in self.filters:
            each.clear()

    def _settle_later(self, chain: _Chain) -> None:
        self._settling.append(([tier.copies_queued for tier in self._tiers], chain))
        self._settling_keys += len(chain.known)

    def _chain(self, request_id: str) -> _Chain:
        chain = self._chains.get(request_id)
        if chain is None:
            chain = self._chains[request_id] = _Chain()
        return chain

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
