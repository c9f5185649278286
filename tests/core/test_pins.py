"""Pins: chunks that stay for a while, wherever they are, within a share of each place."""

from __future__ import annotations

import math

import pytest

from kvstore.core import Core, HostPool
from kvstore.core.hints import Hints
from kvstore.core.residency.remote_answers import Answers
from kvstore.policies import create_policy
from kvstore.types import Op
from tests.core.rig import Rig, chain, host_of

A, B, C = chain("a", 4), chain("b", 4), chain("c", 8)


def fill(rig: Rig, name: str, count: int) -> list[bytes]:
    """Store so many chunks of another prompt, as far as they find room; returns their keys."""
    keys = chain(name, count)
    grant = rig.core.prepare_store(keys, name)
    if grant is not None:
        rig.core.complete_store(grant.keys, name)
    rig.core.on_request_finished(name)
    rig.settle()
    return keys


def alone(rows: int = 8, share: float = 0.5) -> Rig:
    """Host memory without tiers."""
    rig = Rig(rows=rows, on=())
    if share != 0.5:
        rig.core = Core(HostPool(rows, create_policy("lru", rows)), pinned_share=share)
        rig.core.poll(rig.now)
    return rig


def test_what_is_fetched_stays_too() -> None:
    rig = Rig(rows=8, on=(A,))
    rig.core._pins.begin(A, math.inf)
    assert rig.stats.pinned_rows == 0
    assert rig.resolve(A) == 4
    rig.core.on_request_finished("r")
    assert (rig.stats.pinned_rows, rig.stats.busy_rows) == (4, 4)
    fill(rig, "x", 8)
    assert host_of(rig, A) == 4


def test_no_more_than_a_share_is_held_and_the_head_goes_first() -> None:
    rig = alone(rows=8)
    rig.put(C)
    assert rig.core._pins.begin(C, math.inf) == 4
    fill(rig, "x", 8)
    assert [rig.in_host(key) for key in C] == [True] * 4 + [False] * 4
    assert rig.core._pins.begin(A, math.inf) == 0
    none = alone(share=0.0)
    none.put(A)
    assert none.core._pins.begin(A, math.inf) == 0


def test_a_pin_is_prolonged_and_never_cut_short_by_another() -> None:
    rig = alone()
    rig.put(A)
    rig.core._pins.begin(A, rig.now + 10.0)
    rig.core._pins.begin(A[:2], rig.now + 1.0)
    rig.core._pins.begin(A[2:], rig.now + 20.0)
    rig.step(5.0)
    assert rig.stats.pinned_rows == 4
    rig.step(10.0)
    assert rig.stats.pinned_rows == 2
    rig.step(10.0)
    assert rig.stats.pinned_rows == 0


def test_pins_end_when_they_are_ended() -> None:
    rig = alone()
    rig.put(A)
    rig.core._pins.begin(A, math.inf)
    assert rig.core._pins.end([A[0], A[0], *B]) == 1
    assert rig.core._pins.end(A) == 3
    fill(rig, "x", 8)
    assert host_of(rig, A) == 0


def test_a_key_that_is_named_twice_is_pinned_once() -> None:
    rig = Rig(rows=8)
    rig.store(A)
    keys = A[:2]
    assert rig.core._pins.begin([*keys, *keys], math.inf) == 4
    assert rig.stats.pinned_rows == rig.stats.busy_rows == 2
    assert rig.core._pins.end(keys) == 2
    assert rig.stats.busy_rows == 0
    fill(rig, "x", 8)
    assert host_of(rig, A) == 0


def test_thousands_of_pins_that_end_at_once_end_over_some_steps() -> None:
    rig = alone(rows=4000)
    keys = chain("long", 2000)
    rig.core._pins.begin(keys, rig.now + 1.0)
    rig.step(2.0)
    assert 0 < rig.stats.pins < 2000
    assert rig.core.behind
    for _ in range(10):
        rig.step()
    assert rig.stats.pins == 0
    assert not rig.core.behind


