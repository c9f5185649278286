"""Prefix hit density: chains are shed from their ends, and it learns who comes back."""

from __future__ import annotations

import random

import pytest

from kvstore.policies.density import Densities
from kvstore.policies.hitdensity import HitDensity
from kvstore.testing.policy import keys_of, nobody


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}-{depth:04d}".encode() + b"\0\0\0\0" for depth in range(length)]


def request(policy: HitDensity, keys: list[bytes]) -> int:
    """One request; returns its hits."""
    hits = next((depth for depth, key in enumerate(keys) if key not in policy), len(keys))
    policy.link(keys)
    for key in reversed(keys):
        if key in policy:
            policy.touch(key)
    for key in reversed(keys):
        if key not in policy:
            if len(policy) == policy.capacity:
                assert policy.evict(1, nobody, [key])
            policy.insert(key)
    policy.settle(keys)
    return hits


def assert_whole(policy: HitDensity, chains: list[list[bytes]]) -> None:
    """What is resident of a chain is a prefix of it."""
    for keys in chains:
        kept = [key in policy for key in keys]
        assert kept == sorted(kept, reverse=True)


def test_only_ends_of_chains_leave() -> None:
    policy = HitDensity(100)
    chains = [chain(f"c{number}", 10) for number in range(30)]
    for keys in chains:
        request(policy, keys)
        assert_whole(policy, chains)
    rng = random.Random(3)
    for _ in range(200):
        request(policy, rng.choice(chains)[: rng.randrange(1, 11)])
        assert_whole(policy, chains)


def test_of_a_prompt_of_several_groups_the_end_of_each_is_an_end() -> None:
    full, sliding = chain("full", 3), chain("sliding", 3)
    together, apart = HitDensity(8), HitDensity(8)
    for policy in (together, apart):
        for keys in (full, sliding):
            policy.link(keys)
            for key in reversed(keys):
                policy.insert(key)
    prompt = [key for pair in zip(full, sliding, strict=True) for key in pair]
    together.settle(prompt, [full[-1], sliding[-1]])
    apart.settle(full)
    apart.settle(sliding)
    ends = [{key for key in prompt if p._seen[p._slots[key]] & 1} for p in (together, apart)]
    assert ends == [{full[-1], sliding[-1]}] * 2


def test_branches_leave_before_their_common_prefix() -> None:
    policy = HitDensity(20)
    prefix = chain("prefix", 5)
    for branch in range(3):
        request(policy, prefix + chain(f"branch{branch}", 5))
    victims = policy.evict(15, nobody)
    assert victims is not None
    assert set(prefix).isdisjoint(victims)


def test_a_parent_leaves_when_the_end_of_its_chain_is_in_use_and_nobody_else_is_there() -> None:
    policy = HitDensity(4)
    keys = chain("c", 4)
    request(policy, keys)
    assert policy.evict(2, {keys[3]}.__contains__) == [keys[2], keys[1]]
    assert policy.evict(2, nobody) == [keys[3], keys[0]] or keys[3] not in policy


def test_an_unused_end_leaves_before_the_parents_of_one_in_use() -> None:
    policy = HitDensity(8)
    busy, idle = chain("busy", 4), chain("idle", 4)
    request(policy, idle)
    request(policy, busy)
    assert set(policy.evict(4, {busy[3]}.__contains__) or ()) == set(idle)


