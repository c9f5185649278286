"""Stores: reserve rows for chunks that the device writes; the policy decides which ones enter.

This module is long because a store and the admission of its chunks are one decision.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.core.cascade import Cascades
from kvstore.core.chunk import FILLING, READY, Chunk, set_depths
from kvstore.core.eviction import Room, Victims
from kvstore.core.host import HostPool
from kvstore.core.lookup import Lookups
from kvstore.core.pins import Pins
from kvstore.core.request import Request, Requests, RequestState
from kvstore.core.step_budget import Budget
from kvstore.core.usage import Chains, Uses
from kvstore.core.wait_queue import FORGET_AFTER, WaitQueue

__all__ = ["StoreGrant", "Stores"]

LOADED_WITHIN = 0.25
"""Seconds in which chunks that a request has waited for are loaded, if they are, although the same
request waits to store others."""


@dataclass(slots=True)
class StoreGrant:
    """Chunks that a store may write: `keys[i]` goes to row `rows[i]`.

    `declined` were offered and are not wanted; offering them again in the same
    store is of no use.
    """

    keys: list[bytes]
    rows: list[int]
    evicted: list[bytes]
    declined: list[bytes] = field(default_factory=list)

    def in_order_of(self, keys: Iterable[bytes]) -> StoreGrant:
        """Return the same grant in the order of `keys`."""
        row_of = dict(zip(self.keys, self.rows, strict=True))
        named = [key for key in dict.fromkeys(keys) if key in row_of]
        return StoreGrant(named, [row_of[key] for key in named], self.evicted, self.declined)


@dataclass(slots=True)
class _Entered:
    """The result of an attempt to get rows for the new chunks of a store.

    Attributes:
        chunks: chunks that have entered; None if none was asked to enter yet.
        room: how many chunks there was room for, declined ones included.
        declined: keys that fit but that the policy does not want.
    """

    chunks: list[Chunk] | None
    room: int
    declined: list[bytes] = field(default_factory=list)


class Stores:
    """Reserves rows for stores, and takes in their ends.

    Attributes:
        stored: chunks that were stored. deferred: stores that were to be offered again,
            once each.
        refused: chunks that found no room. declined: chunks that were not wanted.
        stray: keys that were reported but were not being stored.
        by_tenant: `stored` by tenant, where there are some.
    """

    def __init__(
        self,
        pool: HostPool,
        victims: Victims,
        room: Room,
        requests: Requests,
        queue: WaitQueue,
        lookups: Lookups,
        chains: Chains,
        uses: Uses,
        cascades: Cascades,
        budget: Budget,
        pins: Pins,
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._victims = victims
        self._room = room
        self._entrance = Entrance(pool, victims, room)
        self._requests = requests
        self._queue = queue
        self._lookups = lookups
        self._chains = chains
        self._uses = uses
        self._cascades = cascades
        self._budget = budget
        # Requests whose last store was deferred, oldest first: when that was, and what the
        # admission filter has said of each key so far.
        self._deferred: OrderedDict[Request, tuple[float, dict[bytes, bool]]] = OrderedDict()
        self.by_tenant: Counter[str] = Counter()
        self.stored = self.deferred = self.refused = self.declined = self.stray = 0

    def prepare(
        self, keys: Collection[bytes], request_id: str, now: float, *, patient: bool
    ) -> StoreGrant | None:
        """Reserve rows for a store: see `Core.prepare_store`."""
        pool = self._pool
        request = self._requests.open(request_id)
        if request.queued:
            request.leave_queue()
        again = request.store_deferred
        # A store that is offered again leaves alone what was looked up since: a caller that does
        # both at once would give up chunks for one and want them back for the other without end.
        silent = now - max(request.asked, request.moved) > LOADED_WITHIN
        over = not again or (request.state is RequestState.ANSWERED and silent)
        if over and (request.leases or request.state is not RequestState.SCANNING):
            self._queue.remove(request)
        offered = list(dict.fromkeys(keys))
        self._chains.extend(request, offered)
        new = [key for key in offered if key not in pool.chunks]
        self._tell_uses(request, offered, again)
        unwanted: list[bytes] = []
        answers: dict[bytes, bool] = {}
        if new and pool.admission is not None:
            # To admit may spend a budget, which a store that is offered again has paid.
            told = self._deferred[request][1] if again else {}
            unasked = [key for key in new if key not in told]
            said = pool.admission.admit(unasked, now) if unasked else []
            answers = {**told, **dict(zip(unasked, said, strict=True))}
            unwanted = [key for key in new if not answers[key]]
            new = [key for key in new if answers[key]]
        before = len(pool.left)
        # Pinned chunks are not among the new ones, and stay.
        may_fit = len(new) <= pool.rows - self._pins.rows and (
            pool.busy > 0 or pool.held > 0 or self._cascades.unsaved > 0
        )
        entered = self._enter(offered, new, unwanted, request_id, now, may_fit, patient=patient)
        chunks, room = entered.chunks, entered.room
        if room < len(new):
            # A search that was cut short goes on in the next step; the store is not cut for it.
            wait = chunks is None and ((may_fit and not again) or self._budget.cut_short)
            if room == 0 or wait:
                self._defer(request, now, answers)
                return None
            if not patient:
                self.refuse(len(new) - room)
        self.forget_deferred(request)
        if request.state is RequestState.ANSWERED and not request.leases:
            # What it looked up meanwhile is over; it may look up anew.
            self._queue.remove(request)
        if chunks is None:
            chunks = pool.reserve(new[:room], -1, request_id)
        set_depths(chunks, self._depths(request, chunks))
        self._chains.storing(request, len(chunks))
        self._requests.drop_if_idle(request)
        unwanted += entered.declined
        self.declined += len(unwanted)
        keys, rows = [chunk.key for chunk in chunks], [chunk.row for chunk in chunks]
        return StoreGrant(keys, rows, pool.left[before:], unwanted)

    def _depths(self, request: Request, chunks: Sequence[Chunk]) -> Mapping[bytes, int]:
        """Return the depth of each chunk in its prompt: see `Chunk.depth`."""
        depths, policy = self._chains.depths(request), self._pool.policy
        if not (chunks and policy.shared):
            return depths
        # What is public comes first, and the rest is of one tenant.
        owner = policy.owner_of(chunks[-1].key)
        first = bisect_left([*depths], True, key=lambda key: policy.owner_of(key) == owner)
        keys = [chunk.key for chunk in chunks]
        return {key: at - first if (at := depths.get(key, 0)) >= first else at for key in keys}

    def complete(self, keys: Collection[bytes], request_id: str, now: float, ok: bool) -> None:
        """Take in the end of a store: the rows were written (`ok`), or the chunks are dropped."""
        if type(keys) is not set:
            keys = dict.fromkeys(keys)
        ended = [
            chunk
            for chunk in filter(None, map(self._pool.chunks.get, keys))
            if chunk.state == FILLING and chunk.stored_by == request_id
        ]
        self.stray += len(keys) - len(ended)
        # A server may report a store as a set; rows were assigned in prefix order.
        ended.sort(key=operator.attrgetter("order"))
        if ok:
            self._queue.stored(ended, now)
            self.stored += len(ended)
            if self._pool.policy.shared:
                owners = (self._pool.policy.tenant_of(chunk.key) for chunk in ended)
                self.by_tenant.update(owners)
            self._cascades.stored(ended, now)
        else:
            for chunk in ended:
                self._queue.failed(chunk, now)
                self._pool.discard(chunk)
        request = self._requests.get(request_id)
        if request is not None and ended:
            self._chains.storing(request, -len(ended))
            self._requests.drop_if_idle(request)

    def refuse(self, count: int) -> None:
        """Count so many chunks that found no room."""
        self.refused += count

    def under_way(self) -> Iterable[tuple[str, bytes, int]]:
        """Yield request, key and row of every chunk that is being stored."""
        for chunk in self._pool.chunks.values():
            if chunk.state == FILLING and chunk.stored_by is not None:
                yield chunk.stored_by, chunk.key, chunk.row

    # -- deferred stores -------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Forget stores that were deferred and never offered again."""
        while self._deferred:
            request, (since, _) = next(iter(self._deferred.items()))
            if now - since < FORGET_AFTER * self._queue.lease:
                break
            self.forget_deferred(request)
            self._requests.drop_if_idle(request)

    def forget_deferred(self, request: Request) -> None:
        """Stop waiting for the deferred store of the request."""
        self._deferred.pop(request, None)
        request.defer_store(False)

    def reset(self) -> None:
        """Forget every store that was deferred."""
        self._deferred.clear()

    def _defer(self, request: Request, now: float, answers: dict[bytes, bool]) -> None:
        self.deferred += not request.store_deferred
        self._deferred[request] = now, answers
        self._deferred.move_to_end(request)
        request.defer_store(True)

    # -- entering --------------------------------------------------------------------------

    def _tell_uses(self, request: Request, offered: list[bytes], again: bool) -> None:
        """Tell the policies the prompt, of which the request may have loaded a part."""
        host_keys, tier_keys = self._uses.take(request)
        self._uses.tell_some()
        if again:
            # This is no second use, but chunks that are here must not leave meanwhile.
            self._pool.keep(offered)
            self._uses.tell_host(host_keys, tier_keys)
            return
        # The chunks that the request has loaded and those it stores are one prompt.
        prompt = offered
        if offered[: len(tier_keys)] != tier_keys:
            prompt = list(dict.fromkeys([*tier_keys, *offered]))
        if host_keys == tier_keys:
            self._uses.tell_host(prompt, prompt)
            return
        promoted = set(tier_keys).difference(host_keys)
        self._uses.tell_host([key for key in prompt if key not in promoted], prompt)
        # Their promotion may be long ago.
        self._pool.keep(promoted)

    def _enter(
        self,
        offered: list[bytes],
        new: list[bytes],
        unwanted: list[bytes],
        request_id: str,
        now: float,
        may_fit: bool,
        *,
        patient: bool,
    ) -> _Entered:
        """Get rows for `new`, those of `offered` that are not here and not `unwanted`.

        Where they fit, or never will, the policy decides chunk by chunk which one enters and
        which one leaves.
        """
        pool, room = self._pool, self._room
        if self._queue.starves(pool.owner(offered)):
            # Rows that a request in the queue waits for are not for stores.
            return _Entered(None, 0)
        self._lookups.keep_hits()
        hindered = pool.busy > 0 or pool.held > 0 or pool.unsaved > 0 or pool.marked > 0
        # Where chunks are copied before they leave, rows take a while to become free.
        obtainable = pool.free if pool.policy.shared else pool.free + pool.leavable
        room.give_way(len(new) - obtainable, offered)
        fits = room.sure >= len(new)
        tight = patient and fits and hindered and not room.demotes and self._is_tight(offered, new)
        if tight and not self._leavable(offered[offered.index(new[0]) :]):
            # Only its head could make way for its end.
            fits = False
        at_once = may_fit or room.demotes or not pool.policy.declines
        # Where tenants share the rows, what others have is not for this store, and the policy does
        # not see it as a whole.
        if pool.policy.shared or (not fits and at_once):
            # Chunks that are here keep their rows, and the head enters first.
            pool.keep(offered)
            free = room.make(len(new), now, shed_unsaved=False, incoming=new[::-1])
            return _Entered(None, free)
        wanted = offered
        if not fits and hindered:
            # The policy is asked only about chunks that fit beside those that have to stay.
            wanted = offered[: self._entrance.reach(offered, room.sure, unwanted)]
            new = [key for key in wanted if key not in pool.chunks and key not in unwanted]
        if new and not self._victims.find_one():
            return _Entered(None, 0)
        chunks, all_asked = self._entrance.enter(
            wanted, new, frozenset(unwanted), request_id, from_head=hindered
        )
        if not fits:
            pool.keep(wanted)
        if tight or len(chunks) == len(new) or not all_asked or not (fits or hindered):
            return _Entered(chunks, len(chunks))
        entered = {chunk.key for chunk in chunks}
        return _Entered(chunks, len(new), [key for key in new if key not in entered])

    def _is_tight(self, offered: Sequence[bytes], new: Sequence[bytes]) -> bool:
        """Whether `new` fit only with rows of their own prompt, of which all fits later."""
        pool, pins = self._pool, self._pins
        stay = sum(key in pool.chunks and not pins.holds(key) for key in offered)
        fits_later = stay + len(new) <= pool.rows - pins.rows
        return fits_later and self._room.sure - self._leavable(offered) < len(new)

    def _leavable(self, keys: Iterable[bytes]) -> int:
        """Return how many chunks of `keys` could leave now."""
        here = filter(None, map(self._pool.chunks.get, keys))
        return sum(_may_leave(chunk, self._pool.step) for chunk in here)


