"""Stores: the device writes chunks to host memory."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvstore.core.cascade import Cascades
from kvstore.core.chunk import FILLING, Chunk, set_depths
from kvstore.core.entrance import Entrance
from kvstore.core.eviction import Room, Victims
from kvstore.core.host import HostPool
from kvstore.core.lookup import Lookups
from kvstore.core.pins import Pins
from kvstore.core.request import Request, Requests, RequestState
from kvstore.core.step_budget import Budget
from kvstore.core.usage import Chains, Uses
from kvstore.core.wait_queue import FORGET_AFTER, WaitQueue

__all__ = ["StoreGrant", "Stores"]


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

    def in_order_of(self, keys: Iterable[bytes]) -> StoreGrant:
        """The same, named in the order of `keys`."""
        row_of = dict(zip(self.keys, self.rows, strict=True))
        named = [key for key in dict.fromkeys(keys) if key in row_of]
        return StoreGrant(named, [row_of[key] for key in named], self.evicted, self.declined)


@dataclass(slots=True)
class _Entered:
    """What came of the attempt to get rows for the new chunks of a store.

    Attributes:
        chunks: those that have entered; None where nobody has yet.
        room: for how many there was room, those that were declined included.
        declined: keys that fit and that the policy does not want.
    """

    chunks: list[Chunk] | None
    room: int
    declined: list[bytes] = field(default_factory=list)


class Stores:
    """Reserves rows for stores, and takes their ends in.

    Attributes:
        stored: chunks that were stored. deferred: stores that were to be offered again.
        refused: chunks that found no room. declined: chunks that were not wanted.
        stray: keys that were reported and not being stored.
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
        self._entrance = Entrance(pool, victims)
        self._requests = requests
        self._queue = queue
        self._lookups = lookups
        self._chains = chains
        self._uses = uses
        self._cascades = cascades
        self._budget = budget
        # Requests whose last store was deferred, and when that was, longest ago first.
        self._deferred: deque[tuple[Request, float]] = deque()
        self.stored = self.deferred = self.refused = self.declined = self.stray = 0

    def prepare(self, keys: Collection[bytes], request_id: str, now: float) -> StoreGrant | None:
        """See `Core.prepare_store`."""
        pool = self._pool
        request = self._requests.open(request_id)
        if request.state is not RequestState.SCANNING:
            self._queue.remove(request)
        again = request.store_deferred is not None
        offered = list(dict.fromkeys(keys))
        self._chains.extend(request, offered)
        new = [key for key in offered if key not in pool.chunks]
        self._tell_uses(request, offered, again)
        unwanted: list[bytes] = []
        if new and pool.admission is not None:
            answers = pool.admission.admit(new, now)
            unwanted = [key for key, answer in zip(new, answers, strict=True) if not answer]
            new = [key for key, answer in zip(new, answers, strict=True) if answer]
        before = len(pool.left)
        # What is pinned is not among the new ones, and stays.
        may_fit = len(new) <= pool.rows - self._pins.rows and (
            pool.busy > 0 or pool.held > 0 or self._cascades.unsaved > 0
        )
        entered = self._enter(offered, new, unwanted, request_id, now, may_fit)
        chunks, room = entered.chunks, entered.room
        if room < len(new):
            # A search that was broken off goes on in the next step: nothing is cut for it.
            wait = chunks is None and ((may_fit and not again) or self._budget.cut_short)
            if room == 0 or wait:
                self._defer(request, now)
                return None
            self.refused += len(new) - room
        self.forget_deferred(request)
        if chunks is None:
            chunks = pool.reserve(new[:room], -1, request_id)
        set_depths(chunks, self._chains.depths(request))
        self._chains.storing(request, len(chunks))
        self._requests.drop_if_idle(request)
        unwanted += entered.declined
        self.declined += len(unwanted)
        keys, rows = [chunk.key for chunk in chunks], [chunk.row for chunk in chunks]
        return StoreGrant(keys, rows, pool.left[before:], unwanted)

    def complete(self, keys: Collection[bytes], request_id: str, now: float, ok: bool) -> None:
        """The device has written the rows (`ok`), or it has not: the chunks are dropped."""
        if type(keys) is not set:
            keys = dict.fromkeys(keys)
        ended = [
            chunk
            for chunk in filter(None, map(self._pool.chunks.get, keys))
            if chunk.state == FILLING and chunk.stored_by == request_id
        ]
        self.stray += len(keys) - len(ended)
        # A server may report a store as a set; rows were given in prefix order.
        ended.sort(key=operator.attrgetter("order"))
        if ok:
            self._queue.stored(ended, now)
            self.stored += len(ended)
            self._cascades.stored(ended, now)
        else:
            for chunk in ended:
                self._queue.failed(chunk, now)
                self._pool.discard(chunk)
        request = self._requests.get(request_id)
        if request is not None and ended:
            self._chains.storing(request, -len(ended))
            self._requests.drop_if_idle(request)

    def under_way(self) -> Iterable[tuple[str, bytes, int]]:
        """Request, key and row of every chunk that is being stored."""
        for chunk in self._pool.chunks.values():
            if chunk.state == FILLING and chunk.stored_by is not None:
                yield chunk.stored_by, chunk.key, chunk.row

    # -- deferred stores -------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Forget those that were deferred and never offered again."""
        deferred = self._deferred
        while deferred:
            request, since = deferred[0]
            if request.store_deferred == since:
                if now - since < FORGET_AFTER * self._queue.lease:
                    break
                self.forget_deferred(request)
                self._requests.drop_if_idle(request)
            deferred.popleft()

    def forget_deferred(self, request: Request) -> None:
        """The store of the request is not waited for any more."""
        request.defer_store(None)

    def reset(self) -> None:
        """Forget every store that was deferred."""
        self._deferred.clear()

    def _defer(self, request: Request, now: float) -> None:
        request.defer_store(now)
        self._deferred.append((request, now))
        self.deferred += 1

    # -- entering --------------------------------------------------------------------------

    def _tell_uses(self, request: Request, offered: list[bytes], again: bool) -> None:
        """The policies hear of the prompt, of which the request may have loaded a part."""
        host_keys, tier_keys = self._uses.take(request)
        self._uses.tell_some()
        if again:
            # This is no second use, but chunks that are here shall not leave meanwhile.
            self._pool.keep(offered)
            self._uses.tell_host(host_keys, tier_keys)
            return
        # What the request has loaded and what it stores are one prompt.
        prompt = offered
        if offered[: len(tier_keys)] != tier_keys:
            prompt = list(dict.fromkeys([*tier_keys, *offered]))
        if host_keys == tier_keys:
            self._uses.tell_host(prompt, prompt)
            return
        promoted = set(tier_keys).difference(host_keys)
        self._uses.tell_host([key for key in prompt if key not in promoted], prompt)
        # Their promotion may lie far back.
        self._pool.keep(promoted)

    def _enter(
        self,
        offered: list[bytes],
        new: list[bytes],
        unwanted: list[bytes],
        request_id: str,
        now: float,
        may_fit: bool,
    ) -> _Entered:
        """Get rows for `new`, those of `offered` that are not here and not `unwanted`.

        Where they fit, or never will, the policy says chunk by chunk who enters and who
        leaves.
        """
        pool, room = self._pool, self._room
        if self._queue.starving:
            # Rows that a request in the queue waits for are not for stores.
            return _Entered(None, 0)
        self._lookups.keep_hits()
        hindered = pool.busy > 0 or pool.held > 0 or pool.unsaved > 0 or pool.marked > 0
        fits = room.sure >= len(new)
        if not fits and (may_fit or room.demotes or not pool.policy.declines):
            # What is there already keeps its place, and the head goes first.
            pool.keep(offered)
            free = room.make(len(new), now, shed_unsaved=False, incoming=new[::-1])
            return _Entered(None, free)
        wanted = offered
        if not fits and hindered:
            # The policy is asked about what can come in beside those that have to stay.
            wanted = offered[: self._entrance.reach(offered, room.sure, unwanted)]
            new = [key for key in wanted if key not in pool.chunks and key not in unwanted]
        if new and not self._victims.find_one():
            return _Entered(None, 0)
        chunks, all_asked = self._entrance.enter(
            wanted, new, frozenset(unwanted), request_id, from_head=hindered
        )
        if not fits:
            pool.keep(wanted)
        if len(chunks) == len(new) or not all_asked or not (fits or hindered):
            return _Entered(chunks, len(chunks))
        entered = {chunk.key for chunk in chunks}
        return _Entered(chunks, len(new), [key for key in new if key not in entered])
