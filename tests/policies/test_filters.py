"""Admission filters: what each lets in, and what it costs."""

from __future__ import annotations

import pytest

from kvstore.policies import AdmissionFilter, Chain, create_filter
from kvstore.policies.doorkeeper import DoorkeeperFilter
from kvstore.policies.endurance import EnduranceBudget
from kvstore.policies.reuse import ReuseThreshold
from kvstore.testing.admission import FilterContract
from kvstore.testing.policy import keys_of

DAY = 86_400.0


class TestReuseThreshold(FilterContract):
    def create(self, capacity: int, chunk_bytes: int) -> AdmissionFilter:
        return ReuseThreshold(capacity, chunk_bytes)


class TestDoorkeeper(FilterContract):
    def create(self, capacity: int, chunk_bytes: int) -> AdmissionFilter:
        return DoorkeeperFilter(capacity, chunk_bytes)


class TestEndurance(FilterContract):
    def create(self, capacity: int, chunk_bytes: int) -> AdmissionFilter:
        return EnduranceBudget(capacity, chunk_bytes)


class TestChain(FilterContract):
    def create(self, capacity: int, chunk_bytes: int) -> AdmissionFilter:
        return Chain(
            [EnduranceBudget(capacity, chunk_bytes), ReuseThreshold(capacity, chunk_bytes)]
        )


@pytest.mark.parametrize("threshold", [1, 2, 3])
@pytest.mark.parametrize("name", ["reuse", "doorkeeper"])
def test_a_key_enters_when_it_was_asked_for_often_enough(name: str, threshold: int) -> None:
    keys = keys_of(10)
    each = create_filter(name, 1000, 1, threshold=threshold)
    for visit in range(1, 5):
        each.asked(keys)
        assert each.admit(keys, 0.0) == [visit >= threshold] * 10


@pytest.mark.parametrize("name", ["reuse", "doorkeeper"])
def test_keys_behind_the_first_miss_count_as_well(name: str) -> None:
    """The second visit to a chain lets all of it in, not one chunk per visit."""
    chain = keys_of(50)
    each = create_filter(name, 1000, 1)
    each.asked(chain)
    assert not any(each.admit(chain, 0.0))
    each.asked(chain)
    assert all(each.admit(chain, 0.0))


def test_the_reuse_table_is_bounded_and_forgets_what_was_asked_longest_ago() -> None:
    each = ReuseThreshold(10, 1, table=100)
    first, second = keys_of(60), keys_of(60, 1000)
    each.asked(first)
    assert len(each) == 60
    each.asked(second)
    assert len(each) == 100
    each.asked(first)
    # Of the 60 the 20 at the tail were forgotten, but forgetting went on while they came back.
    assert each.admit(first[:1], 0.0) == [True]
    assert each.admit(first[-1:], 0.0) == [False]


def test_of_a_prompt_longer_than_the_table_the_head_is_remembered() -> None:
    keys = keys_of(150)
    each = ReuseThreshold(10, 1, table=100)
    each.asked(keys)
    each.asked(keys[:100])
    assert all(each.admit(keys[:100], 0.0))
    assert len(each) == 100


def test_the_doorkeeper_is_seldom_wrong_within_a_window() -> None:
    each = DoorkeeperFilter(1000, 1)
    once, twice = keys_of(3000), keys_of(1000, 10_000)
    for start in range(0, 3000, 100):
        each.asked(once[start : start + 100])
    each.asked(twice)
    each.asked(twice)
    assert all(each.admit(twice, 0.0))
    assert sum(each.admit(once, 0.0)) < 0.05 * len(once)


def test_the_doorkeeper_forgets_after_a_window() -> None:
    each = DoorkeeperFilter(100, 1, window=1.0)
    keys = keys_of(20)
    each.asked(keys)
    each.asked(keys_of(100, 1000))
    each.asked(keys)
    assert not any(each.admit(keys, 0.0))


