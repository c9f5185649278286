"""Request: all that the core remembers of one request of the server.

    SCANNING --a key is not ready yet--> WAITING --all there, or time is up--> ANSWERED
       ^                                                                          |
       +---------- it loads, stores or ends, or is silent for long ---------------+

While SCANNING, lookups see the tiers as they are. While WAITING, every lookup
is "ask again" at no cost. Once ANSWERED, what is in host memory is a hit and
all else a miss; keys that the request had not asked before may send it back to
WAITING, within the `max_wait` that is already running, so this ends.

Some servers name keys in another order than that of the prompt: a sliding window
is looked for from its end, and several KV cache groups come one after the
other. Granted in that order, a request would get all of one group and little of
another, which nobody can use, and policies would take the head of a prompt for
its tail. So a server may tell where in the prompt a key belongs (`Request.position`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable

from kvstore.core.hints import Hints

__all__ = ["MOST_REQUESTS", "Chain", "Loaded", "Request", "RequestState", "Requests"]

MOST_REQUESTS = 2**16
"""Most requests that are remembered, if a server never tells their end."""


class RequestState(enum.IntEnum):
    """See the module's text."""

    SCANNING = 0
    WAITING = 1
    ANSWERED = 2


class Chain:
    """The keys that a request has used.

    Attributes:
        groups: for each KV cache group its keys, in prompt order.
        prompts: what policies hear at its end, in prompt order: one for each group, or one for
            all, whose ends are `ends`.
        known: all keys in `groups`, each with how many were known before it.
    """

    __slots__ = ("ends", "groups", "known", "prompts")

    def __init__(self) -> None:
        self.groups: dict[bytes, list[bytes]] = {}
        # Not a set, through whose keys the garbage collector would look again and again.
        self.known: dict[bytes, int] = {}
        self.prompts: list[list[bytes]] = []
        self.ends: list[bytes] | None = None

    def end(self, prompts: list[list[bytes]], ends: list[bytes] | None) -> None:
        """The request has ended: what policies hear of it."""
        self.prompts, self.ends = prompts, ends


