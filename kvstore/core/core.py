"""The state machine: what is where, who is pinned, what moves next.

The core does no I/O and has no clock, lock, thread or await. Calls go in,
*moves* come out of `flush`, *completions* of those moves go back in through
`poll`. It is owned by one thread. Time is passed to `poll` and `flush`, in
seconds of any monotonic clock.

A *step* is what lies between two calls of `poll`. A key that answered "hit"
stays loadable until its step ends.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.core.chains import Chains
from kvstore.core.chunk import FILLING, READY, Chunk
from kvstore.core.compactor import Compactor
from kvstore.core.directory import TierDirectory
from kvstore.core.flow import Flow
from kvstore.core.followed import FollowedDirectory
from kvstore.core.line import Line
from kvstore.core.pool import HostPool
from kvstore.core.request import Request, RequestState
from kvstore.core.stats import CoreStats, TierStats
from kvstore.types import Completion, Event, Move, Op

__all__ = ["Core", "StoreGrant"]

CASCADE_BATCH = 64
"""Most chunks in one cascade move."""

STORE_PAUSE = 5.0
"""Seconds without new copies to a tier after a copy to it failed."""

MOST_UNTOLD = 1000
"""Requests whose loads the policies have not heard of."""

RETRY_PAUSE = 5.0
"""Seconds before a tier that could not grow or be cleared is asked again."""


_WAITING = RequestState.WAITING

_NOBODY = Request("\0")
"""Stands for the request that asks while none does; its id is nobody's."""


@dataclass(slots=True)
class StoreGrant:
    """Chunks that a store may write: `keys[i]` goes to row `rows[i]`.

    `declined` were offered and are not wanted; offering them again to the same
    end would bring nothing.
    """

    keys: list[bytes]
    rows: list[int]
    evicted: list[bytes]
    declined: list[bytes] = field(default_factory=list)


