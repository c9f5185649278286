"""The core: a state machine that knows where chunks are and decides what moves next.

The core does no I/O and has no clock, lock, thread or await. Calls go in,
*moves* come out of `flush`, *completions* of those moves go back in through
`poll`. It is owned by one thread. Time is passed to `poll` and `flush`, in
seconds of any monotonic clock.

This module has the calls for servers; `kvstore.core.step` has the order of a step.
This module is long because all calls stand here.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kvstore.core.chunk import FILLING
from kvstore.core.hints import Hints, read_hints
from kvstore.core.removal import Removal
from kvstore.core.reports import Outcome
from kvstore.core.request import Request, RequestState
from kvstore.core.statistics import CoreStats, TenantStats
from kvstore.core.step import MOST_HINTED, CoreSteps
from kvstore.core.stores import StoreGrant
from kvstore.core.transfers import Transfer
from kvstore.policies.base import EvictionPolicy
from kvstore.types import Event

__all__ = ["Core"]


class Core(CoreSteps):
    """Answers lookups, and decides on loads, stores, promotions, copies and evictions.

    Attributes:
        lookup: whether a chunk can be loaded in this step, by its key and the request that
            asks: True, False, or None ("ask again"), which always resolves. See `Lookups.lookup`.
        streak: consecutive answers for one request, for callers that call `go_on`: see `Streak`.
        hidden: keys that are being removed.
        chunks: the chunks of host memory, by key; read only for callers.
        tiers: what is known about each slower tier, fastest first.
        era: counts resets. A report of a transfer that may be older names its era.
        on_remove: called with keys that are about to be removed.
    """

    # -- lookups -------------------------------------------------------------------------

    def go_on(self, context: object) -> None:
        """Begin a streak of the request that was looked up last: see `Streak`."""
        self._lookups.go_on(context)

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> int | None:
        """Return how many leading `keys` can be loaded in this step, or None ("ask again")."""
        return self._lookups.lookup_prefix(keys, request_id)

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` host memory or a tier holds; fetches and keeps nothing."""
        return self._lookups.contains_prefix(keys)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether host memory or a tier holds it, for each of `keys`; fetches and keeps nothing."""
        return self._lookups.contains(keys)

    def is_waiting(self, request_id: str) -> bool:
        """Whether every lookup of this request is "ask again" for now."""
        return self._lookups.is_waiting(request_id)

    def renew(self, request_id: str) -> None:
        """Extend the leases of a waiting request as if it had asked again."""
        self._lookups.renew(request_id)

    # -- loads and stores ----------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], request_id: str) -> list[int]:
        """Pin `keys`, which answered "hit" in this step; returns their rows.

        Raises:
            KeyError: if one of them cannot be loaded; then nothing was pinned.
        """
        ordered = _ordered(self._requests.get(request_id), keys)
        rows = self._loads.prepare(ordered, request_id)
        if self._demotions:
            self._demotions.used(keys)
        if ordered is not keys:
            row_of = dict(zip(ordered, rows, strict=True))
            rows = [row_of[key] for key in keys]
        # If it asks again in this step, its keys are listed anew.
        self._lookups.pause()
        self._budget.want(len(rows))
        return rows

    def complete_load(
        self, keys: Collection[bytes], request_id: str, era: int | None = None
    ) -> None:
        """Take back the pins of `prepare_load`, as the device has read the rows.

        Keys that this request is not loading are counted as stray and ignored.

        Args:
            era: the era in which the load was prepared; by default the present one.
        """
        self._lookups.pause()
        if era is not None and era != self.era:
            self._ended_late(keys, request_id, era, stores=False)
        else:
            self._loads.complete(keys, request_id, self.now)

    def load_source(self, key: bytes) -> str:
        """Return the medium from which a loadable chunk reached host memory: "host" or a tier's."""
        chunk = self._pool.chunks.get(key)
        return self._medium(chunk.origin) if chunk is not None else "host"

    def touch(self, keys: Collection[bytes]) -> None:
        """Count `keys`, in prefix order, as used on every tier that has them."""
        self._uses.tell_all()
        self._uses.tell(keys, keys)

    def prepare_store(
        self, keys: Collection[bytes], request_id: str, *, patient: bool = False
    ) -> StoreGrant | None:
        """Reserve rows for those of `keys` that host memory does not have.

        A store that does not fit is granted for the prefix that fits. It never
        evicts those of `keys` that are here already, unless host memory is too
        small for all of `keys`. Chunks that the admission filter does not want
        cost nothing, nor do chunks that the policy would give up again for the
        head of the same store. None means "not now, offer it again": nothing is
        free for it at this moment, or all of it would fit once transfers under
        way have ended. A request gets the latter at most once in a row. Keys that are
        being removed are passed over.

        Args:
            patient: whether chunks for which only others of `keys` could make way now are
                not declined if all fit once other rows are free: they are to be offered again.
                The caller has to give up at some time, and counts by `refuse` what found no
                room by then.
        """
        self._lookups.pause()
        if self.hidden:
            keys = [key for key in keys if key not in self.hidden]
        request = self._requests.get(request_id)
        ordered = _ordered(request, keys)
        if request is not None and request.hints is not None and not request.hints.store:
            return StoreGrant([], [], [], list(keys))
        grant = self._stores.prepare(ordered, request_id, self.now, patient=patient)
        if grant is not None and ordered is not keys:
            grant = grant.in_order_of(keys)
        if grant is not None:
            self._budget.want(len(grant.keys), stored=True)
        return grant

    def refuse(self, count: int) -> None:
        """Count so many chunks of patient stores that found no room."""
        self._stores.refuse(count)

    def complete_store(
        self, keys: Collection[bytes], request_id: str, ok: bool = True, era: int | None = None
    ) -> None:
        """Take in the end of a store: the rows were written (`ok`), or the chunks are dropped.

        Keys that this request is not storing are counted as stray and ignored.

        Args:
            era: the era in which the store was prepared; by default the present one.
        """
        # Requests that waited for these may be answered; what they ask next is listed anew.
        self._lookups.pause()
        if era is not None and era != self.era:
            self._ended_late(keys, request_id, era, stores=True)
        else:
            self._stores.complete(keys, request_id, self.now, ok)
            self._pins.arrived(keys)
            if ok and self._demotions:
                self._demotions.stored(keys, self.now)

    # -- requests ------------------------------------------------------------------------

    def on_new_request(
        self,
        request_id: str,
        position: Callable[[bytes], int] | None = None,
        *,
        one_group: bool = False,
        params: object = None,
        envelope: object = None,
    ) -> None:
        """Begin a request. An earlier one with the same id ends.

        Args:
            position: returns where in the prompt a key belongs, in tokens, for servers that
                name keys in another order. Called only for keys that the request has named.
            one_group: all its keys are of one KV cache group. They are then named in the order
                of the prompt, except in lookups, which may begin at its end.
            params, envelope: may hold hints about its future: see `kvstore.core.hints`.
        """
        self.on_request_finished(request_id)
        if params is not None or envelope is not None:
            hints, taken, ignored = read_hints(params, envelope)
            if taken and self._hinted >= MOST_HINTED:
                taken, ignored = 0, ignored + taken
            self._hints += taken
            self._hints_ignored += ignored
            if taken:
                self._hinted += 1
                self._requests.open(request_id).hint(hints)
        if position is not None:
            self._requests.open(request_id).tell_positions(position, one_group=one_group)

    def on_request_queued(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Fetch the leading `keys` of a request that will ask for them later: see `Arrivals`.

        Returns:
            Whether they are fetched ahead; else they are when the request asks for them.
        """
        request = self._requests.open(request_id)
        self._lookups.pause()
        asks = request.queued or request.asked_step == self._pool.step
        new = request.state is RequestState.SCANNING and not (request.keys or request.leases)
        fresh = new and not asks
        if keys and fresh and self._arrivals.add(request, keys):
            return True
        self._requests.drop_if_idle(request)
        return False

    def on_request_turn(self, request_id: str) -> None:
        """Note that the turn of a queued request has come, whether or not it looks anything up."""
        request = self._requests.get(request_id)
        if request is not None and request.queued:
            request.leave_queue()
            if request.leases:
                self._queue.answer(request, self.now)
                request.ask(self.now)

    def on_request_decided(self, request_id: str, *, loads: bool) -> None:
        """Note that the server asks no more for this request: it loads what was found, or nothing.

        Chunks that were deferred in this step are not fetched for it. If it loads nothing, its
        wait and its leases end.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        self._lookups.pause()
        request.defer(False)
        if not loads:
            if request.state is RequestState.WAITING:
                self._queue.answer(request, self.now, Outcome.GONE)
            self._queue.release(request)

    def reach(self, keys: Sequence[bytes]) -> int:
        """Rows that the chunks of one prompt may have together."""
        return self._pool.reach(keys)

    def owner(self, keys: Sequence[bytes]) -> int:
        """A number for whoever shares rows with these keys; 0 without tenants."""
        return self._pool.owner(keys)

    def loadable_rows(self, keys: Collection[bytes] = ()) -> int:
        """Return how many rows one request can get: those not pinned, or pinned for its `keys`."""
        return self._pool.rows - self._pins.rows_besides(keys)

    def on_request_finished(self, request_id: str, now: float | None = None) -> None:
        """End a request's wait and its leases. Loads under way go on.

        Its hints are followed for every chunk that it has loaded or offered to be stored.

        Args:
            now: by default the time of the step.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        hints, keys = request.hints, self._chains.in_order(request)
        self._end_request(request)
        if hints is not None and keys:
            self._hints_refused += self.follow(hints, keys, self.now if now is None else now)

    def wants_all(self, request_id: str) -> bool:
        """Whether its hints apply to its whole prompt, chunks that the device has included."""
        request = self._requests.get(request_id)
        return request is not None and request.hints is not None and request.hints.at_end

    def follow(self, hints: Hints, keys: Sequence[bytes], now: float) -> int:
        """Follow the hints of a request that has ended and whose prompt is `keys`.

        What other prompts are known to share is neither released nor demoted: the client knows
        nothing of them.

        Returns:
            How many chunks could not be retained or fetched because a limit was reached.
        """
        refused = 0
        own = self._chains.unshared(keys) if hints.release or hints.demote else []
        if hints.release:
            self.unpin(own, cold=True)
        if hints.retain_s is not None:
            # Stores retain nothing.
            host = hints.retain_host or not self.owned
            refused += len(keys) - self.pin(keys, now + hints.retain_s, host=host, yields=True)
        if hints.demote:
            self.demote(own, now)
        after = hints.prefetch_after_s
        if after is not None and not self._prefetches.plan(keys, now + after):
            refused += len(keys)
        return refused

    def extend_prompt(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Add `keys` to the prompt of the request, although it does not load them."""
        self._lookups.pause()
        self._chains.extend(self._requests.open(request_id), keys)

    def on_prompt_end(self, listener: Callable[[Sequence[Sequence[bytes]]], None]) -> None:
        """Tell `listener` the keys of each request that ends, one sequence for each group."""
        self._chains.listen(listener)

    def lapse(self, request_id: str) -> None:
        """End the leases of a request that was answered; its answer still holds."""
        request = self._requests.get(request_id)
        if request is not None:
            self._queue.lapse(request)

    # -- prefetch, pins and demotion ---------------------------------------------------

    def prefetch(self, keys: Sequence[bytes], *, prefix: bool = True) -> int:
        """Fetch leading `keys` to host memory ahead of requests: see `Prefetches.begin`."""
        return self._prefetches.begin(keys, prefix=prefix)

    def is_prefetching(self, keys: Iterable[bytes] | None = None) -> bool:
        """Whether any of `keys`, or of all, is to be fetched ahead of requests, or on its way."""
        return self._prefetches.is_fetching(keys)

    def stop_prefetch(self, keys: Collection[bytes]) -> None:
        """Fetch those of `keys` no more whose fetch has not begun."""
        self._prefetches.drop(keys)

    def pin(
        self, keys: Sequence[bytes], until: float, *, host: bool = True, yields: bool = False
    ) -> int:
        """Keep the chunks of `keys` until then: see `Pins.begin`."""
        return self._pins.begin(keys, until, host=host, yields=yields)

    def unpin(self, keys: Sequence[bytes], *, cold: bool = False) -> int:
        """End the pins of `keys`, which leave first if `cold`; returns how many were pinned."""
        ended = self._pins.end(keys)
        if cold:
            self._demotions.cool(keys)
        return ended

    def demote(self, keys: Sequence[bytes], now: float) -> int:
        """Let the chunks of `keys` leave host memory: see `Demotions.begin`."""
        return self._demotions.begin(keys, now)

    def is_demoting(self, keys: Iterable[bytes]) -> bool:
        """Whether any of `keys` is still to leave host memory."""
        return any(map(self._demotions.is_leaving, keys))

    def stop_demotion(self, keys: Collection[bytes]) -> None:
        """Keep those of `keys` in host memory that have not left."""
        self._demotions.used(keys)

    # -- while it is in use ----------------------------------------------------------------

    @property
    def changing(self) -> int:
        """How many keys, rows and segments are still to change: see `kvstore.core.settings`."""
        return self._settings.left

    @property
    def rewrites(self) -> int:
        """How many segments are still to be rewritten; `changing` counts them, too."""
        return sum(tier.compactor.rewrites for tier in self.owned)

    @property
    def unrewritten(self) -> int:
        """How many segments could not be rewritten, of those that were to be last."""
        return sum(tier.compactor.unrewritten for tier in self.owned)

    @property
    def needs_steps(self) -> bool:
        """Whether compaction, a change or a reset goes on only if steps are made."""
        compacts = any(tier.compactor.rate for tier in self.owned)
        return compacts or self.changing > 0 or bool(self.uncleared)

    @property
    def unrecorded(self) -> bool:
        """Whether uses are still to be recorded on a tier, which takes up to a minute of steps."""
        return any(tier.unrecorded for tier in self.owned)

    def set_policy(self, tier: int | None, policy: EvictionPolicy) -> None:
        """Let `policy` replace that of a tier, by its number, or of host memory (None)."""
        self._lookups.pause()
        self._settings.set_policy(tier, policy)

    def policy_capacity(self, tier: int | None) -> int:
        """Return for how many chunks the policy of a tier, or of host memory, was set last."""
        return self._settings.policy_capacity(tier)

    def limit_rows(self, rows: int) -> None:
        """Use only `rows` rows of host memory, at most those that it began with."""
        self._lookups.pause()
        self._settings.limit_rows(rows)

    def segment_slots(self, tier: int) -> int:
        """Return how many chunks fit into a segment of a tier that this process owns."""
        return self._settings.owned(tier).slots.segment_slots

    def rewrite(self, tier: int, segments: Sequence[int]) -> None:
        """Copy the chunks of these segments of a tier to other slots; see `changing`."""
        self._settings.rewrite(tier, segments)

    def limit_segments(self, tier: int, most: Sequence[int], policy: EvictionPolicy) -> None:
        """Let a tier have so many segments on each device, and a policy for the chunks that fit."""
        self._settings.limit_segments(tier, most, policy)

    def places(self, key: bytes) -> list[str]:
        """Return where the chunk is, as far as is known: "host", and names of tiers."""
        if key in self.hidden:
            return []
        chunk = self._pool.chunks.get(key)
        here = ["host"] if chunk is not None and chunk.state != FILLING else []
        return here + [tier.name for tier in self.tiers if key in tier.entries]

    # -- the rest ------------------------------------------------------------------------

    def may_go_below(self, key: bytes) -> bool:
        """Whether a slower tier has the chunk, is getting it, or would get it on eviction."""
        chunk = self._pool.chunks.get(key)
        if chunk is not None and chunk.unsaved:
            return True
        return any(not tier.index.lacks(key) for tier in self.tiers) or (
            chunk is not None and any(t.accepts(self.now) for t in self._cascades.demoting)
        )

    def may_come(self, key: bytes) -> bool:
        """Whether a request that asks anew could get the chunk from a tier."""
        stores = [tier.store for tier in self.tiers if tier.store is not None]
        if key in self.hidden:
            return False
        return any(tier.health.readable and key in tier.entries for tier in self.tiers) or any(
            store.worth_asking and store.unknown(key) for store in stores
        )

    def save(self) -> None:
        """Copy to every tier the chunks that it would otherwise get only when they are given up.

        A tier that could not be cleared after a reset is tried again now.
        """
        for target in self.targets:
            target.retry_clearing()
        self._uses.tell_all()
        if self._cascades.demoting:
            chunks = [chunk for chunk in self._pool.chunks.values() if chunk.state != FILLING]
            self._cascades.save(chunks, self.now)

    def make_room(self, rows: int) -> None:
        """Let chunks leave until `rows` rows are free, but none that waits for a copy."""
        self._room.make(rows, self.now, shed_unsaved=False)

    def save_first(self, keys: Collection[bytes]) -> None:
        """Copy those of `keys` that host memory has, and the first tier lacks, to that tier."""
        chunks = filter(None, map(self._pool.chunks.get, keys))
        whole = [chunk for chunk in chunks if chunk.state != FILLING]
        self._cascades.save_to(self._cascades.targets[0], whole, self.now)

    def remove(self, keys: Collection[bytes]) -> Removal:
        """Take these chunks out of host memory and of every tier of this process.

        From now on they are misses. Rows and slots become free as soon as no move or transfer
        uses them; loads under way end as usual. Copies that peers keep are not removed, and are
        found again when the keys are no longer `hidden`.
        """
        self._lookups.pause()
        self._pins.end(keys)
        self._prefetches.drop(keys)
        self.on_remove(keys)
        return self._removals.begin(keys)

    def reset(self, *, close_tiers: bool = False) -> None:
        """Forget everything on every tier; on slower tiers durably, as soon as they can.

        With `close_tiers` the slower tiers are left as they are, for the next process, and are
        not used any more: this process computes other data from now on.

        Transfers between device and host memory may be under way. A new `era`
        begins, and their rows stay in use until each is reported with the era in
        which it was prepared, or `transfers_ended` says that all have ended.
        """
        late = list(self.device_transfers())
        self._overtaken.add(late)
        self.era += 1
        before = list(self._requests.values())
        for request in before:
            self._queue.remove(request)
        self._requests.clear()
        for request in before:
            # What the server has told of a request holds: it goes on.
            if request.position is not None or request.hints is not None:
                self._requests.open(request.id).take_over(request)
        while self._news:
            self._drop_first()
        self._lookups.reset()
        self._loads.reset()
        self._stores.reset()
        self._chains.reset()
        self._uses.reset()
        self._grants.reset()
        self._pins.reset()
        self._demotions.reset()
        self._prefetches.reset()
        self._arrivals.reset()
        self._settings.reset()
        self._removals.reset(close_tiers=close_tiers)
        self._questions.reset()
        self._transfers.reset((row for _, row in late), close_tiers=close_tiers)
        self._victims.reset()

    def late_eras(self, request_id: str, *, stores: bool) -> dict[bytes, int]:
        """Return keys that a request still stores, or loads, since before a reset, with eras."""
        return self._overtaken.eras(request_id, stores=stores)

    def transfers_ended(self, era: int | None = None) -> None:
        """Take every transfer prepared before that era as ended, by default the present one."""
        self._overtaken.all_ended(self.era if era is None else era)

    def device_transfers(self) -> Iterable[tuple[Transfer, int]]:
        """Yield loads and stores that were prepared and are not complete, with their rows."""
        for name, key, row in self._loads.under_way():
            yield Transfer(self.era, name, key, stores=False), row
        for name, key, row in self._stores.under_way():
            yield Transfer(self.era, name, key, stores=True), row

    def take_events(self) -> list[Event]:
        """Take the events since the last call: keys that appeared on a medium or left it.

        If events are not taken for long the older ones are lost: `CoreStats.events_lost`.
        """
        histories = [("host", "", self._pool.history.take())]
        histories += [(tier.medium, tier.name, tier.index.history.take()) for tier in self.tiers]
        return [
            Event([key for key, _ in run], medium, left, name)
            for medium, name, history in histories
            for left, run in itertools.groupby(history, key=operator.itemgetter(1))
        ]

    def tell_again(self) -> None:
        """Let `take_events` tell of all that is there: who follows the events has forgotten it."""
        chunks = self._pool.chunks.values()
        self._pool.history.tell_again(chunk.key for chunk in chunks if chunk.state != FILLING)
        for tier in self.tiers:
            tier.index.history.tell_again(tier.entries)

    def stats(self) -> CoreStats:
        """Return a snapshot of counters and gauges."""
        pool, queue, loads, stores = self._pool, self._queue, self._loads, self._stores
        loads.price(self.compute_pace)
        loaded_from: dict[str, int] = {}
        for origin, count in loads.loaded_from.items():
            medium = self._medium(origin)
            loaded_from[medium] = loaded_from.get(medium, 0) + count
        size, tiers = self._chunk_bytes, [tier.stats() for tier in self.tiers]
        for view, tier in zip(self.tiers, tiers, strict=True):
            saved = loads.saved.get(view.number, 0.0)
            its = view.payload_bytes or size
            tier.complete(loads.loaded_from[view.number], saved, its)
        return CoreStats(
            rows=pool.rows,
            free_rows=pool.free,
            busy_rows=pool.busy,
            pinned_rows=self._pins.rows,
            pins=len(self._pins),
            prefetched=self._prefetches.begun,
            fetched_queued=self._arrivals.begun,
            gave_way=self._arrivals.gave_way,
            demoted=self._demotions.demoted,
            hints=self._hints,
            hints_ignored=self._hints_ignored,
            hints_refused=self._hints_refused,
            chunks=len(pool.chunks),
            waiting=len(queue.waiting),
            misses=self._lookups.misses,
            outpaced=self._lookups.outpaced,
            compute_pace=self.compute_pace,
            deferrals=self._deferrals,
            timeouts=queue.timeouts,
            truncations=self._grants.truncations,
            lapses=queue.lapses,
            loaded=loads.loaded,
            loaded_from=loaded_from,
            saved=loads.saved.get(-1, 0.0),
            stored=stores.stored,
            stores_deferred=stores.deferred,
            chunks_refused=stores.refused,
            declined=stores.declined,
            evicted=pool.evicted,
            shed=pool.shed,
            stray=self._stray + loads.stray + stores.stray,
            illegal=self.illegal,
            plugin_faults=self._plugin_faults(),
            events_lost=self._events_lost,
            chunk_bytes=size,
            loaded_bytes=loads.loaded * size,
            stored_bytes=stores.stored * size,
            used_bytes=len(pool.chunks) * size,
            free_bytes=pool.free * size,
            waits=queue.waits.copy(),
            ages=pool.ages.left.copy(),
            tiers=tiers,
            tenants=self._tenants(),
        )

    # -- inside --------------------------------------------------------------------------

    def _ended_late(
        self, keys: Collection[bytes], request_id: str, era: int, *, stores: bool
    ) -> None:
        """Free the rows of transfers from before a reset that have ended."""
        for key in dict.fromkeys(keys):
            ended = self._overtaken.ended(Transfer(era, request_id, key, stores))
            self._stray += not ended
        self._queue.rows_moved(list(keys), self.now)

    def _plugin_faults(self) -> int:
        policies = [self._pool.policy, *(tier.index.policy for tier in self.owned)]
        faults = sum(policy.faults for policy in policies)
        return faults + sum(each.faults for each in self._chains.filters)

    def _tenants(self) -> dict[str, TenantStats]:
        on_tiers: Counter[str] = Counter()
        for tier in self.tiers:
            on_tiers.update(tier.index.policy.tenants())
        loaded, stored = self._loads.by_tenant, self._stores.by_tenant
        return {
            name: TenantStats(loaded[name], stored[name], chunks, on_tiers[name])
            for name, chunks in self._pool.policy.tenants().items()
        }

    def _medium(self, origin: int) -> str:
        return "host" if origin < 0 else self.tiers[origin].medium


def _ordered(request: Request | None, keys: Collection[bytes]) -> Collection[bytes]:
    """Return `keys`, which the request loads or offers, in the order of its prompt."""
    if request is None:
        return keys
    if request.hints is not None and request.hints.at_end:
        request.name(keys)
    return request.ordered(keys)
