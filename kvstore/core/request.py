"""Request: everything the core remembers about one request of the server.

    SCANNING --a key is not ready yet--> WAITING --all there, or time is up--> ANSWERED
       ^                                                                          |
       +--------- it loads, stores or ends, or is not heard of for long ----------+

While SCANNING, lookups see the tiers as they are. While WAITING, every lookup
is "ask again" at no cost. Once ANSWERED, a chunk in host memory is a hit and
everything else is a miss. Keys that the request has not asked for before may send it
back to WAITING, within the `max_wait` that is already running, so this ends.

Some servers name keys in an order other than that of the prompt: a sliding window
is searched from its end, and several KV cache groups come one after the
other. Granted in that order, a request would get all of one group and too little of
another to be of use, and policies would take the head of a prompt for
its tail. So a server may say where in the prompt a key belongs (`Request.position`).

This module is long because all that is remembered of a request stands here.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvstore.core.hints import Hints

__all__ = ["MOST_REQUESTS", "Chain", "Request", "RequestState", "Requests"]

MOST_LOOKED_AT = 1024
"""Most requests that one search for an old one passes over."""

MOST_REQUESTS = 2**16
"""Most requests that are remembered if a server never reports their end."""


class RequestState(enum.IntEnum):
    """State of a request: see the module's text."""

    SCANNING = 0
    WAITING = 1
    ANSWERED = 2