class Core:
    """See the module's text.

    Args:
        pool: host memory.
        tiers: slower tiers, fastest first. A chunk is promoted from the first
            that has it and copied to each, when its flow says.
        deadline: seconds without movement after which a deferred request is answered.
        ceiling: seconds after which it is answered in any case.
        lease: seconds without being asked after which a request's leases end.
        events: whether `take_events` will be called.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierDirectory] = (),
        *,
        deadline: float = 2.0,
        ceiling: float = 30.0,
        lease: float = 10.0,
        events: bool = True,
    ) -> None:
        self.pool = pool
        self.tiers = list(tiers)
        self.compactors = [Compactor(tier) for tier in self.tiers]
        self.line = Line(pool, self.tiers, deadline=deadline, ceiling=ceiling, lease=lease)
        self.chains = Chains(pool, self.tiers)
        self._counts = bool(self.chains.filters)
        self._demoting = [
            tier
            for tier in self.tiers
            if tier.flow is not Flow.WRITE_THROUGH and not isinstance(tier, FollowedDirectory)
        ]
        self._exclusive = [tier for tier in self._demoting if tier.flow is Flow.EXCLUSIVE]
        if self._demoting:
            pool.demote = self._demote
        self._untold: dict[str, tuple[list[bytes], list[bytes]]] = {}
        """What requests have loaded and the policies do not know: on host memory, on tiers."""
        self._marked = 0
        """Chunks that may have become protected until the step ends, beside those just asked."""
        self.now = 0.0
        self._requests: dict[str, Request] = {}
        self._asked: list[Request] = []
        self._moves: dict[int, Move] = {}
        self._orphans: set[int] = set()
        self._next_move = 0
        self._asking = _NOBODY
        self._polled = 0.0
        self._totals = CoreStats(rows=pool.rows)
        self._tier_totals = [TierStats(tier.name, tier.medium) for tier in self.tiers]
        self._keep_events = events
        self._log: Callable[[str], None] = lambda message: None

    def log_to(self, write: Callable[[str], None]) -> None:
        """Where one line per change of a tier's health goes; nowhere by default."""
        self._log = write

    # -- the edges of a step ---------------------------------------------------------

    def poll(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Begin a step: take in what was completed, end what has expired."""
        self.now = now
        self._asking = _NOBODY
        self._marked = 0
        self.pool.begin_step()
        if not self._keep_events:
            self.pool.history.clear()
            for tier in self.tiers:
                tier.history.clear()
        self.absorb(completions)
        elapsed, self._polled = now - self._polled, now
        for tier in self.tiers:
            tier.watch(now, elapsed, self.line.deadline)
            self._judge(tier)
        for request in self.line.expire(now):
            self._drop_if_idle(request)

    def absorb(self, completions: Iterable[Completion]) -> None:
        """Take in completions without beginning a step."""
        for completion in completions:
            self._complete(completion)

    def flush(self, now: float) -> list[Move]:
        """The moves that are due, to be handed to the engine in this order."""
        self.now = now
        self._asking = _NOBODY
        for request in self._asked:
            if self._counts:
                self._count(request)
            if request.deferring:
                request.deferring = False
                self._totals.deferrals += request.since is None
                self.line.join(request, now)
                self.chains.extend(request.id, request.keys)
            elif request.state is not RequestState.WAITING:
                request.keys.clear()
                self._drop_if_idle(request)
        self._asked.clear()
        moves: list[Move] = []
        if self._untold and (self.line.waiting or self._demoting or self.unsaved):
            self._tell()
        if self.line.waiting:
            for tier, (chunks, slots) in self.line.grant(now):
                # One move, but for prefixes so long that its end would be the only sign of life.
                size = tier.max_rows_in_flight
                for start in range(0, len(chunks), size):
                    part = chunks[start : start + size]
                    keys = [chunk.key for chunk in part]
                    rows = [chunk.row for chunk in part]
                    some = slots[start : start + size]
                    moves.append(self._move(Op.PROMOTE, tier, keys, rows, some))
        if self._demoting:
            self.pool.make_ready()
        for tier in self.tiers:
            spare = self.compactors[tier.index].due(now)
            moves += self._tend(tier)
            if spare is not None:
                moves.append(self._hand_out(spare, tier))
        self.chains.settle()
        return moves

    @property
    def in_flight(self) -> int:
        """Moves that were handed out and not completed."""
        return len(self._moves)

    @property
    def waiting(self) -> int:
        """Requests that are deferred."""
        return len(self.line.waiting)

    @property
    def unsaved(self) -> int:
        """Chunks that wait for a copy to a slower tier, or are being copied."""
        return sum(len(tier.queue) + len(tier.writing) for tier in self.tiers)

    # -- lookup ------------------------------------------------------------------------

    def lookup(self, key: bytes, request_id: str) -> bool | None:
        """Whether the chunk can be loaded in this step: True, False, or None ("ask again").

        None always resolves: the request's wait has a deadline. A request asks
        its keys in prefix order and stops at the first False.
        """
        # Written for speed: a scheduler calls this for every key of every request.
        request = self._asking
        if request.id != request_id:
            request = self._begin_asking(request_id)
        chunk = self.pool.chunks.get(key)
        if chunk is not None and chunk.status >= READY and request.state is not _WAITING:
            chunk.step = request.asked_step
            request.keys.append(key)
            return True
        return self._lookup_elsewhere(key, chunk, request)

    def _begin_asking(self, request_id: str) -> Request:
        """The request's first lookup in this step, or its first after another's."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = Request(request_id)
        if request.asked_step != self.pool.step:
            request.asked_step = self.pool.step
            request.asked = self.now
            self._asked.append(request)
        self._asking = request
        return request

    def _lookup_elsewhere(self, key: bytes, chunk: Chunk | None, request: Request) -> bool | None:
        """The answer for a key that is not a hit at first sight."""
        state = request.state
        if state is _WAITING:
            return None
        if chunk is None:
            for tier in self.tiers:
                if key in tier.entries and tier.readable:
                    break
            else:
                self._missed(key, request)
                return False
        elif chunk.origin >= 0 and self.tiers[chunk.origin].stalled:
            # On its way from a tier that does not answer.
            self._missed(key, request)
            return False
        if state is RequestState.ANSWERED and (
            key in request.tried or self.line.overdue(request, self.now)
        ):
            self._missed(key, request)
            return False
        request.keys.append(key)
        request.deferring = True
        return None

    def _missed(self, key: bytes, request: Request) -> None:
        self._totals.misses += 1
        if self._counts:
            self.chains.count(request.id, (key,))

    def _count(self, request: Request) -> None:
        """The filters hear of the keys that the request has asked for in this step."""
        if request.keys:
            self.chains.count(request.id, request.keys)

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> int | None:
        """Number of leading `keys` that can be loaded in this step, or None ("ask again")."""
        deferred = False
        for count, key in enumerate(keys):
            answer = self.lookup(key, request_id)
            if answer is None:
                if self._requests[request_id].state is RequestState.WAITING:
                    return None
                deferred = True
            elif not answer:
                return None if deferred else count
        return None if deferred else len(keys)

    def is_waiting(self, request_id: str) -> bool:
        """Whether every lookup of this request is "ask again" for now."""
        request = self._requests.get(request_id)
        return request is not None and request.state is RequestState.WAITING

    # -- load --------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], request_id: str) -> list[int]:
        """Pin `keys`, which answered "hit" in this step; returns their rows.

        Raises:
            KeyError: if one of them cannot be loaded; then nothing was pinned.
        """
        chunks: list[Chunk] = []
        for key in keys:
            chunk = self.pool.chunks.get(key)
            if chunk is None or chunk.status < READY:
                raise KeyError(f"block {key.hex()} is not loadable; look it up in the same step")
            chunks.append(chunk)
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = Request(request_id)
        if self._counts:
            self._count(request)
        self.chains.extend(request_id, list(keys))
        self._marked += len(chunks)
        loading, sources = request.loading, self._totals.loaded_from
        used: list[bytes] = []
        for chunk in dict.fromkeys(chunks):
            if chunk.leaving:
                self.pool.stay(chunk)
            self.pool.pin(chunk)
            loading[chunk.key] = loading.get(chunk.key, 0) + 1
            source = self._medium(chunk.origin)
            sources[source] = sources.get(source, 0) + 1
            if chunk.origin < 0:
                used.append(chunk.key)
        self._totals.loaded += len(chunks)
        self.line.leave(request)
        # To have been promoted for this load was the use of those that were.
        self._told_later(request_id, used, list(keys))
        return [chunk.row for chunk in chunks]

    def complete_load(self, keys: Collection[bytes], request_id: str) -> None:
        """The device has read the rows: take the pins of `prepare_load` back.

        Keys that this request is not loading are counted as stray and ignored.
        """
        request = self._requests.get(request_id)
        for key in dict.fromkeys(keys):
            pins = request.loading.get(key, 0) if request is not None else 0
            if request is None or not pins:
                self._totals.stray += 1
                continue
            if pins == 1:
                del request.loading[key]
            else:
                request.loading[key] = pins - 1
            chunk = self.pool.chunks[key]
            self.pool.unpin(chunk)
            # What comes next from this row comes from host memory.
            chunk.origin = -1
            self.line.moved = self.now
        if request is not None:
            self._drop_if_idle(request)

    def load_source(self, key: bytes) -> str:
        """Medium from which a loadable chunk reached host memory: "host" or a tier's."""
        chunk = self.pool.chunks.get(key)
        return self._medium(chunk.origin) if chunk is not None else "host"

    def touch(self, keys: Collection[bytes]) -> None:
        """`keys`, in prefix order, were used: on every tier that has them."""
        self._tell()
        self._use(keys, keys)

    def _told_later(self, request_id: str, host_keys: list[bytes], tier_keys: list[bytes]) -> None:
        """The request has used these; the policies hear of it before they decide anything.

        Until then its store may come, so that they hear of the whole prompt tail first.
        """
        earlier = self._untold.pop(request_id, None)
        if earlier is not None:
            self._use(*earlier)
        self._untold[request_id] = (host_keys, tier_keys)
        if len(self._untold) > MOST_UNTOLD:
            self._tell()

    def _tell(self) -> None:
        """The policies hear of every use so far."""
        if self._untold:
            untold, self._untold = self._untold, {}
            for host_keys, tier_keys in untold.values():
                self._use(host_keys, tier_keys)

    def _use(self, host_keys: Collection[bytes], tier_keys: Collection[bytes]) -> None:
        pool = self.pool
        tail_first = list(host_keys)
        tail_first.reverse()
        for tier in self._exclusive:
            for key in tail_first:
                if key in tier.entries and key in pool.chunks and key not in tier.reading:
                    tier.forget(key)
        pool.touch(tail_first)
        if self.tiers:
            tail_first = list(tier_keys)
            tail_first.reverse()
            for tier in self.tiers:
                tier.touch(tail_first)

    # -- store -------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], request_id: str) -> StoreGrant | None:
        """Reserve rows for those of `keys` that host memory does not have.

        A store that does not fit whole is granted for the prefix that fits; it
        never costs those of `keys` their place that are there already, unless host
        memory is too small for all of `keys`. Chunks that
        the admission filter does not want cost nothing; nor do those that the
        policy would give up again for the head of the same store. None
        means "not now, offer it again": nothing is free for it at this moment, or
        the whole would fit once transfers that are under way have ended; the
        latter is said at most once in a row to a request.
        """
        pool = self.pool
        request = self._requests.get(request_id)
        if request is not None and request.state is not RequestState.SCANNING:
            self.line.leave(request)
        offered = list(dict.fromkeys(keys))
        self.chains.extend(request_id, offered)
        new = [key for key in offered if key not in pool.chunks]
        loaded: tuple[list[bytes], list[bytes]] = self._untold.pop(request_id, ([], []))
        self._tell()
        if request is not None and request.put_off:
            # It is no second use, but what is there shall not go meanwhile.
            self._keep(offered)
            self._use(*loaded)
        else:
            # What the request has loaded and what it stores are one prompt.
            prompt = list(dict.fromkeys([*loaded[1], *offered])) if loaded[1] else offered
            promoted = set(loaded[1]).difference(loaded[0])
            self._use([key for key in prompt if key not in promoted], prompt)
            # Their promotion may lie far back.
            self._keep(promoted)
        declined: list[bytes] = []
        if new and pool.admission is not None:
            answers = pool.admission.admit(new, self.now)
            declined = [key for key, answer in zip(new, answers, strict=True) if not answer]
            new = [key for key, answer in zip(new, answers, strict=True) if answer]
        before = len(pool.history)
        may_fit = len(new) <= pool.rows and (pool.busy > 0 or pool.held > 0 or self.unsaved > 0)
        chunks, room = self._enter(offered, new, declined, may_fit)
        if room < len(new):
            put_off = may_fit and not (request is not None and request.put_off)
            if put_off or room == 0:
                if request is None:
                    request = self._requests[request_id] = Request(request_id)
                request.put_off = True
                self._totals.stores_put_off += 1
                return None
            self._totals.chunks_refused += len(new) - room
        if request is not None:
            request.put_off = False
            self._drop_if_idle(request)
        if chunks is None:
            chunks = pool.reserve(new[:room], -1)
        for chunk in chunks:
            chunk.stored_by = request_id
        self.chains.storing(request_id, len(chunks))
        self._totals.declined += len(declined)
        evicted = [key for key, left in pool.history[before:] if left]
        rows = [chunk.row for chunk in chunks]
        return StoreGrant([chunk.key for chunk in chunks], rows, evicted, declined)

    def complete_store(self, keys: Collection[bytes], request_id: str, ok: bool = True) -> None:
        """The device has written the rows (`ok`), or it has not: the chunks are dropped.

        Keys that this request is not storing are counted as stray and ignored.
        """
        pool = self.pool
        stored: list[Chunk] = []
        ended = 0
        for key in keys:
            chunk = pool.chunks.get(key)
            if chunk is None or chunk.status != FILLING or chunk.stored_by != request_id:
                self._totals.stray += 1
                continue
            chunk.stored_by = None
            ended += 1
            if ok:
                pool.fill(chunk)
                self.line.filled(chunk, self.now)
                stored.append(chunk)
            else:
                self.line.failed(chunk, self.now)
                pool.discard(chunk)
        # A server may report a store as a set; rows were given in prefix order.
        stored.sort(key=lambda chunk: chunk.order)
        self._totals.stored += len(stored)
        followed = [tier for tier in self.tiers if isinstance(tier, FollowedDirectory)]
        if followed:
            # What a neighbour keeps on the same disk need not be written twice.
            stored = [c for c in stored if not any(c.key in tier.entries for tier in followed)]
        for tier in self.tiers:
            if tier.flow is not Flow.WRITE_THROUGH or isinstance(tier, FollowedDirectory):
                continue
            if not tier.accepts(self.now):
                self._tier_totals[tier.index].refused += len(stored)
                continue
            self._queue(tier, [chunk for chunk in stored if tier.lacks(chunk.key)])
        self.chains.storing(request_id, -ended)

    # -- the rest ----------------------------------------------------------------------

    def on_new_request(self, request_id: str) -> None:
        """A request was seen for the first time. What an earlier one of that name held, ends."""
        self.on_request_finished(request_id)

    def on_request_finished(self, request_id: str) -> None:
        """The request asks no more: its wait and its leases end. Loads under way go on."""
        request = self._requests.get(request_id)
        if request is not None:
            if self._counts:
                self._count(request)
            self.line.leave(request)
            request.put_off = request.deferring = False
            self._drop_if_idle(request)
        loaded = self._untold.pop(request_id, None)
        if loaded is not None:
            self._use(*loaded)
        self.chains.end(request_id)

    def may_go_below(self, key: bytes) -> bool:
        """Whether the chunk is on a slower tier, on its way there, or will be when given up."""
        chunk = self.pool.chunks.get(key)
        if chunk is not None and chunk.unsaved:
            return True
        return any(not tier.lacks(key) for tier in self.tiers) or (
            chunk is not None and any(tier.accepts(self.now) for tier in self._demoting)
        )

    def save(self) -> None:
        """Copy to every tier what it lacks, also what would only be copied when given up."""
        self._tell()
        for tier in self._demoting:
            if tier.accepts(self.now):
                lacking = [
                    chunk
                    for chunk in self.pool.chunks.values()
                    if chunk.status != FILLING
                    and not chunk.unsaved >> tier.index & 1
                    and tier.lacks(chunk.key)
                    and not self._shared(chunk.key)
                ]
                self._queue(tier, lacking)

    def take_events(self) -> list[Event]:
        """What appeared on or left a medium since the last call."""
        events: list[Event] = []
        sources: list[HostPool | TierDirectory] = [self.pool, *self.tiers]
        for source in sources:
            medium = "host" if isinstance(source, HostPool) else source.medium
            for left, run in itertools.groupby(source.history, key=operator.itemgetter(1)):
                events.append(Event([key for key, _ in run], medium, removed=left))
            source.history.clear()
        return events

    def reset(self) -> None:
        """Forget everything, on every tier; on slower tiers durably, as soon as they can.

        No transfer between device and host memory may be under way: the rows
        of prepared loads and stores are given out again.
        """
        for request in self._requests.values():
            self.line.leave(request)
        self._requests.clear()
        self.chains.reset()
        self._untold.clear()
        self._asked.clear()
        self._asking = _NOBODY
        # Rows of moves that an earlier reset orphaned are held already.
        self.pool.reset(
            row for id, move in self._moves.items() if id not in self._orphans for row in move.rows
        )
        self._orphans = set(self._moves)
        for tier in self.tiers:
            tier.reset()
            self.compactors[tier.index].reset()

    def stats(self) -> CoreStats:
        """A snapshot of counters and gauges."""
        totals, pool, line = self._totals, self.pool, self.line
        totals.free_rows, totals.busy_rows, totals.chunks = pool.free, pool.busy, len(pool.chunks)
        totals.waiting, totals.timeouts = len(line.waiting), line.timeouts
        totals.truncations, totals.lapses, totals.shed = line.truncations, line.lapses, pool.shed
        totals.evicted = pool.evicted
        for tier, tier_totals in zip(self.tiers, self._tier_totals, strict=True):
            tier_totals.chunks, tier_totals.free = len(tier.entries), tier.free
            tier_totals.segments, tier_totals.max_segments = tier.segments, tier.max_segments
            tier_totals.queued = len(tier.queue)
            tier_totals.stalled, tier_totals.congested = tier.stalled, tier.congested
            tier_totals.evicted = tier.evicted
            compactor = self.compactors[tier.index]
            tier_totals.relocated, tier_totals.given_back = (
                compactor.relocated,
                compactor.given_back,
            )
        return replace(
            totals,
            loaded_from=dict(totals.loaded_from),
            tiers=[replace(tier_totals) for tier_totals in self._tier_totals],
        )

    # -- inside ------------------------------------------------------------------------

    def _enter(
        self,
        offered: list[bytes],
        new: list[bytes],
        declined: list[bytes],
        may_fit: bool,
    ) -> tuple[list[Chunk] | None, int]:
        """Get rows for `new`, those of `offered` that are not here and not `declined`.

        Where all fit, or what does not fit never will, the policy says chunk by
        chunk who enters and who leaves; what it does not want is added to `declined`.

        Returns:
            The chunks that have entered, or None where nobody has yet; and for how
            many of `new` there was room.
        """
        pool = self.pool
        if self.line.starving:
            # Rows that a request in line waits for are not for stores.
            return None, 0
        marked = self._marked + sum(len(asked.keys) for asked in self._asked)
        marked += len(offered) - len(new) - len(declined)
        fits = pool.has_room(len(new), marked)
        if fits:
            chunks = pool.enter(offered, frozenset(declined))
            entered = {chunk.key for chunk in chunks}
            declined += [key for key in new if key not in entered]
            return chunks, len(new)
        if not may_fit and pool.demote is None:
            chunks = pool.enter(offered, frozenset(declined))
            self._keep(offered)
            return chunks, len(chunks)
        # What is there already keeps its place, and the head goes first.
        self._keep(offered)
        return None, pool.make_room(len(new), shed_unsaved=False, incoming=new[::-1])

    def _keep(self, keys: Iterable[bytes]) -> None:
        """Those of `keys` that are here stay until the step ends."""
        pool = self.pool
        for key in keys:
            chunk = pool.chunks.get(key)
            if chunk is not None:
                chunk.step = pool.step
                self._marked += 1

    def _medium(self, origin: int) -> str:
        return "host" if origin < 0 else self.tiers[origin].medium

    def _drop_if_idle(self, request: Request) -> None:
        if (
            request.state is RequestState.SCANNING
            and not request.loading
            and not request.put_off
            and not request.deferring
            # Its name may belong to a later request by now.
            and self._requests.get(request.id) is request
        ):
            del self._requests[request.id]
            if self._asking is request:
                self._asking = _NOBODY

    def _queue(self, tier: TierDirectory, chunks: list[Chunk]) -> int:
        """Put `chunks` in the queue for a tier, as far as it admits them; returns how many."""
        if tier.admission is not None and chunks:
            answers = tier.admission.admit([chunk.key for chunk in chunks], self.now)
            wanted = [chunk for chunk, answer in zip(chunks, answers, strict=True) if answer]
            self._tier_totals[tier.index].declined += len(chunks) - len(wanted)
            chunks = wanted
        for chunk in chunks:
            self.pool.queued(chunk, tier.index)
            tier.enqueue(chunk.key)
        return len(chunks)

    def _shared(self, key: bytes) -> bool:
        """Whether a neighbour keeps the chunk on the same disk."""
        return any(
            isinstance(tier, FollowedDirectory) and key in tier.entries for tier in self.tiers
        )

    def _demote(self, chunk: Chunk) -> bool:
        """Host memory gives the chunk up: queue it where it is wanted. False if nowhere."""
        if self._shared(chunk.key):
            return False
        queued = 0
        for tier in self._demoting:
            if not tier.lacks(chunk.key):
                # To be given up once more counts as much as to be given up.
                tier.touch((chunk.key,))
            elif tier.accepts(self.now):
                queued += self._queue(tier, [chunk])
            else:
                self._tier_totals[tier.index].refused += 1
        return queued > 0

    def _move(
        self, op: Op, tier: TierDirectory, keys: list[bytes], rows: list[int], slots: list[int]
    ) -> Move:
        return self._hand_out(Move(-1, op, tier.index, keys, rows, slots), tier)

    def _hand_out(self, move: Move, tier: TierDirectory) -> Move:
        move.id = self._next_move
        self._next_move += 1
        self._moves[move.id] = move
        tier.in_flight[move.id] = (move, self.now)
        tier.rows_in_flight += len(move.rows)
        return move

    def _tend(self, tier: TierDirectory) -> list[Move]:
        """Copies to, growth and clearing of one tier."""
        if tier.clearing:
            if tier.in_flight or self.now < tier.retry_after:
                return []
            return [self._move(Op.CLEAR, tier, [], [], [])]
        moves: list[Move] = []
        if tier.wants_growth and self.now >= tier.retry_after and not tier.stalled:
            tier.growing = True
            tier.growing_since = self.now
            moves.append(self._move(Op.GROW, tier, [], [], []))
        while tier.queue:
            limit = min(CASCADE_BATCH, tier.max_rows_in_flight - len(tier.writing))
            if tier.store_after:
                # It failed a while ago. One chunk tries first: a whole batch would
                # displace chunks that can still be read, for nothing.
                limit = 0 if tier.writing else 1
            batch: list[Chunk] = []
            while tier.queue and len(batch) < limit:
                chunk = self.pool.chunks.get(tier.queue[0])
                if chunk is not None and chunk.unsaved >> tier.index & 1:
                    self.pool.dequeued(chunk, tier.index)
                    batch.append(chunk)
                tier.queue.popleft()
            if not batch:
                break
            # Chunks are given up tail first, but stored head first.
            through = tier.flow is Flow.WRITE_THROUGH
            tail_first = reversed(batch) if through else batch
            slots = tier.take_slots(len(batch), [chunk.key for chunk in tail_first])
            if len(slots) < len(batch):
                for chunk in reversed(batch[len(slots) :]):
                    self.pool.queued(chunk, tier.index)
                    tier.queue.appendleft(chunk.key)
                del batch[len(slots) :]
                if not batch:
                    break
            if not through:
                batch.reverse()
            for chunk, slot in zip(batch, slots, strict=True):
                self.pool.pin(chunk)
                tier.writing[chunk.key] = slot
            keys = [chunk.key for chunk in batch]
            moves.append(self._move(Op.CASCADE, tier, keys, [c.row for c in batch], slots))
        return moves

    def _complete(self, completion: Completion) -> None:
        if completion.news is not None:
            tier = self.tiers[completion.tier]
            if isinstance(tier, FollowedDirectory):
                tier.learn(completion.news)
            return
        move = self._moves.pop(completion.move_id, None)
        if move is None:
            self._totals.stray += 1
            return
        tier = self.tiers[move.tier]
        _, started = tier.in_flight.pop(move.id)
        tier.rows_in_flight -= len(move.rows)
        tier.heard = True
        if completion.error is not None:
            self._tier_totals[tier.index].errors += 1
        if tier.stalled:
            tier.stalled = False
            self._log(f"tier {tier.name} answers again")
        if move.id in self._orphans:
            self._orphans.discard(move.id)
            self.pool.release_held(move.rows)
            if move.op is Op.GROW:
                tier.growing = False
                tier.noted(completion.segments)
            elif move.op is Op.SHRINK and completion.error is None:
                tier.removed(move.segment)
        elif move.op in (Op.LIST, Op.RELOCATE, Op.SHRINK):
            self.compactors[tier.index].ended(move, completion, self.now)
        elif move.op is Op.PROMOTE:
            self._promoted(tier, move, completion, started)
        elif move.op is Op.CASCADE:
            self._cascaded(tier, move, completion)
        elif move.op is Op.GROW:
            tier.growing = False
            for segment in completion.segments:
                tier.grown(segment)
            if not completion.segments:
                tier.cannot_grow = True
                tier.retry_after = self.now + RETRY_PAUSE
        elif completion.error is None:
            tier.cleared(completion.segments)
        else:
            tier.retry_after = self.now + RETRY_PAUSE

    def _promoted(
        self, tier: TierDirectory, move: Move, completion: Completion, started: float
    ) -> None:
        totals = self._tier_totals[tier.index]
        newest = -1
        for key, ok in zip(move.keys, completion.ok, strict=True):
            chunk = self.pool.chunks[key]
            newest = chunk.order
            tier.end_read(key)
            if ok:
                self.pool.fill(chunk)
                self.line.filled(chunk, self.now)
                totals.promoted += 1
                if tier.flow is Flow.EXCLUSIVE:
                    tier.forget(key)
            else:
                self.line.failed(chunk, self.now)
                self.pool.discard(chunk)
                tier.forget(key)
                totals.failed_reads += not isinstance(tier, FollowedDirectory)
        self.line.passed(newest, self.now)
        tier.arrived_since = min(tier.arrived_since, started) if tier.arrived else started
        tier.arrived += len(move.keys)

    def _cascaded(self, tier: TierDirectory, move: Move, completion: Completion) -> None:
        totals = self._tier_totals[tier.index]
        # Tail first, as everything that reaches a policy.
        for key, slot, ok in reversed(list(zip(move.keys, move.slots, completion.ok, strict=True))):
            chunk = self.pool.chunks[key]
            if ok:
                tier.written(key, slot)
                totals.written += 1
            else:
                tier.not_written(key, slot)
                totals.failed_writes += 1
            self.pool.unpin(chunk)
        if not all(completion.ok):
            tier.refused(slot for slot, ok in zip(move.slots, completion.ok, strict=True) if not ok)
            if not tier.ailing:
                self._log(f"a device of tier {tier.name} cannot store now: {completion.error}")
                return
            if self.now >= tier.store_after:
                self._log(f"tier {tier.name} cannot store now: {completion.error}")
            tier.store_after = self.now + STORE_PAUSE
            self._empty_queue(tier)
        elif tier.store_after and self.now >= tier.store_after:
            tier.store_after = 0.0
            self._log(f"tier {tier.name} stores again")

    def _empty_queue(self, tier: TierDirectory) -> None:
        """Let the chunks that wait for a tier go without it."""
        while tier.queue:
            chunk = self.pool.chunks.get(tier.queue.popleft())
            if chunk is not None and chunk.unsaved >> tier.index & 1:
                self.pool.dequeued(chunk, tier.index)
                self._tier_totals[tier.index].refused += 1

    def _judge(self, tier: TierDirectory) -> None:
        """Notice a tier that does not answer, or that has more to do than anyone waits for."""
        if tier.silent >= 2 * self.line.deadline and not tier.stalled:
            tier.stalled = True
            self._log(
                f"tier {tier.name} has not answered for {tier.silent:.1f} s; "
                "its chunks are misses and nothing is stored there until it does"
            )
            self._empty_queue(tier)
        backlog = len(tier.reading) * tier.seconds_per_chunk
        tier.congested = backlog > self.line.ceiling
