"""What the core remembers of one request of the server.

    SCANNING --a key is not ready yet--> WAITING --all there, or time is up--> ANSWERED
       ^                                                                          |
       +---------- it loads, stores or ends, or is silent for long ---------------+

While SCANNING, lookups see the tiers as they are. While WAITING, every lookup
is "ask again" at no cost. Once ANSWERED, what is in host memory is a hit and
all else a miss; keys that the request had not asked before may send it back to
WAITING, within the `max_wait` that is already running, so this ends.

Where in the prompt of its request a key belongs, where the server knows that.

Some servers name keys in another order than that of the prompt: a sliding window
is looked for from its end, and several KV cache groups come one after the
other. Granted in that order, a request would get all of one group and little of
another, which nobody can use, and policies would take the head of a prompt for
its tail.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable

__all__ = ["MOST_REQUESTS", "Positions", "Request", "RequestState", "Requests"]


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


MOST_REQUESTS = 2**16
"""Most requests that are remembered, if a server never tells their end."""


class Positions:
    """The order of the keys of each request whose server tells it."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Callable[[bytes], int], bool]] = {}

    def __bool__(self) -> bool:
        """Whether anything is known of any request."""
        return bool(self._of)

    def tell(
        self, request_id: str, position: Callable[[bytes], int], *, one_group: bool = False
    ) -> None:
        """From now on `position` says where a key of the request belongs, in tokens.

        Args:
            one_group: all keys of the request are of one group. What it names is then in
                the order of the prompt, but for lookups, which may come from its end.
        """
        self._of[request_id] = position, one_group
        if len(self._of) > MOST_REQUESTS:
            del self._of[next(iter(self._of))]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._of.pop(request_id, None)

    def known(self, request_id: str) -> bool:
        """Whether the keys of the request have positions, and are of several groups."""
        return request_id in self._of and not self._of[request_id][1]

    def ordered(self, request_id: str, keys: Collection[bytes]) -> Collection[bytes]:
        """`keys` as they are to be used: in prompt order over all groups, where that is known."""
        return self.sorted(request_id, keys) if self.known(request_id) else keys

    def sorted(self, request_id: str, keys: Iterable[bytes]) -> list[bytes]:
        """`keys`, in whatever order they were named, in that of the prompt."""
        position, _ = self._of[request_id]
        return sorted(keys, key=position)

    def turned(self, request_id: str, keys: list[bytes]) -> bool:
        """Whether `keys`, which were looked up, may be in another order than that of the prompt."""
        if request_id not in self._of:
            return False
        position, one_group = self._of[request_id]
        return not one_group or position(keys[0]) > position(keys[-1])
