"""The state machine: what is where, who is pinned, what moves next.

The core does no I/O and has no clock, lock, thread or await. Calls go in,
*moves* come out of `flush`, *completions* of those moves go back in through
`poll`. It is owned by one thread. Time is passed to `poll` and `flush`, in
seconds of any monotonic clock.

A *step* is what lies between two calls of `poll`. A key that answered "hit"
stays loadable until its step ends.

This module says in which order things happen in a step. What happens is said in the
rooms that it calls. This module is long because it is the core's face: most of it is
what each call guarantees.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from kvstore.core.async_lookup import Questions
from kvstore.core.cascade import Cascades
from kvstore.core.chunk import FILLING, Life
from kvstore.core.eviction import Demotions, Room, Victims
from kvstore.core.host import HostPool
from kvstore.core.loads import Loads
from kvstore.core.lookup import Lookups
from kvstore.core.pins import PINNED_SHARE, Pins
from kvstore.core.promotion import Grants, Prefetches
from kvstore.core.removal import Removal, Removals
from kvstore.core.reports import Log, Spans
from kvstore.core.request import MOST_REQUESTS, Requests, RequestState
from kvstore.core.residency.base import TierView
from kvstore.core.residency.recompute import Average
from kvstore.core.statistics import CoreStats
from kvstore.core.step_budget import Budget, Pace
from kvstore.core.stores import StoreGrant, Stores
from kvstore.core.transfers import Overtaken, Transfer, Transfers
from kvstore.core.usage import Chains, Uses
from kvstore.core.wait_queue import WaitQueue
from kvstore.types import Completion, Event, LogLine, Move

__all__ = ["Core"]

DEFAULT_PACE = Pace()


class Core:
    """See the module's text.

    Attributes:
        lookup: whether a chunk can be loaded in this step, by its key and the request that
            asks: True, False, or None ("ask again"), which always resolves. See `Lookups.lookup`.
        streak: answers for one request in a row, for callers that call `go_on`: see `Streak`.
        hidden: keys that are being removed.
        pins: chunks that stay for a while. prefetches: those that are fetched unasked.
        demotions: those that shall leave host memory.
        spans: waits and moves, one by one, once they are wanted.
        era: counts resets. A report of a transfer that may be older names its era.

    Args:
        pool: host memory.
        tiers: slower tiers, fastest first. A chunk is promoted from the first
            that has it and copied to each, when its flow says.
        deadline: seconds without movement after which a deferred request is answered.
        max_wait: seconds after which it is answered in any case.
        lease: seconds without being asked after which a request's leases end.
        events: whether `take_events` will be called.
        pace: how much one step does at most.
        pinned_share: how much of host memory, and of each tier, may be pinned.
        recompute: seconds that the server takes to compute a chunk; None: as `computed` tells, 0:
            nobody asks whether computing is sooner than reading.
        chunk_bytes: size of a chunk, for `stats`.
    """

    lookup: Callable[[bytes, str], bool | None]

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView] = (),
        *,
        deadline: float = 2.0,
        max_wait: float = 30.0,
        lease: float = 10.0,
        events: bool = True,
        pace: Pace = DEFAULT_PACE,
        pinned_share: float = PINNED_SHARE,
        recompute: float | None = None,
        chunk_bytes: int = 0,
    ) -> None:
        self.pool = pool
        self.tiers = list(tiers)
        self.now = 0.0
        self.era = 0
        self._chunk_bytes = chunk_bytes
        self._log = Log()
        efforts = [tier.index.policy.effort for tier in self.tiers]
        self._compute = Average()
        self._compute_pace = recompute
        self.budget = Budget(pace, pool.policy.effort, efforts)
        self._requests = Requests()
        self.spans = Spans()
        self.queue = WaitQueue(pool, self.spans, deadline=deadline, max_wait=max_wait, lease=lease)
        self._victims = Victims(pool, self.budget)
        self._uses = Uses(pool, self.tiers, self._victims, self.budget)
        self.chains = Chains(pool, self.tiers, self._requests, self._uses)
        self._removals = Removals(pool, self.tiers, self.queue, self._victims)
        self.hidden: Mapping[bytes, object] = self._removals.hidden
        self.cascades = Cascades(pool, self.tiers, self._log, self.budget, self.hidden)
        self.room = Room(pool, self._victims, self.cascades, self.budget)
        self.pins = Pins(pool, self.tiers, pinned_share, self.hidden)
        self.grants = Grants(
            pool,
            self.tiers,
            self.queue,
            self.room,
            self.chains,
            self.budget,
            self.pins,
            self.hidden,
        )
        self.prefetches = Prefetches(pool, self.tiers, self.queue, self.grants)
        self.demotions = Demotions(pool, self.tiers, self.cascades, self._victims, self.pins)
        self.transfers = Transfers(
            pool,
            self.tiers,
            self.queue,
            self.cascades,
            self._log,
            self._removals,
            self.pins,
            self.spans,
        )
        self._lookups = Lookups(
            pool,
            self.tiers,
            self._requests,
            self.queue,
            self.chains,
            self.budget,
            self.hidden,
        )
        self._loads = Loads(pool, self._requests, self.queue, self.chains, self._uses)
        self._stores = Stores(
            pool,
            self._victims,
            self.room,
            self._requests,
            self.queue,
            self._lookups,
            self.chains,
            self._uses,
            self.cascades,
            self.budget,
            self.pins,
        )
        self._questions = Questions(pool, self.tiers, self.queue, self.hidden)
        self.overtaken = Overtaken(pool)
        self.lookup = self._lookups.lookup
        self.go_on, self.streak = self._lookups.go_on, self._lookups.streak
        self.lookup_prefix = self._lookups.lookup_prefix
        self.contains_prefix = self._lookups.contains_prefix
        self.is_waiting = self._lookups.is_waiting
        self.renew = self._lookups.renew
        self._ended: deque[Completion] = deque()
        # What others have done to their tiers, and how much of the first is taken in.
        self._news: deque[Completion] = deque()
        self._learned = 0
        self._polled = 0.0
        self._stray = self._deferrals = self._illegal = self._loss_told = 0
        pool.history.want(events)
        for tier in self.tiers:
            tier.index.history.want(events, tier.entries)
        self._ages = [pool.ages, *(tier.index.ages for tier in self.tiers)]
        pool.begin_step()

    def log_to(self, write: Callable[[LogLine], None]) -> None:
        """Where one line per change of a tier's health goes; nowhere by default."""
        self._log.write_to(write)

    # -- the edges of a step ---------------------------------------------------------

    def poll(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Begin a step: take in what was completed, end what has expired."""
        elapsed, self._polled = now - self._polled, now
        self.now = now
        self.pool.begin_step()
        for ages in self._ages:
            ages.begin_step(now)
        self.budget.begin_step()
        self.spans.begin_step(now)
        if completions or self._ended or self._news:
            self.absorb(completions)
        queue = self.queue
        self.transfers.watch(now, elapsed, queue.deadline, queue.max_wait, self.compute_pace)
        self._lookups.begin_step(now)
        if self._questions:
            self._questions.watch(now)
        if self._ended:
            self.queue.all_moved(now)
        for request in self.queue.expire(now):
            self._requests.drop_if_idle(request)
        for _ in range(len(self._requests) - MOST_REQUESTS):
            oldest = self._requests.oldest(lambda request: not request.busy)
            if oldest is not None:
                self.on_request_finished(oldest.id)
        self._stores.expire(now)
        self.pins.expire(now)
        if Life.ever_illegal:
            self._tell_illegal()
        if self._events_lost > self._loss_told:
            self._tell_lost_events()

    def absorb(self, completions: Iterable[Completion]) -> None:
        """Take in completions without beginning a step, as many as this step may."""
        self._lookups.pause()
        ended = self._ended
        for completion in completions:
            self.transfers.hear(completion)
            ended.append(completion)
        if not (ended or self._news):
            return
        budget = self.budget
        while ended and budget.absorbed > 0:
            completion = ended.popleft()
            if completion.changes is not None:
                # Nobody waits for these. Of a tier that is being cleared they are out of date.
                if self.tiers[completion.tier].clearing:
                    completion.changes.end()
                else:
                    self._news.append(completion)
                continue
            budget.absorb(len(completion.ok))
            self._stray += not self.transfers.complete(completion, self.now)
        if self._news and not ended:
            self._learn()
        if self._questions and self.queue.waiting:
            self._questions.pass_over(self.now)
        self.queue.pass_on(self.now)

    def _learn(self) -> None:
        """Take in what others have done to their tiers, as much as this step may."""
        news, budget = self._news, self.budget
        while news and budget.news > 0:
            changes = news[0].changes
            assert changes is not None
            part = changes.part(self._learned, budget.news)
            self.transfers.complete(replace(news[0], changes=part), self.now)
            budget.learn(len(part))
            self._learned += len(part)
            if self._learned >= len(changes):
                self._drop_first()

    def _drop_first(self) -> None:
        """The first of the news is taken in, or not needed."""
        changes = self._news.popleft().changes
        assert changes is not None
        changes.end()
        self._learned = 0

    def flush(self, now: float) -> list[Move]:
        """The moves that are due, to be handed to the engine in this order."""
        self.now = now
        self._queue_deferred(now)
        if self.budget.bounded:
            self.budget.shorten(self._lookups.wanted)
        if self.queue.waiting:
            self.grants.link_some()
        moves: list[Move] = []
        if self._questions:
            moves += [self.transfers.ask(*due, now) for due in self._questions.take()]
        if self.hidden:
            self._lookups.keep_hits()
            self._removals.go_on()
            moves += self.transfers.erase(now)
        uses = self._uses
        if uses.due or (uses and (self.queue.waiting or self.room.demotes or self.unsaved)):
            uses.tell_some()
        if self.queue.waiting:
            self._lookups.keep_hits()
            for tier, chunks, slots in self.grants.grant(now):
                moves += self.transfers.promote(tier, chunks, slots, now)
        if self.prefetches:
            self._lookups.keep_hits()
            for tier, chunks, slots in self.prefetches.go_on(now):
                moves += self.transfers.promote(tier, chunks, slots, now)
        if self.demotions:
            self._lookups.keep_hits()
            self.demotions.go_on()
        if self.room.demotes:
            self._lookups.keep_hits()
            self.room.make_ahead(now)
        if self.tiers:
            moves += self.transfers.due(now)
            self.chains.settle(self.budget.settled)
        return moves

    def _queue_deferred(self, now: float) -> None:
        """Requests that got "ask again" begin to wait; what others asked is forgotten."""
        for request in self._lookups.take_asked():
            if self.chains.filters and request.keys:
                self.chains.count(request, request.keys)
            if request.deferring:
                request.defer(False)
                self._deferrals += request.since is None
                self.queue.join(request, now)
                self.grants.link(request)
                if self._questions:
                    self._questions.add(request, now, self.compute_pace)
            elif request.state is not RequestState.WAITING:
                request.forget_keys()
                self._requests.drop_if_idle(request)

    @property
    def behind(self) -> bool:
        """Whether the next step has something to do although nothing new will have happened."""
        return (
            bool(self._ended or self._news)
            or self.budget.behind
            or self._removals.behind
            or self.pins.behind
            or self.demotions.behind
            or (self.budget.cut_short and self.waiting > 0)
        )

    @property
    def illegal(self) -> int:
        """Transitions of chunks that were asked for and may not be."""
        return self.pool.life.illegal + sum(tier.index.life.illegal for tier in self.tiers)

    @property
    def in_flight(self) -> int:
        """Moves that were handed out and not completed."""
        return len(self.transfers.moves)

    @property
    def waiting(self) -> int:
        """Requests that are deferred."""
        return len(self.queue.waiting)

    @property
    def clearing(self) -> bool:
        """Whether a tier is still to be cleared after a reset, and has not failed to be."""
        return self.transfers.clearing

    @property
    def uncleared(self) -> list[str]:
        """Tiers that are to be cleared after a reset, by name; `clearing` of those that can be."""
        return self.transfers.uncleared

    @property
    def unsaved(self) -> int:
        """Chunks that wait for a copy to a slower tier, or are being copied."""
        return self.cascades.unsaved

    # -- loads and stores ----------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], request_id: str) -> list[int]:
        """Pin `keys`, which answered "hit" in this step; returns their rows.

        Raises:
            KeyError: if one of them cannot be loaded; then nothing was pinned.
        """
        ordered = self._ordered(request_id, keys)
        rows = self._loads.prepare(ordered, request_id)
        if self.demotions:
            self.demotions.used(keys)
        if ordered is not keys:
            row_of = dict(zip(ordered, rows, strict=True))
            rows = [row_of[key] for key in keys]
        # Should it ask again in this step, its keys are listed anew.
        self._lookups.pause()
        self.budget.want(len(rows))
        return rows

    def complete_load(
        self, keys: Collection[bytes], request_id: str, era: int | None = None
    ) -> None:
        """The device has read the rows: take the pins of `prepare_load` back.

        Keys that this request is not loading are counted as stray and ignored.

        Args:
            era: that in which the load was prepared; the present one if not given.
        """
        self._lookups.pause()
        if era is not None and era != self.era:
            self._ended_late(keys, request_id, era, stores=False)
        else:
            self._loads.complete(keys, request_id, self.now)

    def load_source(self, key: bytes) -> str:
        """Medium from which a loadable chunk reached host memory: "host" or a tier's."""
        chunk = self.pool.chunks.get(key)
        return self._medium(chunk.origin) if chunk is not None else "host"

    def touch(self, keys: Collection[bytes]) -> None:
        """`keys`, in prefix order, were used: on every tier that has them."""
        self._uses.tell_all()
        self._uses.tell(keys, keys)

    def prepare_store(self, keys: Collection[bytes], request_id: str) -> StoreGrant | None:
        """Reserve rows for those of `keys` that host memory does not have.

        A store that does not fit is granted for the prefix that fits. It never
        evicts those of `keys` that are here already, unless host memory is too
        small for all of `keys`. Chunks that the admission filter does not want
        cost nothing, nor do chunks that the policy would give up again for the
        head of the same store. None means "not now, offer it again": nothing is
        free for it at this moment, or all of it would fit once transfers under
        way have ended; a request is told the latter at most once in a row. Keys that are
        being removed are passed over.
        """
        self._lookups.pause()
        if self.hidden:
            keys = [key for key in keys if key not in self.hidden]
        ordered = self._ordered(request_id, keys)
        grant = self._stores.prepare(ordered, request_id, self.now)
        if grant is not None and ordered is not keys:
            grant = grant.in_order_of(keys)
        if grant is not None:
            self.budget.want(len(grant.keys), stored=True)
        return grant

    def complete_store(
        self, keys: Collection[bytes], request_id: str, ok: bool = True, era: int | None = None
    ) -> None:
        """The device has written the rows (`ok`), or it has not: the chunks are dropped.

        Keys that this request is not storing are counted as stray and ignored.

        Args:
            era: that in which the store was prepared; the present one if not given.
        """
        # Requests that waited for these may be answered; what they ask next is listed anew.
        self._lookups.pause()
        if era is not None and era != self.era:
            self._ended_late(keys, request_id, era, stores=True)
        else:
            self._stores.complete(keys, request_id, self.now, ok)
            self.pins.arrived(keys)

    # -- requests ------------------------------------------------------------------------

    def on_new_request(
        self,
        request_id: str,
        position: Callable[[bytes], int] | None = None,
        *,
        one_group: bool = False,
    ) -> None:
        """A request was seen for the first time. An earlier one of that name ends.

        Args:
            position: where in the prompt a key of the request belongs, in tokens, for servers
                that name keys in another order. Called only for keys that the request has named.
            one_group: all its keys are of one KV cache group. They are then named in the order
                of the prompt, except in lookups, which may begin at its end.
        """
        self.on_request_finished(request_id)
        if position is not None:
            self._requests.open(request_id).tell_positions(position, one_group=one_group)

    def on_request_finished(self, request_id: str) -> None:
        """The request asks no more: its wait and its leases end. Loads under way go on."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if self.chains.filters and request.keys:
            self.chains.count(request, request.keys)
        self.queue.remove(request)
        request.defer(False)
        self._stores.forget_deferred(request)
        self._lookups.pause()
        self._uses.end(request)
        self.chains.end(request)
        request.forget_positions()
        self._requests.drop_if_idle(request)

    def extend_prompt(self, request_id: str, keys: Sequence[bytes]) -> None:
        """`keys` are the next ones of the request's prompt, although it does not load them."""
        self.chains.extend(self._requests.open(request_id), keys)

    def on_prompt_end(self, listener: Callable[[Sequence[Sequence[bytes]]], None]) -> None:
        """`listener` is told the keys of each request that ends, one sequence for each group."""
        self.chains.listen(listener)

    def lapse(self, request_id: str) -> None:
        """What was fetched for the request is kept for it no longer; its answer stands."""
        request = self._requests.get(request_id)
        if request is not None:
            self.queue.lapse(request)

    # -- the rest ------------------------------------------------------------------------

    @property
    def compute_pace(self) -> float:
        """Seconds that the server takes to compute a chunk; 0 where that is not known."""
        pace = self._compute_pace
        return self._compute.per_chunk if pace is None else pace

    def computed(self, chunks: int, seconds: float) -> None:
        """The server has computed so many chunks of KV in so many seconds: see `recompute`."""
        if chunks > 0 and seconds > 0:
            self._compute.add(chunks, seconds)

    def may_go_below(self, key: bytes) -> bool:
        """Whether the chunk is on a slower tier, on its way there, or will be when given up."""
        chunk = self.pool.chunks.get(key)
        if chunk is not None and chunk.unsaved:
            return True
        return any(not tier.index.lacks(key) for tier in self.tiers) or (
            chunk is not None and any(t.accepts(self.now) for t in self.cascades.demoting)
        )

    def save(self) -> None:
        """Copy to every tier what it lacks, also what would only be copied when given up."""
        self._uses.tell_all()
        if self.cascades.demoting:
            chunks = [chunk for chunk in self.pool.chunks.values() if chunk.state != FILLING]
            self.cascades.save(chunks, self.now)

    def save_first(self, keys: Collection[bytes]) -> None:
        """Copy those of `keys` that host memory has, and the first tier lacks, to that tier."""
        chunks = filter(None, map(self.pool.chunks.get, keys))
        whole = [chunk for chunk in chunks if chunk.state != FILLING]
        self.cascades.save_to(self.cascades.targets[0], whole, self.now)

    def remove(self, keys: Collection[bytes]) -> Removal:
        """Take these chunks out of host memory and of every tier of this process.

        From now on they are misses. Rows and slots are free as soon as nobody reads or
        writes them; loads under way end as they would. What peers keep is theirs, and is found
        again when the keys are no longer `hidden`.
        """
        self._lookups.pause()
        self.pins.end(keys)
        self.prefetches.drop(keys)
        return self._removals.begin(keys)

    def reset(self, *, close_tiers: bool = False) -> None:
        """Forget everything, on every tier; on slower tiers durably, as soon as they can.

        With `close_tiers` the slower tiers are left as they are, for the next process, and not
        used any more: what this one computes from now on is not what they hold.

        Transfers between device and host memory may be under way: a new `era`
        begins, and their rows stay theirs until each is reported with the era in
        which it was prepared, or `transfers_ended` says that all have ended.
        """
        late = list(self.device_transfers())
        self.overtaken.add(late)
        self.era += 1
        for request in self._requests.values():
            self.queue.remove(request)
        self._requests.clear()
        while self._news:
            self._drop_first()
        self._lookups.reset()
        self._stores.reset()
        self.chains.reset()
        self._uses.reset()
        self.grants.reset()
        self.pins.reset()
        self.demotions.reset()
        self.prefetches.reset()
        self._removals.reset()
        self._questions.reset()
        self.transfers.reset((row for _, row in late), close_tiers=close_tiers)
        self._victims.reset()

    def transfers_ended(self) -> None:
        """Every transfer that was prepared before the last reset has ended, reported or not."""
        self.overtaken.all_ended()

    def device_transfers(self) -> Iterable[tuple[Transfer, int]]:
        """Loads and stores that were prepared and are not complete, and their rows."""
        for name, key, row in self._loads.under_way():
            yield Transfer(self.era, name, key, stores=False), row
        for name, key, row in self._stores.under_way():
            yield Transfer(self.era, name, key, stores=True), row

    def take_events(self) -> list[Event]:
        """What appeared on or left a medium since the last call.

        Of what is not taken for long the older part is lost: `CoreStats.events_lost`.
        """
        histories = [("host", self.pool.history.take())]
        histories += [(tier.medium, tier.index.history.take()) for tier in self.tiers]
        return [
            Event([key for key, _ in run], medium, removed=left)
            for medium, history in histories
            for left, run in itertools.groupby(history, key=operator.itemgetter(1))
        ]

    def stats(self) -> CoreStats:
        """A snapshot of counters and gauges."""
        pool, queue, loads, stores = self.pool, self.queue, self._loads, self._stores
        loaded_from: dict[str, int] = {}
        for origin, count in loads.loaded_from.items():
            medium = self._medium(origin)
            loaded_from[medium] = loaded_from.get(medium, 0) + count
        size, tiers = self._chunk_bytes, [tier.stats() for tier in self.tiers]
        for view, tier in zip(self.tiers, tiers, strict=True):
            tier.complete(loads.loaded_from[view.number], size)
        return CoreStats(
            rows=pool.rows,
            free_rows=pool.free,
            busy_rows=pool.busy,
            pinned_rows=self.pins.rows,
            pins=len(self.pins),
            prefetched=self.prefetches.begun,
            demoted=self.demotions.demoted,
            chunks=len(pool.chunks),
            waiting=len(queue.waiting),
            misses=self._lookups.misses,
            outpaced=self._lookups.outpaced,
            compute_pace=self.compute_pace,
            deferrals=self._deferrals,
            timeouts=queue.timeouts,
            truncations=self.grants.truncations,
            lapses=queue.lapses,
            loaded=loads.loaded,
            loaded_from=loaded_from,
            stored=stores.stored,
            stores_deferred=stores.deferred,
            chunks_refused=stores.refused,
            declined=stores.declined,
            evicted=pool.evicted,
            shed=pool.shed,
            stray=self._stray + loads.stray + stores.stray,
            illegal=self.illegal,
            events_lost=self._events_lost,
            chunk_bytes=size,
            loaded_bytes=loads.loaded * size,
            stored_bytes=stores.stored * size,
            used_bytes=len(pool.chunks) * size,
            free_bytes=pool.free * size,
            waits=queue.waits.copy(),
            ages=pool.ages.left.copy(),
            tiers=tiers,
        )

    # -- inside --------------------------------------------------------------------------

    def _ordered(self, request_id: str, keys: Collection[bytes]) -> Collection[bytes]:
        request = self._requests.get(request_id)
        return keys if request is None else request.ordered(keys)

    def _ended_late(
        self, keys: Collection[bytes], request_id: str, era: int, *, stores: bool
    ) -> None:
        """Transfers from before a reset have ended: their rows are free."""
        for key in dict.fromkeys(keys):
            ended = self.overtaken.ended(Transfer(era, request_id, key, stores))
            self._stray += not ended
        self.queue.rows_moved(self.now)

    def _medium(self, origin: int) -> str:
        return "host" if origin < 0 else self.tiers[origin].medium

    @property
    def _events_lost(self) -> int:
        return self.pool.history.lost + sum(tier.index.history.lost for tier in self.tiers)

    def _tell_lost_events(self) -> None:
        if not self._loss_told:
            text = "events are not taken: the oldest are dropped, and counted"
            self._log(LogLine("events.lost", text))
        self._loss_told = self._events_lost

    def _tell_illegal(self) -> None:
        new, self._illegal = self.illegal - self._illegal, self.illegal
        if new:
            text = f"{new} illegal transitions of chunks were asked for, and not made"
            self._log(LogLine("core.illegal", text, {"count": new}))
