"""How many tokens can be loaded, against trying every boundary."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore.connector.server import Block, KVBlocks
from tests.connector.boundaries import Case, expected
from tests.connector.published_match import published, random_case
from tests.connector.scripted import Key, Prompt, Scripted, scheduler_over

unhurried = settings(max_examples=400, deadline=None, derandomize=True)
few = settings(unhurried, max_examples=120)


@st.composite
def cases(draw: st.DrawFn, *, most_deferred: int = 0, most_groups: int = 3) -> Case:
    hash_size = draw(st.integers(1, 3))
    windows = st.none() | st.integers(1, 9 * hash_size)
    count = draw(st.integers(1, most_groups))
    if draw(st.booleans()):
        sizes = [draw(st.integers(1, 2)) * hash_size] * count
        factor = draw(st.integers(1, 3))
    else:
        sizes = [draw(st.integers(1, 4)) * hash_size for _ in range(count)]
        factor = 1 if len(set(sizes)) > 1 else draw(st.integers(1, 3))
    groups = tuple((size, draw(windows)) for size in sizes)
    whole = math.lcm(*sizes)
    tokens = draw(st.integers(1, 20 * hash_size))
    computed = draw(st.integers(0, max(0, (tokens - 1) // whole))) * whole
    bare = Case(hash_size, groups, factor, tokens, computed, frozenset())
    places = bare.places()
    misses = draw(st.sets(st.sampled_from(places), max_size=5)) if places else set()
    others = [place for place in places if place not in misses]
    deferred = (
        draw(st.sets(st.sampled_from(others), max_size=most_deferred))
        if others and most_deferred
        else set()
    )
    hits = frozenset(others) - deferred
    return Case(hash_size, groups, factor, tokens, computed, hits, frozenset(deferred))


class Asking:
    """A request that is looked up."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.manager = Scripted({case.name(place): True for place in case.hits})
        self.manager.answers |= {case.name(place): None for place in case.deferred}
        self.scheduler = scheduler_over(self.manager, case.hash_size, case.groups, case.factor)
        self.prompt = Prompt(case.tokens, case.hash_size)

    def ask(self) -> int | None:
        matched, between_steps = self.scheduler.get_num_new_matched_tokens(
            self.prompt, self.case.computed
        )
        assert between_steps == bool(matched)
        return matched

    def asked(self) -> set[Key]:
        return {
            place for place in self.case.places() if self.case.name(place) in self.manager.asked
        }

    def resolve(self, hits: Iterable[Key], misses: Iterable[Key]) -> None:
        self.manager.answers |= {self.case.name(place): True for place in hits}
        self.manager.answers |= {self.case.name(place): False for place in misses}

    def load(self, matched: int) -> int:
        """Load what was found, into the blocks that a server gives; returns how many chunks."""
        end = self.case.computed + matched
        given = []
        for size, window in self.case.groups:
            left = 0 if window is None else max(0, end - window + 1) // size
            given.append([Block(n + 1, n < left) for n in range(-(-self.case.tokens // size))])
        self.scheduler.update_state_after_alloc(self.prompt, KVBlocks(given), matched)
        (job,) = self.scheduler._loads.take_begun().values()
        return len(job.src_spec.block_ids)  # type: ignore[attr-defined]


def ways(places: Iterable[Key]) -> Iterable[tuple[set[Key], set[Key]]]:
    """All ways in which fetches can end: what is there, and what is not."""
    places = list(places)
    for ends in itertools.product((True, False), repeat=len(places)):
        yield (
            {place for place, there in zip(places, ends, strict=True) if there},
            {place for place, there in zip(places, ends, strict=True) if not there},
        )


@given(cases())
@unhurried
def test_the_answer_is_the_largest_boundary_that_all_groups_supply_and_can_be_loaded(
    case: Case,
) -> None:
    """Into the blocks that windows leave."""
    asking = Asking(case)
    matched = asking.ask()
    assert matched == expected(case, case.hits)
    if matched:
        asking.load(matched)


@given(cases(most_deferred=5))
@unhurried
def test_an_answer_holds_whatever_is_still_being_fetched(case: Case) -> None:
    assume(case.deferred)
    answer = Asking(case).ask()
    if answer is not None:
        for there, _ in ways(case.deferred):
            assert answer == expected(case, case.hits | there)


@given(cases(most_deferred=5))
@few
def test_only_chunks_between_the_two_ends_can_defer(case: Case) -> None:
    assume(case.deferred)
    within = [
        (group, chunk)
        for group, chunk in case.deferred
        if chunk * case.chunk(group)
        < min(case.end, case.tokens // case.chunk(group) * case.chunk(group))
    ]
    if not within:
        assert Asking(case).ask() is not None


@given(cases(most_deferred=5))
@few
def test_once_all_are_there_or_not_the_answer_is_given(case: Case) -> None:
    assume(case.deferred)
    for there, lost in ways(case.deferred):
        asking = Asking(case)
        asking.ask()
        asking.resolve(there, lost)
        assert asking.ask() == expected(case, case.hits | there)


def most_waits(case: Case) -> int:
    """How often a request waits at most, if all that was asked for is there, or not, then."""
    worst = 0

    def wait(hits: set[Key], misses: set[Key], waits: int) -> None:
        nonlocal worst
        worst = max(worst, waits)
        asking = Asking(case)
        asking.resolve(hits, misses)
        if asking.ask() is None:
            new = (asking.asked() & case.deferred) - hits - misses
            assert new, "it waits for nothing"
            for there, lost in ways(new):
                wait(hits | there, misses | lost, waits + 1)

    wait(set(), set(), 0)
    return worst


@given(cases(most_deferred=4))
@few
def test_a_request_waits_once_and_once_more_for_each_window_that_another_group_cuts(
    case: Case,
) -> None:
    """If all that was asked for is there, or known to be lost, when it asks again.

    All that the largest boundary needs is asked for at once. What smaller ones need of a group
    with a window is asked for only when another group has cut the boundary.
    """
    assume(case.deferred)
    windows = sum(window is not None for _, window in case.groups)
    assert most_waits(case) <= 1 + (windows if len(case.groups) > 1 else 0)


# -- cases that were wrong once --------------------------------------------------------------


def test_a_group_with_larger_chunks_leaves_less_before_any_window_is_looked_for() -> None:
    """Group 1 has no whole chunk behind token 8, where the window of group 0 is not there."""
    there = frozenset({(0, 1), (0, 2), (1, 0)})
    case = Case(4, ((4, 8), (8, 4)), 1, 13, 0, there)
    assert expected(case, there) == 0
    assert Asking(case).ask() == 0


def test_less_than_a_chunk_of_any_group_is_nothing_whichever_group_leaves_it() -> None:
    there = frozenset({(0, 0), (1, 0)})
    case = Case(4, ((8, None), (4, None)), 1, 8, 0, there)
    assert Asking(case).ask() == 0


# -- what the published scheduler finds ---------------------------------------------------------


CASES = 9000


def test_answers_differ_only_below_the_largest_chunk() -> None:
    chance = random.Random("different chunk sizes")
    kinds: Counter[str] = Counter()
    for _ in range(CASES):
        case = random_case(chance)
        largest = max(case.chunk(group) for group in range(len(case.groups)))
        ours, theirs = Asking(case).ask(), published(case)
        assert ours == expected(case, case.hits)
        if ours == theirs:
            kinds["same"] += 1
            continue
        assert ours == 0
        assert 0 < theirs < largest, case
        kinds["less than a chunk"] += 1
    assert kinds["less than a chunk"] > CASES // 100
    assert kinds["same"] > CASES * 9 // 10


def test_the_published_answer_below_a_chunk_depends_on_the_order_of_groups() -> None:
    """Which is why ours is none for any order."""
    for sizes, theirs in [((3, 2), 2), ((2, 3), 0)]:
        groups = tuple((size, None) for size in sizes)
        case = Case(1, groups, 1, 3, 0, frozenset({(0, 0), (1, 0)}))
        assert published(case) == theirs
        assert Asking(case).ask() == 0
