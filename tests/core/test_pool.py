"""The life of a chunk in host memory: the table of `kvstore.core.chunk`, edge by edge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core import HostPool
from kvstore.core.chunk import Chunk, IllegalTransitionError
from policies import create_policy
from tests.core.rig import CountingLRU


def pool_with(state: str) -> tuple[HostPool, Chunk]:
    pool = HostPool(2, create_policy("lru", 2))
    (chunk,) = pool.reserve([b"key"], -1)
    if state != "filling":
        pool.fill(chunk)
    if state == "pinned":
        pool.pin(chunk)
    return pool, chunk


ILLEGAL: list[tuple[str, Callable[[HostPool, Chunk], None]]] = [
    ("filling", HostPool.pin),
    ("filling", HostPool.unpin),
    ("ready", HostPool.fill),
    ("ready", HostPool.discard),
    ("ready", HostPool.unpin),
    ("pinned", HostPool.fill),
    ("pinned", HostPool.discard),
]


@pytest.mark.parametrize(
    ("state", "edge"), ILLEGAL, ids=[f"{edge.__name__}-{state}" for state, edge in ILLEGAL]
)
def test_an_edge_that_the_table_lacks_is_a_mistake_of_the_core(
    state: str, edge: Callable[[HostPool, Chunk], None]
) -> None:
    pool, chunk = pool_with(state)
    before = chunk.status, pool.busy, pool.free
    with pytest.raises(IllegalTransitionError, match=chunk.key.hex()):
        edge(pool, chunk)
    assert (chunk.status, pool.busy, pool.free) == before


@pytest.mark.parametrize("state", ["filling", "pinned"])
def test_who_is_filling_or_pinned_never_leaves(state: str) -> None:
    pool, chunk = pool_with(state)
    pool.begin_step()
    assert pool.make_room(2, shed_unsaved=True) == 1
    assert dict(pool.chunks) == {b"key": chunk}


def test_who_is_ready_leaves_when_room_is_needed() -> None:
    pool, _ = pool_with("ready")
    assert pool.make_room(2, shed_unsaved=False) == 2
    assert not pool.chunks


def test_who_answered_hit_stays_for_the_step() -> None:
    pool, chunk = pool_with("ready")
    chunk.step = pool.step
    assert pool.make_room(2, shed_unsaved=True) == 1
    pool.begin_step()
    assert pool.make_room(2, shed_unsaved=True) == 2


def test_who_waits_for_its_copy_leaves_last_and_only_when_told() -> None:
    pool = HostPool(2, create_policy("lru", 2))
    unsaved, saved = pool.reserve([b"unsaved", b"saved"], -1)
    pool.fill(unsaved)
    pool.fill(saved)
    pool.queued(unsaved, 0)
    assert pool.make_room(2, shed_unsaved=False) == 1
    assert list(pool.chunks) == [b"unsaved"]
    assert pool.make_room(2, shed_unsaved=True) == 2
    assert pool.shed == 1


def test_a_vain_search_is_repeated_only_when_somebody_may_leave_who_could_not_before() -> None:
    policy = CountingLRU(4)
    pool = HostPool(4, policy)
    chunks = pool.reserve([b"hit", b"pinned", b"unsaved", b"hit too"], -1)
    for chunk in chunks:
        pool.fill(chunk)
    hit, pinned, unsaved, hit_too = chunks
    hit.step = hit_too.step = pool.step
    pool.pin(pinned)
    pool.queued(unsaved, 0)
    assert pool.make_room(1, shed_unsaved=False) == 0
    asked = policy.asked
    for _ in range(5):
        assert pool.make_room(1, shed_unsaved=False) == 0
    assert policy.asked == asked
    pool.unpin(pinned)
    assert pool.make_room(1, shed_unsaved=False) == 1
    assert pool.make_room(2, shed_unsaved=False) == 1
    pool.dequeued(unsaved, 0)
    assert pool.make_room(2, shed_unsaved=False) == 2
    assert pool.make_room(3, shed_unsaved=False) == 2
    pool.begin_step()
    assert pool.make_room(4, shed_unsaved=False) == 4


def test_room_that_is_there_costs_nobody_its_place() -> None:
    pool, _ = pool_with("ready")
    assert pool.make_room(1, shed_unsaved=True) == 1
    assert b"key" in pool.chunks


def test_rows_of_a_chain_are_given_in_order() -> None:
    pool = HostPool(4, create_policy("lru", 4))
    keys = [b"a", b"b", b"c"]
    assert [chunk.key for chunk in pool.reserve(keys, -1)] == keys
    assert list(pool.policy.order()) == keys[::-1], "tail first, as everything a policy sees"
