"""Asynchronous lookups: ask stores for keys, and let requests wait for the answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Sequence

from kvstore.core.host import HostPool
from kvstore.core.request import Request
from kvstore.core.residency.base import TierView
from kvstore.core.residency.remote import AskedTier
from kvstore.core.wait_queue import WaitQueue

__all__ = ["MOST_KEYS", "Question", "Questions"]

MOST_KEYS = 256
"""Most keys of one question: a request goes on with those that are answered."""

MOST_AHEAD = 256
"""Most keys of a question that no request waits for; there is one at a time."""

Question = tuple[AskedTier, list[bytes], str]
"""A store, the keys that it is asked about, and the request that they are for."""


class Questions:
    """The questions of requests that begin to wait.

    A question names keys of one request, in prompt order, that neither host memory nor any tier
    is known to have. Every store that may have them is asked, and the request waits
    as long as one of the answers is worth it: see `Patience`.
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
        # For each store, the keys of questions that are not handed out yet.
        self._named: dict[int, set[bytes]] = {store.number: set() for store in self._stores}
        # When the first of the requests that wait for answers stops waiting.
        self._soonest = math.inf

    def __bool__(self) -> bool:
        """Whether there is a store to ask."""
        return bool(self._stores)

    def add(self, request: Request, now: float, compute: float) -> None:
        """Prepare the questions of a request that begins to wait.

        Args:
            compute: seconds that the server takes to compute a chunk; 0 if not known.
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
            # What it is known to have must not be forgotten while the request waits for it. It
            # tells by the read that follows, so not where a faster tier has the chunk.
            faster = [tier.entries for tier in self._tiers[: store.number] if tier.health.readable]
            store.keep(
                key
                for key in store.answers.ending(request.keys, now)
                if key not in chunks and not any(key in entries for entries in faster)
            )
            # The cause of slow reads from an outpaced store may be over.
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

    def ask_ahead(self, request: Request) -> bool:
        """Prepare a question about the next keys of a request that does not wait for the answer.

        Returns:
            Whether there is a store that may have the first of them.
        """
        keys = request.keys[request.granted : request.granted + MOST_AHEAD]
        for store in self._stores:
            if not store.worth_asking or not store.unknown(keys[0]):
                continue
            if not (store.answers.asked or self._due):
                its = [key for key in keys if key not in self._chunks and store.unknown(key)]
                self._due.append((store, its, request.id))
            return True
        return False

    def take(self) -> list[Question]:
        """Take the questions that are to be asked now."""
        due, self._due = self._due, []
        for named in self._named.values():
            named.clear()
        return due

    def watch(self, now: float) -> None:
        """Let requests go on that have waited for answers long enough; called once a step."""
        if now >= self._soonest:
            self.pass_over(now)
            left = [each.answer_by for each in self._queue.waiting.values()]
            self._soonest = min((each for each in left if each > now), default=math.inf)

    def pass_over(self, now: float) -> None:
        """Let requests pass over leading keys that will not arrive, as the stores have answered.

        Where a prompt's chunks are of use only together with all before them, that ends the wait.
        """
        waiting = [request for request in self._queue.waiting.values() if request.awaits_answer]
        readable = [tier.entries for tier in self._tiers if tier.health.readable]
        for request in waiting:
            keys, place = request.keys, request.granted
            waits = now < request.answer_by
            while place < len(keys) and self._is_nowhere(keys[place], readable, waits):
                place += 1
                if not request.gaps:
                    request.cut(place)
                    break
            if place > request.granted:
                request.grant(place, needs_rows=None, short_of_rows=False)
            self._queue.answer_if_complete(request, now)

    def _is_nowhere(self, key: bytes, readable: Sequence[Container[bytes]], waits: bool) -> bool:
        if key in self._chunks or any(key in entries for entries in readable):
            return False
        return not (waits and any(key in s.answers.asked and s.worth_asking for s in self._stores))

    def reset(self) -> None:
        """Forget all questions."""
        self.take()
