"""ARC as in its paper: what its target learns, and when."""

from __future__ import annotations

from kvstore.policies.arc import ARC
from kvstore.policies.base import HELD, LATER
from kvstore.testing.policy import keys_of, nobody


def one(policy: ARC, key: bytes) -> None:
    """An access as the paper has it."""
    if key in policy:
        policy.touch(key)
        return
    if len(policy) == policy.capacity:
        assert policy.evict(1, nobody, [key])
    policy.insert(key)


def filled() -> tuple[ARC, list[bytes]]:
    """Capacity 4; keys 0 and 1 used twice (T2), 4 and 5 once (T1), 2 and 3 ghosts of T1."""
    keys = keys_of(10)
    policy = ARC(4)
    for key in (keys[0], keys[0], keys[1], keys[1], *keys[2:6]):
        one(policy, key)
    assert list(policy._b1) == keys[2:4]
    return policy, keys


def test_a_key_used_again_is_safe_from_a_scan() -> None:
    policy, keys = filled()
    for key in keys_of(20, 100):
        one(policy, key)
    assert keys[0] in policy
    assert keys[1] in policy


def test_a_ghost_of_t1_that_comes_back_makes_t1_larger_and_enters_t2() -> None:
    policy, keys = filled()
    one(policy, keys[2])
    assert policy._p == 1.0
    assert keys[2] in policy._t2
    assert keys[2] not in policy._b1


def test_it_learns_before_it_evicts_and_only_once() -> None:
    policy, keys = filled()
    assert policy.evict(1, nobody, [keys[2]]) is not None
    assert policy._p == 1.0
    assert policy.evict(1, nobody, [keys[2]]) is not None
    policy.insert(keys[2])
    assert policy._p == 1.0


def test_a_ghost_that_was_to_come_and_did_not_stays_a_ghost() -> None:
    policy, keys = filled()
    assert policy.evict(1, nobody, [keys[2]]) is not None
    assert keys[2] in policy._b1
    assert keys[2] not in policy


def test_a_ghost_of_t2_that_comes_back_makes_t1_smaller() -> None:
    policy, keys = filled()
    for key in (keys[2], keys[3]):
        one(policy, key)
    larger = policy._p
    ghost = next(iter(policy._b2))
    one(policy, ghost)
    assert policy._p < larger
    assert ghost in policy._t2


def test_ghosts_are_never_more_than_residents_may_be() -> None:
    policy = ARC(8)
    keys = keys_of(40)
    for turn in range(2000):
        one(policy, keys[turn * turn * 7 % 40 if turn % 3 else turn % 40])
        assert len(policy._t1) + len(policy._b1) <= 8
        assert len(policy) + len(policy._b1) + len(policy._b2) <= 16


def test_a_run_of_evictions_is_as_one_after_another() -> None:
    """All newcomers: what leaves is the same in one call and in many."""
    (together, _), (apart, _) = filled(), filled()
    new = keys_of(2, 100)
    at_once = together.evict(2, nobody, new)
    for key in new:
        together.insert(key)
    singly = []
    for key in new:
        singly += apart.evict(1, nobody, [key]) or []
        apart.insert(key)
    assert at_once is not None
    assert (set(at_once), together._p) == (set(singly), apart._p)


def test_a_search_of_one_question_at_a_time_comes_to_an_end() -> None:
    policy = ARC(4)
    for key in (b"a", b"b", b"c", b"d"):
        policy.insert(key)
    for _ in range(4):
        asked = 0

        def protected(key: bytes) -> int:
            nonlocal asked
            asked += 1
            return LATER if asked > 1 else False if key == b"d" else HELD

        victims = policy.evict(1, protected, (b"new",))
    assert victims == [b"d"]


def test_ghosts_are_bounded_where_it_held_more_than_its_part() -> None:
    # A tenant's part of a tier, which fills all of it by day and is drained by others at night.
    arc = ARC(10)
    for day in range(20):
        keys = [b"%d %d" % (day, number) for number in range(50)]
        for key in keys:
            arc.insert(key)
            arc.touch(key)
        assert arc.evict(len(arc), lambda key: 0) is not None
    arc.insert(b"last")
    assert len(arc._b1) + len(arc._b2) <= 2 * arc.capacity