class Loaded:
    """What a request has loaded, until the policies have heard of it (`told`).

    Attributes:
        host_keys: what was used in host memory. tier_keys: what was used on tiers.
    """

    __slots__ = ("host_keys", "tier_keys", "told")

    def __init__(self, host_keys: list[bytes], tier_keys: list[bytes]) -> None:
        self.host_keys, self.tier_keys, self.told = host_keys, tier_keys, False

    def tell(self) -> tuple[list[bytes], list[bytes]]:
        """All of it: the caller tells the policies."""
        self.told = True
        return self.host_keys, self.tier_keys

    def tell_tail(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """So many keys of tiers from the end on, and those of host memory among them."""
        head = len(self.tier_keys) - most
        tail = frozenset(self.tier_keys[head:])
        later = [key for key in self.host_keys if key not in tail]
        told = self.host_keys[len(later) :], self.tier_keys[head:]
        self.host_keys, self.tier_keys = later, self.tier_keys[:head]
        return told


class Request:
    """Keys asked for and used, leases held, transfers running, clocks.

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
        store_deferred: when its last store was put off, to be offered again; or None.
        needs_rows: whether some of what is not granted has no row yet.
        waits_for: the tier from which no more may be under way for now, or -1.
        awaits_answer: a store is being asked about the first key that is not granted.
        answer_by: until when it waits for answers of stores.
        short_of_rows: what is not granted waits for rows.
        stuck: the last step in which only its own leases stood in its way.
        put_off: it has asked in vain, and waits for its turn.
        unseen: the step in which it has asked in vain last.
        linked: how many of `keys` the policies know as a chain, while it waits.
        position: where in its prompt a key belongs, in tokens, if the server tells.
        one_group: all its keys are of one KV cache group. What it names is then in the order of
            the prompt, but for lookups, which may come from its end.
        counted: keys of which the admission filters have heard.
        chain: what it has used, or None.
        ended: what it had used when it ended, while chunks of it are being written.
        storing: chunks of it that are being written by the device.
        loaded: what it has loaded, until the policies have heard of it.
        hints: what its server knows of its future, or None.
    """

    __slots__ = (
        "answer_by",
        "asked",
        "asked_step",
        "awaits_answer",
        "chain",
        "counted",
        "deferring",
        "ended",
        "granted",
        "hints",
        "id",
        "keys",
        "leases",
        "linked",
        "loaded",
        "loading",
        "moved",
        "needs_rows",
        "newest",
        "one_group",
        "pending",
        "position",
        "put_off",
        "short_of_rows",
        "since",
        "state",
        "store_deferred",
        "storing",
        "stuck",
        "tried",
        "unseen",
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
        self.store_deferred: float | None = None
        self.waits_for = -1
        self.awaits_answer = False
        self.answer_by = math.inf
        self.short_of_rows = False
        self.stuck = -1
        self.put_off = False
        self.unseen = -1
        self.linked = 0
        self.position: Callable[[bytes], int] | None = None
        self.one_group = False
        self.counted: set[bytes] = set()
        self.chain: Chain | None = None
        self.ended: Chain | None = None
        self.storing = 0
        self.loaded: Loaded | None = None
        self.hints: Hints | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing of it has to be remembered."""
        return (
            self.state is RequestState.SCANNING
            and self.chain is None
            and self.position is None
            and self.hints is None
            and not (self.loading or self.storing or self.counted)
            and self.store_deferred is None
            and not (self.deferring or self.put_off)
        )

    @property
    def busy(self) -> bool:
        """Whether something is under way for it."""
        return bool(self.loading or self.storing) or self.state is RequestState.WAITING

    # -- asking ------------------------------------------------------------------------

    def ask(self, now: float, step: int | None = None) -> None:
        """It asks at this time; in a step, if it is looked up in it."""
        self.asked = now
        if step is not None:
            self.asked_step = step

    def unlist(self) -> None:
        """What it asks for next, in the same step perhaps, is a new round."""
        self.asked_step = -1

    def defer(self, deferring: bool) -> None:
        """Whether it begins to wait when the step ends."""
        self.deferring = deferring

    def name_keys(self, keys: Iterable[bytes]) -> None:
        """It asks for these, in this order."""
        self.keys = list(keys)

    def forget_keys(self) -> None:
        """What it has asked for counts no more."""
        self.keys = []

    def defer_store(self, when: float | None) -> None:
        """When its last store was put off, to be offered again; None: it is not any more."""
        self.store_deferred = when

    def queue_up(self, step: int) -> None:
        """It has asked in vain in this step, and waits for its turn."""
        self.put_off, self.unseen = True, step

    def take_turn(self) -> None:
        """It has had its turn, or does not want it any more."""
        self.put_off = False

    # -- using -------------------------------------------------------------------------

    def tell_positions(self, position: Callable[[bytes], int], *, one_group: bool) -> None:
        """From now on `position` says where in its prompt a key belongs."""
        self.position, self.one_group = position, one_group

    def hint(self, hints: Hints) -> None:
        """What its server knows of its future."""
        self.hints = hints

    def end(self) -> None:
        """It asks no more: where keys belong, and what was foreseen, counts no more."""
        self.position = self.hints = None

    @property
    def used(self) -> list[bytes]:
        """The keys that it has used, in the order in which it named them first."""
        return [] if self.chain is None else list(self.chain.known)

    @property
    def reordered(self) -> bool:
        """Whether its keys have positions, and are of several groups."""
        return self.position is not None and not self.one_group

    def ordered(self, keys: Collection[bytes]) -> Collection[bytes]:
        """`keys` as they are to be used: in prompt order over all groups, where that is known."""
        return self.sorted(keys) if self.reordered else keys

    def sorted(self, keys: Iterable[bytes]) -> list[bytes]:
        """`keys`, in whatever order they were named, in that of the prompt."""
        return sorted(keys, key=self.position)

    @property
    def turned(self) -> bool:
        """Whether `keys` may be in another order than that of the prompt."""
        position = self.position
        if position is None:
            return False
        return not self.one_group or position(self.keys[0]) > position(self.keys[-1])

    def count(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` of which the filters have not heard, and now do."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self.counted]
        self.counted.update(fresh)
        return fresh

    def forget_counted(self) -> int:
        """Forget of which keys the filters have heard; returns how many those were."""
        count = len(self.counted)
        self.counted = set()
        return count

    def begin_chain(self) -> Chain:
        """It begins to use keys."""
        self.chain = Chain()
        return self.chain

    def end_chain(self, ended: Chain | None = None) -> None:
        """It uses no more keys; `ended` is kept while chunks of it are being written."""
        self.chain, self.ended = None, ended
        self.counted = set()

    def forget_ended(self) -> None:
        """What it had used when it ended is not kept any more."""
        self.ended = None

    def store(self, chunks: int) -> None:
        """So many more of its chunks are being written (less, when negative)."""
        self.storing += chunks

    def load(self, loaded: Loaded | None) -> None:
        """What it has loaded and the policies have not heard of."""
        self.loaded = loaded

    def link(self, keys: int) -> None:
        """The policies know so many of `keys` as a chain."""
        self.linked = keys

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
        self.linked = 0

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
    """All that are remembered, by id, in the order in which they came."""

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

    def oldest(self, wanted: Callable[[Request], object]) -> Request | None:
        """The first of those that are `wanted`; those before it count as new from now on."""
        for _ in range(len(self)):
            name = next(iter(self))
            request = self[name]
            if wanted(request):
                return request
            del self[name]
            self[name] = request
        return None
