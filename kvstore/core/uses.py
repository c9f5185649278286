"""What the policies hear of the use of chunks: whole prompts, tail first, a bit in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool
from kvstore.core.residency.base import TierView
from kvstore.core.step_budget import Budget
from kvstore.types import Flow

__all__ = ["MOST_UNTOLD", "Uses"]

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
