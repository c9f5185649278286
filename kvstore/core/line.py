"""The line of requests that wait for chunks of slower tiers.

Promotions are granted in the order in which requests joined, as far as rows
allow; what is granted is leased, so promotions cannot evict each other. Those under
way hold only a part of host memory, so that a tier that does not answer leaves
rows to stores and to other tiers: a longer prefix comes in portions. The
request at the head gets rows first; when it could not get one more row even
if everybody else went home, it is answered with the prefix that is there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvstore.core.chunk import FILLING, Chunk
from kvstore.core.pace import UNBOUNDED
from kvstore.core.pool import HostPool
from kvstore.core.request import Request, RequestState
from kvstore.core.tier import TierView

__all__ = ["FORGET_AFTER", "Grant", "Line"]

FORGET_AFTER = 10
"""Lease times without a word after which a request that was answered, or whose store was put
off, is forgotten."""

LEFT_TO_OTHERS = 4
"""One in so many rows of host memory is left to stores by the promotions that are under way, and
as many to each further tier by those of one."""

Grant = tuple[list[Chunk], list[int]]
"""Chunks to fill, and the slots to fill them from."""


class Line:
    """Requests that wait or were answered, and their leases.

    Args:
        deadline: seconds without any movement after which a request is answered.
        ceiling: seconds after which it is answered in any case.
        lease: seconds without being asked after which leases end.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        *,
        deadline: float,
        ceiling: float,
        lease: float,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self.deadline = deadline
        self.ceiling = ceiling
        self.lease = lease
        self.waiting: dict[str, Request] = {}
        self.answered: dict[str, Request] = {}
        self.pace = UNBOUNDED
        """What one step may cost; the core sets it."""
        self.behind = False
        """More could have been granted in this step than its pace allows."""
        self._allowance = self.pace.granted
        self._passed = -1
        self.moved = 0.0
        """When rows or chunks last moved for anybody."""
        self.timeouts = 0
        self.truncations = 0
        self.lapses = 0

    def begin_step(self) -> None:
        """What was over is granted from now on."""
        self._allowance = self.pace.granted
        self.behind = False

    def shorten(self, share: float) -> None:
        """This step grants only a part of what its pace allows."""
        self._allowance = max(1, int(self._allowance * share / self._pool.policy.effort))

    def join(self, request: Request, now: float) -> None:
        """Begin, or go on with, the wait of a request whose lookup was deferred."""
        if request.since is None:
            request.since = now
        self.answered.pop(request.id, None)
        request.state = RequestState.WAITING
        request.keys = list(dict.fromkeys(request.keys))
        request.moved = now
        request.needs_rows = any(key not in self._pool.chunks for key in request.keys)
        request.waits_for = -1
        request.short_of_rows = False
        self.waiting[request.id] = request

    def grant(self, now: float) -> list[tuple[TierView, Grant]]:
        """Lease and fetch for the requests in line, in order, as far as rows allow."""
        grants: list[tuple[TierView, Grant]] = []
        if self.behind:
            return grants
        blocked = for_rows = False
        spoken_for = 0  # rows that the first who waits for its tier will need
        for request in list(self.waiting.values()):
            wanted = len(request.keys) - request.granted
            if wanted and request.needs_rows:
                blocked |= spoken_for > 0 and self._pool.obtainable - spoken_for < wanted
                request.short_of_rows = for_rows
            if wanted and not (blocked and request.needs_rows):
                if request.waits_for < 0 or self._may_read(request.waits_for):
                    before = request.granted
                    grants += self._grant(request)
                    self._allowance -= request.granted - before
                    if request.granted > before:
                        request.moved = now
                        request.stuck = -1
                if self._allowance <= 0:
                    self.behind = True
                elif request.waits_for >= 0:
                    left = self._pool.rows - len(request.leases)
                    spoken_for = spoken_for or min(len(request.keys) - request.granted, left)
                elif request.granted < len(request.keys) and not self._truncate(request):
                    blocked = for_rows = True
            if request.granted == len(request.keys) and not request.pending:
                self.answer(request)
            if self.behind:
                break
        return grants

    @property
    def starving(self) -> bool:
        """Whether somebody in line waits for rows."""
        return any(request.short_of_rows for request in self.waiting.values())

    def answer(self, request: Request) -> None:
        """End the wait: what is in host memory by now is the answer."""
        self.waiting.pop(request.id, None)
        if request.pending:
            chunks = self._pool.chunks
            for key in list(request.leases):
                chunk = chunks[key]
                if chunk.status == FILLING and chunk.waiters is not None:
                    _wait_no_more(chunk, request)
                    del request.leases[key]
            request.pending = 0
        request.state = RequestState.ANSWERED
        request.tried.update(request.keys)
        request.keys = []
        request.granted = 0
        self.answered[request.id] = request

    def passed(self, order: int) -> None:
        """A promotion up to `order` has ended."""
        self._passed = max(self._passed, order)

    def pass_on(self, now: float) -> None:
        """What has ended since is movement for all who stand behind it."""
        order, self._passed = self._passed, -1
        if order < 0:
            return
        for request in self.waiting.values():
            if request.pending and request.newest > order:
                request.moved = now

    def filled(self, chunk: Chunk, now: float) -> None:
        """A chunk became ready (status READY): its waiters' leases become pins."""
        waiters, chunk.waiters = chunk.waiters, None
        for request in waiters or ():
            self._pool.pin(chunk)
            self._arrived(request, now)

    def all_stored(self, chunks: Sequence[Chunk], now: float) -> None:
        """`HostPool.fill` and `filled` for each of `chunks`, which few can have waited for."""
        self._pool.fill_all(chunks)
        for chunk in chunks:
            if chunk.waiters is not None:
                self.filled(chunk, now)

    def all_filled(self, chunks: Sequence[Chunk], now: float) -> None:
        """`HostPool.fill` and `filled` for each of `chunks`, in their order."""
        pool = self._pool
        start, size = 0, len(chunks)
        while start < size:
            waiters = chunks[start].waiters
            end = start + 1
            if type(waiters) is tuple:
                # Granted to one request, for which all of them become pins.
                while end < size and chunks[end].waiters is waiters:
                    end += 1
                run = chunks[start:end]
                pool.fill_pinned(run)
                for chunk in run:
                    chunk.waiters = None
                (request,) = waiters
                request.pending -= end - start - 1
                self._arrived(request, now)
            else:
                pool.fill(chunks[start])
                self.filled(chunks[start], now)
            start = end

    def failed(self, chunk: Chunk, now: float) -> None:
        """A chunk will not come; whoever waited for it goes on without."""
        waiters, chunk.waiters = chunk.waiters, None
        for request in waiters or ():
            del request.leases[chunk.key]
            self._arrived(request, now)

    def leave(self, request: Request) -> None:
        """Forget the wait and the leases: the request is answered for good, or gone."""
        self.waiting.pop(request.id, None)
        self.answered.pop(request.id, None)
        self._release(request)
        request.keys = []
        request.tried.clear()
        request.granted = 0
        request.since = None
        request.state = RequestState.SCANNING

    def keep(self, now: float) -> None:
        """Completed moves are still to be taken in: that is movement for all who wait."""
        for request in self.waiting.values():
            request.moved = now

    def expire(self, now: float) -> list[Request]:
        """Answer those whose deadline has passed; end the leases nobody asks for.

        A request that is slow to come back for its answer still gets it, from
        what is there then: it does not begin to wait anew.

        Returns:
            The requests that were not heard of for so long that they are forgotten.
        """
        for request in list(self.waiting.values()):
            assert request.since is not None
            in_line = request.granted < len(request.keys)
            moved = max(request.moved, self.moved) if in_line else request.moved
            if now - moved >= self.deadline or now - request.since >= self.ceiling:
                self.timeouts += 1
                self.answer(request)
        gone: list[Request] = []
        for request in self.answered.values():
            silence = now - request.asked
            if silence >= self.lease:
                self.lapse(request)
            if silence >= FORGET_AFTER * self.lease:
                gone.append(request)
        for request in gone:
            self.leave(request)
        return gone

    def lapse(self, request: Request) -> None:
        """The leases of a request that was answered end; it does not begin to wait anew."""
        if request.state is RequestState.ANSWERED and request.leases:
            self.lapses += 1
            self._release(request)

    def overdue(self, request: Request, now: float) -> bool:
        """Whether a request that was answered may not be deferred once more."""
        return request.since is not None and now - request.since >= self.deadline

    def _release(self, request: Request) -> None:
        pool = self._pool
        leased = [pool.chunks[key] for key in request.leases]
        if request.pending:
            for chunk in leased:
                if chunk.status == FILLING:
                    _wait_no_more(chunk, request)
            leased = [chunk for chunk in leased if chunk.status != FILLING]
        pool.unpin_all(leased)
        request.leases = {}
        request.pending = 0

    def _arrived(self, request: Request, now: float) -> None:
        request.pending -= 1
        request.moved = self.moved = now
        if not request.pending and request.granted == len(request.keys):
            self.answer(request)

    def _truncate(self, request: Request) -> bool:
        """Give up the rest of the prefix, if nobody else's going could make room for it.

        Chunks that answered "hit" in this step keep their rows until it ends,
        so the room must have been missing for two steps in a row.
        """
        pool = self._pool
        if len(request.leases) < pool.rows:
            if pool.cut_short:
                request.stuck = -1
                return False
            if pool.busy > len(request.leases) or pool.held:
                request.stuck = -1
                return False
            if request.stuck != pool.step - 1:
                request.stuck = pool.step
                return False
        self.truncations += 1
        request.granted = len(request.keys)
        return True

    def _grant(self, request: Request) -> list[tuple[TierView, Grant]]:
        pool, leases = self._pool, request.leases
        chunks_here, rows = pool.chunks, pool.rows
        first = self._tiers[0] if self._tiers and self._tiers[0].health.readable else None
        reach = end = min(len(request.keys), request.granted + self._allowance)
        missing: list[tuple[int, TierView]] = []
        left: dict[int, int] = {}
        request.waits_for = -1
        obtainable = pool.obtainable
        start = request.granted
        asked = request.keys[start:reach]
        if first is not None:
            left = self._left()
            free, may_read = rows - len(leases), min(left[first.number], left[-1])
            count = min(len(asked), free, may_read, obtainable + 1)
            if count > 0 and _all_there(asked[:count], first.entries, chunks_here):
                # What the loop below would do, in one go.
                missing = [(position, first) for position in range(start, start + count)]
                if count < len(asked) and count <= obtainable:
                    reach = start + count
                    if count < free:
                        request.waits_for = first.number
                asked = []
        for position, key in enumerate(asked, start):
            if len(leases) + len(missing) >= rows and key not in leases:
                # A prefix longer than the pool: only its head can ever fit.
                reach = position
                break
            chunk = chunks_here.get(key)
            if chunk is not None:
                self._lease(request, chunk)
            else:
                tier = first if first is not None and key in first.entries else self._holder(key)
                if tier is None and (missing or request.pending):
                    tier = self._overloaded_holder(key)
                    if tier is not None:
                        # It waits in any case, and what it waits for may be the whole load.
                        reach = position
                        request.waits_for = tier.number
                        break
                if tier is not None:
                    left = left or self._left()
                    if not left[tier.number] or not left[-1]:
                        # The rest follows as promotions end: rows are left for others.
                        reach = position
                        request.waits_for = tier.number
                        break
                    left[tier.number] -= 1
                    left[-1] -= 1
                    missing.append((position, tier))
                    if len(missing) > obtainable:
                        # What lies behind cannot be had now; do not even look.
                        break
        room = 0
        if missing:
            incoming = [request.keys[position] for position, _ in reversed(missing)]
            spare = pool.obtainable - len(missing)
            if spare > 0 and pool.free < len(missing):
                # What is here of the rest shall not go for it, as far as all can be here together.
                pool.keep(request.keys[reach : reach + spare])
            room = pool.make_room(len(missing), shed_unsaved=True, incoming=incoming)
        grants: dict[int, Grant] = {}
        for tier in self._tiers:
            keys = [request.keys[p] for p, holder in missing[:room] if holder is tier]
            if keys:
                chunks = pool.reserve(keys, tier.number)
                grants[tier.number] = (chunks, tier.index.begin_reads(keys))
                # Nobody else can know of them yet.
                alone = (request,)
                for chunk in chunks:
                    chunk.waiters = alone
                request.leases.update(dict.fromkeys(keys))
                request.pending += len(chunks)
                request.newest = max(request.newest, chunks[-1].order)
        if room < len(missing):
            request.granted = missing[room][0]
            request.needs_rows = True
            request.waits_for = -1
            request.short_of_rows = True
        else:
            request.granted = reach
            request.short_of_rows = False
            if reach < end:
                request.needs_rows = True
            elif reach == len(request.keys):
                request.needs_rows = False
        return [(self._tiers[index], grant) for index, grant in grants.items()]

    def _may_read(self, tier: int) -> bool:
        left = self._left()
        return bool(left[tier] and left[-1])

    def _left(self) -> dict[int, int]:
        """How many more chunks may be on their way, by number of the tier; -1 for all together."""
        rows, tiers = self._pool.rows, self._tiers
        share = rows // LEFT_TO_OTHERS // len(tiers)
        under_way = sum(len(tier.index.reading) for tier in tiers)
        left = {
            tier.number: max(0, rows - share * len(tiers) - len(tier.index.reading))
            for tier in tiers
        }
        left[-1] = max(0, rows - share - under_way)
        return left

    def _lease(self, request: Request, chunk: Chunk) -> None:
        if chunk.key in request.leases:
            return
        request.leases[chunk.key] = None
        if chunk.leaving:
            self._pool.stay(chunk)
        if chunk.status == FILLING:
            if isinstance(chunk.waiters, list):
                chunk.waiters.append(request)
            else:
                chunk.waiters = [*(chunk.waiters or ()), request]
            request.pending += 1
            request.newest = max(request.newest, chunk.order)
        else:
            self._pool.pin(chunk)

    def _holder(self, key: bytes) -> TierView | None:
        for tier in self._tiers:
            if key in tier.entries and tier.health.readable:
                return tier
        return None

    def _overloaded_holder(self, key: bytes) -> TierView | None:
        """A tier that has the chunk, and more to read than is worth beginning to wait for."""
        for tier in self._tiers:
            if key in tier.entries and tier.health.congested and not tier.health.stalled:
                return tier
        return None


def _all_there(keys: Sequence[bytes], entries: Container[bytes], chunks: Container[bytes]) -> bool:
    """Whether all `keys` are among the tier's `entries` and none has a chunk in host memory."""
    return all(map(entries.__contains__, keys)) and not any(map(chunks.__contains__, keys))


def _wait_no_more(chunk: Chunk, request: Request) -> None:
    """The request does not wait for the chunk any more."""
    waiters = chunk.waiters
    if isinstance(waiters, list):
        waiters.remove(request)
    elif waiters is not None:
        chunk.waiters = None
