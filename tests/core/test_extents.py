"""Free places: each given out once, neighbours together, never across a segment."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.residency.slots import ExtentAllocator

SEGMENT = 8
PLACES = 5 * SEGMENT


def runs(places: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbours within one segment, as (start, length)."""
    found: list[tuple[int, int]] = []
    for place in places:
        start, length = found[-1] if found else (-2, 0)
        if place == start + length and place % SEGMENT:
            found[-1] = (start, length + 1)
        else:
            found.append((place, 1))
    return found


def test_nothing_can_be_taken_from_nothing() -> None:
    assert ExtentAllocator(SEGMENT).take(3) == []


def test_a_whole_segment_comes_in_one_run() -> None:
    free = ExtentAllocator(SEGMENT)
    free.give(range(SEGMENT))
    assert free.take(SEGMENT) == list(range(SEGMENT))


def test_fewer_are_given_when_fewer_are_free() -> None:
    free = ExtentAllocator(SEGMENT)
    free.give(range(3))
    assert free.take(5) == [0, 1, 2]
    assert free.free == 0


def test_neighbours_given_back_one_by_one_are_one_run_again() -> None:
    free = ExtentAllocator(SEGMENT)
    for place in (3, 1, 2, 0, 5, 4, 7, 6):
        free.give([place])
    assert runs(free.take(SEGMENT)) == [(0, SEGMENT)]


def test_places_of_two_segments_are_never_one_run() -> None:
    free = ExtentAllocator(SEGMENT)
    free.give(range(2 * SEGMENT))
    assert free.take(SEGMENT) in (list(range(SEGMENT)), list(range(SEGMENT, 2 * SEGMENT)))


def test_a_run_that_is_long_enough_is_preferred_to_pieces() -> None:
    free = ExtentAllocator(SEGMENT)
    free.give([0, 2, 4])
    free.give(range(SEGMENT, 2 * SEGMENT))
    assert runs(free.take(4)) == [(SEGMENT, 4)]
    assert sorted(free.take(100)) == [0, 2, 4, 12, 13, 14, 15]


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
