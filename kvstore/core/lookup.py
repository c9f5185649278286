"""Lookup: answer whether a chunk can be loaded now, later, or not at all.

`Line` holds the requests that a step has turned away, as it looks up a bounded number of keys.
`Streak` lets a caller answer consecutive keys of one request without calling the core for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import cast

from kvstore.core.chunk import READY, Chunk
from kvstore.core.host import HostPool
from kvstore.core.request import Request, Requests, RequestState
from kvstore.core.residency.base import TierView
from kvstore.core.residency.remote_answers import Answers
from kvstore.core.step_budget import Budget
from kvstore.core.usage import Chains
from kvstore.core.wait_queue import WaitQueue

__all__ = ["Line", "Lookups", "Streak"]

_NOTHING: Container[bytes] = frozenset()


class Streak:
    """The request that was answered last, until anything else happens.

    Its next key is a hit if host memory holds the complete chunk (`state` is at least `READY`).
    It is "ask again" if host memory does not know the key and it is in `below`. A caller that
    answers so calls `note` with the key. For every other key it asks the core.

    Attributes:
        whose: the context of that request, as its caller passed it to `Lookups.go_on`; None
            once anything else has happened.
        below: keys whose chunks are fetched for the request from a slower tier if it asks.
        note: notes a key that was answered so.
    """

    __slots__ = ("below", "note", "whose")

    def __init__(self) -> None:
        self.whose: object | None = None
        self.below = _NOTHING
        nobody: list[bytes] = []
        self.note: Callable[[bytes], None] = nobody.append

    def begin(
        self, whose: object, note: Callable[[bytes], None], below: Container[bytes] = _NOTHING
    ) -> None:
        """Begin a streak of this request."""
        self.whose, self.note, self.below = whose, note, below

    def end(self) -> None:
        """End the streak, as something else happens."""
        self.whose = None


class Line:
    """Requests that were turned away, oldest first: the first has its turn in the next step."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        # Some of them have had their turn by now.
        self._line: deque[Request] = deque()
        self._turn: Request | None = None

    def begin_step(self) -> None:
        """Give the first request its turn, however many ask before it."""
        if self._turn is not None:
            # It has not asked again.
            self._turn.take_turn()
            self._requests.drop_if_idle(self._turn)
        line = self._line
        while line and not line[0].put_off:
            line.popleft()
        self._turn = line[0] if line else None

    def has(self, request: Request) -> bool:
        """Whether it is this request's turn."""
        return request is self._turn

    def take(self, request: Request) -> None:
        """End the request's wait for a turn, as it is looked up."""
        if request.put_off:
            request.take_turn()
            if request is self._turn:
                self._turn = None

    def put_off(self, request: Request, step: int) -> None:
        """Queue a request that this step turns away."""
        if not request.put_off:
            self._line.append(request)
        request.queue_up(step)

    def reset(self) -> None:
        """Forget all requests."""
        self._line.clear()
        self._turn = None


_SCANNING, _WAITING, _ANSWERED = RequestState

_NOBODY = Request(cast(str, object()))
"""The asking request while none asks; no request has its id."""


