"""Settings: policies and sizes change a part in each step, and nobody notices."""

from __future__ import annotations

import itertools

import pytest

from kvstore.core.settings import MOST_CHANGES
from kvstore.policies import create_policy
from kvstore.policies.migration import Migration
from kvstore.types import Op
from tests.core.rig import Rig, chain

A, B = chain("a", 4), chain("b", 4)


def in_host(rig: Rig, keys: list[bytes]) -> int:
    return sum(map(rig.in_host, keys))


def test_a_policy_is_replaced_a_part_in_each_step() -> None:
    keys = chain("long", 3 * MOST_CHANGES)
    rig = Rig(rows=len(keys), on=())
    rig.put(keys)
    rig.settle()
    rig.core.set_policy(None, create_policy("fifo", len(keys)))
    pool = rig.core._pool
    left = [rig.core.changing]
    while rig.core.changing:
        rig.step()
        left.append(rig.core.changing)
    gone = [before - after for before, after in itertools.pairwise(left)]
    # Two policies of LRU's cost are at work meanwhile.
    assert max(gone) == MOST_CHANGES // 2
    assert pool.policy.name == "fifo"
    assert len(pool.policy) == len(keys)
    for _ in range(100):
        # What the old policy remembers is freed a part at a time, too.
        rig.step()
    assert not rig.core.behind


def test_what_was_cold_for_the_old_policy_leaves_first_for_the_new() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    rig.put(B)
    rig.ask(A)
    rig.load(A)
    rig.core.complete_load(A, "r")
    rig.settle()
    rig.core.set_policy(None, create_policy("arc", 8))
    rig.put(chain("c", 2))
    assert (in_host(rig, A), in_host(rig, B)) == (4, 2)
    rig.settle()
    rig.put(chain("d", 2))
    assert (in_host(rig, A), in_host(rig, B)) == (4, 0)


def test_what_is_read_at_that_moment_stays_until_it_is_free() -> None:
    rig = Rig(rows=4, on=())
    rig.put(A)
    rig.ask(A)
    rig.load(A)
    # The old policy has met them: they are set aside there.
    assert rig.core.prepare_store(B, "w") is None
    rig.core.set_policy(None, create_policy("lru", 4))
    rig.settle()
    assert rig.core.prepare_store(B, "w") is None
    rig.core.complete_load(A, "r")
    rig.settle()
    rig.put(B)
    assert in_host(rig, B) == 4


def test_a_policy_may_be_replaced_again_before_that_is_over() -> None:
    keys = chain("long", 2 * MOST_CHANGES)
    rig = Rig(rows=len(keys), on=())
    rig.put(keys)
    for name in ("arc", "sieve", "hit-density"):
        rig.core.set_policy(None, create_policy(name, len(keys)))
        rig.step()
    for _ in range(100):
        rig.step()
    assert rig.core._pool.policy.name == "hit-density"
    assert len(rig.core._pool.policy) == len(keys)


def test_a_reset_ends_what_goes_over() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    rig.core.set_policy(None, create_policy("arc", 8))
    rig.core.reset()
    rig.settle()
    assert not isinstance(rig.core._pool.policy, Migration)
    rig.put(B)
    assert in_host(rig, B) == 4


def test_rows_are_given_up_and_come_back() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    rig.put(B)
    rig.core.limit_rows(4)
    rig.settle()
    assert (rig.stats.rows, in_host(rig, A), in_host(rig, B)) == (4, 0, 4)
    rig.put(A)
    assert (rig.stats.chunks, in_host(rig, A)) == (4, 4)
    rig.core.limit_rows(8)
    assert rig.stats.rows == 8
    rig.put(B)
    assert rig.stats.chunks == 8


def test_rows_in_use_are_given_up_when_they_are_free() -> None:
    rig = Rig(rows=4, on=())
    rig.put(A)
    rig.ask(A)
    rig.load(A)
    rig.core.limit_rows(1)
    for _ in range(3):
        rig.step()
    assert rig.stats.rows == 4
    assert not rig.core.behind, "it would be asked again and again"
    assert rig.core.needs_steps
    rig.core.complete_load(A, "r")
    rig.settle()
    assert (rig.stats.rows, rig.stats.chunks) == (1, 1)


def test_after_a_reset_rows_that_were_given_up_stay_so() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    rig.core.limit_rows(3)
    rig.settle()
    rig.core.reset()
    rig.settle()
    assert (rig.stats.rows, rig.stats.free_rows) == (3, 3)
    rig.core.limit_rows(8)
    assert rig.stats.free_rows == 8


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (100, 8)])
def test_rows_are_at_least_one_and_at_most_what_there_is(asked: int, given: int) -> None:
    rig = Rig(rows=8, on=())
    rig.core.limit_rows(asked)
    rig.settle()
    assert rig.stats.rows == given


def test_pins_follow_the_size() -> None:
    rig = Rig(rows=8, on=())
    rig.core.limit_rows(4)
    rig.settle()
    assert rig.core.pin([*A, *B], rig.now + 100.0) == 2
    rig.core.limit_rows(8)
    assert rig.core.pin([*A, *B], rig.now + 100.0) == 4


def test_a_tier_that_is_too_large_empties_segments_and_keeps_what_was_used_last() -> None:
    keys = chain("long", 32)
    rig = Rig(rows=8, on=(keys,), segment_slots=8, segments=4, max_segments=4, relocation_chunks=4)
    tier = rig.core.tiers[0]
    rig.core.touch(keys[::2])
    rig.core.limit_segments(0, 2, lambda slots: create_policy("lru", slots))
    assert rig.core.changing
    assert tier.index.policy.capacity == 16
    kinds = set()
    for _ in range(100):
        rig.step()
        kinds |= {move.op for move in rig.moves}
        for move in list(rig.moves):
            rig.end(move)
        if not rig.core.changing:
            break
    assert kinds == {Op.LIST, Op.RELOCATE, Op.SHRINK}
    stats = rig.stats.tiers[0]
    assert (stats.segments, stats.max_segments, stats.chunks) == (2, 2, 16)
    assert set(tier.entries) == set(keys[::2])
    assert len(set(tier.entries.values())) == 16
    rig.core.limit_segments(0, 4, lambda slots: create_policy("lru", slots))
    assert (rig.core.changing, rig.stats.tiers[0].room) == (32 if rig.core.changing else 0, 16)
