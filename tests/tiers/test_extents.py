"""How the disk tier groups slots into vectored calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.disk.extents import MAX_CALL_BYTES, MIN_CALL_BYTES, cut_batches, cut_extents
from kvstore.tiers.disk.io import IOV_MAX

MIB = 2**20


def extents_of(
    slots: list[int], *, slot_bytes: int = 4096, segment_slots: int = 64, threads: int = 4
) -> list[list[int]]:
    """The slots of each call that a tier of this shape would make."""
    extents = cut_extents(slots, segment_slots, slot_bytes, threads)
    return [[slots[index] for index in extent] for extent in extents]


many_slots = st.lists(st.integers(0, 300), unique=True, max_size=200)
shapes = st.fixed_dictionaries(
    {
        "slot_bytes": st.sampled_from([4096, 65536, MIB, 3 * MIB, 32 * MIB]),
        "segment_slots": st.integers(1, 64),
        "threads": st.integers(1, 16),
    }
)


@given(many_slots, shapes)
def test_every_slot_is_moved_once(slots: list[int], shape: dict[str, int]) -> None:
    extents = extents_of(slots, **shape)
    assert sorted(slot for extent in extents for slot in extent) == sorted(slots)


@given(many_slots, shapes)
def test_an_extent_is_a_run_of_neighbours_in_one_segment(
    slots: list[int], shape: dict[str, int]
) -> None:
    for extent in extents_of(slots, **shape):
        assert extent == list(range(extent[0], extent[0] + len(extent)))
        assert extent[0] // shape["segment_slots"] == extent[-1] // shape["segment_slots"]


@given(many_slots, shapes)
def test_an_extent_is_one_call_that_the_system_takes(
    slots: list[int], shape: dict[str, int]
) -> None:
    for extent in extents_of(slots, **shape):
        assert len(extent) <= IOV_MAX
        assert len(extent) == 1 or len(extent) * shape["slot_bytes"] <= MAX_CALL_BYTES


@given(many_slots, shapes)
def test_neighbours_stay_together_up_to_a_megabyte(slots: list[int], shape: dict[str, int]) -> None:
    extents = sorted(extents_of(slots, **shape))
    for left, right in pairwise(extents):
        neighbours = left[-1] + 1 == right[0] and right[0] % shape["segment_slots"] != 0
        if neighbours:
            assert (len(left) + 1) * shape["slot_bytes"] > MIN_CALL_BYTES


def test_the_border_of_a_segment_makes_two_calls() -> None:
    assert extents_of([6, 7, 8, 9], segment_slots=8) == [[6, 7], [8, 9]]


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_one_large_request_keeps_every_thread_busy(threads: int) -> None:
    calls = extents_of(list(range(32)), slot_bytes=MIB, threads=threads)
    assert len(calls) >= threads


@given(many_slots, shapes)
def test_a_batch_is_no_longer_than_the_longest_call(
    slots: list[int], shape: dict[str, int]
) -> None:
    size, threads = shape["slot_bytes"], shape["threads"]
    extents = cut_extents(slots, shape["segment_slots"], size, threads)
    batches = cut_batches(extents, size, threads)
    assert [extent for batch in batches for extent in batch] == extents
    for batch in batches:
        assert len(batch) == 1 or sum(map(len, batch)) * size <= MAX_CALL_BYTES


def test_scattered_slots_go_to_every_thread() -> None:
    extents = cut_extents(list(range(0, 64, 2)), 64, MIB, 4)
    assert len(cut_batches(extents, MIB, 4)) >= 4