class Chain:
    """The keys that a request has used.

    Attributes:
        groups: for each KV cache group its keys, in prompt order.
        prompts: what policies are told when the request ends, in prompt order: one list for each
            group, or one for all groups, whose last keys are `ends`.
        known: all keys in `groups`, each with the number of keys known before it.
    """

    __slots__ = ("ends", "groups", "known", "prompts")

    def __init__(self) -> None:
        self.groups: dict[bytes, list[bytes]] = {}
        # Not a set: the garbage collector would scan its keys again and again.
        self.known: dict[bytes, int] = {}
        self.prompts: list[list[bytes]] = []
        self.ends: list[bytes] | None = None

    def end(self, prompts: list[list[bytes]], ends: list[bytes] | None) -> None:
        """Set what policies are told, as the request has ended."""
        self.prompts, self.ends = prompts, ends


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Keys asked for and used, leases held, transfers running, clocks.

    Attributes:
        keys: keys that answered "hit" or "ask again" in this round, in the order asked; a
            new round has a new list.
        tried: keys of earlier rounds of the same wait.
        granted: how many of `keys` were leased, fetched or abandoned so far.
        leases: keys of chunks that are kept for this request; filling ones count in `pending`.
        pending: leased chunks that are still filling.
        loading: pins of loads that were prepared and are not complete.
        since: when the first wait of this round began, or None when there is none.
        began: when the last wait began.
        moved: when something last moved for this request.
        newest: highest `order` of the chunks it waited for.
        asked: when it last asked. asked_step: the step of its last lookup.
        deferring: it got "ask again" in this step, and begins to wait when the step ends.
        store_deferred: its last store was deferred, to be offered again.
        needs_rows: whether some keys that are not granted have no row yet.
        waits_for: the tier whose limit of promotions under way holds it up, or -1.
        awaits_answer: a store is being asked about the first key that is not granted.
        answer_by: until when it waits for answers of stores.
        short_of_rows: the keys that are not granted wait for rows.
        stuck: the last step in which nothing but its own leases blocked it.
        queued: the server has named its keys, and will ask for them later; `keys` and `granted` are
            those of its fetch until then.
        put_off: it was turned away by a full step, and waits for its turn.
        unseen: the last step that turned it away.
        as_prefix: how many keys a lookup of a whole prefix has named, where no other has in this
            round.
        gaps: whether chunks behind one that is missing may be of use to it.
        linked: how many of `keys` the policies know as a chain, while it waits.
        position: returns where in the prompt a key belongs, in tokens, if the server says so.
        one_group: all its keys are of one KV cache group. They are then named in prompt order,
            except in lookups, which may begin at the end of the prompt.
        counted: keys that the admission filters were told of.
        chain: the keys it has used, or None.
        ended: the keys it had used when it ended, while chunks of it are being written.
        storing: number of its chunks that the device is writing.
        named: keys that it has loaded or offered, in that order, if its hints speak of them.
        hints: what its server knows about its future, or None.
    """

    id: str
    state: RequestState = RequestState.SCANNING
    keys: list[bytes] = field(default_factory=list)
    tried: set[bytes] = field(default_factory=set)
    granted: int = 0
    needs_rows: bool = True
    leases: dict[bytes, None] = field(default_factory=dict)
    pending: int = 0
    loading: dict[bytes, int] = field(default_factory=dict)
    since: float | None = None
    began: float = 0.0
    moved: float = 0.0
    newest: int = -1
    asked: float = 0.0
    asked_step: int = -1
    deferring: bool = False
    store_deferred: bool = False
    waits_for: int = -1
    awaits_answer: bool = False
    answer_by: float = math.inf
    short_of_rows: bool = False
    stuck: int = -1
    queued: bool = False
    put_off: bool = False
    unseen: int = -1
    as_prefix: int = 0
    gaps: bool = True
    linked: int = 0
    position: Callable[[bytes], int] | None = None
    one_group: bool = False
    counted: set[bytes] = field(default_factory=set)
    chain: Chain | None = None
    ended: Chain | None = None
    storing: int = 0
    hints: Hints | None = None
    named: dict[bytes, None] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether nothing about it has to be remembered."""
        return (
            self.state is RequestState.SCANNING
            and self.chain is None
            and self.position is None
            and self.hints is None
            and not (self.keys or self.loading or self.storing or self.counted or self.leases)
            and not (self.store_deferred or self.deferring or self.put_off or self.queued)
        )

    @property
    def busy(self) -> bool:
        """Whether something is under way for it."""
        under_way = self.loading or self.storing or self.queued
        return bool(under_way) or self.state is RequestState.WAITING

    # -- asking ------------------------------------------------------------------------

    def ask(self, now: float, step: int | None = None) -> None:
        """Note when it asked, and the step if it was looked up in one."""
        self.asked = now
        if step is not None:
            self.asked_step = step

    def unlist(self) -> None:
        """Make its next lookup begin a new round, even in the same step."""
        self.asked_step = -1

    def defer(self, deferring: bool) -> None:
        """Set whether it begins to wait when the step ends."""
        self.deferring = deferring

    def name_keys(self, keys: Iterable[bytes]) -> None:
        """Set the keys it asks for, in this order."""
        self.keys = list(keys)

    def forget_keys(self) -> None:
        """Forget the keys it has asked for."""
        self.keys = []

    def defer_store(self, deferred: bool) -> None:
        """Set whether its last store was deferred."""
        self.store_deferred = deferred

    def enqueue(self, keys: Iterable[bytes]) -> None:
        """Begin to be queued in the server, with these keys in prompt order."""
        self.keys, self.granted, self.queued = list(dict.fromkeys(keys)), 0, True

    def leave_queue(self) -> None:
        """Be asked for from now on; the leases stay."""
        self.keys, self.granted, self.queued = [], 0, False

    def queue_up(self, step: int) -> None:
        """Wait for a turn, as this step has turned it away."""
        self.put_off, self.unseen = True, step

    def take_turn(self) -> None:
        """End its wait for a turn: it has had one, or wants none any more."""
        self.put_off = False

    # -- using -------------------------------------------------------------------------

    def tell_positions(self, position: Callable[[bytes], int], *, one_group: bool) -> None:
        """Use `position` to find where in the prompt a key belongs."""
        self.position, self.one_group = position, one_group

    def hint(self, hints: Hints) -> None:
        """Set what its server knows about its future."""
        self.hints = hints

    def end(self) -> None:
        """Forget positions and hints, as it asks no more."""
        self.position = self.hints = None
        self.named = {}

    def take_over(self, other: Request) -> None:
        """Take over what the server has told of the request before a reset."""
        self.position, self.one_group, self.hints = other.position, other.one_group, other.hints

    def name(self, keys: Iterable[bytes]) -> None:
        """Note keys that the request loads or offers to store, for its hints."""
        self.named.update(dict.fromkeys(keys))

    @property
    def reordered(self) -> bool:
        """Whether its keys have positions, and are of several groups."""
        return self.position is not None and not self.one_group

    def ordered(self, keys: Collection[bytes]) -> Collection[bytes]:
        """Return `keys` in prompt order over all groups, where that is known."""
        return self.sorted(keys) if self.reordered else keys

    def sorted(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return `keys` in prompt order, whatever their order."""
        return sorted(keys, key=self.position)

    @property
    def turned(self) -> bool:
        """Whether `keys` may be in an order other than that of the prompt."""
        position = self.position
        if position is None:
            return False
        return not self.one_group or position(self.keys[0]) > position(self.keys[-1])

    def ask_prefix(self, count: int) -> None:
        """Note that the last `count` keys were asked for as one prefix."""
        self.as_prefix = count if count == len(self.keys) else 0

    def put_in_order(self) -> None:
        """Put `keys` into prompt order, and note whether they were asked for as one prefix."""
        position, keys = self.position, self.keys
        if position is None:
            self.gaps = self.as_prefix != len(keys)
        else:
            self.gaps = not self.one_group or position(keys[0]) >= position(keys[-1])
            if self.turned:
                keys[:] = self.sorted(keys)
        self.as_prefix = 0

    def cut(self, count: int) -> None:
        """Want only its first `count` keys: it may ask for the others again."""
        self.keys = self.keys[:count]

    def count(self, keys: Iterable[bytes]) -> list[bytes]:
        """Mark `keys` as counted; returns those that the filters were not told of before."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self.counted]
        self.counted.update(fresh)
        return fresh

    def forget_counted(self) -> int:
        """Forget which keys the filters were told of; returns how many."""
        count = len(self.counted)
        self.counted = set()
        return count

    def begin_chain(self) -> Chain:
        """Begin an empty chain of used keys."""
        self.chain = Chain()
        return self.chain

    def end_chain(self, ended: Chain | None = None) -> None:
        """Drop the chain; `ended` is kept while chunks of it are being written."""
        self.chain, self.ended = None, ended
        self.counted = set()

    def forget_ended(self) -> None:
        """Forget the keys it had used when it ended."""
        self.ended = None

    def store(self, chunks: int) -> None:
        """Add to the number of its chunks that are being written; may be negative."""
        self.storing += chunks

    def link(self, keys: int) -> None:
        """Set how many of its keys the policies know as a chain."""
        self.linked = keys

    # -- waiting -----------------------------------------------------------------------

    def begin_wait(self, now: float, needs_rows: bool) -> None:
        """SCANNING or ANSWERED -> WAITING."""
        if self.since is None:
            self.since = now
        self.state = RequestState.WAITING
        self.keys = list(dict.fromkeys(self.keys))
        self.began = self.moved = now
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
        self.deferring = False
        self.state = RequestState.SCANNING

    def movement(self, now: float) -> None:
        """Note that something has moved for it."""
        self.moved = now

    def lease(self, keys: Iterable[bytes], filling: int, newest: int) -> None:
        """Lease these chunks to it; `filling` of them, up to the order `newest`, are filling."""
        self.leases.update(dict.fromkeys(keys))
        if filling:
            self.pending += filling
            self.newest = max(self.newest, newest)

    def drop_lease(self, key: bytes) -> None:
        """Drop its lease on the chunk."""
        del self.leases[key]

    def drop_leases(self) -> None:
        """Drop all its leases."""
        self.leases = {}
        self.pending = 0

    def arrived(self, chunks: int, now: float) -> None:
        """Count `chunks` it has waited for as filled, or as failed."""
        self.pending -= chunks
        self.moved = now

    def wait_for_tier(self, tier: int) -> None:
        """Wait with the remaining keys until less is under way from this tier; -1 for none."""
        self.waits_for = tier

    def await_answer(self, awaits: bool) -> None:
        """Set whether a store is being asked about the first key that is not granted."""
        self.awaits_answer = awaits

    def wait_for_answers(self, until: float) -> None:
        """Wait for answers of stores until then, and go on without the missing ones."""
        self.answer_by = until

    def grant(self, up_to: int, *, needs_rows: bool | None, short_of_rows: bool) -> None:
        """Set how many keys were leased, fetched or abandoned; what the rest lacks, if known."""
        self.granted = up_to
        self.short_of_rows = short_of_rows
        if needs_rows is not None:
            self.needs_rows = needs_rows

    def lack_rows(self, short: bool) -> None:
        """Set whether the keys that are not granted wait for rows."""
        self.short_of_rows = short

    def stick(self, step: int) -> None:
        """Note the step in which only its own leases blocked it; -1 if something else did."""
        self.stuck = step

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.name}, {self.granted}/{len(self.keys)} granted)"


class Requests(OrderedDict[str, Request]):
    """The requests that are remembered, by id, in the order in which they came."""

    def open(self, request_id: str) -> Request:
        """Return the request of that id; a new one is remembered from now on."""
        request = self.get(request_id)
        if request is None:
            request = self[request_id] = Request(request_id)
        return request

    def drop_if_idle(self, request: Request) -> None:
        """Forget the request if nothing about it has to be remembered."""
        # Its id may belong to a later request by now.
        if request.idle and self.get(request.id) is request:
            del self[request.id]

    def oldest(self, wanted: Callable[[Request], object]) -> Request | None:
        """Return the first that is `wanted`; those before it count as new from now on.

        Of very many only the first are looked at, the next ones by the next call.
        """
        for _ in range(min(len(self), MOST_LOOKED_AT)):
            request = next(iter(self.values()))
            if wanted(request):
                return request
            self.move_to_end(request.id)
        return None
