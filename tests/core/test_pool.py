"""Rows of host memory, and who leaves them."""

from __future__ import annotations

import pytest

from kvstore.core import HostPool
from kvstore.core.cascade import Cascades
from kvstore.core.chunk import Chunk
from kvstore.core.eviction import Room, Victims
from kvstore.core.step_budget import Budget
from kvstore.policies import EvictionPolicy, create_policy
from tests.core.rig import CountingLRU


class Memory:
    """A pool, and the room in it, without tiers."""

    def __init__(self, rows: int, policy: EvictionPolicy | None = None) -> None:
        self.pool = HostPool(rows, create_policy("lru", rows) if policy is None else policy)
        budget = Budget()
        self.victims = Victims(self.pool, budget)
        cascades = Cascades(self.pool, [], lambda message: None, budget)
        self.room = Room(self.pool, self.victims, cascades, budget)

    def make(self, count: int, *, shed_unsaved: bool) -> int:
        return self.room.make(count, 0.0, shed_unsaved=shed_unsaved)

    def begin_step(self) -> None:
        self.pool.begin_step()


def memory_with(state: str) -> tuple[Memory, Chunk]:
    memory = Memory(2)
    (chunk,) = memory.pool.reserve([b"key"], -1)
    if state != "filling":
        memory.pool.fill([chunk])
    if state == "pinned":
        memory.pool.pin([chunk])
    return memory, chunk


@pytest.mark.parametrize("state", ["filling", "pinned"])
def test_who_is_filling_or_pinned_never_leaves(state: str) -> None:
    memory, chunk = memory_with(state)
    memory.begin_step()
    assert memory.make(2, shed_unsaved=True) == 1
    assert dict(memory.pool.chunks) == {b"key": chunk}


def test_who_is_ready_leaves_when_room_is_needed() -> None:
    memory, _ = memory_with("ready")
    assert memory.make(2, shed_unsaved=False) == 2
    assert not memory.pool.chunks


def test_who_answered_hit_stays_for_the_step() -> None:
    memory, chunk = memory_with("ready")
    memory.pool.keep([chunk.key])
    assert memory.make(2, shed_unsaved=True) == 1
    memory.begin_step()
    assert memory.make(2, shed_unsaved=True) == 2


def test_who_waits_for_its_copy_leaves_last_and_only_when_told() -> None:
    memory = Memory(2)
    unsaved, saved = memory.pool.reserve([b"unsaved", b"saved"], -1)
    memory.pool.fill([unsaved, saved])
    memory.pool.queue([unsaved], 0)
    assert memory.make(2, shed_unsaved=False) == 1
    assert list(memory.pool.chunks) == [b"unsaved"]
    assert memory.make(2, shed_unsaved=True) == 2
    assert memory.pool.shed == 1


def test_a_vain_search_is_repeated_only_when_somebody_may_leave_who_could_not_before() -> None:
    policy = CountingLRU(4)
    memory = Memory(4, policy)
    pool = memory.pool
    chunks = pool.reserve([b"hit", b"pinned", b"unsaved", b"hit too"], -1)
    pool.fill(chunks)
    hit, pinned, unsaved, hit_too = chunks
    pool.keep([hit.key, hit_too.key])
    pool.pin([pinned])
    pool.queue([unsaved], 0)
    assert memory.make(1, shed_unsaved=False) == 0
    asked = policy.asked
    for _ in range(5):
        assert memory.make(1, shed_unsaved=False) == 0
    assert policy.asked == asked
    pool.unpin([pinned])
    assert memory.make(1, shed_unsaved=False) == 1
    assert memory.make(2, shed_unsaved=False) == 1
    pool.dequeue(unsaved, 0)
    assert memory.make(2, shed_unsaved=False) == 2
    assert memory.make(3, shed_unsaved=False) == 2
    memory.begin_step()
    assert memory.make(4, shed_unsaved=False) == 4


def test_room_that_is_there_costs_nobody_its_place() -> None:
    memory, _ = memory_with("ready")
    assert memory.make(1, shed_unsaved=True) == 1
    assert b"key" in memory.pool.chunks


def test_rows_of_a_chain_are_given_in_order() -> None:
    pool = Memory(4).pool
    keys = [b"a", b"b", b"c"]
    assert [chunk.key for chunk in pool.reserve(keys, -1)] == keys
    assert list(pool.policy.order()) == keys[::-1], "tail first, as everything a policy sees"
