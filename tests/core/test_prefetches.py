"""Prefetches: chunks that come while nobody waits, and are held by nobody."""

from __future__ import annotations

import pytest

from kvstore.core.hints import Hints
from kvstore.types import Op
from tests.core.rig import Rig, chain, host_of

A, B = chain("a", 8), chain("b", 8)


def test_it_stops_at_the_first_chunk_that_is_nowhere_and_at_half_of_host_memory() -> None:
    rig = Rig(rows=16, on=([*A[:3], *A[4:]],))
    assert rig.core._prefetches.begin(A) == 3
    small = Rig(rows=8, on=(A,))
    assert small.core._prefetches.begin(A) == 4
    assert small.core._prefetches.begin(A) == 4
    small.settle()
    assert host_of(small, A) == 4
    assert Rig(rows=8, on=()).core._prefetches.begin(A) == 0


def test_what_is_in_host_memory_is_not_fetched_again() -> None:
    rig = Rig(rows=16, on=(A,))
    rig.resolve(A[:4])
    rig.core.on_request_finished("r")
    assert rig.core._prefetches.begin(A) == 4
    rig.settle()
    assert (host_of(rig, A), rig.stats.prefetched) == (8, 4)


def test_it_comes_in_portions_and_whoever_asks_meanwhile_goes_first() -> None:
    rig = Rig(rows=32, on=([*A, *B],))
    assert rig.core._prefetches.begin(A) == 8
    rig.step()
    assert rig.promotion.keys == A[:4]
    rig.begin(B)
    asked = rig.under_way(Op.PROMOTE)[1]
    assert asked.keys == B
    rig.end(rig.under_way(Op.PROMOTE)[0])
    rig.finish(asked)
    assert rig.ask(B) == 8
    rig.settle()
    assert host_of(rig, A) == 8


def test_who_asks_for_what_is_being_prefetched_waits_for_that() -> None:
    rig = Rig(rows=32, on=(A,))
    rig.core._prefetches.begin(A[:4])
    rig.step()
    move = rig.promotion
    rig.begin(A[:4])
    assert rig.moves == [move]
    rig.finish(move)
    assert rig.ask(A[:4]) == 4


def test_it_displaces_what_the_policy_gives_up_but_no_lease_and_no_hit() -> None:
    rig = Rig(rows=8, on=([*A, *B],))
    rig.resolve(B, "held")
    rig.core._prefetches.begin(A)
    rig.settle()
    assert (host_of(rig, B), host_of(rig, A)) == (8, 0)
    rig.core.on_request_finished("held")
    rig.settle()
    assert host_of(rig, A) == 4


def test_a_chunk_that_waits_for_its_copy_is_not_displaced() -> None:
    rig = Rig(rows=4, on=(A,), in_flight=1)
    rig.put(chain("new", 4))
    rig.core._prefetches.begin(A)
    rig.step()
    rig.step()
    assert not rig.under_way(Op.PROMOTE)
    assert rig.stats.shed == 0
    rig.settle()
    assert host_of(rig, A) > 0


def test_what_finds_no_row_holds_no_chunk_that_is_here() -> None:
    rig = Rig(rows=16, on=(A,), in_flight=1)
    rig.put(chain("new", 15))
    rig.core._prefetches.begin(A[:2])
    rig.begin(A[1:2], "other")
    rig.end(rig.under_way(Op.PROMOTE)[0])
    for _ in range(4):
        rig.step()
    assert rig.ask(A[1:2], "other") == 1
    rig.core.on_request_finished("other")
    for _ in range(4):
        rig.step()
    assert not rig.in_host(A[0])
    rig.settle()
    assert (host_of(rig, A[:2]), rig.stats.busy_rows) == (2, 0)


def test_a_tier_that_does_not_answer_is_not_waited_for() -> None:
    rig = Rig(rows=32, on=(A,), deadline=1.0)
    rig.core._prefetches.begin(A)
    rig.step()
    rig.wait(20.0)
    assert rig.core.tiers[0].health.stalled
    assert rig.core._prefetches.begin(A[4:]) == 0
    rig.settle()
    assert not rig.core._prefetches


def test_a_chunk_that_cannot_be_read_is_passed_over() -> None:
    rig = Rig(rows=32, on=(A,))
    rig.core._prefetches.begin(A)
    rig.step()
    rig.end(rig.promotion, failed=[A[1]])
    rig.settle()
    assert (host_of(rig, A), rig.stats.busy_rows) == (7, 0)
    assert not rig.core._prefetches


