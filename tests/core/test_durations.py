"""How long things took, and what the core counts of it."""

from __future__ import annotations

import math

import pytest

from kvstore.core import AGES, BOUNDS, Durations
from tests.core.rig import Rig, chain

A = chain("a", 4)


def test_a_duration_counts_in_the_first_bucket_that_holds_it() -> None:
    durations = Durations()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 0.3, BOUNDS[-1], 1000.0):
        durations.add(seconds)
    assert durations.count == 6
    assert durations.buckets[:2] == [2, 1]
    assert durations.buckets[BOUNDS.index(0.5)] == 1
    assert durations.buckets[-2:] == [1, 1]
    assert durations.mean == pytest.approx(durations.seconds / 6)


def test_ages_count_in_buckets_of_their_own() -> None:
    ages = Durations(bounds=AGES)
    for seconds in (0.5, 3600.0, 1e9):
        ages.add(seconds)
    copy = ages.copy()
    ages.add(1.0)
    assert (copy.count, copy.bounds) == (3, AGES)
    assert copy.buckets[AGES.index(3600.0)] == copy.buckets[-1] == 1
    assert copy.quantile(0.5) == 3600.0


def test_a_quantile_is_the_bound_that_so_many_kept() -> None:
    durations = Durations()
    assert durations.quantile(0.5) == 0.0
    for seconds in [0.003] * 98 + [0.7, 100.0]:
        durations.add(seconds)
    assert [durations.quantile(share) for share in (0.0, 0.5, 0.98)] == [0.005] * 3
    assert durations.quantile(0.99) == 1.0
    assert durations.quantile(1.0) == math.inf
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="must be from 0 to 1"):
            durations.quantile(share)


def test_a_second_wait_of_a_request_does_not_count_the_first_one_again() -> None:
    rig = Rig(rows=8, on=([*A, *chain("b", 2)],), deadline=5.0)
    for keys in (A, [*A, *chain("b", 2)]):
        assert rig.ask(keys) is None
        rig.step(0.25)
        rig.arrive()
        assert rig.ask(keys) == len(keys)
        rig.step(3.0)
    waits = rig.stats.waits
    assert waits.count == 2
    assert waits.seconds == pytest.approx(0.5)


def test_the_core_counts_how_long_waits_reads_and_writes_took() -> None:
    rig = Rig(rows=8, on=(A,))
    rig.begin(A)
    rig.wait(0.3)
    rig.arrive()
    stats = rig.stats
    assert (stats.waits.count, stats.tiers[0].reads.count) == (1, 1)
    assert stats.waits.seconds == pytest.approx(0.3)
    assert stats.tiers[0].reads.seconds == pytest.approx(0.3)
    rig.put(chain("b", 2))
    rig.step()
    rig.wait(0.2)
    rig.settle()
    assert rig.stats.tiers[0].writes.count == 1
    assert rig.stats.tiers[0].writes.seconds == pytest.approx(0.2)
    assert stats.tiers[0].writes.count == 0, "a snapshot does not change"