def test_chains_that_come_back_stay_and_those_seen_once_go() -> None:
    """A tier too small for both: LRU would keep neither."""
    policy = HitDensity(400)
    loyal = [chain(f"loyal{number}", 10) for number in range(25)]
    hits = asked = 0
    for turn in range(3000):
        if turn % 4 == 0:
            found = request(policy, loyal[turn // 4 % 25])
            if turn > 1500:
                hits, asked = hits + found, asked + 10
        else:
            request(policy, chain(f"once{turn}", 10))
    # Between two visits of a loyal chain 1000 blocks pass through a tier of 400.
    assert hits > 0.9 * asked


def test_the_last_block_of_a_request_is_told_from_the_rest() -> None:
    """Half-filled last blocks never come back: they should leave first."""
    policy = HitDensity(600)
    sessions = [chain(f"s{number}", 6) for number in range(60)]
    for turn in range(40):
        for number, keys in enumerate(sessions):
            request(policy, [*keys, *chain(f"partial-{number}-{turn}", 1)])
    partial = [key for key in policy.order() if key.startswith(b"partial")]
    victims = policy.evict(len(partial) // 2, nobody)
    assert victims is not None
    assert all(key.startswith(b"partial") for key in victims)


def test_what_is_cooled_leaves_first_and_teaches_nothing_of_age() -> None:
    policy = HitDensity(60)
    old, cooled = chain("old", 30), chain("cooled", 30)
    for keys in (old, cooled):
        request(policy, keys)
    before = [*policy._densities.reused]
    policy.cool(reversed(cooled))
    assert policy.evict(10, nobody) == cooled[:19:-1]
    policy.touch(cooled[0])
    grown = [now - then for now, then in zip(policy._densities.reused, before, strict=True)]
    # It was used some 30 uses ago, not before all that is remembered.
    assert sum(grown) == 1
    assert grown.index(1) % policy._bins < policy._bins // 2
    assert policy.evict(20, nobody) == [*cooled[19:0:-1], old[-1]]


def test_ghosts_are_bounded() -> None:
    policy = HitDensity(50, ghosts=1.5)
    for number in range(100):
        request(policy, chain(f"c{number}", 10))
    assert len(policy._ghosts) <= 75
    assert len(policy._ghost_hash) == 75


def test_without_ghosts_it_works_on() -> None:
    policy = HitDensity(50, ghosts=0.0)
    for number in range(100):
        request(policy, chain(f"c{number % 12}", 10))
    assert len(policy) == 50


def test_uses_and_place_of_a_key_that_was_removed_count_when_it_comes_back() -> None:
    policy = HitDensity(8)
    loyal, once = chain("loyal", 2), chain("once", 2)
    for keys in (loyal, once):
        request(policy, keys)
    for _ in range(3):
        request(policy, loyal)
    before = policy._seen[policy._slots[loyal[0]]] & 7
    for keys in (once, loyal):
        for key in reversed(keys):
            policy.remove(key)
        for key in reversed(keys):
            policy.insert(key)  # Nothing tells anew what follows what.
    assert policy._seen[policy._slots[loyal[0]]] & 7 == before > 0
    assert policy.evict(1, nobody) in ([loyal[1]], [once[1]])
    assert_whole(policy, [loyal, once])


def test_removed_keys_that_never_come_back_are_forgotten() -> None:
    policy = HitDensity(50, ghosts=1.5)
    for key in keys_of(1000):
        policy.insert(key)
        policy.remove(key)
    assert len(policy._removed) == 75


def test_links_of_keys_that_never_come_are_forgotten() -> None:
    policy = HitDensity(10)
    for start in range(0, 100_000, 1000):
        policy.link(keys_of(1000, start))
    assert len(policy._expected) <= 2**12


def test_of_a_prompt_with_more_links_than_are_kept_the_end_leaves_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.policies.hitdensity._FEWEST_LINKS", 64)
    policy = HitDensity(400)
    chains = [chain(name, 150) for name in ("one", "other")]
    for keys in chains:
        request(policy, keys)
    for _ in range(8):
        policy.evict(10, nobody)
        kept = [sum(key in policy for key in keys[:64]) for keys in chains]
        assert kept == [64, 64]


def test_slots_are_used_again() -> None:
    policy = HitDensity(50)
    rng = random.Random(5)
    for number in range(500):
        keys = chain(f"c{number}", rng.randrange(1, 12))
        request(policy, keys)
        if number % 3 == 0:
            policy.remove(keys[0])
    # A parent that was removed under its children holds its slot until they are gone.
    assert len(policy._keys) <= 100


def test_the_same_calls_make_the_same_choices() -> None:
    def run() -> list[bytes]:
        policy = HitDensity(200)
        rng = random.Random(1)
        for _ in range(400):
            request(policy, chain(f"c{rng.randrange(60)}", rng.randrange(1, 20)))
        return policy.evict(100, nobody) or []

    assert run() == run()


def test_a_key_kept_across_a_restart_is_linked_when_its_prompt_comes_back() -> None:
    keys = chain("c", 6)
    policy = HitDensity(6)
    policy.restore(keys)
    policy.link(keys)
    assert policy.evict(3, nobody) == keys[:2:-1]


def test_after_a_restart_no_call_pays_for_all_that_was_found() -> None:
    policy = HitDensity(50_000)
    policy.restore(keys_of(50_000))
    moved = 0
    real = policy._queue

    def counting(slot: int) -> None:
        nonlocal moved
        moved += 1
        real(slot)

    policy._queue = counting  # type: ignore[method-assign]
    most = 0
    for number in range(400):
        before = moved
        assert policy.evict(1, nobody) is not None
        most = max(most, moved - before)
        for key in chain(f"c{number}", 1):
            policy.insert(key)
    assert most <= 8 * 50_000 // 128 + 10


# -- the estimate ----------------------------------------------------------------------


def cell(densities: Densities, kind: int, age: float) -> int:
    from bisect import bisect_right

    return kind * densities.bins + bisect_right(densities.edges, age)


def test_where_nothing_is_known_the_oldest_is_worth_least() -> None:
    densities = Densities(2, 1000)
    order = densities.ascending(())
    ages = [place % densities.bins for place in order]
    assert ages == sorted(ages, reverse=True)


def test_a_class_that_comes_back_is_worth_more_than_one_that_does_not() -> None:
    densities = Densities(2, 1000)
    for _ in range(500):
        densities.reused[cell(densities, 0, 800)] += 1
        densities.ended[cell(densities, 1, 3000)] += 1
    order = densities.ascending(())
    assert order.index(cell(densities, 1, 100)) < order.index(cell(densities, 0, 100))


def test_what_comes_back_after_a_pause_is_worth_more_towards_its_end() -> None:
    densities = Densities(1, 1000)
    densities.reused[cell(densities, 0, 2000)] += 500
    order = densities.ascending(())
    assert order.index(cell(densities, 0, 100)) < order.index(cell(densities, 0, 1900))
    assert order.index(cell(densities, 0, 9000)) < order.index(cell(densities, 0, 100))


def test_time_spent_by_those_still_there_counts() -> None:
    with_many, alone = Densities(2, 1000), Densities(2, 1000)
    for densities in (with_many, alone):
        for kind in (0, 1):
            densities.reused[cell(densities, kind, 500)] += 100
    waiting = [(cell(with_many, 0, 5000), 2000.0)]
    order = with_many.ascending(waiting)
    assert order.index(cell(with_many, 0, 100)) < order.index(cell(with_many, 1, 100))
    assert alone.ascending(()) != order


def test_halving_keeps_the_order_and_makes_room_for_news() -> None:
    densities = Densities(1, 1000)
    densities.reused[3] = 8.0
    densities.ended[5] = 4.0
    densities.halve()
    assert (densities.reused[3], densities.ended[5]) == (4.0, 2.0)


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_the_smallest_tiers_work(capacity: int) -> None:
    policy = HitDensity(capacity)
    for number in range(300):
        request(policy, chain(f"c{number % 5}", 4))
        assert len(policy) <= capacity


def test_a_parent_and_its_child_that_both_had_to_stay_are_evicted_once_each() -> None:
    parent, child, other = keys_of(3)
    policy = HitDensity(8)
    policy.link([parent, child], None)
    for key in (child, parent, other):
        policy.insert(key)
    assert policy.evict(3, {parent, child}.__contains__) is None
    policy.remove(child)
    assert sorted(policy.evict(2, lambda key: False) or ()) == sorted([parent, other])
    assert len(policy) == 0


def test_chains_under_any_protection_are_evicted_once_each() -> None:
    rng = random.Random(5)
    policy = HitDensity(24)
    chains = [[b"chain-%d-%d" % (n, depth) + b"\0\0\0\0" for depth in range(6)] for n in range(12)]
    resident: set[bytes] = set()
    for _ in range(4000):
        chain = rng.choice(chains)
        policy.link(chain, None)
        for key in reversed(chain[: rng.randrange(1, 7)]):
            if key in resident:
                policy.touch(key)
            elif len(resident) < 24:
                policy.insert(key)
                resident.add(key)
        if rng.random() < 0.3 and resident:
            gone = rng.choice(sorted(resident))
            policy.remove(gone)
            resident.discard(gone)
        safe = {key for key in resident if rng.random() < rng.choice((0.0, 0.3, 0.9))}
        victims = policy.evict(rng.randrange(8), safe.__contains__)
        if victims is not None:
            assert len(set(victims)) == len(victims)
            assert set(victims) <= resident - safe
            resident -= set(victims)
        assert len(policy) == len(resident)