@pytest.mark.parametrize("policy", ["lru", "arc", "hit-density", "sieve", "s3-fifo"])
def test_a_pinned_chunk_stays_on_its_tier(policy: str) -> None:
    rig = Rig(rows=4, on=(A,), segment_slots=8, tier_policy=create_policy(policy, 8))
    tier = rig.core.tiers[0]
    assert rig.core._pins.begin(A, math.inf, host=False) == 4
    for name in "uvwxyz":
        fill(rig, name, 4)
    assert set(A) <= set(tier.entries)
    assert tier.index.evicted > 0
    assert (rig.stats.tiers[0].pinned, rig.stats.pinned_rows) == (4, 0)
    rig.core._pins.end(A)
    for name in "ghijkl":
        fill(rig, name, 4)
    if policy in ("lru", "arc", "sieve"):
        assert not set(A) & set(tier.entries)
    assert len(tier.index.policy) == len(tier.entries)


def test_a_pinned_chunk_that_is_being_read_is_let_go_of_once_both_have_ended() -> None:
    rig = Rig(rows=4, on=(A,), segment_slots=4)
    tier = rig.core.tiers[0]
    rig.core._pins.begin(A[:2], math.inf, host=False)
    rig.begin(A[:2])
    rig.put(B[:1])
    rig.step()
    rig.core._pins.end(A)
    assert set(A[:2]) <= set(tier.entries)
    rig.settle()
    for name in "uvwxyz":
        fill(rig, name, 2)
    assert not set(A) & set(tier.entries)


def test_a_tier_that_cannot_grow_lets_the_last_pins_go() -> None:
    rig = Rig(rows=8, on=((),), segment_slots=4, segments=1, max_segments=4)
    rig.core._pins.begin(C, math.inf, host=False)
    rig.put(C)
    for _ in range(20):
        for move in list(rig.moves):
            rig.end(move, segments=[] if move.op is Op.GROW else None)
        rig.step(0.1)
    tier = rig.owned()
    assert tier.slots.cannot_grow
    assert rig.stats.tiers[0].pinned == 2
    fill(rig, "x", 2)
    assert set(C[:2]) <= set(tier.entries)


def test_a_prompt_that_does_not_fit_beside_pins_gets_what_fits_without_delay() -> None:
    rig = Rig(rows=8, on=(C,))
    rig.put(A)
    rig.core._pins.begin(A, math.inf)
    begun = rig.now
    assert rig.resolve(C) == 4
    assert rig.now - begun < rig.core._queue.deadline / 2
    assert rig.stats.truncations == 1


def test_a_removal_ends_the_pin() -> None:
    rig = Rig(rows=8, on=(A,))
    rig.core._pins.begin(A, math.inf)
    rig.resolve(A)
    rig.core.on_request_finished("r")
    rig.core.remove(A)
    rig.core._pins.begin(A[:1], math.inf)
    rig.settle()
    assert not rig.core.hidden
    assert (rig.stats.chunks, rig.stats.pinned_rows) == (0, 0)
    rig.put(A)
    assert rig.stats.pinned_rows == 1, "it was pinned again, for when it comes"


def test_a_key_that_is_pinned_again_and_again_costs_no_memory() -> None:
    rig = alone()
    rig.put(A)
    for _ in range(100_000):
        rig.core._pins.begin(A, rig.now + 1000.0)
        rig.core._pins.begin(A, rig.now + 1000.0, yields=True)
    assert len(rig.core._pins._ends) < 1000
    assert sum(map(len, rig.core._pins._yielding.values())) < 1000


