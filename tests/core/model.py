"""A world around the core: rows and slots with contents, a server, a faulty engine.

The world performs moves the way an engine would, in any order, late or never,
with blocks that fail, and checks after each act the promises that the core
makes. It is driven by a seeded generator or by hypothesis.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core import AskedTier, Core, Flow, HostPool, OwnedTier, Pace, PeerTier
from kvstore.core.chunk import ABSENT, FILLING, LEAVING, LEAVING_PINNED, PINNED, READY
from kvstore.core.promotion import LEFT_TO_OTHERS
from kvstore.core.recency import NOTE_SECONDS
from kvstore.core.removal import Removal
from kvstore.core.reports import SpanBegin, SpanKind
from kvstore.core.request import RequestState
from kvstore.core.residency.base import TierView
from kvstore.core.residency.remote_answers import Answers, Patience
from kvstore.core.wait_queue import FORGET_AFTER
from kvstore.policies import EvictionPolicy, Protected, create_policy
from kvstore.policies.lru import LRU
from kvstore.policies.shares import Share, Shares
from kvstore.policies.tenants import Tenants
from kvstore.types import NO_MOVE, Changes, Completion, Move, Op, RecoveredTier

__all__ = [
    "GARBAGE",
    "Client",
    "World",
    "chain",
    "contents_of",
    "random_act",
    "random_world",
    "scatter",
]

Content = tuple[bytes, int]
"""What a row or a slot holds: a chunk's key, and the weights that it was computed with."""

GARBAGE: Content = (b"", -1)

MEDIA = ("disk", "remote", "far", "farther")

TRACED = (Op.ASK, Op.PROMOTE, Op.CASCADE)
"""Moves of which spans tell."""


def chain(prompt: int, length: int) -> list[bytes]:
    """Keys of a prompt: prompts share prefixes as numbers share high bits."""
    return [
        f"{prompt >> max(0, 6 - depth // 2):04x}-{depth:04d}".encode() + b"\0\0\0\0"
        for depth in range(length)
    ]


def contents_of(slots: list[Content]) -> dict[bytes, int]:
    """Where the chunks are that `slots` hold."""
    return {content[0]: slot for slot, content in enumerate(slots) if content is not GARBAGE}


@dataclass(eq=False)
class Copy:
    """A copy between device and host memory that a reset has overtaken.

    It reads or writes its rows at any moment until it has ended.
    """

    era: int
    request: str
    keys: list[bytes]
    rows: list[int]
    contents: list[Content]
    store: bool


@dataclass
class Client:
    """One request of the server.

    Attributes:
        state: asking, loading, computing, storing or done.
        joined: when its wait began; None while it does not wait.
        granted: how many of its keys were leased or fetched so far.
        seen: the same in the present round of its wait; `moved` is when it rose.
        failed: keys that did not come while it waited.
        leased: how many leading keys it was told of and has leases for.
        asked: when it last asked.
        store_deferred: whether its last store was deferred.
        again: it was answered and waits once more, for keys it had not asked for.
        gone: it has finished; only a transfer that was begun is still under way.
    """

    id: str
    keys: list[bytes]
    state: str = "asking"
    deferred: bool = False
    joined: float | None = None
    granted: int = 0
    seen: int = 0
    failed: set[bytes] = field(default_factory=set)
    moved: float = 0.0
    leased: int = 0
    asked: float = 0.0
    store_deferred: bool = False
    store_deferred_at: float = 0.0
    again: bool = False
    gone: bool = False
    loaded: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    weights: int = 0
    """Those that its present copy between device and host memory is of."""

    def forget(self) -> None:
        """Its wait and its leases have ended."""
        self.deferred, self.joined, self.again = False, None, False
        self.granted = self.seen = self.leased = 0
        self.failed.clear()


SLOW = Pace(asked=3, told=2, granted=2, absorbed=2, copied=1, questions=1)
"""A core that puts most of what it could do off to the next step."""


