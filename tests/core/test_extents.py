"""Free places: each given out once, neighbours together, never across a segment.

Against a set, which is slow and obviously right.
"""

from __future__ import annotations

import copy

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.core.residency.slots import ExtentAllocator

SEGMENT = 8
SEGMENTS = 4
PLACES = 5 * SEGMENT


def runs(places: set[int], segment_slots: int) -> list[range]:
    """The longest runs of neighbours, none of which crosses a segment."""
    found: list[range] = []
    for place in sorted(places):
        if found and found[-1].stop == place and place % segment_slots:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


class AllocatorAgainstASet(RuleBasedStateMachine):
    """`free` is what the allocator may hand out, `taken` what it has handed out."""

    @initialize(segment_slots=st.integers(1, 17))
    def begin(self, segment_slots: int) -> None:
        self.segment_slots = segment_slots
        self.allocator = ExtentAllocator(segment_slots)
        self.free: set[int] = set()
        self.taken = set(range(SEGMENTS * segment_slots))

    @rule(data=st.data())
    def give_some(self, data: st.DataObject) -> None:
        if not self.taken:
            return
        places = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.allocator.give(places)
        self.taken.difference_update(places)
        self.free.update(places)

    @rule(segment=st.integers(0, SEGMENTS - 1))
    def give_the_rest_of_a_segment(self, segment: int) -> None:
        first = segment * self.segment_slots
        places = self.taken & set(range(first, first + self.segment_slots))
        self.allocator.give(iter(places))
        self.taken -= places
        self.free |= places

    @rule(count=st.integers(0, 40))
    def take(self, count: int) -> None:
        places = self.allocator.take(count)
        assert len(places) == min(count, len(self.free)), "fewer than are free"
        assert len(set(places)) == len(places), "a place was handed out twice in one call"
        assert set(places) <= self.free, "a place was handed out that was not free"
        self.free.difference_update(places)
        self.taken.update(places)

    @rule(segment=st.integers(0, SEGMENTS - 1), most=st.none() | st.integers(0, 20))
    def withdraw(self, segment: int, most: int | None) -> None:
        its = sorted(one for one in self.free if one // self.segment_slots == segment)
        places = self.allocator.withdraw(segment, most)
        assert places == its[:most]
        self.free.difference_update(places)
        self.taken.update(places)

    @invariant()
    def counts_what_is_free(self) -> None:
        assert self.allocator.free == len(self.free)

    @invariant()
    def neighbours_are_merged_and_no_run_crosses_a_segment(self) -> None:
        longest = max((len(run) for run in runs(self.free, self.segment_slots)), default=0)
        if not longest:
            return
        # A power of two, because runs are kept by the size of their power of two.
        count = 1 << (longest.bit_length() - 1)
        places = copy.deepcopy(self.allocator).take(count)
        assert places == list(range(places[0], places[0] + count)), "neighbours were not merged"
        assert places[0] // self.segment_slots == places[-1] // self.segment_slots


AllocatorAgainstASet.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAllocatorAgainstASet = AllocatorAgainstASet.TestCase


def test_places_of_two_segments_are_never_one_run() -> None:
    free = ExtentAllocator(SEGMENT)
    free.give(range(2 * SEGMENT))
    assert free.take(SEGMENT) in (list(range(SEGMENT)), list(range(SEGMENT, 2 * SEGMENT)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_what_is_taken_from_a_fresh_segment_is_consecutive(counts: list[int]) -> None:
    allocator = ExtentAllocator(256)
    allocator.give(range(256))
    places = [place for count in counts for place in allocator.take(count)]
    assert places == list(range(sum(counts)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.randoms(use_true_random=False))))
def test_every_place_is_in_one_hand_at_any_time(acts: list[tuple[bool, int, object]]) -> None:
    free = ExtentAllocator(SEGMENT)
    free.give(range(PLACES))
    taken: list[int] = []
    for take, count, rng in acts:
        if take:
            expected = min(count, free.free)
            got = free.take(count)
            assert len(got) == expected
            assert not set(got) & set(taken)
            taken += got
        else:
            rng.shuffle(taken)  # type: ignore[attr-defined]
            free.give(taken[:count])
            del taken[:count]
        assert len(set(taken)) == len(taken)
        assert free.free == PLACES - len(taken)
    free.give(taken)
    assert sorted(free.take(PLACES)) == list(range(PLACES))
