"""What the core remembers of one request of the server.

    SCANNING --a key is not ready yet--> WAITING --all there, or time is up--> ANSWERED
       ^                                                                          |
       +---------- it loads, stores or ends, or is silent for long ---------------+

While SCANNING, lookups see the tiers as they are. While WAITING, every lookup
is "ask again" at no cost. Once ANSWERED, what is in host memory is a hit and
all else a miss; keys that the request had not asked before may send it back to
WAITING, within the `max_wait` that is already running, so this ends.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

__all__ = ["Request", "RequestState", "Requests"]


class RequestState(enum.IntEnum):
    """See the module's text."""

    SCANNING = 0
    WAITING = 1
    ANSWERED = 2


class Request:
    """Keys asked for, leases held, loads running, clocks.

    Attributes:
        keys: keys that answered "hit" or "ask again" in this round, in the order asked; a
            new round has a new list.
        tried: keys of earlier rounds of the same wait.
        granted: how many of `keys` were leased, fetched or given up so far.
        leases: keys of chunks that stay for this request; filling ones count in `pending`.
        pending: leased chunks that are still filling.
        loading: pins of loads that were prepared and are not complete.
        since: when this wait began, or None when there is none.
        moved: when something last moved for this request.
        newest: highest `order` of the chunks it waited for.
        asked: when it last asked. asked_step: the step of its last lookup.
        deferring: it got "ask again" in this step, and begins to wait when it ends.
        store_deferred: whether its last store is to be offered again.
        needs_rows: whether some of what is not granted has no row yet.
        waits_for: the tier from which no more may be under way for now, or -1.
        awaits_answer: a store is being asked about the first key that is not granted.
        answer_by: until when it waits for answers of stores.
        short_of_rows: what is not granted waits for rows.
        stuck: the last step in which only its own leases stood in its way.
    """

    __slots__ = (
        "answer_by",
        "asked",
        "asked_step",
        "awaits_answer",
        "deferring",
        "granted",
        "id",
        "keys",
        "leases",
        "loading",
        "moved",
        "needs_rows",
        "newest",
        "pending",
        "short_of_rows",
        "since",
        "state",
        "store_deferred",
        "stuck",
        "tried",
        "waits_for",
    )

    def __init__(self, request_id: str, state: RequestState = RequestState.SCANNING) -> None:
        self.id = request_id
        self.state = state
        self.keys: list[bytes] = []
        self.tried: set[bytes] = set()
        self.granted = 0
        self.needs_rows = True
        self.leases: dict[bytes, None] = {}
        self.pending = 0
        self.loading: dict[bytes, int] = {}
        self.since: float | None = None
        self.moved = 0.0
        self.newest = -1
        self.asked = 0.0
        self.asked_step = -1
        self.deferring = False
        self.store_deferred = False
        self.waits_for = -1
        self.awaits_answer = False
        self.answer_by = math.inf
        self.short_of_rows = False
        self.stuck = -1

    @property
    def idle(self) -> bool:
        """Whether nothing of it has to be remembered."""
        return (
            self.state is RequestState.SCANNING
            and not self.loading
            and not self.store_deferred
            and not self.deferring
        )

    # -- asking ------------------------------------------------------------------------

    def ask(self, now: float, step: int | None = None) -> None:
        """It asks at this time; in a step, if it is looked up in it."""
        self.asked = now
        if step is not None:
            self.asked_step = step

    def defer(self, deferring: bool) -> None:
        """Whether it begins to wait when the step ends."""
        self.deferring = deferring

    def name_keys(self, keys: Iterable[bytes]) -> None:
        """It asks for these, in this order."""
        self.keys = list(keys)

    def forget_keys(self) -> None:
        """What it has asked for counts no more."""
        self.keys = []

    def defer_store(self, deferred: bool) -> None:
        """Whether its last store is to be offered again."""
        self.store_deferred = deferred

    # -- waiting -----------------------------------------------------------------------

    def begin_wait(self, now: float, needs_rows: bool) -> None:
        """SCANNING or ANSWERED -> WAITING."""
        if self.since is None:
            self.since = now
        self.state = RequestState.WAITING
        self.keys = list(dict.fromkeys(self.keys))
        self.moved = now
        self.needs_rows = needs_rows
        self.waits_for = -1
        self.awaits_answer = False
        self.answer_by = math.inf
        self.short_of_rows = False

    def end_wait(self) -> None:
        """WAITING -> ANSWERED."""
        self.state = RequestState.ANSWERED
        self.tried.update(self.keys)
        self.keys = []
        self.granted = 0
        self.pending = 0

    def forget_wait(self) -> None:
        """Any state -> SCANNING, without leases."""
        self.drop_leases()
        self.keys = []
        self.tried.clear()
        self.granted = 0
        self.since = None
        self.state = RequestState.SCANNING

    def movement(self, now: float) -> None:
        """Something has moved for it."""
        self.moved = now

    def lease(self, keys: Iterable[bytes], filling: int, newest: int) -> None:
        """These chunks stay for it; so many of them, up to the order `newest`, are filling."""
        self.leases.update(dict.fromkeys(keys))
        if filling:
            self.pending += filling
            self.newest = max(self.newest, newest)

    def drop_lease(self, key: bytes) -> None:
        """The chunk stays for it no longer."""
        del self.leases[key]

    def drop_leases(self) -> None:
        """No chunk stays for it any longer."""
        self.leases = {}
        self.pending = 0

    def arrived(self, chunks: int, now: float) -> None:
        """So many chunks for which it has waited are filled, or will not come."""
        self.pending -= chunks
        self.moved = now

    def wait_for_tier(self, tier: int) -> None:
        """What is not granted waits until less is under way from this tier; -1 for none."""
        self.waits_for = tier

    def await_answer(self, awaits: bool) -> None:
        """Whether a store is being asked about the first key that is not granted."""
        self.awaits_answer = awaits

    def wait_for_answers(self, until: float) -> None:
        """Then it goes on without those that have not come."""
        self.answer_by = until

    def grant(self, up_to: int, *, needs_rows: bool | None, short_of_rows: bool) -> None:
        """So many of its keys were leased, fetched or given up; what the rest lacks, if known."""
        self.granted = up_to
        self.short_of_rows = short_of_rows
        if needs_rows is not None:
            self.needs_rows = needs_rows

    def lack_rows(self, short: bool) -> None:
        """Whether what is not granted waits for rows."""
        self.short_of_rows = short

    def stick(self, step: int) -> None:
        """Nothing but its own leases stood in its way in this step; -1 if something else did."""
        self.stuck = step

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.name}, {self.granted}/{len(self.keys)} granted)"


class Requests(dict[str, Request]):
    """All that are remembered, by id."""

    def open(self, request_id: str) -> Request:
        """The request of that id, remembered from now on."""
        request = self.get(request_id)
        if request is None:
            request = self[request_id] = Request(request_id)
        return request

    def drop_if_idle(self, request: Request) -> None:
        """Forget the request if nothing of it has to be remembered."""
        # Its name may belong to a later request by now.
        if request.idle and self.get(request.id) is request:
            del self[request.id]
