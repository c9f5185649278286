"""The order of a step: what is taken in when it begins, and what is handed out when it ends.

A *step* is the time between two calls of `poll`. A key that answered "hit" stays loadable until
its step ends. The parts of the core are created here; each is described in its own module.

This module is long because a step is told in one place, with what it consists of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from kvstore.core.arrivals import Arrivals
from kvstore.core.async_lookup import Questions
from kvstore.core.cascade import Cascades
from kvstore.core.chunk import Life
from kvstore.core.eviction import Demotions, Room, Victims
from kvstore.core.host import HostPool
from kvstore.core.loads import Loads
from kvstore.core.lookup import Lookups
from kvstore.core.pins import PINNED_SHARE, Pins
from kvstore.core.prefetch import Prefetches
from kvstore.core.promotion import Grants
from kvstore.core.removal import Removals
from kvstore.core.reports import SpanBegin, SpanEnd, Spans
from kvstore.core.request import MOST_REQUESTS, Request, Requests, RequestState
from kvstore.core.residency.base import CopyTarget, TierView
from kvstore.core.residency.recompute import Average
from kvstore.core.settings import Settings
from kvstore.core.step_budget import Budget, Pace
from kvstore.core.stores import Stores
from kvstore.core.transfers import Overtaken, Transfers
from kvstore.core.usage import Chains, Uses
from kvstore.core.wait_queue import WaitQueue
from kvstore.types import Completion, LogLine, Move

__all__ = ["CoreSteps"]

DEFAULT_PACE = Pace()

MOST_HINTED = 2**14
"""Most requests with hints; hints of further ones are ignored."""


MOST_FORGOTTEN = 1024
"""Most chunks that a step removes because their keys for tiers were forgotten."""


class CoreSteps:
    """The parts of the core, and the steps that drive them.

    Args:
        pool: host memory.
        tiers: slower tiers, fastest first. A chunk is promoted from the first
            that has it and copied to each, when its flow says.
        deadline: seconds without movement after which a deferred request is answered.
        max_wait: seconds after which it is answered in any case.
        lease: seconds without a lookup after which a request's leases end.
        events: whether `take_events` will be called.
        pace: how much one step does at most.
        pinned_share: how much of host memory, and of each tier, may be pinned.
        recompute: seconds that the server takes to compute a chunk; None: as `computed` reports,
            0: computing is never compared with reading.
        chunk_bytes: size of a chunk, for `stats`.
        log: where log lines go, one per change of a tier's health.
    """

    lookup: Callable[[bytes, str], bool | None]

    @abstractmethod
    def remove(self, keys: Collection[bytes]) -> object:
        """See `Core.remove`."""

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
        log: Callable[[LogLine], object] = lambda line: None,
    ) -> None:
        self._pool = pool
        self.chunks = pool.chunks
        self.tiers = list(tiers)
        self.owned = [tier.owned for tier in tiers if tier.owned is not None]
        self.now = 0.0
        self.era = 0
        self.on_remove: Callable[[Collection[bytes]], object] = lambda keys: None
        self._chunk_bytes = chunk_bytes
        self._log = log
        efforts = [tier.index.policy.effort for tier in self.tiers]
        self._compute = Average()
        self._compute_pace = recompute
        self._budget = Budget(pace, pool.policy.effort, efforts)
        self._requests = Requests()
        self._spans = Spans()
        self._queue = WaitQueue(
            pool, self._requests, self._spans, deadline=deadline, max_wait=max_wait, lease=lease
        )
        self._victims = Victims(pool, self._budget)
        self._uses = Uses(pool, self.tiers, self._victims, self._budget)
        self._chains = Chains(pool, self.tiers, self._requests, self._uses)
        self._removals = Removals(pool, self.tiers, self._queue, self._victims)
        self.hidden: Mapping[bytes, object] = self._removals.hidden
        self._cascades = Cascades(pool, self.tiers, self._log, self._budget, self.hidden)
        self._room = Room(pool, self._victims, self._cascades, self._budget)
        self._pins = Pins(pool, self.tiers, pinned_share, self.hidden)
        self._grants = Grants(
            pool,
            self.tiers,
            self._queue,
            self._room,
            self._chains,
            self._budget,
            self._pins,
            self.hidden,
        )
        self._demotions = Demotions(pool, self.tiers, self._cascades, self._victims, self._pins)
        self._prefetches = Prefetches(
            pool, self.tiers, self._queue, self._grants, self._demotions.used
        )
        self._transfers = Transfers(
            pool,
            self.tiers,
            self._queue,
            self._cascades,
            self._log,
            self._removals,
            self._pins,
            self._spans,
        )
        self._lookups = Lookups(
            pool,
            self.tiers,
            self._requests,
            self._queue,
            self._chains,
            self._budget,
            self.hidden,
        )
        self._loads = Loads(pool, self._requests, self._queue, self._chains, self._uses)
        self._stores = Stores(
            pool,
            self._victims,
            self._room,
            self._requests,
            self._queue,
            self._lookups,
            self._chains,
            self._uses,
            self._cascades,
            self._budget,
            self._pins,
        )
        self._questions = Questions(pool, self.tiers, self._queue, self.hidden)
        self._arrivals = Arrivals(pool, self.tiers, self._queue, self._grants, self._questions)
        self._room.yield_by(self._arrivals.give_way)
        self._settings = Settings(
            pool, self.tiers, self._room, self._pins, self._chains, self._budget
        )
        self._overtaken = Overtaken(pool)
        # A scheduler calls this for every key of every request.
        self.lookup = self._lookups.lookup
        self.streak = self._lookups.streak
        self.server_computes = self._grants.server_computes
        self._ended: deque[Completion] = deque()
        # Changes by other processes to their tiers, and how many of the first are taken in.
        self._news: deque[Completion] = deque()
        # Chunks that are still to be removed for the first of the news.
        self._forgotten: list[bytes] = []
        self._learned = 0
        self._polled = 0.0
        self._stray = self._deferrals = self._illegal = self._loss_told = 0
        self._hints = self._hints_ignored = self._hints_refused = 0
        # Requests with hints that have not ended.
        self._hinted = 0
        pool.history.want(events)
        for tier in self.tiers:
            tier.index.history.want(events, tier.entries)
        self._ages = [pool.ages, *(tier.index.ages for tier in self.tiers)]
        pool.begin_step()

    def want_spans(self) -> None:
        """Keep spans, as `take_spans` will be called from now on."""
        self._spans.want()

    def take_spans(self) -> list[SpanBegin | SpanEnd]:
        """Take the waits and moves that have begun or ended since the last call."""
        return self._spans.take()

    # -- the edges of a step ---------------------------------------------------------

    def poll(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Begin a step: take in completed moves, and end waits, leases and pins that expired."""
        elapsed, self._polled = now - self._polled, now
        self.now = now
        self._pool.begin_step()
        for ages in self._ages:
            ages.begin_step(now)
        self._budget.begin_step()
        self._spans.set_time(now)
        if completions or self._ended or self._news:
            self.absorb(completions)
        queue = self._queue
        self._transfers.watch(now, elapsed, queue.deadline, queue.max_wait, self.compute_pace)
        self._lookups.begin_step(now)
        if self._questions:
            self._questions.watch(now)
        if self._ended:
            self._queue.all_moved(now)
        for request in self._queue.expire(now):
            self._requests.drop_if_idle(request)
        for _ in range(len(self._requests) - MOST_REQUESTS):
            # Hints hold until their request ends: `do_not_store`, for one.
            oldest = self._requests.oldest(lambda one: one.hints is None and not one.busy)
            if oldest is None:
                break
            self._end_request(oldest)
        self._stores.expire(now)
        self._pins.expire(now)
        if Life.ever_illegal:
            self._tell_illegal()
        if self._events_lost > self._loss_told:
            self._tell_lost_events()

    def absorb(self, completions: Iterable[Completion]) -> None:
        """Take in completions without beginning a step, as many as this step may."""
        self._lookups.pause()
        ended = self._ended
        for completion in completions:
            self._transfers.hear(completion)
            ended.append(completion)
        if not (ended or self._news):
            return
        budget = self._budget
        while ended and budget.absorbed > 0:
            completion = ended.popleft()
            changes = completion.changes
            if changes is not None:
                # No request waits for these. If the tier is being cleared they are out of date, but
                # for what is forgotten: that is in host memory, too.
                if self.tiers[completion.tier].clearing and not changes.forgotten:
                    changes.end()
                else:
                    self._news.append(completion)
                continue
            budget.absorb(len(completion.ok))
            self._stray += not self._transfers.complete(completion, self.now)
        if self._news and not ended:
            self._learn()
        if self._questions and self._queue.waiting:
            self._questions.pass_over(self.now)
        self._queue.pass_on(self.now)

    def _learn(self) -> None:
        """Take in changes by other processes to their tiers, as many as this step may."""
        news, budget = self._news, self._budget
        while news and budget.news > 0:
            changes = news[0].changes
            assert changes is not None
            part = changes.part(self._learned, budget.news)
            self._transfers.complete(replace(news[0], changes=part), self.now)
            if part.forgotten and not self._forget(tuple(part.forgotten)):
                # The next step goes on with that.
                return
            budget.learn(len(part))
            self._learned += len(part)
            if self._learned >= len(changes):
                self._drop_first()

    def _forget(self, prefixes: tuple[bytes, ...]) -> bool:
        """Remove some of host memory's chunks whose keys begin so, wherever they are copied to.

        Returns:
            Whether none is left.
        """
        forgotten = self._forgotten
        if not forgotten:
            forgotten += (
                key for key in self.chunks if key.startswith(prefixes) and key not in self.hidden
            )
            if not forgotten:
                return True
            text = f"{len(forgotten)} chunks leave host memory: their keys for tiers were forgotten"
            self._log(LogLine("host.forgotten", text))
        self.remove(forgotten[-MOST_FORGOTTEN:])
        del forgotten[-MOST_FORGOTTEN:]
        return False

    def _drop_first(self) -> None:
        """Drop the first of the news, which is taken in or not needed."""
        changes = self._news.popleft().changes
        assert changes is not None
        changes.end()
        self._learned = 0
        self._forgotten.clear()

    def flush(self, now: float) -> list[Move]:
        """Return the moves that are due, to be handed to the engine in this order."""
        self.now = now
        self._spans.set_time(now)
        self._queue_deferred(now)
        if self._budget.bounded:
            self._budget.shorten(self._lookups.wanted)
        if self._queue.waiting:
            self._grants.link_some()
        moves: list[Move] = []
        if self._questions:
            moves += [self._transfers.ask(*due, now) for due in self._questions.take()]
        if self.hidden:
            self._lookups.keep_hits()
            self._removals.go_on()
            moves += self._transfers.erase(now)
        uses = self._uses
        if uses.due or (uses and (self._queue.waiting or self._room.demotes or self.unsaved)):
            uses.tell_some()
        if self._queue.waiting:
            self._lookups.keep_hits()
            for tier, chunks, slots in self._grants.grant(now, self.compute_pace, self._polled):
                moves += self._transfers.promote(tier, chunks, slots, now)
        if self._arrivals:
            self._lookups.keep_hits()
            for tier, chunks, slots in self._arrivals.go_on(now):
                moves += self._transfers.promote(tier, chunks, slots, now)
            moves += [self._transfers.ask(*due, now) for due in self._questions.take()]
        if self._prefetches:
            self._lookups.keep_hits()
            for tier, chunks, slots in self._prefetches.go_on(now):
                moves += self._transfers.promote(tier, chunks, slots, now)
        if self._demotions:
            self._lookups.keep_hits()
            self._demotions.go_on()
        if self._room.due:
            self._lookups.keep_hits()
            self._room.make_ahead(now)
        if self._settings.under_way:
            self._lookups.keep_hits()
            self._settings.go_on(now)
        if self.tiers:
            moves += self._transfers.due(now)
            self._chains.settle(self._budget.settled)
        return moves

    def _queue_deferred(self, now: float) -> None:
        """Let requests that got "ask again" begin to wait; forget what others asked."""
        for request in self._lookups.take_asked():
            if request.queued:
                # Its name was used again in the step in which the earlier one had asked.
                continue
            if self._chains.filters and request.keys:
                self._chains.count(request, request.keys)
            if request.deferring:
                request.defer(False)
                self._deferrals += request.since is None
                self._queue.join(request, now)
                self._grants.link(request)
                if self._questions:
                    self._questions.add(request, now, self.compute_pace)
            elif request.state is not RequestState.WAITING:
                request.forget_keys()
                if request.leases and request.state is RequestState.SCANNING:
                    # It was queued. If it loads nothing, its leases lapse.
                    self._queue.answer(request, now)
                self._requests.drop_if_idle(request)

    @property
    def behind(self) -> bool:
        """Whether the next step has work to do even if nothing new happens."""
        return (
            bool(self._ended or self._news)
            or self._budget.behind
            or self._removals.behind
            or self._pins.behind
            or self._demotions.behind
            or self._settings.behind
            or (self._budget.cut_short and self.waiting > 0)
        )

    @property
    def wants_room(self) -> bool:
        """Whether a step could use rows that have become free, or make more of them free."""
        if self.behind or self.removing or self._arrivals or self.prefetching or self._demotions:
            return True
        if self._settings.under_way:
            return True
        return self.waiting > 0 or self.unsaved > 0 or self._room.demotes

    @property
    def illegal(self) -> int:
        """Number of illegal transitions of chunks that were tried."""
        return self._pool.life.illegal + sum(tier.index.life.illegal for tier in self.tiers)

    @property
    def in_flight(self) -> int:
        """Moves that were handed out and not completed."""
        return len(self._transfers.moves)

    @property
    def waiting(self) -> int:
        """Requests that are deferred."""
        return len(self._queue.waiting)

    @property
    def removing(self) -> bool:
        """Whether chunks are still to be removed; those that are in use are, too."""
        return bool(self.hidden)

    @property
    def erasing(self) -> bool:
        """Whether records of chunks that are being removed are still to be erased."""
        return self._removals.erasing

    @property
    def clearing(self) -> bool:
        """Whether a tier is still to be cleared after a reset, and clearing has not failed."""
        return self._transfers.clearing

    @property
    def uncleared(self) -> list[str]:
        """Names of tiers that are to be cleared after a reset, also where clearing has failed."""
        return self._transfers.uncleared

    @property
    def targets(self) -> Sequence[CopyTarget]:
        """Tiers to which chunks are copied, fastest first."""
        return self._cascades.targets

    @property
    def prefetching(self) -> bool:
        """Whether a prefetch is under way or planned."""
        return bool(self._prefetches)

    @property
    def late_transfers(self) -> int:
        """Transfers from before a reset that have not ended."""
        return len(self._overtaken)

    @property
    def unsaved(self) -> int:
        """Chunks that wait for a copy to a slower tier, or are being copied."""
        return self._cascades.unsaved

    @property
    def compute_pace(self) -> float:
        """Seconds that the server takes to compute a chunk; 0 where that is not known."""
        pace = self._compute_pace
        return self._compute.per_chunk if pace is None else pace

    def computed(self, chunks: int, seconds: float) -> None:
        """Note that the server has computed `chunks` of KV in `seconds`: see `recompute`."""
        if chunks > 0 and seconds > 0:
            # What was loaded since the last measurement saved the time that was known then.
            self._loads.price(self.compute_pace)
            self._compute.add(chunks, seconds)

    # -- inside --------------------------------------------------------------------------

    def _end_request(self, request: Request) -> None:
        """End a request: it asks no more."""
        if request.queued:
            request.leave_queue()
        if self._chains.filters and request.keys:
            self._chains.count(request, request.keys)
        self._queue.remove(request)
        self._stores.forget_deferred(request)
        self._lookups.leave(request)
        self._uses.end(request)
        self._chains.end(request)
        self._hinted -= request.hints is not None
        request.end()
        self._requests.drop_if_idle(request)

    @property
    def _events_lost(self) -> int:
        return self._pool.history.lost + sum(tier.index.history.lost for tier in self.tiers)

    def _tell_lost_events(self) -> None:
        if not self._loss_told:
            text = "events are not taken: the oldest are dropped, and counted"
            self._log(LogLine("events.lost", text))
        self._loss_told = self._events_lost

    def _tell_illegal(self) -> None:
        new, self._illegal = self.illegal - self._illegal, self.illegal
        if new:
            text = f"{new} illegal transitions of chunks were tried and refused"
            self._log(LogLine("core.illegal", text, {"count": new}))
