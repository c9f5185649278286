"""Arrivals: fetch chunks for requests that the server has queued, before it asks for them.

A server names the keys of a request when it arrives (`add`). Queued requests are served in the
order of their arrival, while no request that was asked for lacks chunks. Their chunks are leased,
the ones that are in host memory already included, so each finds them when its turn comes. Together
they lease at most half of host memory. When a request that was asked for, or a store, lacks rows,
the last of the queued requests give up theirs, and are served again later. All this is within what
each tenant may have, where there are some: none waits for another's requests.

A request leaves the queue when its turn comes: with its first lookup, load or store, or when the
server says so. Its leases stay for a while.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
from itertools import islice

from kvstore.core.async_lookup import Questions
from kvstore.core.host import HostPool
from kvstore.core.prefetch import MOST_PORTION, MOST_SHARE, PORTION_SHARE
from kvstore.core.promotion import Grant, Grants
from kvstore.core.request import Request
from kvstore.core.residency.base import TierView
from kvstore.core.usage import link
from kvstore.core.wait_queue import WaitQueue

__all__ = ["MOST_KEYS", "MOST_QUEUED", "Arrivals"]

MOST_QUEUED = 4096
"""Most requests that are queued; later ones are fetched for when they are asked for."""

MOST_KEYS = 2**20
"""Most keys that queued requests may name together."""

OVERLAP = 16
"""Keys of the portion before that are told to the policy again, as what the next ones follow."""

MOST_LOOKED_AT = 512
"""Most queued requests that one step looks at."""


class Arrivals:
    """The queued requests: see the module's text.

    Attributes:
        begun: chunks whose fetch was begun for queued requests.
        gave_way: how often a queued request gave up its leases to others.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        queue: WaitQueue,
        grants: Grants,
        questions: Questions,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._queue = queue
        self._grants = grants
        self._questions = questions
        self.begun = self.gave_way = 0
        # With their tenants, oldest first; some are not queued any more.
        self._line: deque[tuple[Request, int]] = deque()
        self._keys = 0
        # Those of them that may have leases, with their tenants, by name; the last came last.
        self._holders: dict[str, tuple[Request, int]] = {}
        # Entries of the tiers that are worth reading in this step.
        self._readable: list[Container[bytes]] = []

    def __bool__(self) -> bool:
        """Whether a request is queued."""
        return bool(self._line)

    def add(self, request: Request, keys: Sequence[bytes]) -> bool:
        """Queue a request with these keys, in prompt order; False if too much is queued."""
        if len(self._line) >= MOST_QUEUED or self._keys + len(keys) > MOST_KEYS:
            self._forget_left()
        if len(self._line) >= MOST_QUEUED or self._keys + len(keys) > MOST_KEYS:
            return False
        request.enqueue(keys)
        self._line.append((request, self._pool.owner(keys)))
        self._keys += len(keys)
        return True

    def go_on(self, now: float) -> list[Grant]:
        """Fetch the next portion for the first request that is not complete, if there is room."""
        self._forget_left()
        if not self._line:
            return []
        wishful = self._queue.wishful()
        if wishful and not self._pool.policy.shared:
            return []
        self._readable = [tier.entries for tier in self._tiers if tier.health.readable]
        if any(tier.health.stalled for tier in self._tiers):
            self._give_up()
        leases, pending = self._held()
        room: dict[int, int] = {}
        half = self._pool.rows // MOST_SHARE
        # So many rows each tenant may lease whatever others do.
        sure = half // max(1, len(self._pool.policy.parts)) if self._pool.policy.shared else 0
        left = half - leases.total()
        incomplete = (one for one in self._line if one[0].granted < len(one[0].keys))
        for request, owner in islice(incomplete, MOST_LOOKED_AT):
            if owner not in room:
                rows = self._pool.reach(request.keys)
                portion = max(1, min(rows // PORTION_SHARE, MOST_PORTION)) - pending[owner]
                its = min(rows // MOST_SHARE, max(leases[owner] + left, sure))
                room[owner] = min(its - leases[owner], portion)
            most = room[owner]
            if most <= 0 or owner in wishful:
                if not self._pool.policy.shared:
                    return []
                continue
            count = self._count_known(request, most)
            if count:
                start = request.granted
                link(self._pool.policy, request.keys[max(0, start - OVERLAP) : start + count])
                grants = self._grants.ahead(request, now, most=count)
                self._holders[request.id] = request, owner
                self.begun += sum(len(chunks) for _, chunks, _ in grants)
                if request.granted > start or not self._pool.policy.shared:
                    return grants
        return []

    def give_way(self, rows: int, keys: Sequence[bytes]) -> None:
        """Let the last of the queued requests end their leases, so that `rows` may become free.

        Those of the tenant of `keys` come first, and others only if it has less than its part.
        Without keys, all may.
        """
        for request in self._givers(keys):
            if rows <= 0:
                break
            if request.queued and request.leases:
                busy = self._pool.busy
                self._start_over(request)
                del self._holders[request.id]
                rows -= busy - self._pool.busy
                self.gave_way += 1

    def _givers(self, keys: Sequence[bytes]) -> list[Request]:
        """Return the queued requests that may give way to these keys, last first."""
        holders = [*self._holders.values()][::-1]
        if not keys:
            return [request for request, _ in holders]
        owner = self._pool.owner(keys)
        givers = [request for request, its in holders if its == owner]
        if len(givers) < len(holders) and not self._pool.has_its_part(keys):
            givers += [request for request, its in holders if its != owner]
        return givers

    def reset(self) -> None:
        """Forget all queued requests."""
        for request, _ in self._line:
            if request.queued:
                request.leave_queue()
        self._line.clear()
        self._holders.clear()
        self._keys = 0

    def _held(self) -> tuple[Counter[int], Counter[int]]:
        """Count the leases of queued requests, and those that wait for their chunks, by tenant."""
        leases, pending = Counter[int](), Counter[int]()
        for request, owner in self._holders.values():
            leases[owner] += len(request.leases)
            pending[owner] += request.pending
        return leases, pending

    def _count_known(self, request: Request, most: int) -> int:
        """Count the next keys that are in host memory or on a tier; cut the request at a gap."""
        readable, chunks = self._readable, self._pool.chunks
        keys, start = request.keys, request.granted
        for place in range(start, min(start + most, len(keys))):
            key = keys[place]
            if key in chunks or any(key in entries for entries in readable):
                continue
            if place == start and not self._may_come(request, key):
                self._keys -= len(keys) - place
                request.name_keys(keys[:place])
                if not place:
                    request.leave_queue()
            return place - start
        return min(most, len(keys) - start)

    def _may_come(self, request: Request, key: bytes) -> bool:
        """Whether the chunk may be had later: its tier is not read now, or a store is asked."""
        if any(key in tier.entries for tier in self._tiers):
            return True
        if self._grants.is_asked(key):
            return True
        return self._questions.ask_ahead(request)

    def _give_up(self) -> None:
        """Let requests start over that wait for chunks of tiers that do not answer."""
        stalled = {tier.number for tier in self._tiers if tier.health.stalled}
        for request, _ in self._holders.values():
            if self._queue.waits_for(request, stalled):
                self._start_over(request)

    def _start_over(self, request: Request) -> None:
        self._queue.release(request)
        request.grant(0, needs_rows=None, short_of_rows=False)

    def _forget_left(self) -> None:
        """Forget the requests that are not queued any more."""
        if all(request.queued for request, _ in self._line):
            return
        self._line = deque(one for one in self._line if one[0].queued)
        self._holders = {name: one for name, one in self._holders.items() if one[0].queued}
        self._keys = sum(len(request.keys) for request, _ in self._line)
