"""Promotion: choose which chunks are read from slower tiers now.

`Grants` serves the requests that wait, in the order in which they joined, as far as rows allow.
Granted chunks are leased, so promotions cannot evict each other. Promotions under way use only a
part of host memory, so a tier that does not answer leaves rows to stores and to other tiers. A
long prefix is read in portions. The request at the head gets rows first. When no row can become
free for it, it is answered with the prefix that is there.

`Prefetches` reads chunks that no request has asked for yet, while no request waits. They are read
in portions, in the order in which they were named. They displace chunks that the policy gives up,
but none that waits for a copy. Prefetched chunks are ordinary chunks: they are not leased.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from kvstore.core.chunk import READY, Chunk
from kvstore.core.eviction import Room
from kvstore.core.host import HostPool
from kvstore.core.pins import Pins
from kvstore.core.request import Request, RequestState
from kvstore.core.residency.base import TierView
from kvstore.core.step_budget import Budget
from kvstore.core.usage import Chains, link
from kvstore.core.wait_queue import WaitQueue

__all__ = ["LEFT_TO_OTHERS", "Grant", "Grants", "Prefetches"]

LEFT_TO_OTHERS = 4
"""Promotions of one tier leave one in this many rows of host memory to others. Several tiers
together leave that share divided by their number."""

Grant = tuple[TierView, list[Chunk], list[int]]
"""Chunks to fill from a tier, and the slots to fill them from."""


@dataclass(slots=True)
class _Plan:
    """The chunks that a request is to get.

    Attributes:
        reach: how many of its keys are handled and need not be looked at again.
        missing: positions of keys that are to be fetched, each with its tier.
        waits_for: the tier whose limit of promotions under way holds up the rest; -1 for none.
        awaits_answer: a store is being asked about the key at `reach`.
    """

    reach: int
    missing: list[tuple[int, TierView]] = field(default_factory=list)
    waits_for: int = -1
    awaits_answer: bool = False


class Grants:
    """Leases and fetches chunks for the requests in the queue.

    Attributes:
        truncations: prefixes that were cut short for lack of rows.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        queue: WaitQueue,
        room: Room,
        chains: Chains,
        budget: Budget,
        pins: Pins,
        hidden: Collection[bytes] = (),
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._hidden = hidden
        self._tiers = tiers
        self._stores = [store for tier in tiers if (store := tier.store) is not None]
        self._queue = queue
        self._room = room
        self._chains = chains
        self._budget = budget
        self.truncations = 0
        # Requests whose chains the policies may not know completely.
        self._unlinked: deque[Request] = deque()

    def link(self, request: Request) -> None:
        """Let policies learn the chains of a request that begins to wait, a part in each step."""
        self._unlinked.append(request)

    def link_some(self) -> None:
        """Tell the policies as much of the chains of waiting requests as this step may."""
        left = self._budget.linked
        unlinked = self._unlinked
        while unlinked and left > 0:
            request = unlinked[0]
            keys, linked = request.keys, request.linked
            if request.state is not RequestState.WAITING or linked >= len(keys):
                unlinked.popleft()
                continue
            some = keys[linked : linked + left]
            self._chains.extend(request, some)
            request.link(linked + len(some))
            left -= len(some)

    def reset(self) -> None:
        """Forget the requests."""
        self._unlinked.clear()

    def grant(self, now: float) -> list[Grant]:
        """Lease and fetch for the requests in the queue, in order, as far as rows allow."""
        grants: list[Grant] = []
        pool, budget = self._pool, self._budget
        if budget.granted <= 0:
            return grants
        blocked = for_rows = False
        spoken_for = 0  # rows that the first request waiting for its tier will need
        for request in list(self._queue.waiting.values()):
            wanted = len(request.keys) - request.granted
            if wanted and request.needs_rows:
                blocked |= spoken_for > 0 and pool.obtainable - spoken_for < wanted
                request.lack_rows(for_rows)
            if wanted and request.needs_rows and not blocked:
                self._room.give_way(min(wanted, pool.rows) - pool.obtainable)
            if wanted and not (blocked and request.needs_rows):
                if request.waits_for < 0 or self._may_read(request.waits_for):
                    before, awaited_answer = request.granted, request.awaits_answer
                    grants += self._grant(request, now)
                    budget.grant(request.granted - before)
                    if request.granted > before:
                        # Waiting for an answer, and then for the chunks it found, is one wait.
                        if not awaited_answer:
                            request.movement(now)
                        request.stick(-1)
                if budget.granted <= 0 or request.awaits_answer:
                    pass
                elif request.waits_for >= 0:
                    left = pool.rows - len(request.leases)
                    spoken_for = spoken_for or min(len(request.keys) - request.granted, left)
                elif request.granted < len(request.keys) and not self._truncate(request):
                    blocked = for_rows = True
            self._queue.answer_if_complete(request, now)
            if budget.granted <= 0:
                break
        return grants

    def ahead(self, request: Request, now: float, *, most: int) -> list[Grant]:
        """Fetch up to `most` next keys of a request that does not wait, as far as rows allow.

        Nothing that waits for a copy is displaced.
        """
        if self._budget.granted <= 0:
            return []
        before = request.granted
        grants = self._grant(request, now, unasked=True, most=most)
        self._budget.grant(request.granted - before)
        return grants

    def is_asked(self, key: bytes) -> bool:
        """Whether a store that is worth waiting for is being asked for the chunk."""
        return any(store.worth_asking and key in store.answers.asked for store in self._stores)

    def _truncate(self, request: Request) -> bool:
        """Abandon the rest of the prefix if no row held by others could become free for it.

        Chunks that answered "hit" in this step keep their rows until it ends,
        so the rows must have been missing for two steps in a row.
        """
        pool = self._pool
        if len(request.leases) < pool.rows:
            staying = len(request.leases) + self._pins.rows
            if self._pins.rows and pool.busy <= staying:
                staying = len(request.leases) + self._pins.rows_besides(request.leases)
            others = pool.busy > staying or pool.held > 0 or pool.soon_free > 0
            if self._budget.cut_short or others:
                request.stick(-1)
                return False
            if request.stuck != pool.step - 1:
                request.stick(pool.step)
                return False
        self.truncations += 1
        request.grant(len(request.keys), needs_rows=None, short_of_rows=request.short_of_rows)
        return True

    def _grant(
        self, request: Request, now: float, *, unasked: bool = False, most: int = sys.maxsize
    ) -> list[Grant]:
        pool = self._pool
        end = min(len(request.keys), request.granted + min(self._budget.granted, most))
        plan = self._plan(request, end, unasked, now)
        keys, missing, reach = request.keys, plan.missing, plan.reach
        room = 0
        if missing:
            incoming = [keys[position] for position, _ in reversed(missing)]
            spare = pool.obtainable - len(missing)
            if spare > 0 and pool.free < len(missing):
                # As far as all fit, the rest's chunks that are here must not be evicted for these.
                pool.keep(keys[reach : reach + spare])
            room = self._room.make(len(missing), now, shed_unsaved=not unasked, incoming=incoming)
        if room and not unasked and request.linked < len(keys):
            # Policies learn which key follows which before they see the chunks.
            self._chains.extend(request, keys[request.granted : missing[room - 1][0] + 1])
        grants: list[Grant] = []
        for tier in self._tiers:
            its = [keys[position] for position, holder in missing[:room] if holder is tier]
            if its:
                chunks = pool.reserve(its, tier.number)
                self._queue.expect(request, chunks)
                grants.append((tier, chunks, tier.index.begin_reads(its)))
        request.await_answer(plan.awaits_answer and room == len(missing))
        if room < len(missing):
            request.wait_for_tier(-1)
            request.grant(missing[room][0], needs_rows=True, short_of_rows=True)
        else:
            request.wait_for_tier(plan.waits_for)
            needs_rows = True if reach < end else False if reach == len(keys) else None
            request.grant(reach, needs_rows=needs_rows, short_of_rows=False)
        return grants

    def _plan(self, request: Request, end: int, unasked: bool, now: float) -> _Plan:
        """Plan what to fetch of its keys up to `end`; lease the chunks that are here at once.

        Chunks for a prefetch (`unasked`) may come from any tier that is alive.
        """
        rows, leases, start = self._pool.rows, request.leases, request.granted
        chunks, obtainable = self._pool.chunks, self._pool.obtainable
        plan = _Plan(end)
        asked = request.keys[start:end]
        left: dict[int, int] = {}
        worth = [t for t in self._tiers if (t.health.alive if unasked else t.health.readable)]
        first = worth[0] if worth and worth[0].number == 0 else None
        if first is not None and not self._hidden:
            left = self._left()
            free, may_read = rows - len(leases), min(left[first.number], left[-1])
            count = min(len(asked), free, may_read, obtainable + 1)
            if count > 0 and _all_there(asked[:count], first.entries, chunks):
                # The same as the loop below, in one go.
                plan.missing = [(position, first) for position in range(start, start + count)]
                plan.reach = start + count
                if count < min(len(asked), free) and count <= obtainable:
                    plan.waits_for = first.number
                return plan
        missing = plan.missing
        for position, key in enumerate(asked, start):
            if len(leases) + len(missing) >= rows and key not in leases:
                # The prefix is longer than the pool: only its head can ever fit.
                plan.reach = position
                break
            if key in self._hidden:
                continue
            chunk = chunks.get(key)
            if chunk is not None:
                self._queue.lease_to(request, chunk)
                continue
            tier = next((each for each in worth if key in each.entries), None)
            if tier is None and (missing or request.pending):
                tier = self._overloaded_holder(key)
                if tier is not None:
                    # It waits in any case, and its own chunks may be all that the tier has to read.
                    plan.reach, plan.waits_for = position, tier.number
                    break
            if tier is None:
                if now >= request.answer_by or not self.is_asked(key):
                    continue
                # Keys behind this one are not fetched before it is known whether it arrives.
                plan.reach, plan.awaits_answer = position, True
                break
            left = left or self._left()
            if not left[tier.number] or not left[-1]:
                # The rest follows as promotions end, as rows are left for others.
                plan.reach, plan.waits_for = position, tier.number
                break
            left[tier.number] -= 1
            left[-1] -= 1
            missing.append((position, tier))
            if len(missing) > obtainable:
                # No rows can be had for the keys behind this one.
                plan.reach = position + 1
                break
        return plan

    def _may_read(self, tier: int) -> bool:
        left = self._left()
        return bool(left[tier] and left[-1])

    def _left(self) -> dict[int, int]:
        """Return how many more chunks may be under way, by number of the tier; -1 for all tiers."""
        rows, tiers = self._pool.rows, self._tiers
        share = rows // LEFT_TO_OTHERS // len(tiers)
        most = rows - share * len(tiers)
        left = {tier.number: max(0, most - len(tier.index.reading)) for tier in tiers}
        left[-1] = max(0, rows - share - sum(len(tier.index.reading) for tier in tiers))
        return left

    def _overloaded_holder(self, key: bytes) -> TierView | None:
        """Return a tier that has the chunk but is too congested to begin to wait for."""
        for tier in self._tiers:
            if key in tier.entries and tier.health.congested and not tier.health.stalled:
                return tier
        return None


