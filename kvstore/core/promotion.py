"""Promotion: choose which chunks are read from slower tiers now, for requests that wait.

`Grants` serves them in the order in which they joined, as far as rows allow. Granted chunks are
leased, so promotions cannot evict each other. Promotions under way use only a part of host memory,
so a tier that does not answer leaves rows to stores and to other tiers. A long prefix is read in
portions. The request at the head gets rows first. When no row can become free for it, it is
answered with the prefix that is there.

While requests wait for rows and the server computes nothing, the last of them is answered so, too:
it would have to wait for longest. So the server computes from the end of the queue while chunks are
fetched for its head. (Within one prompt: Jin et al., "Compute or load KV cache? Why not both?",
2024.)
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field

from kvstore.core.chunk import Chunk
from kvstore.core.eviction import Room
from kvstore.core.host import HostPool
from kvstore.core.pins import Pins
from kvstore.core.request import Request, RequestState
from kvstore.core.residency.base import TierView
from kvstore.core.step_budget import Budget
from kvstore.core.usage import Chains
from kvstore.core.wait_queue import WaitQueue

__all__ = ["LEFT_TO_OTHERS", "Grant", "Grants"]

LEFT_TO_OTHERS = 4
"""Promotions of one tier leave one in this many rows of host memory to others. Several tiers
together leave that share divided by their number."""

SHED_AFTER = 0.1
"""Seconds that a request waits, where there are tenants, before chunks leave for it without the
copies that they wait for."""

LEASES_FOR_ONE = 4
"""Chunks that are here, whose leases cost a step as much as the fetch of one."""

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
        # Since when the server computes no prompt but what was left to it; infinite while it
        # computes others, or does not tell.
        self._idle_since = math.inf
        # A request was left to the server in the last step.
        self._has_left = False
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

    def grant(self, now: float, compute: float = 0.0, began: float = 0.0) -> list[Grant]:
        """Lease and fetch for the requests in the queue, in order, as far as rows allow.

        Args:
            compute: seconds that the server takes to compute a chunk; 0 if not known.
            began: when the step began.
        """
        grants: list[Grant] = []
        pool, budget = self._pool, self._budget
        if budget.granted <= 0:
            return grants
        # Tenants whose requests wait for one before them, those of them where it lacks rows, and
        # the rows that the first request of each that waits for its tier will need.
        blocked: set[int] = set()
        for_rows: set[int] = set()
        spoken_for: dict[int, int] = {}
        last: Request | None = None  # of those that wait for rows, and were asked for in this step
        may: dict[int, int] = {}
        for request in list(self._queue.waiting.values()):
            wanted = len(request.keys) - request.granted
            if not wanted:
                # Else it is answered when the last of its chunks has come.
                if not request.pending:
                    self._queue.answer_if_complete(request, now)
                continue
            owner = pool.owner(request.keys)
            if request.needs_rows:
                spoken = spoken_for.get(owner, 0)
                if spoken > 0 and pool.obtainable - spoken < wanted:
                    blocked.add(owner)
                request.lack_rows(owner in for_rows)
            if request.needs_rows and owner not in blocked:
                obtainable = pool.free if pool.policy.shared else pool.obtainable
                self._room.give_way(min(wanted, pool.rows) - obtainable, request.keys)
            if not (owner in blocked and request.needs_rows):
                waits_for = request.waits_for
                if waits_for >= 0:
                    may = may or self._left()
                if waits_for < 0 or min(may[waits_for], may[-1]):
                    before, awaited_answer = request.granted, request.awaits_answer
                    grants += self._grant_some(request, now)
                    may = {}
                    if request.granted > before:
                        # Waiting for an answer, and then for the chunks it found, is one wait.
                        if not awaited_answer:
                            request.movement(now)
                        request.stick(-1)
                if budget.granted <= 0 or request.awaits_answer:
                    pass
                elif request.waits_for >= 0:
                    left = pool.rows - len(request.leases)
                    needed = min(len(request.keys) - request.granted, left)
                    spoken_for[owner] = spoken_for.get(owner) or needed
                elif request.granted < len(request.keys) and not self._truncate(request):
                    blocked.add(owner)
                    for_rows.add(owner)
            if request.short_of_rows and request.asked >= began:
                last = request
            self._queue.answer_if_complete(request, now)
            if budget.granted <= 0:
                return grants
        if last is not None and compute:
            self._leave_to_server(last, now, compute)
        return grants

    def _grant_some(self, request: Request, now: float) -> list[Grant]:
        """Lease and fetch for a request as much as the step may. Leases cost less than fetches."""
        grants: list[Grant] = []
        while True:
            before = request.granted
            some = self._grant(request, now)
            grants += some
            fetched = sum(len(chunks) for _, chunks, _ in some)
            leased = request.granted - before - fetched
            self._budget.grant(fetched + -(-max(0, leased) // LEASES_FOR_ONE))
            done = fetched or leased <= 0 or request.granted >= len(request.keys)
            if done or request.short_of_rows or self._budget.granted <= 0:
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
        if len(request.leases) < pool.reach(request.keys):
            staying = len(request.leases) + self._pins.rows
            if self._pins.rows and pool.busy <= staying:
                staying = len(request.leases) + self._pins.rows_besides(request.leases)
            others = pool.busy > staying or pool.held > 0 or pool.soon_free > 0
            if self._budget.cut_short or others:
                request.stick(-1)
                if not self._budget.cut_short:
                    self._break_circle(request)
                return False
            if request.stuck != pool.step - 1:
                request.stick(pool.step)
                return False
        self._abandon(request)
        return True

    def _break_circle(self, request: Request) -> None:
        """Let the last request give up its leases if requests wait only for each other's rows.

        It waits on behind `request`, the first of them of the same tenant.
        """
        pool = self._pool
        if pool.held or pool.soon_free:
            return
        stuck = [
            one
            for one in self._queue.waiting.values()
            if one.leases and one.short_of_rows and not one.pending
        ]
        if sum(len(one.leases) for one in stuck) + self._pins.rows < pool.busy:
            return
        owner = pool.owner(request.keys)
        circle = [one for one in stuck if pool.owner(one.keys) == owner]
        leased = set().union(*(one.leases for one in stuck))
        busy = len(leased) + self._pins.rows_besides(leased)
        if len(circle) > 1 and circle[0] is request and pool.busy <= busy:
            self._queue.release(circle[-1])
            circle[-1].grant(0, needs_rows=True, short_of_rows=True)

    def server_computes(self, computes: bool, now: float) -> None:
        """Note whether the server computes prompts from now on, until the next call.

        While it does not, what would wait longest for rows may be left to it. A server that never
        tells is taken for busy.
        """
        if not computes:
            self._idle_since = min(self._idle_since, now)
        elif not self._has_left:
            self._idle_since = math.inf
        self._has_left = False

    def _leave_to_server(self, request: Request, now: float, compute: float) -> None:
        """Abandon what the request lacks rows for if it could have been computed by now.

        Counted is the time in which nothing moved for it and the server has computed no prompt.
        While it computes for others, computing this, too, would make them wait.
        """
        # Of several KV cache groups a part of a prefix may be of no use.
        lacking = len(request.keys) - (0 if request.reordered else request.granted)
        if now - max(request.moved, self._idle_since) > lacking * compute:
            self._abandon(request)
            self._queue.answer_if_complete(request, now)
            # It computes this now. The one before it waits for as long at least.
            self._idle_since, self._has_left = now, True

    def _abandon(self, request: Request) -> None:
        """Give up the keys that are not granted: its answer is a shorter prefix."""
        self.truncations += 1
        request.grant(len(request.keys), needs_rows=None, short_of_rows=False)

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
            spare = min(pool.obtainable, pool.reach(keys)) - len(missing)
            if spare > 0 and pool.free < len(missing):
                # As far as all fit, the rest's chunks that are here must not be evicted for these.
                pool.keep(keys[reach : reach + spare])
            sheds = not unasked and not self._may_be_copied_first(request, now)
            room = self._room.make(len(missing), now, shed_unsaved=sheds, incoming=incoming)
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
            needs_rows = False if reach == len(keys) else True if reach < end else None
            request.grant(reach, needs_rows=needs_rows, short_of_rows=False)
        return grants

    def _may_be_copied_first(self, request: Request, now: float) -> bool:
        """Whether a request waits for its tenant's chunks to be copied before they leave.

        A flood of another tenant makes copies slow; chunks that are shed for it are lost.
        """
        waited = 0.0 if request.since is None else now - request.since
        return self._pool.policy.shared and waited < SHED_AFTER

    def _plan(self, request: Request, end: int, unasked: bool, now: float) -> _Plan:
        """Plan what to fetch of its keys up to `end`; lease the chunks that are here at once.

        Chunks for a prefetch (`unasked`) may come from any tier that is alive.
        """
        leases, start = request.leases, request.granted
        rows = self._pool.reach(request.keys)
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
                # The prefix is longer than what it may have: only its head can ever fit.
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
                    if request.gaps or unasked:
                        continue
                    # Nothing behind this one is of use.
                    plan.reach = position + 1
                    request.cut(plan.reach)
                    break
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
