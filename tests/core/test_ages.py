"""How long chunks had not been used when they left for others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvstore.core import AGES, Durations
from kvstore.core.statistics import EVERY, MOST, Ages
from tests.core.rig import Rig, chain


def ages_of(*seconds: float) -> list[int]:
    """The buckets of what was so old."""
    durations = Durations(bounds=AGES)
    for each in seconds:
        durations.add(each)
    return durations.buckets


def test_the_age_is_the_time_since_the_last_use_or_since_it_came() -> None:
    ages = Ages()
    keys = chain("a", 2 * EVERY)
    ages.begin_step(100.0)
    ages.come(keys)
    ages.begin_step(130.0)
    ages.use(keys[EVERY:])
    ages.begin_step(160.0)
    ages.leave(keys)
    assert ages.left.count == 2, "one of so many"
    assert ages.left.seconds == pytest.approx(60.0 + 30.0)
    assert ages.left.buckets == ages_of(60.0, 30.0)


@pytest.mark.parametrize("sizes", [[1], [3, 5], [EVERY - 1], [EVERY + 1], [100]])
def test_as_many_are_followed_whatever_comes_together(sizes: list[int]) -> None:
    ages = Ages()
    ages.begin_step(1.0)
    keys = iter(chain("a", 1000))
    for size in itertools.cycle(sizes):
        some = list(itertools.islice(keys, size))
        if not some:
            break
        ages.come(some)
    assert len(ages) == -(-1000 // EVERY)


def test_what_comes_before_the_first_step_has_no_age() -> None:
    ages = Ages()
    keys = chain("a", 2 * EVERY)
    ages.come(keys)
    ages.begin_step(36_000.0)
    ages.use(keys)
    ages.leave(keys)
    assert ages.left.count == 0


def test_what_is_followed_stays_few_and_ages_stay_right() -> None:
    ages = Ages()
    count = 20 * EVERY * MOST
    width = 1000
    names = [index.to_bytes(8, "big") for index in range(count)]
    for step in range(count // width):
        ages.begin_step(float(step))
        ages.come(names[step * width : (step + 1) * width])
        assert len(ages) <= MOST
    for first in range(0, count, width):
        ages.leave(names[first : first + width])
    left = ages.left
    assert MOST / 4 < left.count <= MOST
    # Those that came first are as likely among them as those that came last.
    assert left.mean == pytest.approx(count / width / 2, rel=0.1)


@pytest.mark.parametrize("go", [Ages.forget, lambda ages, keys: ages.reset()])
def test_what_goes_for_no_other_has_no_age(go: Callable[[Ages, list[bytes]], None]) -> None:
    ages = Ages()
    ages.begin_step(1.0)
    keys = chain("a", 4 * EVERY)
    ages.come(keys)
    assert len(ages) == 4
    go(ages, keys)
    ages.leave(keys)
    assert (len(ages), ages.left.count) == (0, 0)


def test_chunks_that_leave_host_memory_and_the_disk_tell_how_long_nobody_used_them() -> None:
    rig = Rig(rows=2 * EVERY, segment_slots=4 * EVERY)
    old, used = chain("old", EVERY), chain("used", EVERY)
    rig.put(old)
    rig.store(used)
    rig.wait(50.0)
    assert rig.ask(used, "again") == EVERY
    rig.use(used, "again")
    rig.core.on_request_finished("again")
    rig.step()
    rig.wait(30.0)
    for name in "abcd":
        rig.store(chain(name, EVERY), name)
        rig.step()
    stats = rig.stats
    disk = stats.tiers[0]
    assert stats.evicted == 4 * EVERY
    assert disk.evicted == 2 * EVERY
    assert (stats.ages.count, disk.ages.count) == (4, 2)
    # The disk gave up both: what was used later had been used 30 s before.
    assert disk.ages.seconds == pytest.approx(80.0 + 30.0, abs=2.0)
    assert stats.ages.seconds == pytest.approx(80.0 + 30.0, abs=2.0)


def test_removed_chunks_and_those_of_before_a_reset_have_no_age() -> None:
    rig = Rig(rows=4 * EVERY, segment_slots=4 * EVERY)
    keys = chain("a", 2 * EVERY)
    rig.store(keys)
    rig.core.remove(keys)
    rig.settle()
    rig.store(chain("b", 2 * EVERY))
    rig.core.reset()
    rig.settle()
    assert len(rig.core._pool.ages) == 0
    assert len(rig.core.tiers[0].index.ages) == 0
    assert (rig.stats.ages.count, rig.stats.tiers[0].ages.count) == (0, 0)
