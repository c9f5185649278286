"""Asynchronous lookups: ask stores for keys, each key once, and wake the requests that wait."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Sequence

from kvstore.core.host import HostPool
from kvstore.core.request import Request
from kvstore.core.residency.base import Store, TierView
from kvstore.core.wait_queue import WaitQueue

__all__ = ["MOST_KEYS", "Question", "Questions"]

MOST_KEYS = 1024
"""Keys of one question."""

Question = tuple[Store, list[bytes], str]
"""A store, keys that it is asked about, and the request for which it is."""


class Questions:
    """The questions of requests that begin to wait.

    A question names keys of one request, in the order of its prompt, that host memory does not
    have, nor any tier that is known to have them. Each store is asked about them that may, and
    the request waits as long as one of the answers is worth it: see `Patience`.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        queue: WaitQueue,
        hidden: Collection[bytes] = (),
    ) -> None:
        self._chunks = pool.chunks
        self._queue = queue
        self._tiers = tiers
        self._hidden = hidden
        self._stores = [store for tier in tiers if (store := tier.store) is not None]
        self._due: list[Question] = []
        # What is to be asked and not handed out yet, of each store.
        self._named: dict[int, set[bytes]] = {store.number: set() for store in self._stores}
        # When the first of those who wait for answers waits no longer.
        self._soonest = math.inf

    def __bool__(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._stores)

    def add(self, request: Request, now: float, compute: float) -> None:
        """The request begins to wait: what nobody knows of its keys is asked.

        Args:
            compute: seconds in which the server computes a chunk; 0 where nobody knows.
        """
        readable = [tier.entries for tier in self._tiers if tier.health.readable]
        chunks, hidden = self._chunks, self._hidden
        keys = [
            key
            for key in request.keys
            if key not in chunks
            and key not in hidden
            and not any(key in entries for entries in readable)
        ]
        patience = 0.0
        for store in self._stores:
            if not store.worth_asking:
                continue
            # What made reads from an outpaced one slow may be over.
            read = 0.0 if store.health.recompute.outpaced else store.health.pace.per_chunk
            lasts = store.patience.lasts(len(keys), compute, read)
            patience = max(patience, lasts)
            if not lasts:
                store.count("unawaited")
            asked, named = store.answers.asked, self._named[store.number]
            its = [k for k in keys if k not in asked and k not in named and store.unknown(k)]
            named.update(its)
            for start in range(0, len(its), MOST_KEYS):
                self._due.append((store, its[start : start + MOST_KEYS], request.id))
        if keys:
            request.wait_for_answers(now + patience)
            self._soonest = min(self._soonest, now + patience)

    def take(self) -> list[Question]:
        """The questions that are to be asked now."""
        due, self._due = self._due, []
        for named in self._named.values():
            named.clear()
        return due

    def watch(self, now: float) -> None:
        """Who has waited for answers as long as they are worth goes on without, once a step."""
        if now >= self._soonest:
            self.pass_over(now)
            left = [each.answer_by for each in self._queue.waiting.values()]
            self._soonest = min((each for each in left if each > now), default=math.inf)

    def pass_over(self, now: float) -> None:
        """Go on where stores have answered: requests for which nothing comes wait no longer."""
        waiting = [request for request in self._queue.waiting.values() if request.awaits_answer]
        readable = [tier.entries for tier in self._tiers if tier.health.readable]
        for request in waiting:
            keys, place = request.keys, request.granted
            waits = now < request.answer_by
            while place < len(keys) and self._is_nowhere(keys[place], readable, waits):
                place += 1
            if place > request.granted:
                request.grant(place, needs_rows=None, short_of_rows=False)
            self._queue.answer_if_complete(request, now)

    def _is_nowhere(self, key: bytes, readable: Sequence[Container[bytes]], waits: bool) -> bool:
        if key in self._chunks or any(key in entries for entries in readable):
            return False
        return not (waits and any(key in s.answers.asked and s.worth_asking for s in self._stores))

    def reset(self) -> None:
        """Nobody waits any more."""
        self.take()
