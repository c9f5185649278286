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
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.core.cascades import Cascades
from kvstore.core.chains import Chains
from kvstore.core.chunk import FILLING, READY, Chunk
from kvstore.core.flow import Flow
from kvstore.core.line import FORGET_AFTER, Line
from kvstore.core.overtaken import Overtaken, Transfer
from kvstore.core.pace import STORED, Pace
from kvstore.core.pool import HostPool
from kvstore.core.request import Request, RequestState
from kvstore.core.stats import CoreStats
from kvstore.core.tier import TierView
from kvstore.core.transfers import Transfers
from kvstore.types import Completion, Event, Move

__all__ = ["Core", "StoreGrant"]

MOST_UNTOLD = 1000
"""Requests whose loads the policies have not heard of."""

DEFAULT_PACE = Pace()

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
        pace: how much one step does at most.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView] = (),
        *,
        deadline: float = 2.0,
        ceiling: float = 30.0,
        lease: float = 10.0,
        events: bool = True,
        pace: Pace = DEFAULT_PACE,
    ) -> None:
        self.pool = pool
        self._chunk_of = pool.chunks.get
        self.tiers = list(tiers)
        self.line = Line(pool, self.tiers, deadline=deadline, ceiling=ceiling, lease=lease)
        self.chains = Chains(pool, self.tiers)
        self._counts = bool(self.chains.filters)
        self._write: Callable[[str], None] = lambda message: None
        self.cascades = Cascades(pool, self.tiers, self._log)
        self.transfers = Transfers(pool, self.tiers, self.line, self.cascades, self._log)
        self._pace = pool.pace = self.line.pace = pace
        pool.begin_step()
        self.line.begin_step()
        self.cascades.begin_step(pace)
        self._ended: deque[Completion] = deque()
        """Completions that are still to be taken in."""
        self._to_absorb = pace.absorbed
        self._looked_up = 0
        self._asking_keys: list[bytes] = []
        """What the request that began to ask last has asked for, growing."""
        self._unseen: set[str] = set()
        """Requests that shall ask again in the next step."""
        self._to_tell = pace.told
        self._wanted = 0.0
        """What callers have wanted since a step's own work was last begun."""
        self._shortened = True
        self._effort = pool.policy.effort
        efforts = {self._effort, *(tier.index.policy.effort for tier in self.tiers)}
        self._light = pace.whole - pace.own if efforts == {1.0} else -1
        """What callers may want of a step before anything else is left for later."""
        self._unseen_request = Request("\0")
        self._unseen_request.state = RequestState.WAITING
        self.overtaken = Overtaken(pool)
        """Transfers that were prepared before a reset and have not ended."""
        self.era = 0
        """Counts resets. Who reports a transfer that may be older says in which it was prepared."""
        self._demoting = self.cascades.demoting
        self._exclusive = [tier for tier in self._demoting if tier.flow is Flow.EXCLUSIVE]
        if self._demoting:
            pool.demote = self._demote
        self._untold: dict[str, tuple[list[bytes], list[bytes]]] = {}
        """What requests have loaded and the policies do not know: on host memory, on tiers."""
        self._listed: list[tuple[list[bytes], int]] = []
        """Keys of this step's hits, by request and round, and how many of each the pool knows."""
        self.now = 0.0
        self._readable = list(self.tiers)
        """Tiers whose chunks were worth waiting for when the step began."""
        self._requests: dict[str, Request] = {}
        self._put_off: dict[str, tuple[Request, float]] = {}
        """Requests whose last store was put off, and when that was, longest ago first."""
        self._asked: list[Request] = []
        self._asking = _NOBODY
        self._polled = 0.0
        self._totals = CoreStats(rows=pool.rows)
        pool.keep_history(events)
        for tier in self.tiers:
            tier.index.keep_history(events)

    def log_to(self, write: Callable[[str], None]) -> None:
        """Where one line per change of a tier's health goes; nowhere by default."""
        self._write = write

    def _log(self, message: str) -> None:
        self._write(message)

    def _demote(self, chunk: Chunk) -> bool:
        return self.cascades.demote(chunk, self.now)

    # -- the edges of a step ---------------------------------------------------------

    def poll(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Begin a step: take in what was completed, end what has expired."""
        self.now = now
        self._asking = _NOBODY
        self._listed.clear()
        self._looked_up, self._asking_keys = 0, []
        self._to_tell = self._pace.told
        self._shortened = False
        self._unseen.clear()
        self.pool.begin_step()
        self.line.begin_step()
        self.cascades.begin_step(self._pace)
        self._to_absorb = self._pace.absorbed
        if completions or self._ended:
            self.absorb(completions)
        elapsed, self._polled = now - self._polled, now
        self.transfers.watch(now, elapsed, self.line.deadline, self.line.ceiling)
        self._readable = [tier for tier in self.tiers if tier.health.readable]
        if self._ended:
            self.line.keep(now)
        for request in self.line.expire(now):
            self._drop_if_idle(request)
        while self._put_off:
            request, since = next(iter(self._put_off.values()))
            if now - since < FORGET_AFTER * self.line.lease:
                break
            self._forget_put_off(request)
            self._drop_if_idle(request)

    def absorb(self, completions: Iterable[Completion]) -> None:
        """Take in completions without beginning a step, as many as this step may."""
        self._asking = _NOBODY
        ended = self._ended
        for completion in completions:
            self.transfers.hear(completion)
            ended.append(completion)
        if not ended:
            return
        while ended and self._to_absorb > 0:
            completion = ended.popleft()
            changes = completion.changes
            if changes is not None and len(changes.appeared) > self._to_absorb:
                some, rest = changes.split(self._to_absorb)
                ended.appendleft(replace(completion, changes=rest))
                completion = replace(completion, changes=some)
                changes = some
            self._to_absorb -= 1 + (len(completion.ok) if changes is None else len(changes))
            self._totals.stray += not self.transfers.complete(completion, self.now)
        self.line.pass_on(self.now)

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
                request.keys = []
                self._drop_if_idle(request)
        self._asked.clear()
        if not self._shortened:
            self._shorten()
        moves: list[Move] = []
        if self._untold and (self.line.waiting or self._demoting or self.unsaved):
            self._tell_some()
        if self.line.waiting:
            for tier, (chunks, slots) in self.line.grant(now):
                moves += self.transfers.promote(tier, chunks, slots, now)
        if self._demoting:
            self.pool.make_ready()
        moves += self.transfers.due(now)
        self.chains.settle(self._pace.told)
        return moves

    def _shorten(self) -> None:
        """The more callers want of a step, the less else is done in it."""
        self._shortened = True
        wanted = self._wanted + self._looked_up + len(self._asking_keys)
        self._wanted = 0.0
        if wanted <= self._light:
            return
        share = self._pace.share(wanted)
        self.cascades.shorten(share)
        self.line.shorten(share)
        self._to_tell = int(self._to_tell * share / self._effort)

    @property
    def in_flight(self) -> int:
        """Moves that were handed out and not completed."""
        return len(self.transfers.moves)

    @property
    def behind(self) -> bool:
        """Whether the next step has something to do although nothing new will have happened."""
        return (
            bool(self._ended)
            or self.line.behind
            or self.cascades.behind
            or (self.pool.cut_short and self.waiting > 0)
        )

    @property
    def waiting(self) -> int:
        """Requests that are deferred."""
        return len(self.line.waiting)

    @property
    def clearing(self) -> bool:
        """Whether a tier has not been cleared since a reset, nor has failed to be."""
        return self.transfers.clearing

    @property
    def unsaved(self) -> int:
        """Chunks that wait for a copy to a slower tier, or are being copied."""
        return self.cascades.unsaved

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
        chunk = self._chunk_of(key)
        if chunk is not None and chunk.status >= READY and request.state is not _WAITING:
            chunk.step = request.asked_step
            request.keys.append(key)
            return True
        return self._lookup_elsewhere(key, chunk, request)

    def _begin_asking(self, request_id: str) -> Request:
        """The request's first lookup in this step, or its first after another's."""
        request = self._requests.get(request_id)
        if request is not None and request.state is _WAITING:
            # Nothing of it is looked up.
            request.asked_step = self.pool.step
            request.asked = self.now
            self._asking = request
            return request
        if request is None or request.asked_step != self.pool.step:
            self._looked_up += len(self._asking_keys)
            self._asking_keys = []
            if self._looked_up >= self._pace.asked:
                return self._answer_later(request_id, request)
            if request is None:
                request = self._requests[request_id] = Request(request_id)
            self._asking_keys = request.keys
        if request.asked_step != self.pool.step:
            request.asked_step = self.pool.step
            request.asked = self.now
            self._asked.append(request)
            self._listed.append((request.keys, len(request.keys)))
        elif not request.keys:
            self._listed.append((request.keys, 0))
        self._asking = request
        return request

    def _answer_later(self, request_id: str, request: Request | None) -> Request:
        """The request shall ask again in the next step: this one has looked up enough."""
        if request is not None:
            request.asked = self.now
        self._unseen.add(request_id)
        self._asking = self._unseen_request
        self._asking.id = request_id
        return self._asking

    def _lookup_elsewhere(self, key: bytes, chunk: Chunk | None, request: Request) -> bool | None:
        """The answer for a key that is not a hit at first sight."""
        state = request.state
        if state is _WAITING and (request is not self._unseen_request or chunk is not None):
            return None
        if chunk is None:
            for tier in self._readable:
                if key in tier.entries:
                    break
            else:
                self._missed(key, request)
                return False
        elif chunk.origin >= 0 and self.tiers[chunk.origin].health.stalled:
            # On its way from a tier that does not answer.
            self._missed(key, request)
            return False
        if state is RequestState.ANSWERED and (
            key in request.tried or self.line.overdue(request, self.now)
        ):
            self._missed(key, request)
            return False
        if state is _WAITING:
            return None
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

    def put_in_order(
        self, request_id: str, place: Callable[[bytes], int], *, straight: bool = False
    ) -> None:
        """What a deferred request asked for in this step is put in the order of its prompt.

        For servers that ask in another: a sliding window is looked for from its end,
        and several KV cache groups one after the other. To be called before `flush`.

        Args:
            place: where in the prompt a key belongs.
            straight: the keys were asked either in the order of the prompt or from its end.
        """
        request = self._requests.get(request_id)
        if request is None or not request.deferring:
            return
        keys = request.keys
        if straight and place(keys[0]) <= place(keys[-1]):
            return
        self.pool.mark(keys)
        if straight:
            keys.reverse()
        else:
            keys.sort(key=place)

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> int | None:
        """Number of leading `keys` that can be loaded in this step, or None ("ask again")."""
        deferred = False
        for count, key in enumerate(keys):
            answer = self.lookup(key, request_id)
            if answer is None:
                if self.is_waiting(request_id):
                    return None
                deferred = True
            elif not answer:
                return None if deferred else count
        return None if deferred else len(keys)

    def is_waiting(self, request_id: str) -> bool:
        """Whether every lookup of this request is "ask again" for now."""
        request = self._asking
        if request.id == request_id:
            return request.state is _WAITING
        known = self._requests.get(request_id)
        waits = known is not None and known.state is _WAITING
        return waits or request_id in self._unseen

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
        loading, leases, pool = request.loading, request.leases, self.pool
        wanted = list(dict.fromkeys(chunks))
        for chunk in wanted:
            key = chunk.key
            if key in leases:
                # The pin of its lease becomes that of the load.
                del leases[key]
            else:
                if chunk.leaving:
                    pool.stay(chunk)
                pool.pin(chunk)
            loading[key] = loading.get(key, 0) + 1
        origins = Counter(map(operator.attrgetter("origin"), wanted))
        used = [chunk.key for chunk in wanted if chunk.origin < 0] if -1 in origins else []
        sources = self._totals.loaded_from
        for origin, count in origins.items():
            source = self._medium(origin)
            sources[source] = sources.get(source, 0) + count
        self._totals.loaded += len(chunks)
        self._wanted += len(chunks)
        self._leave_line(request)
        # To have been promoted for this load was the use of those that were.
        self._told_later(request_id, used, list(keys))
        return [chunk.row for chunk in chunks]

    def complete_load(
        self, keys: Collection[bytes], request_id: str, era: int | None = None
    ) -> None:
        """The device has read the rows: take the pins of `prepare_load` back.

        Keys that this request is not loading are counted as stray and ignored.

        Args:
            era: that in which the load was prepared; the present one if not given.
        """
        if era is not None and era != self.era:
            self._ended_late(keys, request_id, era)
            return
        request = self._requests.get(request_id)
        loading = request.loading if request is not None else {}
        chunks = self.pool.chunks
        loaded: list[Chunk] = []
        for key in dict.fromkeys(keys):
            pins = loading.pop(key, 0)
            if not pins:
                self._totals.stray += 1
                continue
            if pins > 1:
                loading[key] = pins - 1
            chunk = chunks[key]
            # What comes next from this row comes from host memory.
            chunk.origin = -1
            loaded.append(chunk)
        if loaded:
            self.pool.unpin_all(loaded)
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

    def _tell_some(self) -> None:
        """The policies hear of as many uses as this step may tell, of each prompt tail first."""
        untold = self._untold
        if not untold:
            return
        many = sum(len(tier_keys) for _, tier_keys in untold.values())
        most = max(self._to_tell, many // 8 if self._to_tell > 0 else 0)
        while untold and most > 0:
            request_id = next(iter(untold))
            host_keys, tier_keys = untold.pop(request_id)
            if len(tier_keys) > most:
                head = len(tier_keys) - most
                told = frozenset(tier_keys[head:])
                later = [key for key in host_keys if key not in told]
                # It stays the first in turn.
                self._untold = untold = {request_id: (later, tier_keys[:head]), **untold}
                host_keys, tier_keys = host_keys[len(later) :], tier_keys[head:]
            self._use(host_keys, tier_keys)
            most -= len(tier_keys)
            self._to_tell -= len(tier_keys)

    def _use(self, host_keys: Collection[bytes], tier_keys: Collection[bytes]) -> None:
        pool = self.pool
        tail_first = list(host_keys)
        tail_first.reverse()
        for target in self._exclusive:
            for key in tail_first:
                if key in target.entries and key in pool.chunks and key not in target.index.reading:
                    target.forget((key,))
        pool.touch(tail_first)
        if self.tiers:
            tail_first = list(tier_keys)
            tail_first.reverse()
            for tier in self.tiers:
                tier.index.touch(tail_first)

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
            self._leave_line(request)
        offered = list(dict.fromkeys(keys))
        self.chains.extend(request_id, offered)
        new = [key for key in offered if key not in pool.chunks]
        loaded: tuple[list[bytes], list[bytes]] = self._untold.pop(request_id, ([], []))
        self._tell_some()
        if request is not None and request.put_off:
            # It is no second use, but what is there shall not go meanwhile.
            self.pool.keep(offered)
            self._use(*loaded)
        else:
            # What the request has loaded and what it stores are one prompt.
            prompt = list(dict.fromkeys([*loaded[1], *offered])) if loaded[1] else offered
            promoted = set(loaded[1]).difference(loaded[0])
            self._use([key for key in prompt if key not in promoted], prompt)
            # Their promotion may lie far back.
            self.pool.keep(promoted)
        declined: list[bytes] = []
        if new and pool.admission is not None:
            answers = pool.admission.admit(new, self.now)
            declined = [key for key, answer in zip(new, answers, strict=True) if not answer]
            new = [key for key, answer in zip(new, answers, strict=True) if answer]
        before = len(pool.left)
        may_fit = len(new) <= pool.rows and (pool.busy > 0 or pool.held > 0 or self.unsaved > 0)
        chunks, room = self._enter(offered, new, declined, may_fit)
        if room < len(new):
            put_off = may_fit and not (request is not None and request.put_off)
            # A search that was broken off goes on in the next step: nothing is cut for it.
            wait = chunks is None and (put_off or pool.cut_short)
            if room == 0 or wait:
                if request is None:
                    request = self._requests[request_id] = Request(request_id)
                self._put_off.pop(request_id, None)
                self._put_off[request_id] = (request, self.now)
                request.put_off = True
                self._totals.stores_put_off += 1
                return None
            self._totals.chunks_refused += len(new) - room
        if request is not None:
            self._forget_put_off(request)
            self._drop_if_idle(request)
        if chunks is None:
            chunks = pool.reserve(new[:room], -1)
        self._wanted += STORED * self._effort * len(chunks)
        for chunk in chunks:
            chunk.stored_by = request_id
        self.chains.storing(request_id, len(chunks))
        self._totals.declined += len(declined)
        evicted = pool.left[before:]
        rows = [chunk.row for chunk in chunks]
        return StoreGrant([chunk.key for chunk in chunks], rows, evicted, declined)

    def complete_store(
        self, keys: Collection[bytes], request_id: str, ok: bool = True, era: int | None = None
    ) -> None:
        """The device has written the rows (`ok`), or it has not: the chunks are dropped.

        Keys that this request is not storing are counted as stray and ignored.

        Args:
            era: that in which the store was prepared; the present one if not given.
        """
        if era is not None and era != self.era:
            self._ended_late(keys, request_id, era)
            return
        chunks = self.pool.chunks
        ended: list[Chunk] = []
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None or chunk.status != FILLING or chunk.stored_by != request_id:
                self._totals.stray += 1
                continue
            chunk.stored_by = None
            ended.append(chunk)
        # A server may report a store as a set; rows were given in prefix order.
        ended.sort(key=operator.attrgetter("order"))
        if not ok:
            for chunk in ended:
                self.line.failed(chunk, self.now)
                self.pool.discard(chunk)
            self.chains.storing(request_id, -len(ended))
            return
        self.line.all_stored(ended, self.now)
        self._totals.stored += len(ended)
        self.cascades.stored(ended, self.now)
        self.chains.storing(request_id, -len(ended))

    # -- the rest ----------------------------------------------------------------------

    def on_new_request(self, request_id: str) -> None:
        """A request was seen for the first time. What an earlier one of that name held, ends."""
        self.on_request_finished(request_id)

    def on_request_finished(
        self, request_id: str, place: Callable[[bytes], int] | None = None
    ) -> None:
        """The request asks no more: its wait and its leases end. Loads under way go on.

        Args:
            place: where in its prompt a key belongs, for servers that use keys in another order.
        """
        request = self._requests.get(request_id)
        if request is not None:
            if self._counts:
                self._count(request)
            self._leave_line(request)
            request.deferring = False
            self._forget_put_off(request)
            self._drop_if_idle(request)
        loaded = self._untold.pop(request_id, None)
        if loaded is not None:
            self._use(*loaded)
        self.chains.end(request_id, place)

    def lapse(self, request_id: str) -> None:
        """What was fetched for the request is kept for it no longer; its answer stands."""
        request = self._requests.get(request_id)
        if request is not None:
            self.line.lapse(request)

    def may_go_below(self, key: bytes) -> bool:
        """Whether the chunk is on a slower tier, on its way there, or will be when given up."""
        chunk = self.pool.chunks.get(key)
        if chunk is not None and chunk.unsaved:
            return True
        return any(not tier.index.lacks(key) for tier in self.tiers) or (
            chunk is not None and any(tier.accepts(self.now) for tier in self._demoting)
        )

    def save(self) -> None:
        """Copy to every tier what it lacks, also what would only be copied when given up."""
        self._tell()
        if self._demoting:
            chunks = [chunk for chunk in self.pool.chunks.values() if chunk.status != FILLING]
            self.cascades.save(chunks, self.now)

    def take_events(self) -> list[Event]:
        """What appeared on or left a medium since the last call."""
        histories = [("host", self.pool.take_history())]
        histories += [(tier.medium, tier.index.take_history()) for tier in self.tiers]
        return [
            Event([key for key, _ in run], medium, removed=left)
            for medium, history in histories
            for left, run in itertools.groupby(history, key=operator.itemgetter(1))
        ]

    def reset(self) -> None:
        """Forget everything, on every tier; on slower tiers durably, as soon as they can.

        Transfers between device and host memory may be under way: a new `era`
        begins, and their rows stay theirs until each is reported with the era in
        which it was prepared, or `transfers_ended` says that all have ended.
        """
        late = list(self._device_transfers())
        self.overtaken.add(late)
        self.era += 1
        for request in self._requests.values():
            self.line.leave(request)
        self._requests.clear()
        self._put_off.clear()
        self.chains.reset()
        self._untold.clear()
        self._asked.clear()
        self._listed.clear()
        self._asking = _NOBODY
        self.transfers.reset(row for _, row in late)

    def transfers_ended(self) -> None:
        """Every transfer that was prepared before the last reset has ended, reported or not."""
        self.overtaken.all_ended()

    def stats(self) -> CoreStats:
        """A snapshot of counters and gauges."""
        totals, pool, line = self._totals, self.pool, self.line
        totals.free_rows, totals.busy_rows, totals.chunks = pool.free, pool.busy, len(pool.chunks)
        totals.waiting, totals.timeouts = len(line.waiting), line.timeouts
        totals.truncations, totals.lapses, totals.shed = line.truncations, line.lapses, pool.shed
        totals.evicted = pool.evicted
        return replace(
            totals,
            loaded_from=dict(totals.loaded_from),
            tiers=[tier.stats() for tier in self.tiers],
        )

    # -- inside ------------------------------------------------------------------------

    def _device_transfers(self) -> Iterable[tuple[Transfer, int]]:
        """Loads and stores that were prepared and are not complete, with their rows."""
        chunks = self.pool.chunks
        for request in self._requests.values():
            for key, pins in request.loading.items():
                for _ in range(pins):
                    yield (self.era, request.id, key), chunks[key].row
        for chunk in chunks.values():
            if chunk.status == FILLING and chunk.stored_by is not None:
                yield (self.era, chunk.stored_by, chunk.key), chunk.row

    def _ended_late(self, keys: Collection[bytes], request_id: str, era: int) -> None:
        """A transfer from before a reset has ended: its rows are free."""
        for key in dict.fromkeys(keys):
            self._totals.stray += not self.overtaken.ended((era, request_id, key))
        self.line.moved = self.now

    def _enter(
        self,
        offered: list[bytes],
        new: list[bytes],
        declined: list[bytes],
        may_fit: bool,
    ) -> tuple[list[Chunk] | None, int]:
        """Get rows for `new`, those of `offered` that are not here and not `declined`.

        Where they fit, or never will, the policy says chunk by chunk who enters and who
        leaves. Of what fits, those whom it does not want are added to `declined`.

        Returns:
            The chunks that have entered, or None where nobody has yet; and for how
            many of `new` there was room.
        """
        pool = self.pool
        if self.line.starving:
            # Rows that a request in line waits for are not for stores.
            return None, 0
        hindered = self._tell_hits(len(new))
        fits = pool.room >= len(new)
        if not fits and (may_fit or pool.demote is not None or not pool.policy.declines):
            # What is there already keeps its place, and the head goes first.
            pool.keep(offered)
            return None, pool.make_room(len(new), shed_unsaved=False, incoming=new[::-1])
        wanted = offered
        if not fits and hindered:
            # The policy is asked about what can come in beside those that have to stay.
            wanted = offered[: pool.reach(offered, declined)]
            new = [key for key in wanted if key not in pool.chunks and key not in declined]
        if new and not pool.find_one():
            return None, 0
        chunks, all_asked = pool.enter(wanted, frozenset(declined), from_head=hindered)
        if not fits:
            pool.keep(wanted)
        if len(chunks) == len(new) or not all_asked or not (fits or hindered):
            return chunks, len(chunks)
        entered = {chunk.key for chunk in chunks}
        declined += [key for key in new if key not in entered]
        return chunks, len(new)

    def _tell_hits(self, count: int) -> bool:
        """The pool hears of this step's hits, unless it has room for `count` in any case.

        Returns:
            Whether anybody in host memory may not leave now.
        """
        pool, listed = self.pool, self._listed
        untold = sum(len(keys) - told for keys, told in listed)
        if untold and pool.room - untold < count and pool.demote is None:
            for index, (keys, told) in enumerate(listed):
                if told < len(keys):
                    pool.mark(keys[told:])
                    listed[index] = (keys, len(keys))
            untold = 0
        return untold > 0 or pool.busy > 0 or pool.unsaved > 0 or pool.marked > 0

    def _forget_put_off(self, request: Request) -> None:
        if request.put_off:
            request.put_off = False
            self._put_off.pop(request.id, None)

    def _leave_line(self, request: Request) -> None:
        self.line.leave(request)
        # Should it ask again in this step, its keys are listed anew.
        self._asking = _NOBODY

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
