"""A store gets rows from its head on, whatever the policy and whatever else is in use.

Servers differ in when they end a step: before they offer its stores (`early`), or after.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from kvstore.core import StoreGrant
from kvstore.core.chunk import READY
from kvstore.policies import Protected, create_policy, policy_names
from kvstore.policies.hitdensity import HitDensity
from kvstore.policies.lru import LRU
from tests.core.rig import Rig, chain

POLICIES = [*policy_names(), "hit-density, whole stores"]


def rig_of(policy: str, rows: int) -> Rig:
    if policy == "hit-density, whole stores":
        return Rig(rows=rows, on=(), policy=HitDensity(rows, whole_stores=True))
    return Rig(rows=rows, on=(), policy=create_policy(policy, rows))


def offered_last(
    rig: Rig, keys: list[bytes], early: bool, request: str = "w", patient: bool = False
) -> StoreGrant | None:
    """The last call of a step, before or after its `flush`."""
    if early:
        rig.flush()
    grant = rig.core.prepare_store(keys, request, patient=patient)
    if not early:
        rig.flush()
    return grant


def assert_no_hole(rig: Rig, keys: list[bytes], grant: StoreGrant) -> None:
    """Nothing was given a row behind a chunk of the same prompt that has none."""
    here = [key in rig.core._pool.chunks for key in keys]
    gap = here.index(False) if False in here else len(keys)
    behind = set(keys[gap:])
    assert not behind & set(grant.keys), "a tail without its head"


def assert_cut_from_its_end(rig: Rig, keys: list[bytes], before: list[bytes], room: int) -> None:
    """A prompt that fits has lost nothing that was here, or else lacks nothing but its end."""
    here = [key in rig.core._pool.chunks for key in keys]
    if len(keys) <= room and not all(key in rig.core._pool.chunks for key in before):
        assert not any(here[here.index(False) :]), "a hole, and something given up for it"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_that_answered_hit_and_were_not_loaded_cost_a_store_its_tail_only(
    policy: str, early: bool
) -> None:
    rig = rig_of(policy, 8)
    hits, keys = chain("hit", 6), chain("new", 6)
    rig.put([*hits, *chain("old", 2)])
    rig.step()
    assert rig.ask(hits) == 6
    grant = offered_last(rig, keys, early)
    assert grant is not None
    assert grant.keys == keys[: len(grant.keys)]
    assert grant.keys
    assert set(grant.declined) <= set(keys[:2]), "what has no room is refused, not declined"
    assert rig.stats.chunks_refused == 4
    assert len(grant.keys) + len(grant.declined) == 2
    assert all(rig.in_host(key) for key in hits)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_may_not_leave_makes_no_hole_in_a_prompt(policy: str, early: bool) -> None:
    tried = 0
    for seed in range(40):
        rng = random.Random(seed)
        rows = rng.choice((3, 5, 8, 13))
        rig = rig_of(policy, rows)
        loading: list[tuple[str, list[bytes]]] = []
        storing: list[tuple[str, list[bytes]]] = []
        for step in range(60):
            for number in range(rng.randrange(3)):
                asked = chain(f"p{rng.randrange(6)}", rng.randrange(1, rows + 3))
                name = f"ask-{step}-{number}"
                hits = rig.ask(asked, name)
                if hits and rng.random() < 0.4:
                    rig.load(asked[:hits], name)
                    loading.append((name, asked[:hits]))
            keys = chain(f"p{rng.randrange(6)}", rng.randrange(1, rows + 3))
            chunks = rig.core._pool.chunks.values()
            rig.core._lookups.keep_hits()
            hindered = any(c.state != READY or c.step == rig.core._pool.step for c in chunks)
            free = [k for k in keys if k not in rig.core._pool.chunks]
            before = [k for k in keys if k in rig.core._pool.chunks]
            room = rig.core._pool.free
            room += sum(c.state == READY and c.step != rig.core._pool.step for c in chunks)
            grant = offered_last(rig, keys, early, f"w-{step}", patient=rng.random() < 0.3)
            if grant is not None:
                assert grant.keys == [key for key in keys if key in grant.keys]
                assert set(grant.keys).isdisjoint(grant.declined)
                assert {*grant.keys, *grant.declined} <= set(free)
                if hindered:
                    # Otherwise the policy alone has chosen.
                    assert_no_hole(rig, keys, grant)
                    assert_cut_from_its_end(rig, keys, before, room)
                tried += hindered
                storing.append((f"w-{step}", grant.keys))
            rig.core.on_request_finished(f"w-{step}")
            while storing and rng.random() < 0.8:
                name, stored = storing.pop(0)
                rig.core.complete_store(stored, name)
            while loading and rng.random() < 0.5:
                name, loaded = loading.pop(0)
                rig.core.complete_load(loaded, name)
                rig.core.on_request_finished(name)
            rig.step(0.01)
    assert tried > 500


class Scripted(LRU):
    """Gives up what the test says."""

    declines = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.script: list[bytes] = []

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        victims = self.script[:count]
        if any(protected(key) for key in victims):
            return None
        del self.script[:count]
        for key in victims:
            self.remove(key)
        return victims


def test_a_policy_that_cuts_a_prompt_cuts_what_is_here_of_it_from_its_end() -> None:
    keys = chain("cut", 7)
    policy = Scripted(9)
    rig = Rig(rows=9, on=(), policy=policy)
    rig.put([*keys[:2], *keys[4:], *chain("other", 3)])
    rig.granted(chain("busy", 1), "busy")
    rig.step()
    # For the fourth chunk the policy gives up the last one, and then the fourth for the third.
    policy.script = [keys[6], keys[3]]
    grant = rig.granted(keys, "w")
    assert grant.keys == keys[2:4]
    assert grant.evicted == [keys[6], keys[5]]
    assert [key in rig.core._pool.chunks for key in keys] == [True] * 5 + [False] * 2
    assert all(rig.in_host(key) for key in chain("other", 3))
    rig.core.complete_store(grant.keys, "w")
    assert len(policy) == len(rig.core._pool.chunks) == 9


def test_the_pool_knows_exactly_how_many_chunks_answered_in_this_step() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        rig = Rig(rows=8, in_flight=rng.choice((1, 8)))
        pool = rig.core._pool
        loads: list[tuple[str, list[bytes]]] = []
        for act in range(80):
            prompt = chain(f"p{rng.randrange(3)}", rng.randrange(1, 6))
            roll = rng.random()
            if roll < 0.4:
                hits = rig.ask(prompt, f"r{act % 5}")
                if hits and rng.random() < 0.5:
                    rig.load(prompt[:hits], f"r{act % 5}")
                    loads.append((f"r{act % 5}", prompt[:hits]))
            elif roll < 0.5 and loads:
                name, keys = loads.pop()
                rig.core.complete_load(keys, name)
            elif roll < 0.6:
                rig.flush()
            elif roll < 0.8:
                rig.end_all()
                rig.step(0.01)
            else:
                grant = rig.core.prepare_store(prompt, "w")
                if grant is not None:
                    rig.core.complete_store(grant.keys, "w", ok=rng.random() < 0.8)
            rig.core._lookups.keep_hits()
            answered = [
                chunk
                for chunk in pool.chunks.values()
                if chunk.step == pool.step and chunk.state == READY and not chunk.unsaved
            ]
            assert pool.marked == len(answered)


def test_a_prompt_with_a_hole_that_does_not_fit_keeps_its_head_and_what_fills_the_hole() -> None:
    rig = Rig(rows=5, on=())
    keys = chain("p", 7)
    rig.put(keys[2:5])
    rig.step()
    grant = rig.granted(keys, "w")
    assert grant.keys == keys[:2]
    assert [rig.in_host(key) for key in keys[2:]] == [True, True, True, False, False]


@pytest.mark.parametrize("busy", [5, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_end_of_a_prompt_waits_for_rows_in_use_rather_than_is_declined(
    policy: str, busy: int
) -> None:
    # The only chunks that may leave are the head of the prompt, whose end is offered now.
    rig = rig_of(policy, 9)
    keys = chain("p", 7)
    rig.put(keys[: 9 - busy])
    others = chain("other", busy)
    rig.granted(others, "busy")
    rig.step()
    for _ in range(3):
        assert rig.core.prepare_store(keys, "w", patient=True) is None
        rig.step()
    rig.core.complete_store(others, "busy")
    grant = rig.granted(keys, "w", patient=True)
    assert grant.keys == keys[9 - busy :]
    assert not grant.declined
    assert rig.stats.chunks_refused == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_need_not_wait_for_that(policy: str) -> None:
    rig = rig_of(policy, 9)
    keys = chain("p", 7)
    rig.put(keys[:4])
    rig.granted(chain("other", 5), "busy")
    rig.step()
    grant = rig.granted(keys, "w")
    assert not grant.keys


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pinned", [0, 3])
def test_a_prompt_that_will_never_fit_is_not_waited_for(policy: str, pinned: int) -> None:
    rig = rig_of(policy, 8)
    pins, keys = chain("pin", pinned), chain("p", 12)
    rig.put(pins)
    assert rig.core._pins.begin(pins, math.inf) == pinned
    rig.put(keys[: 8 - pinned])
    rig.step()
    assert rig.ask(keys[:1], "l") == 1
    rig.load(keys[:1], "l")
    rig.step()
    grant = rig.granted(keys[: 9 - pinned], "w", patient=True)
    assert not grant.keys


HOLES = [("lru", 7, (2, 4), 3), ("fifo", 7, (2, 4), 3)]
"""A policy, rows, which chunks of a prompt are there, and how many of its first are then."""

NO_HEAD = [(policy, 9, (2, 3, 4, 5, 6), 5) for policy in POLICIES]


@pytest.mark.parametrize(("policy", "rows", "there", "first"), [*HOLES, *NO_HEAD])
def test_what_is_missing_of_a_prompt_takes_rows_of_its_end_without_waiting(
    policy: str, rows: int, there: tuple[int, ...], first: int
) -> None:
    rig = rig_of(policy, rows)
    keys, others = chain("p", there[-1] + 1), chain("other", 4)
    rig.put([*(keys[number] for number in there), *others])
    rig.step()
    assert rig.ask(others, "l") == 4
    rig.load(others, "l")
    rig.step()
    grant = rig.granted(keys, "w", patient=True)
    here = [key in rig.core._pool.chunks for key in keys]
    assert here == [number < first for number in range(len(keys))]
    assert not grant.declined
