"""Settings: policies and sizes change a part in each step, and nobody notices."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest

from kvstore.core.host import HostPool
from kvstore.core.settings import MOST_CHANGES
from kvstore.policies import create_policy
from kvstore.policies.migration import Migration
from kvstore.types import Op
from tests.core.rig import Rig, chain, host_of

A, B = chain("a", 4), chain("b", 4)


def test_a_policy_is_replaced_a_part_in_each_step() -> None:
    keys = chain("long", 3 * MOST_CHANGES)
    rig = Rig(rows=len(keys), on=())
    rig.store(keys)
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
    rig.use(A)
    rig.settle()
    rig.core.set_policy(None, create_policy("arc", 8))
    rig.put(chain("c", 2))
    assert (host_of(rig, A), host_of(rig, B)) == (4, 2)
    rig.settle()
    rig.put(chain("d", 2))
    assert (host_of(rig, A), host_of(rig, B)) == (4, 0)


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
    assert host_of(rig, B) == 4


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
    assert host_of(rig, B) == 4


def test_what_could_not_go_on_goes_on_after_a_reset() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    rig.put(B)
    rig.load([*A, *B])
    rig.core.limit_rows(4)
    rig.settle()
    assert not rig.core.behind, "all rows are in use"
    rig.core.reset()
    assert rig.core.behind


def test_rows_are_given_up_and_come_back() -> None:
    rig = Rig(rows=8, on=())
    rig.put(A)
    rig.put(B)
    rig.core.limit_rows(4)
    rig.settle()
    assert (rig.stats.rows, host_of(rig, A), host_of(rig, B)) == (4, 0, 4)
    rig.put(A)
    assert (rig.stats.chunks, host_of(rig, A)) == (4, 4)
    rig.core.limit_rows(8)
    assert rig.stats.rows == 8
    rig.put(B)
    assert rig.stats.chunks == 8


def test_a_part_of_the_rows_is_kept_free_however_few_there_are() -> None:
    pool = HostPool(100, create_policy("lru", 100), reserve=3)
    assert pool.ahead == 3
    pool.withhold(99)
    assert (pool.rows, pool.ahead) == (1, 1)


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
    rig.core.limit_segments(0, [2], create_policy("lru", 16))
    assert rig.core.changing
    assert tier.index.policy.capacity == 16
    kinds = set()
    for _ in range(100):
        rig.step()
        kinds |= {move.op for move in rig.moves}
        rig.end_all()
        if not rig.core.changing:
            break
    assert kinds == {Op.LIST, Op.RELOCATE, Op.SHRINK}
    stats = rig.stats.tiers[0]
    assert (stats.segments, stats.max_segments, stats.chunks) == (2, 2, 16)
    assert set(tier.entries) == set(keys[::2])
    assert len(set(tier.entries.values())) == 16
    rig.core.limit_segments(0, [4], create_policy("lru", 32))
    assert (rig.core.changing, rig.stats.tiers[0].room) == (32 if rig.core.changing else 0, 16)


def shrinking(keys: list[bytes], **more: Any) -> Rig:
    """A tier of four segments of eight chunks."""
    return Rig(
        rows=16,
        on=(keys,),
        segment_slots=8,
        segments=4,
        max_segments=4,
        relocation_chunks=4,
        **more,
    )


def go_on(rig: Rig, *, steps: int = 60, but: Collection[Op] = (), **how: Any) -> None:
    """Steps in which all moves end but those of some kinds."""
    for _ in range(steps):
        rig.step(0.01)
        for move in list(rig.moves):
            if move.op not in but:
                rig.end(move, **(how if move.op is Op.LIST else {}))


def test_a_segment_is_kept_while_chunks_of_it_are_read() -> None:
    keys = chain("long", 20)
    rig = shrinking(keys, deadline=60.0, max_wait=60.0)
    rig.ask(keys[16:])
    rig.step()
    (reading,) = rig.under_way(Op.PROMOTE)
    rig.core.limit_segments(0, [1], create_policy("lru", 8))
    go_on(rig, but=[Op.PROMOTE])
    entries = rig.core.tiers[0].entries
    assert [entries[key] for key in reading.keys] == reading.slots
    rig.end(reading)
    go_on(rig)
    stats = rig.stats.tiers[0]
    assert (rig.core.changing, stats.segments, stats.chunks) == (0, 1, 8)
    assert (stats.corrupt, stats.failed_reads) == (0, 0)


def test_chunks_that_are_written_to_a_surplus_segment_are_copied_out_of_it() -> None:
    keys = chain("long", 24)
    rig = shrinking(keys)
    rig.put(A)
    rig.step()
    (writing,) = rig.under_way(Op.CASCADE)
    rig.core.limit_segments(0, [3], create_policy("lru", 24))
    go_on(rig, but=[Op.CASCADE])
    rig.end(writing)
    go_on(rig)
    stats = rig.stats.tiers[0]
    assert (rig.core.changing, stats.segments) == (0, 3)
    assert set(rig.core.tiers[0].entries) == {*keys[4:], *A}


def test_a_chunk_with_a_damaged_record_leaves_with_its_segment() -> None:
    keys = chain("long", 20)
    rig = shrinking(keys)
    rig.core.limit_segments(0, [2], create_policy("lru", 16))
    go_on(rig, unlisted=keys[17:19])
    stats = rig.stats.tiers[0]
    assert (rig.core.changing, stats.segments, stats.corrupt) == (0, 2, 2)
    assert set(rig.core.tiers[0].entries) == {*keys[2:17], keys[19]}


def test_segments_go_from_the_device_that_has_too_many() -> None:
    rig = shrinking(chain("long", 4), stripes=2)
    rig.core.limit_segments(0, [2, 1], create_policy("lru", 24))
    go_on(rig)
    assert rig.owned().slots._segments in ({0, 2, 1}, {0, 2, 3})
    rig.core.limit_segments(0, [1, 2], create_policy("lru", 24))
    go_on(rig)
    held = [segment % 2 for segment in rig.owned().slots._segments]
    assert held.count(0) == 1
    assert held.count(1) <= 2


def test_of_policies_that_are_set_one_after_the_other_the_last_one_stays() -> None:
    keys = chain("long", 2 * MOST_CHANGES)
    rig = Rig(rows=len(keys), on=())
    rig.store(keys)
    for _ in range(200):
        for name in ("fifo", "arc", "s3-fifo"):
            rig.core.set_policy(None, create_policy(name, len(keys)))
        rig.step()
        policy = rig.core._pool.policy
        assert not isinstance(policy, Migration) or not isinstance(policy.old, Migration)
        assert rig.core.changing
    while rig.core.changing:
        rig.step()
    assert rig.core._pool.policy.name == "s3-fifo"
    assert len(rig.core._pool.policy) == len(keys)


def test_a_tier_that_becomes_smaller_while_nothing_can_be_written_forgets_nothing() -> None:
    keys = chain("k", 64)
    rig = Rig(rows=4, on=(keys,), segment_slots=8, segments=8, relocation_chunks=4)
    rig.core.remove([key for number, key in enumerate(keys) if number % 4])
    rig.settle(0.1)
    rig.core.limit_segments(0, [4], create_policy("lru", 32))
    for number in range(4000):
        for move in rig.step(1.0):
            failed = move.keys if move.op is Op.RELOCATE and number < 2500 else []
            rig.end(move, failed=failed, unread=failed)
        if not rig.core.changing:
            break
    assert (rig.core.changing, rig.owned().slots.segments) == (0, 4)
    assert len(rig.owned().entries) == 16


def test_a_tier_of_nothing_that_can_be_read_becomes_smaller_in_the_end() -> None:
    keys = chain("k", 16)
    rig = Rig(rows=4, on=(keys,), segment_slots=8, segments=2, relocation_chunks=8)
    rig.core.remove([key for number, key in enumerate(keys) if number % 8 != 7])
    rig.settle(0.1)
    rig.core.limit_segments(0, [1], create_policy("lru", 8))
    for _ in range(4000):
        for move in rig.step(1.0):
            failed = move.keys if move.op is Op.RELOCATE else []
            rig.end(move, failed=failed, unread=failed)
        if not rig.core.changing:
            break
    assert (rig.core.changing, rig.owned().slots.segments) == (0, 1)
    assert len(rig.owned().entries) == 1


@pytest.mark.parametrize("one", [True, False])
def test_what_cannot_be_read_does_not_keep_a_tier_large_for_ever(one: bool) -> None:
    keys = chain("k", 32)
    rig = Rig(rows=4, on=(keys,), segment_slots=8, segments=4, relocation_chunks=8)
    bad = set(keys[31:] if one else keys[7::8])
    # The segment with the fewest chunks has one of them.
    rig.core.remove(keys[24:27])
    rig.settle(0.1)
    rig.core.limit_segments(0, [1], create_policy("lru", 8))
    for _ in range(4000):
        for move in rig.step(1.0):
            failed = [key for key in move.keys if key in bad] if move.op is Op.RELOCATE else []
            rig.end(move, failed=failed, unread=failed)
        if not rig.core.changing:
            break
    assert (rig.core.changing, rig.owned().slots.segments) == (0, 1)
    # What lies in a segment that can stay is still there.
    assert len(bad & set(rig.owned().entries)) == 1
    # But for what was copied beside it each time, and the slots that are tried later.
    assert len(rig.owned().entries) >= 6
