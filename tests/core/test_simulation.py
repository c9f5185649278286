"""Random acts of a server, a clock and a faulty engine, from seeds.

A seed that fails is named in the failure. Run it alone with

    KVSTORE_SEED=123 pytest tests/core/test_simulation.py

which runs that seed and no other; several are separated by commas. `make
simulation` runs a million acts over a hundred seeds. The second
half proves that the simulation can fail: it breaks the core on purpose, one
rule at a time, and expects the world to notice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvstore.core import AskedTier, Core, HostPool, OwnedTier
from kvstore.core.arrivals import Arrivals
from kvstore.core.async_lookup import Questions
from kvstore.core.cascade import Cascades
from kvstore.core.chunk import READY, Chunk, Life
from kvstore.core.eviction import Room, Victims
from kvstore.core.lookup import Lookups, Streak
from kvstore.core.promotion import Grants
from kvstore.core.removal import Removals
from kvstore.core.request import Request, Requests
from kvstore.core.residency.health import Health
from kvstore.core.residency.index import Index
from kvstore.core.residency.remote_answers import Answers
from kvstore.core.residency.slots import Slots
from kvstore.core.transfers import Overtaken, Transfers
from kvstore.core.wait_queue import WaitQueue
from kvstore.types import Completion
from tests.core.model import World, random_act, random_world, scatter

SEEDS = range(100)
ACTS = int(os.environ.get("KVSTORE_SIMULATION", "2000"))
"""Acts of each seed; `make simulation` sets it to ten thousand."""
SEEDS_PER_TEST = 10

LISTEN_EVERY = 50
"""Acts between two comparisons of the events with what is there."""


def simulate(seed: int, acts: int) -> None:
    """One world from its beginning to its end; whatever fails says which seed it was."""
    rng = random.Random(seed)
    world = random_world(rng)
    act = 0
    try:
        for act in range(acts):
            random_act(world, rng)
            world.check()
            if act % LISTEN_EVERY == 0:
                world.check_events()
        world.settle()
        for _ in range(4):
            world.check_reach(rng.randrange(64), 2 * len(world.rows) + 1)
    except Exception as error:
        raise AssertionError(f"KVSTORE_SEED={seed}, act {act}: {error!r}") from error


def told_seeds() -> list[int] | None:
    told = os.environ.get("KVSTORE_SEED")
    return None if told is None else [int(seed) for seed in told.split(",")]


def batches() -> Iterable[Any]:
    told = told_seeds()
    if told is not None:
        return [pytest.param([seed], id=f"seed-{seed}") for seed in told]
    return [
        pytest.param(range(first, first + SEEDS_PER_TEST), id=f"seeds-{first}")
        for first in SEEDS[::SEEDS_PER_TEST]
    ]


@pytest.mark.parametrize("seeds", batches())
def test_no_interleaving_breaks_a_promise(seeds: Iterable[int]) -> None:
    for seed in seeds:
        simulate(seed, ACTS)


def test_the_same_seed_is_the_same_world() -> None:
    def trace(seed: int) -> list[object]:
        rng = random.Random(seed)
        world = random_world(rng)
        seen: list[object] = []
        for _ in range(300):
            random_act(world, rng)
            seen.append((world.now, sorted(world.core._pool.chunks), len(world.moves)))
        return seen

    assert trace(7) == trace(7) != trace(8)


# -- the core, broken on purpose ---------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]

BREAKS: dict[str, Break] = {}

FIRST: dict[str, int] = {}
"""The seed that is tried first, where those from 0 on take long to notice."""


def breaks(rule: str, first: int = 0) -> Callable[[Break], Break]:
    def register(make: Break) -> Break:
        BREAKS[rule], FIRST[rule] = make, first
        return make

    return register


@breaks("a pin is taken back")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostPool, "unpin", lambda self, chunks: None)


@breaks("a pin protects")
def _(patch: pytest.MonkeyPatch) -> None:
    def unprotected(self: Victims, count: int, **rest: Any) -> list[bytes]:
        policy = self._pool.policy
        return policy.evict(max(0, min(count, len(policy))), lambda key: False) or []

    patch.setattr(Victims, "choose", unprotected)
    patch.setattr(Life, "raises", False)


@breaks("a hit stays for its step", first=30)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookups, "keep_hits", lambda self: None)


@breaks("a streak ends with whatever else happens")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streak, "end", lambda self: None)


@breaks("a question ends")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Answers, "end", lambda self, keys: None)


@breaks("nobody asks about what is here")
def _(patch: pytest.MonkeyPatch) -> None:
    init = Questions.__init__

    def blind(self: Questions, *args: Any) -> None:
        init(self, *args)
        self._chunks = {}  # type: ignore[assignment]

    patch.setattr(Questions, "__init__", blind)


@breaks("nothing is believed of a store that is still to be cleared", first=154)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AskedTier, "worth_asking", property(lambda self: self.health.readable))


@breaks("a server defers by itself only what the core would")
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Lookups, context: object) -> None:
        entries = self._readable[0] if self._readable else ()
        self.streak.begin(context, self._asking.keys.append, entries)

    patch.setattr(Lookups, "go_on", hasty)


@breaks("a chunk that is being filled is no hit")
def _(patch: pytest.MonkeyPatch) -> None:
    lookup = Lookups.lookup

    def hasty(self: Lookups, key: bytes, request_id: str) -> bool | None:
        answer = lookup(self, key, request_id)
        return True if answer is None and key in self._pool.chunks else answer

    patch.setattr(Lookups, "lookup", hasty)


@breaks("leases end")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitQueue, "release", lambda self, request: request.leases.clear())


@breaks("what is granted is leased")
def _(patch: pytest.MonkeyPatch) -> None:
    lease = WaitQueue.lease_to

    def filling_only(self: WaitQueue, request: Request, chunk: Chunk) -> None:
        if chunk.state < READY:
            lease(self, request, chunk)

    patch.setattr(WaitQueue, "lease_to", filling_only)


@breaks("a lease lasts until nobody asks", first=112)
def _(patch: pytest.MonkeyPatch) -> None:
    expire = WaitQueue.expire

    def impatient(self: WaitQueue, now: float) -> list[Request]:
        for request in self.answered.values():
            self.release(request)
        return expire(self, now)

    patch.setattr(WaitQueue, "expire", impatient)


@breaks("queued requests leave half of host memory to others")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvstore.core.arrivals.MOST_SHARE", 1)


@breaks("a reset forgets queued requests", first=52)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrivals, "reset", lambda self: None)


@breaks("a queued request that has begun is not queued any more")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "leave_queue", lambda self: None)


@breaks("a wait has a deadline")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitQueue, "expire", lambda self, now: [])


@breaks("waiting for rows has an end")
def _(patch: pytest.MonkeyPatch) -> None:
    expire = WaitQueue.expire

    def endless(self: WaitQueue, now: float) -> list[Request]:
        for request in self.waiting.values():
            request.since = now
            request.moved = max(request.moved, self.moved(request.keys))
        return expire(self, now)

    patch.setattr(WaitQueue, "expire", endless)


@breaks("who waits for a chunk that fails is told")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitQueue, "failed", lambda self, chunk, now: None)


@breaks("a prefix is as large as fits")
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Grants, request: Request) -> bool:
        request.granted = len(request.keys)
        return True

    grant = Grants._grant

    def stingy(self: Grants, request: Request, now: float) -> Any:
        grants = grant(self, request, now)
        request.granted = min(request.granted, 2)
        return grants

    patch.setattr(Grants, "_truncate", hasty)
    patch.setattr(Grants, "_grant", stingy)


@breaks("a failed block fails alone, and fails")
def _(patch: pytest.MonkeyPatch) -> None:
    promoted = Transfers._promoted

    def believing(self: Transfers, tier: Any, move: Any, completion: Any, *rest: Any) -> None:
        completion.ok = [True] * len(completion.ok)
        promoted(self, tier, move, completion, *rest)

    patch.setattr(Transfers, "_promoted", believing)


@breaks("what is being read is not evicted from its tier")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "begin_reads", lambda self, keys: [self.entries[key] for key in keys])
    patch.setattr(Index, "end_reads", lambda self, keys: None)


@breaks("the slot of a failed write is set aside")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "set_aside", lambda self, slots, now: None)


@breaks("what was set aside comes back", first=47)
def _(patch: pytest.MonkeyPatch) -> None:
    def lose(self: Slots, count: int) -> None:
        for slot in list(self._aside)[:count]:
            del self._aside[slot]

    patch.setattr(Slots, "give_aside", lose)


@breaks("a chunk is pinned while it is copied to a tier")
def _(patch: pytest.MonkeyPatch) -> None:
    due, ended = Cascades.due, Cascades.ended

    def careless(self: Cascades, target: Any) -> Any:
        moves = due(self, target)
        for move in moves:
            for key in move.keys:
                self._pool.unpin([self._pool.chunks[key]])
        return moves

    def forgiving(self: Cascades, target: Any, move: Any, *rest: Any) -> None:
        for key in move.keys:
            if key not in self._pool.chunks:
                raise AssertionError("a chunk left while it was copied")
            self._pool.pin([self._pool.chunks[key]])
        ended(self, target, move, *rest)

    patch.setattr(Cascades, "due", careless)
    patch.setattr(Cascades, "ended", forgiving)


@breaks("copies on their way are bounded")
def _(patch: pytest.MonkeyPatch) -> None:
    init = OwnedTier.__init__

    def boundless(self: OwnedTier, *args: Any, **rest: Any) -> None:
        init(self, *args, **rest)
        self.max_rows_in_flight *= 2
        self.max_rows_in_flight += 1

    patch.setattr(OwnedTier, "__init__", boundless)


@breaks("rows of moves that a reset left behind are not given out")
def _(patch: pytest.MonkeyPatch) -> None:
    reset = HostPool.reset
    patch.setattr(HostPool, "reset", lambda self, rows_in_flight: reset(self, ()))
    patch.setattr(HostPool, "release_held", lambda self, rows: None)


@breaks("a row that a late device copy may touch is given to nobody")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "device_transfers", lambda self: [])


@breaks("a row that a late load reads is given to nobody")
def _(patch: pytest.MonkeyPatch) -> None:
    transfers = Core.device_transfers

    def stores(self: Core) -> Any:
        return [(t, row) for t, row in transfers(self) if self.chunks[t[2]].state < READY]

    patch.setattr(Core, "device_transfers", stores)


@breaks("ends of transfers are told apart by their era", first=47)
def _(patch: pytest.MonkeyPatch) -> None:
    complete_store = Core.complete_store

    def whatever(self: Core, keys: Any, request_id: str, ok: bool = True, era: Any = None) -> None:
        complete_store(self, keys, request_id, ok)

    patch.setattr(Core, "complete_store", whatever)


@breaks("rows of transfers that have ended are free again")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Overtaken, "all_ended", lambda self, era: None)


@breaks("what is removed is found no more")
def _(patch: pytest.MonkeyPatch) -> None:
    due = Removals.due

    def lazy(self: Removals) -> Any:
        for move in due(self):
            self.erased(move, Completion(move.id, [True] * len(move.keys)))
        return []

    patch.setattr(Removals, "due", lazy)


@breaks("records are erased when nothing writes them any more", first=108)
def _(patch: pytest.MonkeyPatch) -> None:
    leave = Removals._leave_tier

    def hasty(self: Removals, target: Any, key: bytes) -> bool:
        leave(self, target, key)
        return True

    patch.setattr(Removals, "_leave_tier", hasty)


@breaks("a removal ends", first=34)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Removals, "_leave_host", lambda self, chunk: False)


@breaks("what a neighbour has counts from where the own lane stands", first=17)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfers, "_clearing_targets", lambda self: [])


@breaks("what ended after a reset is not believed")
def _(patch: pytest.MonkeyPatch) -> None:
    reset = Core.reset

    def forgetful(self: Core) -> None:
        reset(self)
        self._transfers.orphans.clear()

    patch.setattr(Core, "reset", forgetful)


@breaks("a store is deferred once")
def _(patch: pytest.MonkeyPatch) -> None:
    prepare_store = Core.prepare_store

    def forgetful(self: Core, keys: Any, request_id: str) -> Any:
        request = self._requests.get(request_id)
        if request is not None:
            self._stores.forget_deferred(request)
        return prepare_store(self, keys, request_id)

    patch.setattr(Core, "prepare_store", forgetful)


@breaks("a store gets as much as fits")
def _(patch: pytest.MonkeyPatch) -> None:
    make = Room.make

    def stingy(self: Room, count: int, now: float, **rest: Any) -> int:
        return min(make(self, count, now, **rest), max(1, count // 2))

    patch.setattr(Room, "make", stingy)


@breaks("a store does not evict its own chain")
def _(patch: pytest.MonkeyPatch) -> None:
    make = Room.make

    def forgetful(self: Room, count: int, now: float, **rest: Any) -> int:
        for chunk in self._pool.chunks.values():
            chunk.step = -1
        self._pool.marked = 0
        return make(self, count, now, **rest)

    patch.setattr(Room, "make", forgetful)


@breaks("what is stored reaches the tier")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnedTier, "take_slots", lambda self, count: [])


@breaks("the disk budget is a limit")
def _(patch: pytest.MonkeyPatch) -> None:
    ended = Slots.growth_ended

    def generous(self: Slots, segments: Any, now: float) -> None:
        ended(self, segments, now)
        self.max_segments += len(segments)

    patch.setattr(Slots, "growth_ended", generous)
    patch.setattr(Index, "evict", lambda self, count, incoming: [])


@breaks("a tier that does not answer is not waited for", first=29)
def _(patch: pytest.MonkeyPatch) -> None:
    always = property(lambda self: True, lambda self, value: None)
    patch.setattr(Health, "readable", always, raising=False)


@breaks("events are told in order")
def _(patch: pytest.MonkeyPatch) -> None:
    take_events = Core.take_events

    def shuffled(self: Core) -> Any:
        return sorted(take_events(self), key=lambda event: not event.removed)

    patch.setattr(Core, "take_events", shuffled)


@breaks("a request that finished is forgotten")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "drop_if_idle", lambda self, request: None)


@pytest.mark.skipif(told_seeds() is not None, reason="KVSTORE_SEED is set")
@pytest.mark.parametrize("rule", BREAKS)
def test_the_simulation_notices_when_a_rule_is_broken(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BREAKS[rule](monkeypatch)
    with pytest.raises(AssertionError, match="KVSTORE_SEED="):
        for seed in range(FIRST[rule], FIRST[rule] + 200):
            simulate(seed, 1000)


def test_compaction_amid_traffic_loses_nothing() -> None:
    relocated = removed_segments = 0
    for seed in range(60):
        rng = random.Random(seed)
        world = World(rows=6, segment_slots=8, slots=96, relocation=3, stripes=1 + seed % 2)
        scatter(world, rng)
        for _ in range(500):
            random_act(world, rng)
            world.check()
        relocated += sum(tier.relocated for tier in world.core.stats().tiers)
        removed_segments += sum(tier.removed_segments for tier in world.core.stats().tiers)
        world.settle()
    assert relocated > 100
    assert removed_segments > 100
