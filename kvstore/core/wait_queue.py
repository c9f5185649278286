"""Wait queue: requests that wait for chunks of slower tiers, and their deadlines.

Requests wait in the order in which they were deferred. Chunks that arrive for a request are leased
to it until it loads them, finishes, or has not asked for a while.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kvstore.core.chunk import FILLING, Chunk, wait_together
from kvstore.core.host import HostPool
from kvstore.core.reports import Outcome, Spans
from kvstore.core.request import Request, Requests, RequestState
from kvstore.core.statistics import Durations

__all__ = ["FORGET_AFTER", "WaitQueue"]

FORGET_AFTER = 10
"""A request that was answered, or whose store was deferred, is forgotten once it has not been
heard of for this many lease times."""


class WaitQueue:
    """Requests that wait or were answered, and their leases.

    Attributes:
        waiting: requests that wait, by id, oldest first. answered: requests that were answered.
        waits: how long requests have waited for their answers.

    Args:
        deadline: seconds without any movement after which a request is answered.
        max_wait: seconds after which it is answered in any case.
        lease: seconds without a lookup after which a request's leases end.
        spans: told of each wait.
    """

    def __init__(
        self,
        pool: HostPool,
        requests: Requests,
        spans: Spans,
        *,
        deadline: float,
        max_wait: float,
        lease: float,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._spans = spans
        self.deadline = deadline
        self.max_wait = max_wait
        self.lease = lease
        self.waiting: dict[str, Request] = {}
        self.answered: dict[str, Request] = {}
        # When rows or chunks last moved, by tenant.
        self._moved: dict[int, float] = {}
        # No wait and no lease ends before.
        self._soonest = math.inf
        self.waits = Durations()
        self.timeouts = 0
        self.lapses = 0
        # The highest order of chunks whose promotion has ended since `pass_on`.
        self._passed = -1

    def starves(self, owner: int) -> bool:
        """Whether any of the waiting requests of this tenant waits for rows."""
        return any(
            request.short_of_rows and self._pool.owner(request.keys) == owner
            for request in self.waiting.values()
        )

    def wishful(self) -> set[int]:
        """The tenants of waiting requests that have keys which were not granted yet."""
        if not self._pool.policy.shared:
            wishes = any(one.granted < len(one.keys) for one in self.waiting.values())
            return {0} if wishes else set()
        return {
            self._pool.owner(request.keys)
            for request in self.waiting.values()
            if request.granted < len(request.keys)
        }

    def waits_for(self, request: Request, tiers: Collection[int]) -> bool:
        """Whether it has leases on chunks that are being read from one of these tiers."""
        if not (request.pending and tiers):
            return False
        chunks = (self._pool.chunks[key] for key in request.leases)
        return any(chunk.state == FILLING and chunk.origin in tiers for chunk in chunks)

    # -- coming and going ----------------------------------------------------------------

    def join(self, request: Request, now: float) -> None:
        """Begin or continue the wait of a request whose lookup was deferred."""
        self.answered.pop(request.id, None)
        chunks = self._pool.chunks
        request.begin_wait(now, any(key not in chunks for key in request.keys))
        self.waiting[request.id] = request
        self._soonest = min(self._soonest, self._end_of(request))
        self._spans.wait_began(request.id, len(request.keys))

    def answer(self, request: Request, now: float, outcome: Outcome = Outcome.COMPLETE) -> None:
        """End the wait: the answer is what is in host memory by now."""
        waited = self.waiting.pop(request.id, None) is not None
        if waited:
            self.waits.add(now - request.began)
        if request.pending:
            chunks = self._pool.chunks
            for key in list(request.leases):
                chunk = chunks[key]
                if chunk.state == FILLING and chunk.waiters is not None:
                    chunk.wait_no_more(request)
                    request.drop_lease(key)
        if waited:
            self._spans.wait_ended(request.id, len(request.leases), outcome)
        request.end_wait()
        self.answered[request.id] = request
        self._soonest = min(self._soonest, request.asked + self.lease)

    def _end_of(self, request: Request) -> float:
        """When the wait of a request ends without an answer, if nothing moves."""
        assert request.since is not None
        moved = request.moved
        if request.granted < len(request.keys):
            moved = max(moved, self.moved(request.keys))
        return min(moved + self.deadline, request.since + self.max_wait)

    def answer_if_complete(self, request: Request, now: float) -> None:
        """End the wait if everything that can arrive has arrived."""
        if request.state is not RequestState.WAITING or request.granted < len(request.keys):
            return
        if not request.pending:
            self.answer(request, now)
        else:
            # What moves for others has put its end off until now.
            self._soonest = min(self._soonest, self._end_of(request))

    def remove(self, request: Request) -> None:
        """Forget the wait and the leases of a request that needs no answer any more."""
        if self.waiting.pop(request.id, None) is not None:
            self._spans.wait_ended(request.id, len(request.leases) - request.pending, Outcome.GONE)
        self.answered.pop(request.id, None)
        self.release(request)
        request.forget_wait()

    def lapse(self, request: Request) -> None:
        """End the leases of a request that was answered; it does not wait again."""
        if request.state is RequestState.ANSWERED and request.leases:
            self.lapses += 1
            self.release(request)

    def end_leases(self, keys: Collection[bytes]) -> None:
        """End all leases on chunks of these keys that are complete."""
        pool = self._pool
        for request in [one for one in self._requests.values() if one.leases]:
            for key in request.leases.keys() & keys:
                chunk = pool.chunks[key]
                if chunk.state != FILLING:
                    pool.unpin((chunk,))
                    request.drop_lease(key)

    def overdue(self, request: Request, now: float) -> bool:
        """Whether a request that was answered may not be deferred again."""
        return request.since is not None and now - request.since >= self.deadline

    def give_up(self, tier: int, now: float) -> None:
        """Answer the requests that wait for chunks being read from this tier."""
        for request in list(self.waiting.values()):
            if self.waits_for(request, (tier,)):
                self.answer(request, now, Outcome.GIVEN_UP)

    def expire(self, now: float) -> list[Request]:
        """Answer requests whose deadline has passed; end leases of requests that stopped asking.

        A request that is slow to come back for its answer still gets it, from
        what is in host memory then: it does not wait again.

        Returns:
            The requests that were not heard of for so long that they are forgotten.
        """
        if now < self._soonest:
            return []
        self._soonest = math.inf
        for request in list(self.waiting.values()):
            end = self._end_of(request)
            if now < end:
                self._soonest = min(self._soonest, end)
            else:
                self.timeouts += 1
                self.answer(request, now, Outcome.DEADLINE)
        gone: list[Request] = []
        for request in self.answered.values():
            end = request.asked + self.lease
            if now >= end:
                self.lapse(request)
                # It may ask again, from now on.
                end = now + self.lease
            if now - request.asked >= FORGET_AFTER * self.lease:
                gone.append(request)
            self._soonest = min(self._soonest, end, request.asked + FORGET_AFTER * self.lease)
        for request in gone:
            self.remove(request)
        return gone

    # -- movement ------------------------------------------------------------------------

    def moved(self, keys: Sequence[bytes]) -> float:
        """When rows or chunks last moved for any request of the tenant of these keys."""
        return self._moved.get(self._pool.owner(keys), 0.0)

    def rows_moved(self, keys: Sequence[bytes], now: float) -> None:
        """Note that rows of these keys have become free, for which requests may wait."""
        self._moved[self._pool.owner(keys)] = now

    def all_moved(self, now: float) -> None:
        """Count completed moves that are not taken in yet as movement for all that wait."""
        for request in self.waiting.values():
            request.movement(now)

    def passed(self, order: int) -> None:
        """Note that a promotion of chunks up to `order` has ended."""
        self._passed = max(self._passed, order)

    def pass_on(self, now: float) -> None:
        """Count ended promotions as movement for requests that wait for later ones."""
        order, self._passed = self._passed, -1
        if order < 0:
            return
        for request in self.waiting.values():
            if request.pending and request.newest > order:
                request.movement(now)

    # -- chunks that arrive --------------------------------------------------------------

    def expect(self, request: Request, chunks: Sequence[Chunk]) -> None:
        """Lease newly reserved chunks, which no other request waits for, to the request."""
        wait_together(chunks, request)
        request.lease([chunk.key for chunk in chunks], len(chunks), chunks[-1].order)

    def lease_to(self, request: Request, chunk: Chunk) -> None:
        """Lease a chunk, which is here or on its way, to the request."""
        if chunk.key in request.leases:
            return
        self._pool.stay(chunk)
        if chunk.state == FILLING:
            chunk.wait(request)
            request.lease((chunk.key,), 1, chunk.order)
        else:
            self._pool.pin((chunk,))
            request.lease((chunk.key,), 0, -1)

    def stored(self, chunks: Sequence[Chunk], now: float) -> None:
        """Take in chunks that were filled, for which few requests can have waited."""
        for chunk in self._pool.fill(chunks):
            if chunk.waiters is not None:
                self._came(chunk, now)

    def promoted(self, chunks: Sequence[Chunk], now: float) -> None:
        """Take in promoted chunks: their waiters' leases become pins, in the chunks' order."""
        pool = self._pool
        start, size = 0, len(chunks)
        while start < size:
            waiters = chunks[start].waiters
            end = start + 1
            if type(waiters) is tuple:
                # All of them were granted to one request, which gets the pins.
                while end < size and chunks[end].waiters is waiters:
                    end += 1
                (request,) = waiters
                pool.fill_pinned(chunks[start:end])
                self._arrived(request, end - start, now)
            else:
                pool.fill(chunks[start:end])
                self._came(chunks[start], now)
            start = end

    def failed(self, chunk: Chunk, now: float) -> None:
        """Take in a chunk that will not arrive: its waiters go on without it."""
        for request in chunk.take_waiters():
            request.drop_lease(chunk.key)
            self._arrived(request, 1, now)

    def _came(self, chunk: Chunk, now: float) -> None:
        for request in chunk.take_waiters():
            self._pool.pin((chunk,))
            self._arrived(request, 1, now)

    def _arrived(self, request: Request, chunks: int, now: float) -> None:
        request.arrived(chunks, now)
        self._moved[self._pool.owner(request.keys)] = now
        self.answer_if_complete(request, now)

    def release(self, request: Request) -> None:
        """End all leases of the request."""
        if not request.leases:
            return
        pool = self._pool
        leased = [pool.chunks[key] for key in request.leases]
        if request.pending:
            for chunk in leased:
                if chunk.state == FILLING:
                    chunk.wait_no_more(request)
            leased = [chunk for chunk in leased if chunk.state != FILLING]
        pool.unpin(leased)
        request.drop_leases()