class Moody(Patience):
    """Answers are worth waiting for as the dice say, until `calm`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = random.Random(seed)
        self.calm = False

    def lasts(self, chunks: int, compute: float, read: float) -> float:
        return math.inf if self.calm else self._dice.choice((0.0, 0.0, 0.02, 0.5, math.inf))


class World:
    """See the module's text.

    Args:
        rows, slots, segment_slots, tiers, in_flight: geometry.
        stripes: devices of each tier.
        relocation: most chunks that compaction copies at once; 0 without compaction.
        flow: between host memory and every tier; `reserve` rows are kept ahead of need.
        followed: whether there is one tier more, which a neighbour writes to.
        asked: whether there is a store behind all of them, which others write to as well.
        lasts: seconds for which an answer of the store counts.
        deadline, max_wait, lease: of the core, in seconds.
        faults: the fraction of moves that fail, or some of their blocks.
        reports: whether the server reports copies that a reset has overtaken, one by one;
            else it says when all have ended, as vLLM does.
        changes: whether policies and sizes are changed now and then.
    """

    def __init__(
        self,
        rows: int = 12,
        slots: int = 24,
        segment_slots: int = 8,
        tiers: int = 1,
        followed: bool = False,
        asked: bool = False,
        lasts: float = 5.0,
        moody: int | None = None,
        in_flight: int = 12,
        policy: str = "lru",
        flow: Flow = Flow.WRITE_THROUGH,
        reserve: int = 0,
        pace: Pace | None = None,
        deadline: float = 1.0,
        max_wait: float = 5.0,
        lease: float = 3.0,
        faults: float = 0.1,
        stripes: int = 1,
        relocation: int = 0,
        reports: bool = True,
        changes: bool = False,
    ) -> None:
        self.reports = reports
        self.changes = changes
        self.weights = self.newest_weights = self.their_weights = 0
        """Of this process, of anybody, of the neighbour."""
        self.epoch = self.newest_epoch = self.their_epoch = self.heard_epoch = 0
        """The same for the epochs of chunks on the last tier, and the one that is looked for."""
        self.weights_of = {0: 0}
        """Those of the processes of each epoch."""
        self.rows: list[Content] = [GARBAGE] * rows
        self.slots = [[GARBAGE] * slots for _ in range(tiers + followed)]
        self.followed = tiers if followed else -1
        self.asked = tiers + followed if asked else -1
        self.lasts = lasts
        self.moody = None if moody is None else Moody(moody)
        """How long answers of the store are worth waiting for; None: until the deadline."""
        self.shared: dict[int, dict[bytes, int]] = {}
        """What stores have, with the weights of each chunk, for processes that began with some."""
        self.store_has: dict[bytes, int] = {}
        """What the store has for this process."""
        if asked:
            self.slots.append([])
        self.their_epochs = [0] * slots
        """Of what the neighbour's slots hold."""
        self.gossip = Changes()
        """What the neighbour did and nobody was told of."""
        self.segment_slots = segment_slots
        self.stripes = stripes
        self.relocation = relocation
        self.in_flight = in_flight
        self.faults = faults
        self.policy = policy
        self.flow = flow
        self.reserve = reserve
        self.pace = pace or Pace()
        self.demotes = flow is not Flow.WRITE_THROUGH and tiers + asked > 0
        self.timing: dict[str, Any] = {"deadline": deadline, "max_wait": max_wait, "lease": lease}
        self.now = 0.0
        self.moved = 0.0
        """When anything last moved for anybody."""
        self.rotten: set[tuple[int, int]] = set()
        """(tier, slot) whose bytes changed behind the core's back."""
        self.silent: set[int] = set()
        """Tiers whose moves do not end at present."""
        self.segment_ids: list[set[int]] = []
        """Segments that each tier has."""
        self.most_of: dict[int, list[int]] = {}
        """The most of each device, of tiers whose size was changed."""
        self.cramped: set[int] = set()
        """Tiers that can neither grow nor be cleared at present."""
        self.begin([{} for _ in self.slots], [{0} for _ in self.slots])

    def begin(self, found: list[dict[bytes, int]], segments: list[set[int]]) -> None:
        """A process begins, and finds these entries on its tiers."""
        rows = len(self.rows)
        self.rows = [GARBAGE] * rows
        self.late: list[Copy] = []
        """Copies that resets have overtaken."""
        self.sources: dict[int, list[Content]] = {}
        """What the rows of copies to tiers hold, by move."""
        self.looked_for: dict[int, int] = {}
        """The epoch that each promotion from the neighbour was begun in."""
        self.row_owner: list[object | None] = [None] * rows
        directories: list[TierView] = []
        self.store_has = self.shared.setdefault(self.weights, {})
        self.segment_ids = segments
        self.most_of.clear()
        for index, entries in enumerate(found):
            slots = len(self.slots[index])
            if index == self.asked:
                directories.append(self._store(index))
                continue
            if index == self.followed:
                shared = RecoveredTier(
                    "neighbour",
                    MEDIA[index],
                    list(entries.items()),
                    self.segment_slots,
                    (),
                    0,
                )
                directories.append(PeerTier(index, shared, self.in_flight))
                continue
            opening = RecoveredTier(
                f"t{index}",
                MEDIA[index],
                list(entries.items()),
                self.segment_slots,
                sorted(segments[index]),
                slots // self.segment_slots,
                stripes=self.stripes,
                relocation_chunks=self.relocation,
                note_chunks=2,
            )
            policy = policy_of(self.policy, slots)
            directory = OwnedTier(index, opening, policy, self.in_flight, flow=self.flow)
            directory.compactor.set_rate(1000.0 * self.relocation)
            # What is used first is written down at once, the rest after a minute.
            directory.index.recency._noted = -NOTE_SECONDS
            if not self.changes:
                # Where a policy is replaced, pinned keys leave it for the new one.
                _watch_pins(directory)
            directories.append(directory)
        pool = HostPool(rows, policy_of(self.policy, rows), reserve=self.reserve)
        self.core = Core(pool, directories, pace=self.pace, **self.timing)
        self.core._spans.want()
        self.spans: dict[tuple[SpanKind, str | int], SpanBegin] = {}
        """What has begun and not ended, for who traces requests."""
        self.moves: list[Move] = []
        self.done: list[Completion] = []
        self.clients: dict[str, Client] = {}
        self.hits_this_step: set[bytes] = set()
        self.removals: list[tuple[Removal, set[bytes]]] = []
        """Each with the keys that were not erased yet when anybody looked."""
        self.told: list[set[bytes]] = [set() for _ in range(len(found) + 1)]
        """What a listener to the events believes to be in host memory and on each tier."""
        self.core.poll(self.now)

    def _store(self, index: int) -> AskedTier:
        opened = RecoveredTier("store", MEDIA[index], [], 1, [], 0)
        flow = Flow.WRITE_THROUGH if self.flow is Flow.EXCLUSIVE else self.flow
        answers = Answers(2 * len(self.rows), self.lasts)
        store = AskedTier(index, opened, self.in_flight, flow=flow, answers=answers)
        if self.moody is not None:
            store.patience = self.moody
        return store

    # -- the clock and the server ------------------------------------------------------

    def step(self, seconds: float) -> None:
        """The edge between two steps."""
        self.now += seconds
        self.hand_over()
        if self.done or self.core.behind:
            # What is still to be taken in, or to be granted, is movement, too.
            self.moved = self.now
        done, self.done = self.done, []
        waiting = dict(self.core._queue.waiting)
        self.core.poll(self.now, done)
        for name, request in waiting.items():
            if request.state is RequestState.ANSWERED:
                # What is not there when the wait ends is not kept for it.
                client = self.clients[name]
                client.granted = min(client.granted, self._ready(client.keys))
                if self.asked >= 0:
                    # Nor is what it passed over before the store had it, and another fetched.
                    its = request.leases
                    passed = (n for n, key in enumerate(client.keys) if key not in its)
                    client.granted = min(client.granted, next(passed, client.granted))
        self.hits_this_step.clear()
        self.listen()

    def hand_over(self) -> None:
        """The engine gets the moves that are due."""
        for client in self.clients.values():
            if client.deferred and client.joined is None:
                client.joined = self.now
            if client.again:
                client.again, client.moved, client.seen = False, self.now, 0
        truncations = self.core._grants.truncations
        queued = [
            (client, request)
            for client in self.clients.values()
            for request in [self.core._requests.get(client.id)]
            if request is not None and (request.deferring or client.id in self.core._queue.waiting)
        ]
        # Behind the first miss it did not ask, so nothing there can be granted to it.
        asked = [min(len(set(request.keys)), len(client.keys)) for client, request in queued]
        for client, _ in queued:
            # What left its tier while it was waited for does not come.
            client.failed.update(key for key in client.keys if not self._exists(key))
        for move in self.core.flush(self.now):
            self._start(move)
        for (client, request), most in zip(queued, asked, strict=True):
            waits = request.state is RequestState.WAITING
            granted = request.granted if waits else most
            if granted > client.seen:
                client.seen, client.moved = granted, self.now
                if self.core._grants.truncations == truncations:
                    # Otherwise the rest may have been given up, not granted.
                    client.granted = granted

    def _exists(self, key: bytes) -> bool:
        core = self.core
        if key in core.hidden:
            return False
        held = any(key in tier.entries for tier in core.tiers)
        return held or key in core._pool.chunks or key in self.store_has

    def take_in(self) -> None:
        """The core hears of moves that have ended, in the middle of a step."""
        done, self.done = self.done, []
        if done:
            self.moved = self.now
        self.core.absorb(done)

    def arrive(self, name: str, prompt: int, length: int, *, queued: bool = False) -> Client:
        client = Client(name, chain(prompt, length))
        self.clients[client.id] = client
        self.core.on_new_request(client.id)
        if queued:
            self.core.on_request_queued(client.id, client.keys)
        return client

    def ask(self, client: Client, one_by_one: bool = False) -> int | None:
        """Look the client's prefix up."""
        core = self.core
        before = core._requests.get(client.id)
        silence = self.now - client.asked
        waits = before is not None and before.state is not RequestState.SCANNING
        held = waits and silence < core._queue.lease
        if silence >= FORGET_AFTER * core._queue.lease:
            # Forgotten by now: it begins anew.
            client.forget()
        answered = before is not None and before.state is RequestState.ANSWERED
        answer = self._scan(client) if one_by_one else core.lookup_prefix(client.keys, client.id)
        client.asked = self.now
        asking = core._requests.get(client.id)
        if answer is None and asking is not None and asking.unseen == core._pool.step:
            # This step has looked up enough; others were first.
            assert self.pace is SLOW, "nobody had asked for so much"
            if not held:
                client.granted = client.leased = 0
            return None
        if answer is None:
            if answered and client.joined is not None:
                waited = self.now - client.joined
                assert waited < core._queue.deadline, f"{client.id} has had its time"
                client.again = True
            else:
                self._check_wait(client)
            client.deferred = True
            return None
        if client.leased and held:
            assert answer >= client.leased, f"{client.id} lost chunks that were leased to it"
        if not held:
            client.leased = 0
        elif client.deferred:
            # It is told for the first time since it waited: what was granted stays.
            held_keys = client.keys[: min(answer, client.granted)]
            client.leased = next(
                (n for n, key in enumerate(held_keys) if key in client.failed), len(held_keys)
            )
        leased = client.leased
        client.forget()
        client.leased = leased
        self.hits_this_step.update(client.keys[:answer])
        return answer

    def _scan(self, client: Client) -> int | None:
        """Ask as a server does that knows only `lookup`, and answers hits in a row itself."""
        core, deferred = self.core, False
        for count, key in enumerate(client.keys):
            chunk = core._pool.chunks.get(key)
            streak, told = core.streak, False
            own: bool | None = None
            if streak.whose is client:
                own = chunk is not None and chunk.state >= READY
                told = own or (chunk is None and key in streak.below)
            if told and count % 2:
                streak.note(key)
                deferred |= not own
                continue
            answer = core.lookup(key, client.id)
            assert not told or answer is (own or None), f"{client.id} would have answered otherwise"
            if answer is False:
                return None if deferred else count
            core.go_on(client)
            deferred |= answer is None
        return None if deferred else len(client.keys)

    def _check_wait(self, client: Client) -> None:
        core = self.core
        if client.joined is not None:
            waited = self.now - max(client.joined, client.moved, self.moved)
            assert waited < core._queue.deadline, f"{client.id} waits while nothing moves"
            assert self.now - client.joined < core._queue.max_wait, f"{client.id} waits for ever"
        if not core.is_waiting(client.id):
            stalled = {tier.number for tier in core.tiers if tier.health.stalled}
            assert not stalled or any(self._may_come(key, stalled) for key in client.keys), (
                f"{client.id} begins to wait for a tier that does not answer"
            )

    def _may_come(self, key: bytes, stalled: set[int]) -> bool:
        chunk = self.core._pool.chunks.get(key)
        if chunk is not None:
            return chunk.state == FILLING and chunk.origin not in stalled
        if self.asked >= 0 and self.asked not in stalled:
            store = self.core.tiers[self.asked].store
            assert store is not None
            if store.unknown(key):
                return True
        return any(key in tier.entries for tier in self.core.tiers if tier.number not in stalled)

    def _ready(self, keys: list[bytes]) -> int:
        chunks = self.core._pool.chunks
        for count, key in enumerate(keys):
            if key not in chunks or chunks[key].state < READY:
                return count
        return len(keys)

    def load(self, client: Client, count: int) -> None:
        keys = client.keys[:count]
        client.rows = self.core.prepare_load(keys, client.id)
        client.loaded = keys
        client.forget()
        client.state = "loading"
        client.weights = self.weights
        self._check_load(client)

    def _check_load(self, client: Client) -> None:
        for key, row in zip(client.loaded, client.rows, strict=True):
            found = self.rows[row]
            assert found == (key, client.weights), f"row {row} holds {found}, while {key!r} is read"

    def finish_load(self, client: Client) -> None:
        self._check_load(client)
        self.core.complete_load(set(client.loaded), client.id)
        self.moved = self.now
        client.state = "computing"
        if client.gone:
            del self.clients[client.id]

    def store(self, client: Client) -> None:
        core, pool = self.core, self.core._pool
        core._lookups.keep_hits()
        offered = [key for key in client.keys if key not in core.hidden]
        new = [key for key in offered if key not in pool.chunks]
        present = [key for key in offered if key in pool.chunks]
        before = pool.free + sum(
            chunk.state == READY and chunk.step != pool.step and not chunk.unsaved
            for chunk in pool.chunks.values()
        )
        hindered = any(
            chunk.state != READY or chunk.step == pool.step or chunk.unsaved
            for chunk in pool.chunks.values()
        )
        grant = core.prepare_store(client.keys, client.id)
        client.forget()
        room = pool.free + sum(
            chunk.state == READY and chunk.step != pool.step and not chunk.unsaved
            for chunk in pool.chunks.values()
        )
        kept = all(key in pool.chunks for key in present)
        if not kept and grant is not None and self.policy != "lru":
            # Some policies prefer the head of a prompt to what they have of its tail.
            here = [key in pool.chunks for key in offered]
            kept = not any(here[here.index(False) :])
            # Of a prompt with a hole, as a removal or a failed copy leaves it, a policy may
            # give up what lies behind the hole for what fills it.
            kept |= present != offered[: len(present)]
        assert kept or len(client.keys) > before, "a store evicted its own chain"
        if grant is None:
            queued = any(r.granted < len(r.keys) for r in core._queue.waiting.values())
            forgotten = self.now - client.store_deferred_at >= FORGET_AFTER * core._queue.lease
            once = not client.store_deferred or forgotten or not room or queued or self.demotes
            # It may have no room in its share.
            once |= bool(core._pool.policy.shared)
            # A search that was broken off goes on with the next offer.
            assert once or core._budget.cut_short, "a store is deferred once"
            client.store_deferred, client.store_deferred_at = True, self.now
            return
        client.store_deferred = False
        assert grant.keys == [key for key in new if key in grant.keys], "not in prefix order"
        missing = next((n for n, key in enumerate(offered) if key not in pool.chunks), None)
        whole = self.policy == "lru" or present == offered[: len(present)]
        # A policy may give up what lies behind a hole for what fills it, and leave another hole.
        if missing is not None and hindered and whole:
            behind = set(offered[missing:])
            assert not behind & set(grant.keys), "a tail without its head"
        if self.policy == "lru":
            # Other policies may prefer what is there already to some of a long prompt.
            wanted = [key for key in new if key not in grant.declined]
            assert wanted == new[: len(wanted)], "the head goes first"
            assert grant.keys == wanted[: len(grant.keys)], "a store is granted in prefix order"
            whole = len(grant.keys) == len(wanted) or not room or self.demotes
            assert whole, "a store gets as much as fits"
            assert grant.keys or not wanted, "a store is not refused as a whole"
        for row in grant.rows:
            assert self.row_owner[row] is None, f"row {row} is in use by {self.row_owner[row]}"
            self.row_owner[row] = client
            self.rows[row] = GARBAGE
        client.weights = self.weights
        client.stored, client.rows = grant.keys, grant.rows
        client.state = "storing" if grant.keys else "done"

    def finish_store(self, client: Client, failed: Collection[bytes]) -> None:
        for key, row in zip(client.stored, client.rows, strict=True):
            assert self.row_owner[row] is client
            self.row_owner[row] = None
            if key not in failed:
                self.rows[row] = (key, client.weights)
        # As servers do: as a set, in no order.
        self.core.complete_store({*client.stored} - {*failed}, client.id)
        self.core.complete_store(failed, client.id, ok=False)
        self.moved = self.now
        client.state = "done"
        if client.gone:
            del self.clients[client.id]

    def leave(self, client: Client) -> None:
        if not client.gone:
            self.core.on_request_finished(client.id)
        client.forget()
        client.gone = True
        if client.state not in ("loading", "storing"):
            del self.clients[client.id]

    def remove(self, keys: list[bytes]) -> Removal:
        """The server wants these to be gone."""
        removal = self.core.remove(keys)
        self.removals.append((removal, set(keys)))
        for client in self.clients.values():
            first = next((n for n, key in enumerate(client.keys) if key in keys), None)
            if first is not None:
                client.leased = min(client.leased, first)
                client.failed.update(keys)
        return removal

    def pin(self, keys: list[bytes], seconds: float, *, host: bool) -> None:
        """The server wants these to stay."""
        most = max(len(self.rows), *map(len, self.slots), 0) // 2
        yields = len(keys) % 2 == 0
        pinned = self.core._pins.begin(keys, self.now + seconds, host=host, yields=yields)
        assert pinned <= len(keys)
        assert len(self.core._pins) <= most

    def prefetch(self, keys: list[bytes]) -> None:
        """The server will ask for these later."""
        coming = self.core._prefetches.begin(keys)
        assert coming <= len(keys)

    def demote(self, keys: list[bytes]) -> None:
        """The server will not ask for these soon."""
        self.core._demotions.begin(keys, self.now)

    def change(self, rng: random.Random) -> None:
        """Somebody changes a policy, or a size."""
        core = self.core
        # Less is expected of these than of LRU.
        name = self.policy = rng.choice(("arc", "hit-density", "tenants"))
        owned = [tier for tier in core.tiers if isinstance(tier, OwnedTier)]
        roll = rng.random()
        if roll < 0.3 or (roll >= 0.6 and not owned):
            core.set_policy(None, policy_of(name, len(self.rows)))
        elif roll < 0.6:
            core.limit_rows(rng.choice((1, len(self.rows) // 2, len(self.rows))))
        elif roll > 0.9 and self.relocation:
            tier = rng.choice(owned)
            core.rewrite(tier.number, rng.sample(range(4), 2))
        else:
            tier = rng.choice(owned)
            most = len(self.slots[tier.number]) // self.segment_slots
            segments = rng.randrange(most) + 1 if self.relocation else most
            of_each = [len(range(n, segments, self.stripes)) for n in range(self.stripes)]
            self.most_of[tier.number] = of_each
            slots = segments * core.segment_slots(tier.number)
            core.limit_segments(tier.number, of_each, policy_of(name, slots))

    @property
    def _most_rows(self) -> int:
        """Rows of which a share may be in some use; fewer are in use before it is over."""
        return len(self.rows) if self.changes else self.core._pool.rows

    def _check_held(self) -> None:
        """What is pinned is there, and no more than may be."""
        core, pool = self.core, self.core._pool
        assert core._pins.rows <= self._most_rows // 2
        for key, chunk in core._pins._held.items():
            assert pool.chunks.get(key) is chunk, "a pinned chunk has left host memory"
            assert core._pins.is_pinned(key)
        for tier in core.tiers:
            if tier.number != self.followed:
                assert tier.index.pinned.keys() <= set(tier.entries)
                assert all(map(core._pins.is_pinned, tier.index.pinned))
                assert len(tier.index.pinned) <= len(self.slots[tier.number]) // 2

    def _check_removals(self) -> None:
        """What is removed would be found neither now nor by the next process."""
        for removal, left in self.removals:
            # Once erased, a key may be stored anew while others are still to be erased.
            erased = left - removal.left - {*removal.unerased}
            left &= removal.left
            for tier in self.core.tiers if erased else ():
                # What is removed others may store again.
                if tier.number not in (self.followed, self.asked):
                    held = contents_of(self.slots[tier.number])
                    assert not erased & held.keys(), "removed, and kept"
        self.removals = [each for each in self.removals if not each[0].done]

    def reset(self) -> None:
        """The server has new weights, in the middle of whatever it does."""
        core = self.core
        for client in list(self.clients.values()):
            if client.state in ("loading", "storing"):
                store = client.state == "storing"
                keys = client.stored if store else client.loaded
                contents = [(key, client.weights) for key in keys]
                copy = Copy(core.era, client.id, keys, client.rows, contents, store)
                self.late.append(copy)
                for row in copy.rows if store else ():
                    self.row_owner[row] = copy
            if client.gone:
                del self.clients[client.id]
        core.reset()
        self.removals.clear()
        self.newest_weights += 1
        self.weights = self.newest_weights
        self.hits_this_step.clear()
        for client in self.clients.values():
            client.forget()
            client.state, client.store_deferred = "asking", False

    def land(self, copy: Copy, *, moment: bool = False) -> None:
        """A late copy moves its bytes, once more or (not `moment`) for the last time."""
        if copy.store:
            for row, content in zip(copy.rows, copy.contents, strict=True):
                self.rows[row] = content
        else:
            self._check_late(copy)
        if moment:
            return
        self.late.remove(copy)
        for row in copy.rows if copy.store else ():
            assert self.row_owner[row] is copy
            self.row_owner[row] = None
        core = self.core
        if self.reports and copy.store:
            core.complete_store(set(copy.keys), copy.request, era=copy.era)
        elif self.reports:
            core.complete_load(set(copy.keys), copy.request, copy.era)
        elif not self.late:
            core.transfers_ended()
        self.moved = self.now

    def _check_late(self, copy: Copy) -> None:
        for row, content in zip(copy.rows, copy.contents, strict=True):
            assert self.rows[row] == content, f"row {row} was rewritten while a late load reads it"

    def restart(self) -> None:
        """The process is killed; the next one finds what the slots hold."""
        for move in self.moves:
            if move.op is Op.CASCADE and move.tier != self.asked:
                for slot in move.slots:
                    self.slots[move.tier][slot] = GARBAGE
        outdated = self.followed >= 0 and self.epoch < self.newest_epoch
        for tier in self.core.tiers:
            if tier.number in (self.followed, self.asked):
                continue
            if tier.clearing or outdated:
                # Its records are of an older epoch, or will be erased before anybody asks.
                self.slots[tier.number] = [GARBAGE] * len(self.slots[tier.number])
                continue
            found = contents_of(self.slots[tier.number])
            for key, slot in tier.entries.items():
                kept = key in found or (tier.number, slot) in self.rotten
                assert kept, "what was stored is gone"
        if self.followed >= 0:
            # Who starts belongs to the newest epoch, and has its weights.
            self.epoch = self.newest_epoch
            self.weights = self.weights_of[self.epoch]
            self.heard_epoch = self.epoch
        found_now = [contents_of(slots) for slots in self.slots]
        if self.followed >= 0:
            theirs = found_now[self.followed]
            found_now[self.followed] = {
                key: slot
                for key, slot in theirs.items()
                if self.their_epochs[slot] == self.heard_epoch
            }
            self.gossip = Changes()
        self.begin(found_now, self.segment_ids)

    def listen(self) -> None:
        """Somebody follows the events."""
        media = ["host", *(tier.medium for tier in self.core.tiers)]
        for event in self.core.take_events():
            there = self.told[media.index(event.medium)]
            for key in event.keys:
                assert (key in there) is event.removed, f"{event.medium}: {key!r} told twice"
                (there.remove if event.removed else there.add)(key)

    def _check_spans(self) -> None:
        """What has begun and not ended is what waits and what is under way."""
        core, open_spans = self.core, self.spans
        for one in core._spans.take():
            if isinstance(one, SpanBegin):
                assert (one.kind, one.id) not in open_spans, "begun twice"
                open_spans[one.kind, one.id] = one
            else:
                begin = open_spans.pop((one.kind, one.id))
                assert begin.at <= one.at, "ended before it began"
                assert one.chunks <= begin.chunks or one.kind is SpanKind.DEFERRAL
        waits = {each.id for each in open_spans.values() if each.kind is SpanKind.DEFERRAL}
        assert waits == set(core._queue.waiting)
        moves = {each.id for each in open_spans.values()} - waits
        assert moves == {n for n, move in core._transfers.moves.items() if move.op in TRACED}

    # -- the engine ----------------------------------------------------------------------

    def _start(self, move: Move) -> None:
        if move.op is Op.NOTE:
            self.moves.append(move)
            return
        if move.op is Op.ERASE:
            for other in self.moves:
                writes = other.op in (Op.CASCADE, Op.RELOCATE) and other.tier == move.tier
                late = other.id in self.core._transfers.orphans
                assert not writes or late or not {*other.keys} & {*move.keys}, "it comes back"
            self.moves.append(move)
            return
        if move.op is Op.ASK:
            known = [key for key in move.keys if key in self.core._pool.chunks]
            tried = not self.core.tiers[move.tier].health.calls.closed
            assert tried or not known, "it is here, and asked about"
            self.moves.append(move)
            return
        if move.op is Op.SHRINK:
            first = move.segment * self.segment_slots
            self._check_unread(move, range(first, first + self.segment_slots))
        if move.op is Op.RELOCATE:
            self._check_unread(move, move.targets)
            for target in move.targets:
                self.slots[move.tier][target] = GARBAGE
                self.rotten.discard((move.tier, target))
            self.moves.append(move)
            return
        if move.op is Op.CASCADE and move.tier != self.asked:
            self._check_unread(move, move.slots)
        for key, row, slot in zip(move.keys, move.rows, move.slots, strict=True):
            owner = self.row_owner[row]
            assert owner is None, f"row {row} is in use by {owner}"
            if move.op is Op.PROMOTE:
                self.row_owner[row] = move
                self.rows[row] = GARBAGE
                self.moved = self.now
            else:
                assert self.rows[row] == (key, self.weights), "a copy of bytes not the key's"
                if move.tier == self.asked:
                    continue
                self.slots[move.tier][slot] = GARBAGE
                self.rotten.discard((move.tier, slot))
        self.sources[move.id] = [self.rows[row] for row in move.rows]
        self.looked_for[move.id] = self.heard_epoch
        self.moves.append(move)

    def _check_unread(self, move: Move, slots: Iterable[int]) -> None:
        """Nobody reads these slots, which the move is about to write or to remove."""
        orphans, its = self.core._transfers.orphans, set(slots)
        for other in self.moves:
            if other.tier == move.tier and other.op is Op.PROMOTE and other.id not in orphans:
                assert not its & set(other.slots), "a slot is used again while it is read"

    def _next_segment(self, tier: int) -> list[int]:
        """The number of the segment that a tier makes next, on a device that may have one more."""
        ids, stripes, most = self.segment_ids[tier], self.stripes, self.most_of.get(tier)
        have = Counter(number % stripes for number in ids)
        numbers = range((len(ids) + 1) * stripes)
        unused = (n for n in numbers if n not in ids)
        may = (n for n in unused if most is None or have[n % stripes] < most[n % stripes])
        return list(itertools.islice(may, 1))

    def complete(self, index: int, failures: Collection[int] = ()) -> None:
        """The engine ends a move; `failures` are positions that failed."""
        move = self.moves.pop(index)
        if move.tier == self.asked:
            self._complete_at_store(move, failures)
            return
        slots = self.slots[move.tier]
        ok = [position not in failures for position in range(len(move.keys))]
        segments: list[int] = []
        failed = bool(failures) or (not move.keys and move.tier in self.cramped)
        ids = self.segment_ids[move.tier]
        if move.op is Op.ERASE:
            wanted = {key for key, good in zip(move.keys, ok, strict=True) if good}
            slots[:] = [GARBAGE if content[0] in wanted else content for content in slots]
            self.done.append(Completion(move.id, ok, error="injected" if failed else None))
            return
        if move.op is Op.NOTE:
            self.done.append(Completion(move.id, ok, error="injected" if failed else None))
            return
        if move.op in (Op.LIST, Op.RELOCATE, Op.SHRINK):
            self._complete_compaction(move, ok, failed)
            return
        if move.op is Op.GROW and not failed:
            segments = self._next_segment(move.tier)
            ids.update(segments)
        elif move.op is Op.CLEAR and move.tier == self.followed:
            # What the neighbour has stays; from now on only what is of the epoch is told.
            if self.followed == 0:
                self.epoch = self._new_epoch(self.weights)
            self.heard_epoch = self.epoch
            held = contents_of(slots).items()
            now = [(k, slot) for k, slot in held if self.their_epochs[slot] == self.heard_epoch]
            self.gossip = Changes(now, [])
        elif move.op is Op.CLEAR and not failed:
            segments = sorted(ids)
            slots[:] = [GARBAGE] * len(slots)
            if move.tier == self.followed - 1:
                self.epoch = self._new_epoch(self.weights)
        for position, (key, row, slot) in enumerate(
            zip(move.keys, move.rows, move.slots, strict=True)
        ):
            if move.op is Op.PROMOTE:
                assert self.row_owner[row] is move
                self.row_owner[row] = None
                # A slot that holds anything else fails its digest, or is of another epoch.
                ok[position] = ok[position] and slots[slot][0] == key
                if move.tier == self.followed:
                    ok[position] &= self.their_epochs[slot] == self.looked_for[move.id]
                self.rows[row] = slots[slot] if ok[position] else GARBAGE
                if not ok[position]:
                    for client in self.clients.values():
                        client.failed.add(key)
            else:
                slots[slot] = self.rows[row] if ok[position] else GARBAGE
                before = self.sources[move.id][position]
                same = slots[slot] == before
                assert not ok[position] or same, "a row changed while it was copied"
        unread = [
            place
            for place in failures
            if move.op is Op.PROMOTE and slots[move.slots[place]][0] == move.keys[place]
        ]
        error = "injected" if failed else None
        self.done.append(Completion(move.id, ok, segments, error, unread=unread[::2]))

    def _complete_at_store(self, move: Move, failures: Collection[int]) -> None:
        ok = [position not in failures for position in range(len(move.keys))]
        has, unread = self.store_has, list(failures)
        late = move.id in self.core._transfers.orphans
        if move.op is Op.CLEAR and not (failures or move.tier in self.cramped):
            # An epoch of its own, of which nobody else knows.
            self.store_has = {}
        elif move.op is Op.CLEAR:
            failures = (0,)
        elif move.op is Op.ASK:
            ok = [good and key in has for key, good in zip(move.keys, ok, strict=True)]
        elif move.op is Op.ERASE:
            for key, good in zip(move.keys, ok, strict=True):
                if good:
                    has.pop(key, None)
        elif move.op is Op.PROMOTE:
            for position, (key, row) in enumerate(zip(move.keys, move.rows, strict=True)):
                assert self.row_owner[row] is move
                self.row_owner[row] = None
                ok[position] &= key in has
                self.rows[row] = (key, has[key]) if ok[position] else GARBAGE
            unread = [place for place in failures if move.keys[place] in has]
        else:
            assert move.op is Op.CASCADE
            for position, (key, row) in enumerate(zip(move.keys, move.rows, strict=True)):
                same = self.rows[row] == self.sources[move.id][position]
                assert not ok[position] or same, "a row changed while it was copied"
                # What a reset has overtaken goes to where it was begun for.
                if ok[position] and not late:
                    has.setdefault(key, self.rows[row][1])
        if move.op in (Op.ASK, Op.PROMOTE):
            for key, good in zip(move.keys, ok, strict=True):
                for client in self.clients.values() if not good else ():
                    client.failed.add(key)
        error = "injected" if failures else None
        self.done.append(Completion(move.id, ok, error=error, unread=unread))

    def others_store(self, keys: Collection[bytes]) -> None:
        """Other replicas store these, with weights as this process began with."""
        if self.store_has is self.shared.get(self.weights):
            self.store_has |= dict.fromkeys(keys, self.weights)

    def store_drops(self, keys: Collection[bytes]) -> None:
        """The store has no room for these any more, or others have removed them."""
        for key in keys:
            self.store_has.pop(key, None)

    def _complete_compaction(self, move: Move, ok: list[bool], failed: bool) -> None:
        slots = self.slots[move.tier]
        found: list[tuple[bytes, int]] = []
        unread: list[int] = []
        first = move.segment * self.segment_slots
        its_slots = range(first, first + self.segment_slots)
        if move.op is Op.RELOCATE:
            for position, (key, source, target) in enumerate(
                zip(move.keys, move.slots, move.targets, strict=True)
            ):
                whole = slots[source][0] == key
                if ok[position] and whole:
                    slots[target] = slots[source]
                elif whole and position % 2:
                    # Every other chunk that fails has rotted, and its record is erased.
                    slots[source] = GARBAGE
                    self.rotten.add((move.tier, source))
                elif whole:
                    unread.append(position)
                ok[position] = ok[position] and whole
            failed = not all(ok)
        elif not failed and move.op is Op.LIST:
            found = [(slots[slot][0], slot) for slot in its_slots if slots[slot] is not GARBAGE]
        elif not failed:
            tier = self.core.tiers[move.tier]
            orphan = move.id in self.core._transfers.orphans
            assert orphan or not any(slot in its_slots for slot in tier.entries.values())
            for other in self.moves:
                # The tier itself sees that a record is not noted in a segment that is gone.
                if other.tier == move.tier and other.op is not Op.NOTE:
                    used = {*other.slots, *other.targets}
                    assert not used & set(its_slots), "a segment is removed under a move"
            self.segment_ids[move.tier].discard(move.segment)
            for slot in its_slots:
                slots[slot] = GARBAGE
        error = "injected" if failed else None
        self.done.append(Completion(move.id, ok, error=error, found=found, unread=unread))

    def neighbour_writes(self, slot: int, key: bytes) -> None:
        """Somebody else stores `key`, over whatever was in the slot."""
        slots = self.slots[self.followed]
        if key in contents_of(slots):
            return
        if slots[slot] is not GARBAGE:
            self.gossip.gone.append(slots[slot][0])
        slots[slot] = (key, self.their_weights)
        self.their_epochs[slot] = self.their_epoch
        self.gossip.appeared = [(k, s) for k, s in self.gossip.appeared if s != slot]
        if self.their_epoch == self.heard_epoch:
            self.gossip.gone = [gone for gone in self.gossip.gone if gone != key]
            self.gossip.appeared.append((key, slot))

    def neighbour_resets(self) -> None:
        """The neighbour has newer weights, and forgets what it stored with older ones."""
        self.newest_weights += 1
        self.their_weights = self.newest_weights
        self.their_epoch = self._new_epoch(self.their_weights)
        self._neighbour_forgets()

    def neighbour_restarts(self) -> None:
        """Another process takes the neighbour's place. It belongs to the newest epoch."""
        if self.their_epoch < self.newest_epoch:
            self.their_epoch = self.newest_epoch
            self.their_weights = self.weights_of[self.newest_epoch]
            self._neighbour_forgets()

    def _neighbour_forgets(self) -> None:
        slots = self.slots[self.followed]
        self.gossip.gone += contents_of(slots)
        self.gossip.appeared = []
        slots[:] = [GARBAGE] * len(slots)

    def _new_epoch(self, weights: int) -> int:
        self.newest_epoch += 1
        self.weights_of[self.newest_epoch] = weights
        return self.newest_epoch

    def hear_news(self) -> None:
        """The engine has looked what the neighbour did."""
        news, self.gossip = self.gossip, Changes()
        self.done.append(Completion(NO_MOVE, [], changes=news, tier=self.followed))

    def rot(self, tier: int, slot: int) -> None:
        """A slot loses its bytes."""
        if self.slots[tier][slot] is not GARBAGE:
            self.slots[tier][slot] = GARBAGE
            self.rotten.add((tier, slot))

    def lose(self, tier: int, slots: Sequence[int]) -> None:
        """What these slots hold cannot be read any more, of which the core is told."""
        lost = [(self.slots[tier][slot][0], slot) for slot in slots]
        for slot in slots:
            self.rot(tier, slot)
        self.done.append(Completion(NO_MOVE, [], changes=Changes(lost=lost), tier=tier))

    # -- checks ----------------------------------------------------------------------

    def check(self) -> None:
        core, pool = self.core, self.core._pool
        used = [chunk.row for chunk in pool.chunks.values()]
        assert len(set(used)) == len(used), "two chunks in one row"
        assert len(used) + pool.free + pool.held == pool.rows, "rows leaked or over budget"
        leaving = {key for key, chunk in pool.chunks.items() if chunk.state >= LEAVING}
        assert len(leaving) == pool.leaving
        assert len(pool.policy) == len(pool.chunks) - len(leaving)
        assert not any(key in pool.policy for key in leaving), "given up, and kept"
        at_rest = {key for key in leaving if pool.chunks[key].state == LEAVING}
        assert at_rest == pool._uncopied.keys() | pool._copied.keys(), "a chunk that never leaves"
        assert not any(pool.chunks[key].unsaved for key in pool._copied)
        assert all(pool.chunks[key].unsaved for key in pool._uncopied)
        busy = unsaved = 0
        for key, chunk in pool.chunks.items():
            assert chunk.key == key
            assert chunk.state != ABSENT
            assert (chunk.pins > 0) == (chunk.state in (PINNED, LEAVING_PINNED))
            busy += chunk.state not in (READY, LEAVING)
            unsaved += chunk.state in (READY, LEAVING) and chunk.unsaved != 0
            if chunk.state >= READY:
                found = self.rows[chunk.row]
                assert found == (key, self.weights), f"a ready chunk of {key!r} holds {found}"
                assert chunk.waiters is None
        for client in self.clients.values():
            if client.state == "loading":
                self._check_load(client)
        for copy in self.late:
            if not copy.store:
                self._check_late(copy)
        if self.reports or not self.late:
            orphans = self.core._transfers.orphans
            owners = [copy.rows for copy in self.late]
            owners += [self.core._transfers.moves[id].rows for id in orphans]
            held_by = {row for rows in owners for row in rows}
            assert pool.held == len(held_by), "rows are held for nobody"
        assert busy == pool.busy
        assert unsaved == pool.unsaved
        kept = [c for c in pool.chunks.values() if c.step == pool.step and not c.unsaved]
        assert pool.marked == sum(c.state in (READY, LEAVING) for c in kept)
        self._check_pins()
        self._check_held()
        self._check_removals()
        for key in self.hits_this_step:
            ready = pool.chunks.get(key)
            assert ready is not None, "a hit left within its step"
            assert ready.state >= READY
        for tier in core.tiers:
            self._check_tier(tier)
        assert pool.rows + len(pool._withheld) == len(self.rows)
        share = pool.rows // LEFT_TO_OTHERS // max(1, len(core.tiers))
        filling = [c.origin for c in pool.chunks.values() if c.state == FILLING and c.origin >= 0]
        assert len(filling) <= self._most_rows - share, "promotions leave no rows to stores"
        for index in set(filling):
            most = self._most_rows - share * len(core.tiers)
            assert filling.count(index) <= max(1, most), "a tier leaves no rows to others"

    def _check_pins(self) -> None:
        """Every pin has an owner that knows of it, and every owner its pin."""
        core, line = self.core, self.core._queue
        pins: Counter[bytes] = Counter()
        for name, request in core._requests.items():
            assert request.id == name
            assert (request.state is RequestState.WAITING) == (line.waiting.get(name) is request)
            assert (request.state is RequestState.ANSWERED) == (line.answered.get(name) is request)
            pending = 0
            for key in request.leases:
                assert key in core._pool.chunks, "a lease on a chunk that is gone"
                chunk = core._pool.chunks[key]
                scanning = request.state is RequestState.SCANNING
                asks = request.queued or request in core._lookups._asked
                assert asks or not scanning, "leases without a wait"
                if chunk.state == FILLING:
                    pending += 1
                else:
                    pins[key] += 1
            assert request.pending == pending
            pins.update(request.loading)
        portion = core._prefetches._portion
        if portion is not None:
            pins.update(k for k in portion.leases if core._pool.chunks[k].state != FILLING)
            filling = [k for k in portion.leases if core._pool.chunks[k].state == FILLING]
            assert portion.pending == len(filling)
        pins.update(core._pins._held.keys())
        assert len(line.waiting) + len(line.answered) <= len(core._requests)
        queued = [request for request in core._requests.values() if request.queued]
        leases = Counter[int]()
        for request in queued:
            leases[core._pool.owner(request.keys)] += len(request.leases)
        # Beyond that in all, each tenant may have as much as if all had alike.
        assert max(leases.values(), default=0) <= self._most_rows // 2
        assert core._pool.policy.shared or leases.total() <= self._most_rows // 2
        for id, move in core._transfers.moves.items():
            if move.op is Op.CASCADE and id not in core._transfers.orphans:
                pins.update(move.keys)
        held = {key: chunk.pins for key, chunk in core._pool.chunks.items() if chunk.pins}
        assert held == pins, "pins without an owner"

    def _check_store(self, tier: TierView) -> None:
        store = tier.store
        assert store is not None
        answers, moves = store.answers, self.core._transfers.moves.values()
        asking = {key for m in moves if m.op is Op.ASK for key in m.keys}
        assert answers.asked.keys() <= asking, "an answer is awaited that nobody will give"
        assert len(answers.absent) <= 2 * len(self.rows)
        assert set(answers._present) <= set(tier.entries) | set(tier.index.writing)
        assert set(tier.entries) <= set(answers._present), "an entry that is believed for ever"

    def _check_tier(self, tier: TierView) -> None:
        self._check_traffic(tier)
        if tier.number == self.followed:
            assert not tier.index.writing, "nobody but its owner writes to it"
            assert tier.target is None
            return
        if tier.number == self.asked:
            self._check_store(tier)
            return
        assert isinstance(tier, OwnedTier)
        contents = self.slots[tier.number]
        slots = [*tier.entries.values(), *tier.index.writing.values()]
        assert len(set(slots)) == len(slots), "two keys in one slot"
        assert len(tier.index.policy) == len(tier.entries)
        most = len(contents) // self.segment_slots if self.changes else tier.slots.max_segments
        assert tier.slots.segments <= most, "over the disk budget"
        for key, slot in tier.entries.items():
            right = contents[slot] == (key, self.weights)
            assert right or (tier.number, slot) in self.rotten, "a stale entry"
        if not tier.clearing:
            unused = tier.slots.free + len(tier.slots._retired_free) + tier.slots.aside
            in_use = len(slots) + unused
            for move in (m for m in self.core._transfers.moves.values() if m.tier == tier.number):
                in_use += len(move.targets) if move.id not in self.core._transfers.orphans else 0
            assert in_use == tier.slots.segments * self.segment_slots, "slots leaked"

    def _check_traffic(self, tier: TierView) -> None:
        rows: Counter[Op] = Counter()
        reading: Counter[bytes] = Counter()
        for move in (m for m in self.core._transfers.moves.values() if m.tier == tier.number):
            rows[move.op] += len(move.rows)
            if move.op in (Op.PROMOTE, Op.RELOCATE) and move.id not in self.core._transfers.orphans:
                reading.update(move.keys)
        assert reading == tier.index.reading, "what is read is protected, and nothing else"
        assert tier.in_flight.rows == rows.total()
        assert rows[Op.CASCADE] <= self.in_flight, "too much on its way to a tier"

    def check_events(self) -> None:
        """Whoever followed the events knows what is where; who traces, what goes on."""
        self.listen()
        self._check_spans()
        pool = self.core._pool
        assert self.told[0] == {k for k, chunk in pool.chunks.items() if chunk.state != FILLING}
        for tier, told in zip(self.core.tiers, self.told[1:], strict=True):
            assert told == set(tier.entries)

    def settle(self) -> None:
        """Everybody goes home, the engine ends all: nothing may stay pinned or waiting."""
        core = self.core
        self.silent.clear()
        self.cramped.clear()
        if self.moody is not None:
            self.moody.calm = True
        for tier in core.owned:
            # A segment that cannot be emptied is tried again for ever.
            tier.compactor.set_rate(0.0)
        for copy in list(self.late):
            self.land(copy)
        for client in list(self.clients.values()):
            self.leave(client)
            if client.state == "loading":
                self.finish_load(client)
            elif client.state == "storing":
                self.finish_store(client, ())
        core._pins.end(list(core._pins._until))
        self.run_dry(10 * core._queue.lease + 1)
        # Where host memory is small, each key that is to be fetched has a step of its own.
        for _ in range(1 + sum(map(len, core._prefetches._lines.values()))):
            self.run_dry(1.0)
        self.check()
        self.check_events()
        assert core.in_flight == 0
        assert not core.hidden, "a removal that never ends"
        assert core.waiting == 0
        assert not core._prefetches, "a prefetch that never ends"
        assert not core._arrivals, "a request that is queued for ever"
        assert not core._demotions, "a demotion that never ends"
        assert core.unsaved == 0, "chunks wait for a copy that nobody makes"
        assert core._pool.busy == 0, "a pin leaked"
        assert core._pool.held == 0
        assert not core._requests, "a request was never forgotten"
        assert not core._queue.answered
        assert not any(
            tier.clearing or tier.health.stalled or tier.index.reading for tier in core.tiers
        )

    def run_dry(self, seconds: float) -> None:
        """Steps of `seconds` in which every move ends well, until none is left."""
        quiet = 0
        for _ in range(400):
            ended = bool(self.moves)
            while self.moves:
                self.complete(0)
            self.step(seconds)
            busy = ended or self.moves or self.done or self.core.behind
            quiet = 0 if busy else quiet + 1
            if quiet == 3:
                return
        raise AssertionError("the core never comes to rest")

    def check_reach(self, prompt: int, length: int) -> None:
        """In a world at rest, a prefix is found as far as it is known and fits."""
        core = self.core
        client = self.arrive("reach", prompt, length)
        evicted = sum(tier.index.evicted for tier in core.tiers)
        truncations = core.stats().truncations
        known = 0
        asks = self.asked >= 0 and self._store_is_awaited()
        for key in client.keys:
            # Computing is sooner than reading from a tier that is outpaced.
            read = [t for t in core.tiers if not t.health.recompute.outpaced]
            held = [self._held(t, key) for t in read if key in t.entries]
            if asks and core.tiers[self.asked] in read and key in self.store_has:
                held.append(key)
            if key not in core._pool.chunks and (not held or held[0] != key):
                break
            known += 1
        # A server that computes for others leaves rows the time to become free.
        core.server_computes(True, self.now)
        answer = self.ask(client)
        for _ in range(50):
            if answer is not None:
                break
            self.step(0.001)
            while self.moves:
                self.complete(0)
            answer = self.ask(client)
        assert answer is not None
        costs = evicted < sum(tier.index.evicted for tier in core.tiers)
        # While a row waits for the copy of what leaves it, the rest could have been computed.
        computed = truncations < core.stats().truncations
        if not (self.demotes and (costs or computed)):
            # What is promoted where chunks are demoted can cost a full tier others of the prefix.
            reach = min(known, core._pool.rows)
            if core._pool.policy.shared:
                # Shares of tenants may have no room for all of it.
                reach = min(reach, 1)
            assert answer >= reach, f"{answer} of {known} chunks"
        self.leave(client)
        self.step(0.001)

    def _store_is_awaited(self) -> bool:
        """Whether a request would wait for the store's answer, though it lacked one chunk only."""
        store = self.core.tiers[self.asked].store
        assert store is not None
        pace = self.core.compute_pace
        return store.patience.lasts(1, pace, pace) > 0

    def _held(self, tier: TierView, key: bytes) -> bytes:
        """The key of what lies where the tier's entry of `key` says."""
        if tier.number == self.asked:
            return key if key in self.store_has else b""
        return self.slots[tier.number][tier.entries[key]][0]


def _watch_pins(tier: OwnedTier) -> None:
    """Let the world notice if a pinned chunk of a tier leaves for others."""
    policy = tier.index.policy
    evict = policy.evict

    def watched(count: int, protected: Protected, incoming: Sequence[bytes] = ()) -> Any:
        victims = evict(count, protected, incoming)
        assert not tier.index.pinned.keys() & set(victims or ()), "a pinned chunk has left a tier"
        return victims

    policy.evict = watched  # type: ignore[method-assign]


def policy_of(name: str, capacity: int) -> EvictionPolicy:
    """A policy by its name; "tenants" for shares of several."""
    if name != "tenants":
        return create_policy(name, capacity)
    shares = Shares({"one": Share(guaranteed=0.3, maximal=0.6)}, partitions=2, idle_s=50.0)
    policy = Tenants(capacity, LRU, shares, itertools.count().__next__)
    # Parts of each prompt are of several tenants.
    policy.places.of = lambda key: key[3] % 3  # type: ignore[method-assign]
    return policy


def random_world(rng: random.Random) -> World:
    """A world of any shape, small enough that everything is always short."""
    # Dice of their own for what came later: the worlds of a seed are those of before.
    aside = random.Random()
    aside.setstate(rng.getstate())
    rows = rng.choice((1, 2, 3, 5, 8, 12, 20))
    segment_slots = rng.choice((1, 4, 8))
    world = World(
        rows=rows,
        segment_slots=segment_slots,
        slots=segment_slots * rng.choice((1, 2, 3, 6)),
        tiers=rng.choice((0, 1, 1, 1, 2)),
        followed=rng.random() < 0.3,
        asked=rng.random() < 0.3,
        lasts=rng.choice((0.05, 5.0, 60.0)),
        moody=aside.choice((None, aside.randrange(1000))),
        in_flight=rng.choice((1, 3, rows)),
        max_wait=rng.choice((1.5, 5.0)),
        faults=rng.choice((0.0, 0.01, 0.1)),
        stripes=rng.choice((1, 1, 2, 3)),
        policy=rng.choice(("lru", "lru", "arc", "hit-density")),
        relocation=rng.choice((0, 1, 3)),
        flow=rng.choice((Flow.WRITE_THROUGH, Flow.WRITE_THROUGH, Flow.DEMOTE, Flow.EXCLUSIVE)),
        reserve=rng.choice((0, 1, rows // 4, rows // 2)),
        pace=rng.choice((None, None, None, SLOW)),
        reports=rng.random() < 0.5,
        changes=aside.random() < 0.4,
    )
    if aside.random() < 0.2:
        world.policy = "tenants"
        world.begin([{} for _ in world.slots], [{0} for _ in world.slots])
    if world.relocation:
        scatter(world, rng)
    return world


def scatter(world: World, rng: random.Random) -> None:
    """The process finds every segment made, and few chunks in each: much to compact."""
    found: list[dict[bytes, int]] = [{} for _ in world.slots]
    segments = [{0} for _ in world.slots]
    for tier, contents in enumerate(world.slots):
        if tier not in (world.followed, world.asked):
            segments[tier] = set(range(len(contents) // world.segment_slots))
            keys = list(dict.fromkeys(key for n in range(64) for key in chain(n, 12)))
            for slot in range(len(contents)):
                if rng.random() < 0.2:
                    contents[slot] = (keys.pop(rng.randrange(len(keys))), world.weights)
                    found[tier][contents[slot][0]] = slot
    world.begin(found, segments)


def random_act(world: World, rng: random.Random) -> None:
    """One act of the server, the engine or the clock."""
    if world.late:
        # Late copies touch their rows at any moment, and end after a while.
        copy = rng.choice(world.late)
        world.land(copy, moment=rng.random() < 0.9)
    if world.changes and rng.random() < 0.03:
        world.change(rng)
    roll = rng.random()
    clients = list(world.clients.values())
    able = [i for i, move in enumerate(world.moves) if move.tier not in world.silent]
    if roll < 0.06 and len(clients) < 8:
        free = [name for name in "abcdefghijkl" if name not in world.clients]
        length = rng.randrange(1, 2 * len(world.rows) + 2)
        queued = rng.random() < 0.5
        world.arrive(rng.choice(free), rng.randrange(64), length, queued=queued)
    elif 0.06 <= roll < 0.55 and clients:
        act_of_client(world, rng.choice(clients), rng)
    elif 0.55 <= roll < 0.75 and able:
        # Mostly in order, as a device does, but not always.
        index = able[0] if rng.random() < 0.6 else rng.choice(able)
        size = len(world.moves[index].keys)
        failures: set[int] = set()
        if rng.random() < world.faults:
            failures = {p for p in range(max(size, 1)) if rng.random() < 0.5}
        world.complete(index, failures)
    elif 0.75 <= roll < 0.7525 or (0.75 <= roll < 0.755 and world.asked < 0):
        rare_act(world, rng)
    elif 0.798 <= roll < 0.8 or (0.78 <= roll < 0.79 and world.followed < 0):
        keys = chain(rng.randrange(64), 2 * len(world.rows) + 1)
        first = rng.randrange(len(keys))
        world.remove(keys[first : first + rng.choice((1, 2, len(keys)))])
    elif 0.79 <= roll < 0.798:
        keys = chain(rng.randrange(64), 2 * len(world.rows) + 1)
        keys = keys[: rng.randrange(len(keys)) + 1]
        act = rng.random()
        if act < 0.2:
            world.prefetch(keys)
        elif act < 0.3:
            world.core._prefetches.plan(keys, world.now + rng.choice((0.0, 0.5, 5.0)))
        elif act < 0.5:
            world.demote(keys)
        elif act < 0.8:
            world.pin(keys, rng.choice((0.01, 1.0, 30.0, math.inf)), host=rng.random() < 0.6)
        else:
            world.core._pins.end(keys)
    elif 0.7525 <= roll < 0.755 and world.asked >= 0:
        keys = chain(rng.randrange(64), 2 * len(world.rows) + 1)
        keys = keys[: rng.randrange(len(keys)) + 1]
        if rng.random() < 0.6:
            world.others_store(keys)
        else:
            world.store_drops(keys)
    elif 0.755 <= roll < 0.76:
        world.silent.clear()
        world.cramped.clear()
    elif 0.76 <= roll < 0.77:
        world.hand_over()
    elif 0.77 <= roll < 0.78:
        world.take_in()
    elif 0.78 <= roll < 0.8 and world.followed >= 0:
        prompt, length = rng.randrange(64), 2 * len(world.rows)
        for key in chain(prompt, length)[: rng.randrange(length)]:
            world.neighbour_writes(rng.randrange(len(world.slots[world.followed])), key)
        if rng.random() < 0.05:
            rng.choice((world.neighbour_resets, world.neighbour_restarts))()
        if rng.random() < 0.7:
            world.hear_news()
    else:
        world.step(rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)))


def rare_act(world: World, rng: random.Random) -> None:
    """What happens to a store now and then."""
    roll = rng.random()
    tiers = range(len(world.slots))
    if roll < 0.25:
        world.reset()
    elif roll < 0.28:
        world.restart()
    elif roll < 0.3:
        world.core.save()
    elif roll < 0.34:
        world.step(30.0)
    elif roll < 0.4:
        world.core.poll(world.now, [Completion(-1, [True])])
        world.hits_this_step.clear()
        world.core.complete_load([b"stray"], "nobody")
        world.core.complete_store([b"stray"], "nobody")
    elif not tiers:
        return
    elif roll < 0.43:
        world.core.computed(rng.choice((10, 10_000)), rng.choice((1.0, 1000.0, 1e6)))
        world.core.server_computes(rng.random() < 0.5, world.now)
    elif roll < 0.55:
        tier = rng.choice([tier for tier in tiers if tier != world.followed] or [0])
        slots = range(len(world.slots[tier]))
        if slots and rng.random() < 0.7:
            world.rot(tier, rng.choice(slots))
        else:
            world.lose(tier, rng.sample(slots, rng.randrange(len(slots) + 1)))
    elif roll < 0.8:
        world.silent ^= {rng.choice(tiers)}
    else:
        world.cramped ^= {rng.choice(tiers)}


def act_of_client(world: World, client: Client, rng: random.Random) -> None:
    """What a server might do next with this request."""
    roll = rng.random()
    if client.state == "asking":
        if rng.random() < 0.1:
            world.core.on_request_turn(client.id)
        answer = world.ask(client, one_by_one=rng.random() < 0.3)
        if answer and roll < 0.8:
            world.load(client, answer)
        elif answer == 0 and roll < 0.8:
            client.state = "computing"

        # Whatever it does with the answer: it may say so, or go away, or ask for other keys.
        if answer is not None and rng.random() < 0.3:
            loads = client.state == "loading" or (answer > 0 and rng.random() < 0.5)
            world.core.on_request_decided(client.id, loads=loads)
            if not loads:
                client.leased = 0
        elif roll > 0.97:
            world.leave(client)
        elif roll > 0.95:
            # It asks for more, or for less, of the same prompt.
            client.keys = client.keys[: rng.randrange(len(client.keys)) + 1]
            client.leased = min(client.leased, len(client.keys))
    elif client.state == "loading":
        if roll < 0.9:
            world.finish_load(client)
        else:
            world.leave(client)
    elif client.state == "computing":
        if roll < 0.8:
            world.store(client)
        elif roll < 0.85:
            client.state = "asking"
        else:
            world.leave(client)
    elif client.state == "storing":
        if roll < 0.85:
            world.finish_store(client, ())
        elif roll < 0.95:
            world.finish_store(client, [key for key in client.stored if rng.random() < 0.5])
        else:
            world.leave(client)
    else:
        world.leave(client)