def _all_there(keys: Sequence[bytes], entries: Container[bytes], chunks: Container[bytes]) -> bool:
    """Whether all `keys` are among the tier's `entries` and none has a chunk in host memory."""
    return all(map(entries.__contains__, keys)) and not any(map(chunks.__contains__, keys))


PORTION_SHARE = 8
"""A portion fills at most one in this many rows of host memory."""

MOST_PORTION = 256
"""Most chunks of a portion."""

MOST_SHARE = 2
"""At most one in this many rows of host memory may be waited for at once."""

MOST_PLANNED = 2**20
"""Most keys that may be planned to be fetched later."""

_NAME = "\0prefetch"


class Prefetches:
    """Chunks to be fetched ahead of requests: see the module's text.

    Args:
        keep: told of chunks that are in host memory already: they shall stay there.

    Attributes:
        begun: chunks whose fetch was begun.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        queue: WaitQueue,
        grants: Grants,
        keep: Callable[[Collection[bytes]], None],
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._queue = queue
        self._grants = grants
        self._keep = keep
        self.begun = 0
        # Keys that wait for a portion, oldest first, and the portion under way.
        self._keys: dict[bytes, None] = {}
        self._portion: Request | None = None
        # Keys to be fetched later, by time, and how many they are.
        self._plans: list[tuple[float, int, list[bytes]]] = []
        self._planned = 0
        self._numbers = count()

    def __bool__(self) -> bool:
        """Whether anything waits, is planned or is under way."""
        return bool(self._keys) or self._portion is not None or bool(self._plans)

    def begin(self, keys: Sequence[bytes], *, prefix: bool = True) -> int:
        """Fetch those of the leading `keys` that only a slower tier has, when no request waits.

        Args:
            prefix: stop at the first chunk that is nowhere; else pass over it, as where keys of
                several KV cache groups are named together.

        Returns:
            How many are on their way or will be: at most as many as half of host memory holds.
        """
        most = max(1, self._pool.rows // MOST_SHARE)
        alive = [tier for tier in self._tiers if tier.health.alive]
        coming = 0
        for key in keys:
            chunk = self._pool.chunks.get(key)
            if chunk is not None:
                coming += chunk.state < READY
                self._keep((key,))
                continue
            if not any(key in tier.entries for tier in alive):
                if prefix:
                    break
                continue
            if key not in self._keys and len(self._keys) >= most:
                break
            self._keys[key] = None
            coming += 1
        return coming

    def plan(self, keys: Sequence[bytes], when: float) -> bool:
        """Plan to fetch these keys at that time; False if too many are planned already."""
        if self._planned + len(keys) > MOST_PLANNED:
            return False
        heapq.heappush(self._plans, (when, next(self._numbers), list(keys)))
        self._planned += len(keys)
        return True

    def is_fetching(self, keys: Iterable[bytes] | None = None) -> bool:
        """Whether any of `keys`, or of all, waits for a portion, or is in the one under way."""
        if keys is None:
            return bool(self._keys) or self._portion is not None
        coming: Collection[bytes] = self._portion.keys if self._portion is not None else ()
        return any(key in self._keys or key in coming for key in keys)

    def drop(self, keys: Collection[bytes]) -> None:
        """Forget these keys, which are not wanted any more; moves under way go on."""
        for key in keys:
            self._keys.pop(key, None)

    def go_on(self, now: float) -> list[Grant]:
        """Fetch the next portion, if its turn has come."""
        while self._plans and self._plans[0][0] <= now:
            keys = heapq.heappop(self._plans)[2]
            self._planned -= len(keys)
            self.begin(keys, prefix=False)
        portion = self._portion
        if portion is not None:
            if portion.pending:
                return []
            self._queue.remove(portion)
            self._portion = None
        if not self._keys or self._queue.has_wishes:
            return []
        size = max(1, min(self._pool.rows // PORTION_SHARE, MOST_PORTION))
        portion = Request(_NAME)
        portion.ask(now)
        portion.name_keys(islice(self._keys, size))
        link(self._pool.policy, portion.keys)
        grants = self._grants.ahead(portion, now, most=size)
        self.drop(portion.keys[: portion.granted])
        self.begun += sum(len(chunks) for _, chunks, _ in grants)
        self._portion = portion
        return grants

    def reset(self) -> None:
        """Forget everything that is to be fetched."""
        self._keys.clear()
        self._plans.clear()
        self._planned = 0
        if self._portion is not None:
            self._queue.remove(self._portion)
            self._portion = None