@pytest.mark.parametrize("threshold", [1, 2])
def test_the_doorkeeper_answers_before_it_forgets(threshold: int) -> None:
    """A request that ends a window is judged by what was asked in it, its own keys included."""
    filter_, keys = DoorkeeperFilter(100, 1024, threshold=threshold), keys_of(100)
    filter_.asked(keys_of(600, 1000))
    for _ in range(threshold):
        filter_.asked(keys)
    assert filter_.admit(keys, 0.0) == [True] * 100


def test_the_doorkeeper_is_compact() -> None:
    each = DoorkeeperFilter(100_000, 1)
    assert len(each._door._bits) + len(each._again._counts) <= 24 * 100_000


def test_a_budget_is_spent_head_first_and_fills_again() -> None:
    each = EnduranceBudget(10, 100, bytes_per_day=86_400, burst_s=1000.0)
    keys = keys_of(12)
    # 1 byte a second, 1000 saved up: ten chunks of 100.
    assert each.admit(keys, 5.0) == [True] * 10 + [False] * 2
    assert each.admit(keys[:1], 104.0) == [False]
    assert each.admit(keys[:3], 205.0) == [True, True, False]
    assert sum(each.admit(keys, 1e6)) == 10


def test_no_more_than_the_budget_is_admitted_over_a_day() -> None:
    each = EnduranceBudget(10, 1000, bytes_per_day=500_000, burst_s=600.0)
    keys = keys_of(7)
    admitted = sum(sum(each.admit(keys, minute * 60.0)) for minute in range(24 * 60))
    assert admitted * 1000 <= 500_000 + 4000
    assert admitted * 1000 >= 490_000


def test_without_a_figure_the_tier_may_be_written_once_a_day() -> None:
    assert EnduranceBudget(20, 512).bytes_per_day == 20 * 512


def test_a_budget_smaller_than_a_chunk_saves_until_it_can_afford_one() -> None:
    each = EnduranceBudget(10, 1000, bytes_per_day=1000, burst_s=0.0)
    key = keys_of(1)
    assert each.admit(key, 0.0) == [True]
    assert each.admit(key, DAY / 2) == [False]
    assert each.admit(key, DAY) == [True]


def test_what_was_spent_stays_spent_when_the_cache_is_cleared() -> None:
    each = EnduranceBudget(10, 100, bytes_per_day=100, burst_s=0.0)
    assert each.admit(keys_of(1), 0.0) == [True]
    each.clear()
    assert each.admit(keys_of(1), 1.0) == [False]


def test_in_a_chain_all_must_say_yes_and_nothing_is_spent_on_who_was_refused_before() -> None:
    budget = EnduranceBudget(10, 100, bytes_per_day=86_400, burst_s=300.0)
    chain = Chain([budget, ReuseThreshold(10, 100)])
    keys = keys_of(6)
    chain.asked(keys)
    assert not any(chain.admit(keys, 0.0))
    chain.asked(keys[3:])
    assert chain.admit(keys, 0.0) == [False] * 3 + [True] * 3
    chain.asked(keys)
    assert not any(chain.admit(keys, 0.0))


def test_a_chain_needs_a_filter() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Chain([])


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("reuse", {"threshold": 0}, "threshold must be at least 1, not 0"),
        ("reuse", {"table": 0}, "table must be at least 1 key, not 0"),
        ("doorkeeper", {"threshold": 17}, "threshold must be from 1 to 16, not 17"),
        ("doorkeeper", {"window": 0.0}, "window must be above 0"),
        ("endurance", {"bytes_per_day": -1}, "bytes_per_day must be from 0 to"),
        ("endurance", {"burst_s": -1.0}, "burst_s must be from 0 to"),
        ("endurance", {"burst_s": float("nan")}, "burst_s must be from 0 to"),
    ],
)
def test_values_out_of_range_are_refused(
    name: str, parameters: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create_filter(name, 10, 10, **parameters)
