"""Forgetting everything while moves are under way."""

from __future__ import annotations

import pytest

from kvstore.core.residency.slots import RETRY_PAUSE
from kvstore.policies import create_policy
from kvstore.types import Op
from tests.core.rig import Rig, chain


def test_after_a_reset_nothing_is_found() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys, keys])
    rig.put(chain("b", 4))
    rig.core.reset()
    assert rig.ask(keys, "r0") == 0
    assert rig.ask(chain("b", 4), "r1") == 0
    assert rig.core._pool.free == 8


def test_a_tier_is_cleared_once_nothing_moves_there_and_given_no_slot_before() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=16, on=[keys])
    (promotion,) = rig.begin(keys)
    rig.core.reset()
    rig.put(chain("b", 3))
    assert rig.wait(1.0) == []
    rig.finish(promotion)
    (clear,) = rig.step()
    assert clear.op is Op.CLEAR
    rig.put(chain("c", 3))
    assert rig.wait(1.0) == []
    rig.finish(clear)
    rig.store(chain("d", 3))
    assert set(rig.core.tiers[0].entries) == set(chain("d", 3))
    assert rig.owned().slots.free == 61


def test_a_tier_that_cannot_be_cleared_is_asked_again_after_a_pause_and_not_used() -> None:
    rig = Rig(rows=8, on=[chain("a", 3)])
    rig.core.reset()
    (clear,) = rig.step()
    rig.finish(clear, segments=[])
    assert rig.wait(RETRY_PAUSE - 0.2) == []
    assert rig.ask(chain("a", 3)) == 0
    (again,) = rig.wait(0.4)
    assert again.op is Op.CLEAR
    rig.finish(again)
    assert not rig.core.tiers[0].clearing


def test_a_tier_that_could_not_grow_is_cleared_at_once() -> None:
    rig = Rig(rows=8, on=[chain("a", 4)], segment_slots=4, max_segments=2)
    (grow,) = rig.step()
    rig.finish(grow, segments=[])
    rig.core.reset()
    (clear,) = rig.step()
    assert clear.op is Op.CLEAR


def test_a_segment_that_is_made_during_a_reset_is_used_afterwards() -> None:
    rig = Rig(rows=8, on=[chain("old", 4)], segment_slots=4, max_segments=2)
    (grow,) = rig.step()
    rig.core.reset()
    rig.end(grow)
    rig.settle()
    assert rig.owned().slots.segments == 2
    assert rig.owned().slots.free == 8


def test_the_end_of_a_load_from_before_is_stray() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=8)
    rig.put(keys)
    rig.load(keys)
    rig.core.reset()
    rig.core.complete_load(keys, "r")
    assert rig.stats.stray == 3


# -- transfers between device and host memory that a reset overtakes ------------------------


def test_a_row_that_a_late_store_may_write_is_given_to_nobody_until_that_is_reported() -> None:
    old, new = chain("old", 3), chain("new", 8)
    rig = Rig(rows=8)
    grant = rig.granted(old, "w")
    late, era = set(grant.rows), rig.core.era
    rig.core.reset()
    again = grant_as_far_as_possible(rig, new)
    assert not late & set(again)
    assert (len(again), rig.core._pool.held) == (5, 3)
    rig.core.complete_store(old[:1], "w", era=era)
    rig.core.complete_store(old[1:], "w", ok=False, era=era)
    assert rig.stats.stray == 0
    assert (rig.core._pool.free, rig.core._pool.held) == (3, 0)


def test_a_row_that_a_late_load_may_read_is_given_to_nobody_until_that_is_reported() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=4)
    rig.put(keys)
    rows = set(rig.load(keys, "r"))
    rig.load(keys[:1], "s")
    era = rig.core.era
    rig.core.reset()
    assert not rows & set(grant_as_far_as_possible(rig, chain("new", 4)))
    rig.core.complete_load(keys, "r", era)
    assert rig.core._pool.held == 1, "two loads read the same row"
    rig.core.complete_load(keys[:1], "s", era)
    assert rig.core._pool.held == 0
    assert rig.stats.stray == 0