def test_a_removal_takes_its_keys_off_the_list_and_a_reset_takes_all() -> None:
    rig = Rig(rows=32, on=(A,))
    rig.core._prefetches.begin(A)
    rig.core.remove(A[4:])
    assert not rig.core._prefetches.is_fetching(A[4:])
    rig.settle()
    assert (host_of(rig, A), rig.stats.chunks) == (4, 4)
    for steps in range(2):
        late = Rig(rows=32, on=(A,))
        late.core._prefetches.begin(A)
        for _ in range(steps):
            late.step()
        late.core.reset()
        assert not late.core._prefetches.is_fetching()
        late.settle()
        assert (late.stats.chunks, late.core._pool.free) == (0, 32)


def test_what_is_planned_comes_when_its_time_has_come() -> None:
    rig = Rig(rows=32, on=(A,))
    assert rig.core._prefetches.plan(A, rig.now + 10.0)
    rig.wait(5.0)
    assert not rig.moves
    rig.wait(6.0)
    assert rig.under_way(Op.PROMOTE)
    rig.settle()
    assert host_of(rig, A) == 8
    assert not rig.core._prefetches
    rig.core._prefetches.plan(A, rig.now + 10.0)
    rig.core.reset()
    assert not rig.core._prefetches


def test_of_what_is_planned_a_chunk_that_is_nowhere_is_passed_over() -> None:
    rig = Rig(rows=32, on=([*A[:3], *A[4:]],))
    rig.core._prefetches.plan(A, rig.now)
    rig.settle()
    assert host_of(rig, A) == 7


def test_plans_are_bounded() -> None:
    rig = Rig(rows=8, on=(A,))
    keys = chain("x", 2**16)
    assert sum(rig.core._prefetches.plan(keys, rig.now + 1.0) for _ in range(20)) == 16


def test_a_tier_that_does_not_answer_keeps_no_other_ones_chunks_waiting() -> None:
    hung, other = chain("x", 4), chain("y", 4)
    rig = Rig(rows=32, on=[hung, other])
    assert rig.core.prefetch(hung) == 4
    rig.step(0.1)
    silent = list(rig.moves)
    assert rig.core.prefetch(other) == 4
    for _ in range(3000):
        rig.step(0.1)
        for move in list(rig.moves):
            if move not in silent:
                rig.end(move)
        if all(map(rig.in_host, other)):
            break
    assert all(map(rig.in_host, other))


def test_what_a_tier_has_that_does_not_answer_is_fetched_when_it_does() -> None:
    keys = chain("x", 32)
    rig = Rig(rows=64, on=[keys])
    assert rig.core.prefetch(keys) == 32
    for _ in range(60):
        rig.step(0.1)
    assert rig.core.tiers[0].health.stalled
    assert rig.core.is_prefetching()
    rig.run(10.0)
    assert all(map(rig.in_host, keys))


@pytest.mark.parametrize("planned", [False, True])
def test_what_a_congested_tier_has_is_fetched_when_it_is_not_any_more(planned: bool) -> None:
    keys, asked, slow = chain("x", 32), chain("y", 16), chain("z", 2)
    rig = Rig(rows=64, on=[[*keys, *asked, *slow]], deadline=100.0, max_wait=2.0)
    assert rig.ask(slow, "slow") is None
    rig.step(1.5)
    rig.arrive()
    before = keys[:8] if planned else keys
    assert rig.core.prefetch(before) == len(before)
    if planned:
        assert rig.core.follow(Hints(prefetch_after_s=0.25), keys, rig.now) == 0
    assert rig.ask(asked) is None
    rig.step(0.1)
    first, ahead = rig.under_way(Op.PROMOTE)
    assert (len(first.keys), len(ahead.keys)) == (16, 8)
    rig.end(ahead)
    for _ in range(3):
        rig.step(0.1)
    assert rig.stats.tiers[0].congested
    rig.end(first)
    rig.run(4.0)
    assert all(map(rig.in_host, keys))


def test_what_a_tier_has_that_is_away_is_in_nobodys_way() -> None:
    away, here = chain("x", 16), chain("y", 16)
    rig = Rig(rows=32, on=[away, here], deadline=1e9)
    assert rig.core.prefetch(away) == 16
    assert rig.core.tiers[0].health.failed(Op.PROMOTE, 1e9, "its server is gone")
    for _ in range(16):
        rig.step(0.05)
    assert rig.core.prefetch(here) == 16
    rig.settle(0.05)
    assert all(map(rig.in_host, here))
