"""Reads that fail: what could not be read is tried again, what is damaged is forgotten."""

from __future__ import annotations

import pytest

from kvstore.core import AskedTier, PeerTier
from kvstore.core.residency.base import TierView
from kvstore.core.residency.index import MOST_FAILURES
from kvstore.types import NO_MOVE, Changes, Completion, RecoveredTier
from tests.core.rig import Rig, chain


def fail_once(rig: Rig, keys: list[bytes], request: str, unread: bool = True) -> None:
    rig.begin(keys, request)
    rig.arrive(failed=keys, unread=keys if unread else ())
    assert rig.ask(keys, request) == 0, "a miss for who asked"
    rig.core.on_request_finished(request)
    rig.step()


def test_an_entry_outlives_a_read_that_failed_in_passing() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=8, on=[keys])
    fail_once(rig, keys, "r0")
    assert rig.resolve(keys, "r1") == 3
    assert rig.stats.tiers[0].failed_reads == 3


def test_damage_is_forgotten_at_once() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=8, on=[keys])
    fail_once(rig, keys, "r0", unread=False)
    assert rig.ask(keys, "r1") == 0
    assert not rig.core.tiers[0].entries


def test_of_a_move_only_the_damaged_are_forgotten() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=8, on=[keys])
    rig.begin(keys)
    rig.arrive(failed=keys[1:], unread=keys[2:])
    assert set(rig.core.tiers[0].entries) == {keys[0], keys[2]}


def test_an_entry_that_cannot_be_read_several_times_in_a_row_is_forgotten() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=8, on=[keys])
    for number in range(MOST_FAILURES):
        assert set(rig.core.tiers[0].entries) == set(keys)
        fail_once(rig, keys, f"r{number}")
    assert not rig.core.tiers[0].entries
    assert not rig.core.tiers[0].index._unread
    assert rig.ask(keys, "later") == 0


def test_reads_in_between_that_go_well_make_the_count_begin_anew() -> None:
    keys = chain("a", 1)
    rig = Rig(rows=1, on=[keys])
    for number in range(3 * MOST_FAILURES):
        fail_once(rig, keys, f"r{number}")
        if number % 2:
            assert rig.resolve(keys, "well") == 1
            rig.core.on_request_finished("well")
            rig.step()
            rig.store(chain("b", 1))
    assert rig.core.tiers[0].entries


def lose(rig: Rig, lost: dict[bytes, int]) -> None:
    """The tier tells that these cannot be read any more."""
    rig.core.poll(rig.now, [Completion(NO_MOVE, [], changes=Changes(lost=[*lost.items()]), tier=0)])


def test_what_the_tier_says_is_lost_is_forgotten_where_it_still_lies() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    slots = dict(rig.core.tiers[0].entries)
    free = rig.stats.tiers[0].free
    lose(rig, {keys[1]: slots[keys[1]], keys[2]: slots[keys[3]], b"no chunk": 0})
    assert set(rig.core.tiers[0].entries) == {keys[0], keys[2], keys[3]}
    assert rig.stats.tiers[0].free == free + 1
    assert rig.core.contains(keys) == [True, False, True, True]


def test_what_is_lost_while_it_is_read_is_forgotten_once_that_has_failed() -> None:
    keys = chain("a", 2)
    rig = Rig(rows=8, on=[keys])
    free = rig.stats.tiers[0].free
    rig.begin(keys)
    lose(rig, dict(rig.core.tiers[0].entries))
    assert rig.stats.tiers[0].free == free, "what is being read is not written to"
    rig.arrive(failed=keys[1:], unread=keys[1:])
    assert set(rig.core.tiers[0].entries) == {keys[0]}
    assert rig.stats.tiers[0].free == free + 1
    assert not rig.core.tiers[0].index._unread


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_nothing_is_remembered_of_an_entry_that_has_left(how: str) -> None:
    keys = chain("a", 1)
    rig = Rig(rows=4, on=[keys], segment_slots=1)
    fail_once(rig, keys, "r")
    tier = rig.core.tiers[0]
    assert tier.index._unread
    if how == "evicted":
        rig.put(chain("b", 1))
    else:
        rig.core.reset()
    rig.settle()
    assert keys[0] not in tier.entries
    assert not tier.index._unread


@pytest.mark.parametrize("kind", ["peer", "store"])
def test_nothing_is_remembered_of_what_others_have_removed(kind: str) -> None:
    keys = chain("a", 4)
    tier: TierView
    if kind == "peer":
        recovered = RecoveredTier("theirs", "disk", [(key, 0) for key in keys], 64, (), 0)
        tier = PeerTier(0, recovered, 64)
    else:
        tier = AskedTier(0, RecoveredTier("store", "remote", [], 1, [], 0), 64)
        tier.index.appear((key, 0) for key in keys)
    for key in keys:
        tier.not_promoted(key, perhaps_whole=True)
    assert set(tier.entries) == {*keys}
    tier.forget(keys[:2])
    tier.index.disappear(keys[2:])
    assert not tier.entries
    assert not tier.index._unread