def test_pins_that_yield_give_way_to_those_that_end_sooner_tails_first() -> None:
    rig = alone(rows=8)
    rig.put(C)
    pins = rig.core._pins
    assert pins.begin(C[:4], rig.now + 100.0, yields=True) == 4
    assert pins.begin(C[4:6], rig.now + 200.0, yields=True) == 0, "that returns later"
    assert pins.begin(C[4:6], rig.now + 10.0, yields=True) == 2
    assert [pins.is_pinned(key) for key in C] == [
        True,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert pins.begin(C[6:], rig.now + 1.0, yields=True) == 2
    assert [pins.is_pinned(key) for key in C] == [False] * 4 + [True] * 4
    assert rig.stats.pinned_rows == 4
    fill(rig, "x", 8)
    assert [rig.in_host(key) for key in C] == [False] * 4 + [True] * 4
    rig.step(300.0)
    assert rig.stats.pins == rig.stats.busy_rows == 0


def test_a_pin_that_does_not_yield_stands() -> None:
    rig = alone(rows=8)
    rig.put(C)
    pins = rig.core._pins
    assert pins.begin(C[:4], math.inf) == 4
    assert pins.begin(C[4:], rig.now + 1.0, yields=True) == 0
    pins.end(C)
    assert pins.begin(C[:4], rig.now + 50.0, yields=True) == 4
    # Prolonged by somebody who does not yield.
    assert pins.begin(C[:2], math.inf) == 2
    assert pins.begin(C[4:], rig.now + 1.0, yields=True) == 2
    assert [pins.is_pinned(key) for key in C[:6]] == [True, True, False, False, True, True]


def test_what_is_released_as_cold_leaves_before_what_was_used_longer_ago() -> None:
    rig = alone(rows=12)
    rig.put(B)
    rig.put(A)
    rig.core._pins.begin(A, math.inf)
    fill(rig, "x", 4)
    rig.core._pins.end(A)
    rig.core._demotions.cool(A)
    fill(rig, "y", 3)
    assert (host_of(rig, A), host_of(rig, B)) == (1, 4)
    assert rig.in_host(A[0]), "it leaves tail first"


def test_what_is_cold_is_like_any_other_once_it_was_used() -> None:
    rig = alone(rows=12)
    rig.put(B)
    rig.put(A)
    rig.core._demotions.cool(A)
    assert rig.load(A)
    fill(rig, "x", 8)
    assert (host_of(rig, A), host_of(rig, B)) == (4, 0)


def test_what_is_still_pinned_is_not_cold() -> None:
    rig = alone(rows=12)
    rig.put(A)
    rig.core._pins.begin(A, rig.now + 5.0)
    rig.put(B)
    rig.core._demotions.cool(A)
    fill(rig, "x", 8)
    assert host_of(rig, A) == 4


def test_what_is_cold_leaves_a_tier_first_too() -> None:
    rig = Rig(rows=8, segment_slots=8)
    for keys in (B, A):
        rig.store(keys)
    rig.core._demotions.cool(A)
    fill(rig, "x", 4)
    assert [key in rig.core.tiers[0].entries for key in (*A, *B)] == [False] * 4 + [True] * 4


def conversations(rig: Rig, keys_of: dict[str, list[bytes]]) -> None:
    """Each asks, and stores what is not there."""
    for name, keys in keys_of.items():
        held = rig.resolve(keys, name)
        if held:
            rig.use(keys[:held], name)
        rig.put(keys, name)
        rig.core.on_request_finished(name)
        rig.settle()


@pytest.mark.parametrize("hints", [Hints(release=True), Hints(demote=True)])
def test_what_other_prompts_share_stays_when_a_conversation_ends_or_pauses(hints: Hints) -> None:
    """Its client knows nothing of theirs, which find nothing without their head."""
    rig, head = Rig(rows=9, segment_slots=64), chain("head", 3)
    rig.core.follow(hints, chain("first", 1), rig.now)
    asked = {name: [*head, *chain(name, 3)] for name in "ab"}
    conversations(rig, asked)
    rig.core.follow(hints, asked["a"], rig.now)
    for name in "xy":
        fill(rig, name, 3)
    assert [rig.in_host(key) for key in asked["a"]] == [True] * 3 + [False] * 3


def test_a_prompt_that_another_goes_on_from_is_not_released() -> None:
    rig, head = Rig(rows=16, on=()), chain("head", 3)
    chains = rig.core._chains
    chains.unshared(head)
    conversations(rig, {"long": [*head, *chain("long", 3)], "short": head})
    assert chains.unshared(head) == []
    assert chains.unshared([*head, *chain("long", 3)]) == [*head, *chain("long", 3)]


def test_a_head_that_the_device_has_in_part_is_shared_as_a_whole() -> None:
    """Its load begins in the middle, and what is before it is named by the store."""
    rig, head = Rig(rows=12, on=()), chain("head", 6)
    rig.core.follow(Hints(release=True), chain("first", 1), rig.now)
    conversations(rig, {"b": [*head, *chain("b", 3)]})
    its = [*head, *chain("a", 3)]
    rig.core.on_new_request("a", params={"kvstore": {"release": True}})
    assert rig.resolve(its[3:], "a") == 3
    rig.use(its[3:6], "a")
    rig.put(its, "a")
    rig.core.on_request_finished("a")
    rig.settle()
    fill(rig, "x", 3)
    fill(rig, "y", 3)
    assert host_of(rig, head) == 6
    assert host_of(rig, its) == 6


def test_a_conversation_that_is_over_ends_no_pins_of_others() -> None:
    rig, head = Rig(rows=24, on=()), chain("head", 3)
    rig.core.follow(Hints(release=True), chain("first", 1), rig.now)
    asked = {name: [*head, *chain(name, 3)] for name in "ab"}
    conversations(rig, asked)
    for keys in asked.values():
        rig.core.follow(Hints(retain_s=1000.0, retain_host=True), keys, rig.now)
    rig.core.follow(Hints(release=True), asked["a"], rig.now)
    assert [*map(rig.core._pins.is_pinned, asked["b"])] == [True] * 6
    assert [*map(rig.core._pins.is_pinned, asked["a"])] == [True] * 3 + [False] * 3


def test_prompts_part_in_each_group_by_itself() -> None:
    full = [b"f%d\0\0\0\0" % number for number in range(3)]
    sliding = [b"s%d\0\0\0\1" % number for number in range(3)]
    rig = Rig(rows=16, on=())
    chains = rig.core._chains
    assert chains.unshared([*full, *sliding]) == [*full, *sliding]
    rig.put([*full, *sliding], "one")
    rig.put([*full[:2], b"other\0\0\0\0", *sliding[:1], b"other\0\0\0\1"], "other")
    assert chains.unshared([*full, *sliding]) == [full[2], *sliding[1:]]


def test_the_tails_of_all_groups_are_cold_before_the_head_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = [b"hash-%d" % number for number in range(3)]
    groups = [[head + b"\0\0\0%c" % group for head in heads] for group in range(2)]
    place = {key: number for keys in groups for number, key in enumerate(keys)}
    rig, cooled = Rig(rows=8, on=()), list[bytes]()
    monkeypatch.setattr(rig.core._demotions, "cool", cooled.extend)
    hints = {"kvstore": {"release": True}}
    rig.core.on_new_request("r", place.__getitem__, params=hints)
    for keys in groups:
        rig.core.prepare_store(keys, "r")
        rig.core.complete_store(keys, "r")
    rig.core.on_request_finished("r")
    assert cooled == [key for pair in zip(*groups, strict=True) for key in pair]


def test_what_follows_what_is_known_of_so_many_chunks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.core.usage.MOST_FOLLOWED", 10)
    rig, head = Rig(rows=64, on=()), chain("head", 2)
    chains = rig.core._chains
    chains.unshared(head)
    for name in "abcdefgh":
        rig.put([*head, *chain(name, 2)], name)
    assert chains._followers is not None
    assert len(chains._followers) == 10
    # What many prompts share is used, and so remembered.
    assert chains.unshared([*head, *chain("a", 2)]) == chain("a", 2)
    rig.core.reset()
    assert not chains._followers


def test_what_is_not_there_takes_no_room_from_what_is() -> None:
    head, tail = chain("p", 4), chain("p", 8, 4)
    rig = Rig(rows=8, on=[head])
    rig.put(tail)
    assert rig.core.pin(head + tail, math.inf) == 8
    assert rig.stats.pinned_rows == 4
    fill(rig, "x", 8)
    assert host_of(rig, tail) == 4


def test_host_memory_that_becomes_smaller_than_its_pins_lets_the_last_of_them_go() -> None:
    rig = alone(rows=16)
    rig.put(chain("p", 8))
    assert rig.core.pin(chain("p", 8), math.inf) == 8
    rig.core.limit_rows(4)
    for _ in range(20):
        rig.step(0.1)
    assert (rig.stats.rows, rig.core.changing, rig.stats.pinned_rows) == (4, 0, 2)
    assert host_of(rig, chain("p", 2)) == 2
    grant = rig.granted(chain("x", 2), "s")
    assert len(grant.rows) == 2


@pytest.mark.parametrize("store", [None, Answers()])
def test_without_a_disk_host_memory_keeps_what_is_retained(store: Answers | None) -> None:
    rig = Rig(rows=16, on=(), store=store)
    keys = chain("a", 4)
    rig.core.on_new_request("r", params={"kvstore": {"retain_s": 300}})
    rig.put(keys, "r")
    rig.core.on_request_finished("r")
    rig.settle(0.01)
    for wave in range(6):
        rig.put(chain(f"f{wave}", 8), f"w{wave}")
        rig.core.on_request_finished(f"w{wave}")
        rig.settle(0.01)
    assert all(map(rig.in_host, keys))