def test_ends_of_transfers_of_one_key_and_one_request_are_told_apart_by_their_era() -> None:
    keys = chain("a", 2)
    rig = Rig(rows=8)
    eras, rows = [], []
    for _ in range(3):
        grant = rig.granted(keys, "w")
        eras.append(rig.core.era)
        rows.append(set(grant.rows))
        rig.core.reset()
    assert not rows[0] & rows[1] | rows[1] & rows[2] | rows[0] & rows[2]
    grant = rig.granted(keys, "w")
    rig.core.complete_store(keys, "w", era=eras[1])
    assert not rig.in_host(keys[0]), "an old store's end is not that of the new one"
    assert (rig.core._pool.held, rig.core._pool.free) == (4, 2)
    rig.core.complete_store(keys, "w", era=rig.core.era)
    assert rig.in_host(keys[0])
    assert rig.core._pool.held == 4
    for era in (eras[0], eras[2]):
        rig.core.complete_store(keys, "w", era=era)
    assert rig.core._pool.held == 0
    assert rig.stats.stray == 0


def test_an_end_that_comes_twice_frees_nothing_twice() -> None:
    keys = chain("a", 2)
    rig = Rig(rows=4)
    rig.granted(keys, "w")
    rig.core.reset()
    rig.core.complete_store(keys, "w", era=0)
    rig.core.complete_store(keys[:1], "w", era=0)
    assert rig.stats.stray == 1
    assert rig.core._pool.free == 4


def test_a_row_that_a_load_and_a_copy_to_a_tier_read_is_free_when_both_have_ended() -> None:
    keys = chain("a", 1)
    rig = Rig(rows=2, on=[()])
    rig.put(keys)
    (copy,) = rig.step()
    rig.load(keys, "r")
    rig.core.reset()
    rig.core.complete_load(keys, "r", 0)
    assert rig.core._pool.held == 1
    rig.finish(copy)
    assert rig.core._pool.held == 0


def grant_as_far_as_possible(rig: Rig, keys: list[bytes]) -> list[int]:
    """Rows of a store that is offered twice: the first time it may be deferred."""
    for _ in range(2):
        grant = rig.core.prepare_store(keys, "late")
        if grant is not None:
            return grant.rows
    raise AssertionError("a store is deferred once")


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "hit-density"])
def test_a_row_that_is_held_costs_a_store_its_tail_and_no_chunk_in_the_middle(policy: str) -> None:
    keys, late = chain("a", 4), chain("late", 1)
    whole = {"whole_stores": True} if policy == "hit-density" else {}
    rig = Rig(rows=4, policy=create_policy(policy, 4, **whole))
    rig.put(late)
    assert rig.ask(late, "r") == 1
    rig.core.prepare_load(late, "r")
    rig.core.reset()
    assert rig.core._pool.held == 1
    for _ in range(3):
        grant = rig.core.prepare_store(keys, "w")
        if grant is not None:
            rig.core.complete_store(grant.keys, "w")
        rig.step()
        rig.step()
    assert rig.ask(keys) == 3


def test_a_tier_that_is_closed_keeps_no_change_waiting() -> None:
    rig = Rig(rows=8, on=[chain("a", 30)], segment_slots=8, segments=4, relocation_chunks=4)
    rig.core.limit_segments(0, [2], create_policy("lru", 16))
    rig.core.reset(close_tiers=True)
    rig.core.rewrite(0, [0, 1, 2])
    rig.settle(1.0)
    assert (rig.core.changing, rig.core.rewrites, rig.core.unrewritten) == (0, 0, 3)
    assert not rig.core.needs_steps


def test_a_tier_that_is_closed_does_not_grow() -> None:
    rig = Rig(rows=8, on=[chain("held", 7)], segment_slots=8, max_segments=4)
    rig.core.reset(close_tiers=True)
    rig.wait(10.0)
    assert not rig.moves


def test_tiers_that_are_closed_take_part_in_nothing_whatever_was_under_way() -> None:
    held, new = chain("held", 6), chain("new", 4)
    rig = Rig(rows=16, on=[held], segment_slots=8, max_segments=4)
    grant = rig.granted(new, "s")
    rig.core.complete_store(grant.keys, "s")
    assert rig.core.lookup_prefix(held, "r") is None
    rig.step()
    assert {move.op for move in rig.moves} >= {Op.PROMOTE, Op.CASCADE}
    rig.core.reset(close_tiers=True)
    assert rig.core.unsaved == 0
    rig.settle()
    assert not rig.core.in_flight
    assert rig.stats.free_rows == 16
    assert rig.core.lookup_prefix(held, "again") == 0
    assert not rig.core.clearing
    grant = rig.granted(chain("later", 4), "t")
    rig.core.complete_store(grant.keys, "t")
    assert rig.core._prefetches.begin(held) == 0
    rig.settle()
    rig.wait(10.0)
    assert not rig.moves
    assert rig.stats.tiers[0].closed
    assert rig.core.lookup_prefix(chain("later", 4), "u") == 4
