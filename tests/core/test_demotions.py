"""Demotions: chunks leave host memory once a tier has them, unless somebody uses them."""

from __future__ import annotations

import math

import pytest

from kvstore.types import Flow, Op
from tests.core.rig import Rig, chain, host_of

A, B = chain("a", 4), chain("b", 4)


def test_what_is_still_being_stored_goes_when_it_is_whole_and_copied() -> None:
    rig = Rig(rows=8)
    rig.granted(A, "w")
    rig.core._demotions.begin(A, rig.now)
    rig.settle()
    assert rig.stats.chunks == 4
    rig.core.complete_store(A, "w")
    rig.settle()
    assert (rig.stats.chunks, rig.stats.demoted) == (0, 4)


def test_without_a_tier_nothing_leaves() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    assert rig.core._demotions.begin(A, rig.now) == 0
    rig.settle()
    assert host_of(rig, A) == 4


def test_a_load_keeps_the_chunk_and_so_does_a_pin() -> None:
    rig = Rig(rows=8)
    rig.store(A)
    rig.core._pins.begin(A[:1], math.inf)
    assert rig.ask(A[1:3]) == 2
    assert rig.core._demotions.begin(A, rig.now) == 3
    rig.load(A[1:3])
    rig.settle()
    assert [rig.in_host(key) for key in A] == [True, True, True, False]
    rig.core.complete_load(A[1:3], "r")
    rig.settle()
    assert [rig.in_host(key) for key in A] == [True, True, True, False]


def test_a_prefetch_keeps_what_has_not_left_yet() -> None:
    rig = Rig(rows=8)
    rig.put(A)
    assert rig.core.demote(A, rig.now) == 4
    rig.step()
    (copy,) = rig.under_way(Op.CASCADE)
    rig.core.prefetch(A)
    rig.end(copy)
    rig.settle()
    assert (host_of(rig, A), rig.stats.demoted) == (4, 0)


def test_what_is_loaded_at_that_moment_goes_afterwards() -> None:
    rig = Rig(rows=8)
    rig.store(A)
    rig.ask(A)
    rig.load(A)
    rig.core._demotions.begin(A, rig.now)
    rig.settle()
    assert host_of(rig, A) == 4
    rig.core.complete_load(A, "r")
    rig.settle()
    assert host_of(rig, A) == 0


def test_many_leave_over_some_steps_and_a_reset_forgets_them() -> None:
    keys = chain("long", 1000)
    rig = Rig(rows=1000, segment_slots=2000, in_flight=1000)
    rig.store(keys)
    rig.core._demotions.begin(keys, rig.now)
    rig.step()
    assert 0 < host_of(rig, keys) < 1000
    assert rig.core.behind
    while rig.core.behind:
        rig.step()
    assert host_of(rig, keys) == 0
    rig.put(A)
    rig.core._demotions.begin(A, rig.now)
    rig.core.reset()
    assert not rig.core._demotions


def test_what_has_come_anew_since_stays() -> None:
    rig = Rig(rows=8)
    rig.put(A)
    rig.core._demotions.begin(A, rig.now)
    rig.core.remove(A)
    rig.settle()
    rig.store(A)
    assert host_of(rig, A) == 4


@pytest.mark.parametrize("flow", list(Flow))
@pytest.mark.parametrize("hint", [False, True])
def test_what_is_being_stored_leaves_once_it_is_copied(flow: Flow, hint: bool) -> None:
    keys = chain("p", 3)
    rig = Rig(8, segment_slots=64, flow=flow)
    rig.core.on_new_request("r", params={"kvstore": {"demote": hint}})
    grant = rig.granted(keys, "r")
    rig.core.on_request_finished("r")
    if not hint:
        assert rig.core.demote(keys, rig.now) == 3
        assert rig.core.demote(keys, rig.now) == 3, "they are still to leave"
    rig.core.complete_store(grant.keys, "r")
    rig.run(1.0)
    assert all(key in rig.owned().entries for key in keys)
    assert not any(map(rig.in_host, keys))