class Lookups:
    """Answers lookups, and keeps what was asked in the present step.

    Lookups carry no time: the time of the step counts.

    Attributes:
        misses: keys that answered "miss". outpaced: those of them that a tier has, but that are
            faster to compute again than to read.
        streak: the request that is answered at present, for callers that call `go_on`.

    Args:
        budget: how many keys a step looks up before further requests have to ask again.
        hidden: keys that are being removed: they are misses.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        requests: Requests,
        queue: WaitQueue,
        chains: Chains,
        budget: Budget,
        hidden: Collection[bytes] = (),
    ) -> None:
        self._pool = pool
        self._hidden = hidden
        self._chunk_of = pool.chunks.get
        self._tiers = tiers
        self._requests = requests
        self._queue = queue
        self._chains = chains
        self._counts = bool(chains.filters)
        self._budget = budget
        self.misses = self.outpaced = 0
        self.streak = Streak()
        self._now = 0.0
        # Entries of the tiers that were worth waiting for when the step began.
        self._readable = [tier.entries for tier in tiers]
        # A store worth asking may have any key that is not known to be absent from it.
        self._stores = [store for tier in tiers if (store := tier.store) is not None]
        self._asks: Sequence[Answers] = ()
        self._outpaced: list[TierView] = []
        # Requests that were looked up in this step.
        self._asked: list[Request] = []
        self._line = Line(requests)
        # The request that asks at present, and the growing key list of the last one looked up.
        self._asking = _NOBODY
        self._asking_keys: list[bytes] = []
        self._looked_up = 0
        # Keys that this step has answered, by request and round, and how many of each list the
        # pool keeps.
        self._listed: list[tuple[list[bytes], int]] = []

    @property
    def wanted(self) -> int:
        """Keys that were looked up in this step."""
        return self._looked_up + len(self._asking_keys)

    def begin_step(self, now: float) -> None:
        """Begin a step: hits of the last step may leave, and requests it turned away may ask."""
        self._now = now
        self._readable = [tier.entries for tier in self._tiers if tier.health.readable]
        self._outpaced = [tier for tier in self._tiers if tier.health.recompute.avoided]
        self._asks = [store.answers for store in self._stores if store.worth_asking]
        self.pause()
        self._listed.clear()
        self._looked_up, self._asking_keys = 0, []
        self._line.begin_step()

    def pause(self) -> None:
        """Forget which request asks at present, as something else happens."""
        self._asking = _NOBODY
        self.streak.end()

    def leave(self, request: Request) -> None:
        """The request asks no more: others have its turn."""
        self.pause()
        self._line.take(request)

    def reset(self) -> None:
        """Forget what was asked."""
        self.pause()
        self._asked.clear()
        self._listed.clear()
        self._line.reset()

    # -- answers ---------------------------------------------------------------------------

    def lookup(self, key: bytes, request_id: str) -> bool | None:
        """Whether the chunk can be loaded in this step: True, False, or None ("ask again").

        None always resolves: the request's wait has a deadline. A request asks for
        its keys in prefix order and stops at the first False.
        """
        # Written for speed: a scheduler calls this for every key of every request.
        request = self._asking
        if request.id != request_id:
            request = self._begin_asking(request_id)
        chunk = self._chunk_of(key)
        if self._hidden and key in self._hidden and request.state is not _WAITING:
            return self._miss(key, request)
        if chunk is not None and chunk.state >= READY and request.state is not _WAITING:
            request.keys.append(key)
            return True
        return self._lookup_elsewhere(key, chunk, request)

    def go_on(self, context: object) -> None:
        """Begin a streak of the request whose last lookup was a hit, or deferred: see `Streak`."""
        request = self._asking
        if self._hidden or request.state is _WAITING:
            return
        # Only in a first round is every chunk that a tier has fetched.
        if request.deferring and request.state is _SCANNING and self._readable:
            self.streak.begin(context, request.keys.append, self._readable[0])
        else:
            self.streak.begin(context, request.keys.append)

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> int | None:
        """Return how many leading `keys` can be loaded in this step, or None ("ask again")."""
        count, deferred = 0, False
        for key in keys:
            answer = self.lookup(key, request_id)
            if answer is None:
                if self.is_waiting(request_id):
                    return None
                deferred = True
            elif not answer:
                break
            count += 1
        if not deferred:
            return count
        self._asking.ask_prefix(count)
        return None

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` host memory or a readable tier holds.

        This is no lookup: nothing is counted, fetched or kept.
        """
        there = self._held(keys)
        return next((count for count, held in enumerate(there) if not held), len(keys))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether host memory or a readable tier holds it, for each of `keys`; no lookup either."""
        return list(self._held(keys))

    def _held(self, keys: Sequence[bytes]) -> Iterator[bool]:
        tiers = [tier.entries for tier in self._tiers if tier.health.readable]
        for key in keys:
            chunk = self._chunk_of(key)
            ready = chunk is not None and chunk.state >= READY
            yield key not in self._hidden and (ready or any(key in held for held in tiers))

    def is_waiting(self, request_id: str) -> bool:
        """Whether every lookup of this request is "ask again" for now."""
        request = self._asking
        if request.id == request_id:
            return request.state is _WAITING
        known = self._requests.get(request_id)
        if known is None:
            return False
        return known.state is _WAITING or known.unseen == self._pool.step

    def renew(self, request_id: str) -> None:
        """Extend the leases of a waiting request as if it had asked again."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ask(self._now)

    def _begin_asking(self, request_id: str) -> Request:
        """Begin the lookups of a request, in this step or after another request's."""
        self.streak.end()
        step = self._pool.step
        request = self._requests.get(request_id)
        if request is not None and request.state is _WAITING:
            # Nothing of it is looked up.
            request.ask(self._now, step)
            self._asking = request
            return request
        if request is None or request.queued or request.asked_step != step:
            self._looked_up += len(self._asking_keys)
            self._asking_keys = []
            request = request or self._requests.open(request_id)
            if self._looked_up >= self._budget.asked and not self._line.has(request):
                return self._answer_later(request)
            if request.queued:
                request.leave_queue()
            elif request.deferring:
                # The step in which it asked was not flushed: it asks for all of it anew.
                request.forget_keys()
            self._line.take(request)
            self._asking_keys = request.keys
            request.ask(self._now, step)
            self._asked.append(request)
            self._listed.append((request.keys, len(request.keys)))
        elif not request.keys:
            self._listed.append((request.keys, 0))
        self._asking = request
        return request

    def _answer_later(self, request: Request) -> Request:
        """Turn the request away until the next step, as this one has looked up enough."""
        request.ask(self._now)
        self._line.put_off(request, self._pool.step)
        # Everything else it asks for in this step has the same answer.
        self._asking = Request(request.id, _WAITING)
        return self._asking

    def _lookup_elsewhere(self, key: bytes, chunk: Chunk | None, request: Request) -> bool | None:
        """Answer for a key that is not a plain hit."""
        state = request.state
        if state is _WAITING and (request.since is not None or chunk is not None):
            return None
        if chunk is None:
            for entries in self._readable:
                if key in entries:
                    break
            else:
                for answers in self._asks:
                    if not answers.is_absent(key, self._now):
                        return self._ask_again(key, request)
                if self._outpaced:
                    self.outpaced += any(key in tier.entries for tier in self._outpaced)
                return self._miss(key, request)
        elif chunk.origin >= 0 and self._tiers[chunk.origin].health.hopeless:
            # On its way from a tier that does not answer in time, or at all.
            return self._miss(key, request)
        return self._ask_again(key, request)

    def _ask_again(self, key: bytes, request: Request) -> bool | None:
        """Answer for a key that may arrive; a request that has waited for it gets a miss."""
        state = request.state
        if state is _ANSWERED and (key in request.tried or self._queue.overdue(request, self._now)):
            return self._miss(key, request)
        if state is _WAITING:
            return None
        if not request.deferring:
            request.defer(True)
        request.keys.append(key)
        return None

    def _miss(self, key: bytes, request: Request) -> bool:
        self.misses += 1
        if self._counts:
            # A request that was turned away has a stand-in, so the real one is looked up by id.
            self._chains.count(self._requests.get(request.id, request), (key,))
        return False

    # -- what was asked --------------------------------------------------------------------

    def keep_hits(self) -> None:
        """Keep the chunks that answered "hit" in this step until it ends.

        To be called before any chunk may be evicted.
        """
        for position, (keys, kept) in enumerate(self._listed):
            if kept < len(keys):
                self._pool.keep(keys[kept:])
                self._listed[position] = (keys, len(keys))

    def take_asked(self) -> list[Request]:
        """Return the requests that were looked up since the last call.

        The keys of those that begin to wait are put into the order of their prompts.
        """
        self.pause()
        # One that asked again before the step was flushed stands there twice.
        asked, self._asked = [*dict.fromkeys(self._asked)], []
        for request in asked:
            request.unlist()
            if request.deferring:
                if request.turned:
                    # Hits are kept by their place in the list, so this comes before the sorting.
                    self.keep_hits()
                request.put_in_order()
        return asked