class Entrance:
    """Admits the chunks of a store, evicting others as needed."""

    def __init__(self, pool: HostPool, victims: Victims, room: Room) -> None:
        self._pool = pool
        self._victims = victims
        self._room = room

    def reach(self, keys: Sequence[bytes], room: int, unwanted: Collection[bytes] = ()) -> int:
        """Return how many leading `keys` fit in host memory together, `unwanted` ones left out.

        Args:
            room: rows that are free or certain to become free.
        """
        chunks, step = self._pool.chunks, self._pool.step
        for position, key in enumerate(keys):
            if key in unwanted:
                continue
            chunk = chunks.get(key)
            # A chunk that is here and could leave must stay, too.
            if chunk is None or _may_leave(chunk, step):
                room -= 1
                if room < 0:
                    return position
        return len(keys)

    def enter(
        self,
        keys: Sequence[bytes],
        new: Sequence[bytes],
        unwanted: Collection[bytes],
        request_id: str,
        *,
        from_head: bool = False,
    ) -> tuple[list[Chunk], bool]:
        """Assign rows to `new`, those of `keys` that are neither here nor `unwanted`.

        They go to the policy tail first, each right after the eviction that
        makes room for it, and may be evicted for those that follow. So the
        policy decides which chunks of a store are worth a row; with LRU it is
        the head that fits. A chunk of `keys` that is given up before its turn
        enters the policy again in its turn, and keeps its row.

        Args:
            request_id: the request that stores them.
            from_head: no chunk enters behind one that does not. The policy decides how
                many enter, and prompt order decides which ones. Used when chunks that
                may not leave have narrowed the policy's choice.

        Returns:
            The chunks, head first; and whether all were offered to the policy: if not, the
            missing ones found no room.
        """
        pool = self._pool
        self._victims.let_loose()
        if pool.policy.spares_latest:
            entered = self._enter_together(keys, new, request_id)
            if entered is not None:
                return entered, True
        return self._enter_one_by_one(keys, unwanted, request_id, from_head)

    def _enter_together(
        self, keys: Sequence[bytes], new: Sequence[bytes], request_id: str
    ) -> list[Chunk] | None:
        """Admit all at once; None if not enough others can be evicted for them."""
        pool = self._pool
        short = max(0, len(new) - pool.free)
        protected = self._victims.protection(
            shed_unsaved=False, bounded=False, staying=frozenset(keys)
        )
        victims = pool.policy.evict(short, protected, new[::-1])
        if victims is None:
            return None
        self._victims.given_up(victims)
        pool.leave(victims)
        return pool.reserve(new, -1, request_id)

    def _enter_one_by_one(
        self, keys: Sequence[bytes], unwanted: Collection[bytes], request_id: str, from_head: bool
    ) -> tuple[list[Chunk], bool]:
        pool, chunks = self._pool, self._pool.chunks
        insert, evict = pool.policy.insert, pool.policy.evict
        may_not_leave = self._victims.protection(shed_unsaved=False, bounded=False)
        # Tail first: chunks that enter, and chunks of the prompt that were here and were given up.
        entering: dict[bytes, None] = {}
        given_up: dict[bytes, Chunk] = {}
        gone: list[bytes] = []

        def whole(key: bytes) -> int:
            return key in entering or may_not_leave(key)

        protected = may_not_leave if self._room.turns_away else whole
        own: Collection[bytes] = ()
        free = pool.free
        all_asked = True
        for key in reversed(keys):
            if key in chunks or key in unwanted:
                continue
            if free:
                free -= 1
            else:
                victims = evict(1, protected, (key,))
                if victims is None:
                    all_asked = False
                    break
                (victim,) = victims
                own = own or frozenset(keys)
                if victim in entering:
                    del entering[victim]
                else:
                    self._victims.given_up(victims)
                    if victim in own:
                        given_up[victim] = pool.take_out(victim)
                    else:
                        gone.append(victim)
            insert(key)
            back = given_up.pop(key, None)
            if back is not None:
                pool.put_back(back)
            else:
                entering[key] = None
        # A policy that knows only recency cannot tell which end of a prompt is worth more.
        by_recency = pool.policy.spares_latest and bool(given_up)
        fills = by_recency and _fills_a_hole(keys, entering, given_up)
        # Where all that enters stays, what was given up for it may find no row again in its turn.
        cut = bool(own) and (from_head or protected is whole)
        if not all_asked or fills or cut:
            entering = self._from_the_head(keys, unwanted, entering, given_up)
        for chunk in given_up.values():
            pool.put_back(chunk)
        pool.leave([*gone, *given_up])
        return pool.assign_rows([*reversed(entering)], -1, request_id), all_asked

    def _from_the_head(
        self,
        keys: Sequence[bytes],
        unwanted: Collection[bytes],
        entering: dict[bytes, None],
        given_up: dict[bytes, Chunk],
    ) -> dict[bytes, None]:
        """Give rows at the tail to missing chunks before them; returns what enters, tail first."""
        pool, chunks, policy = self._pool, self._pool.chunks, self._pool.policy
        missing = [
            (position, key)
            for position, key in enumerate(keys)
            if key not in entering and key not in chunks and key not in unwanted
        ]
        if not missing or not entering:
            return entering
        position_of = {key: position for position, key in enumerate(keys)}
        behind = list(entering)
        if given_up:
            # The policy gave up part of the prompt: then its chunks that are here go from the end.
            here = (key for key in reversed(position_of) if key in chunks)
            behind += [key for key in here if _may_leave(chunks[key], pool.step)]
            behind.sort(key=position_of.__getitem__, reverse=True)
        moving_up: list[bytes] = []
        for (position, key), last in zip(missing, behind, strict=False):
            if position_of[last] < position:
                break
            policy.remove(last)
            if last in entering:
                del entering[last]
            else:
                given_up[last] = pool.take_out(last)
            moving_up.append(key)
        for key in reversed(moving_up):
            policy.insert(key)
            back = given_up.pop(key, None)
            if back is not None:
                pool.put_back(back)
            else:
                entering[key] = None
        return dict.fromkeys(sorted(entering, key=position_of.__getitem__, reverse=True))


def _fills_a_hole(
    keys: Sequence[bytes], entering: Collection[bytes], given_up: Collection[bytes]
) -> bool:
    """Whether the first of `keys` that enters or is given up is one that enters."""
    first = next((key for key in keys if key in entering or key in given_up), None)
    return first in entering


def _may_leave(chunk: Chunk, step: int) -> bool:
    return chunk.state == READY and chunk.step != step and not chunk.unsaved
