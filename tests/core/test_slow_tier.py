"""A tier that is slow: it is told, and it costs nobody's place."""

from __future__ import annotations

from kvstore.core.residency.health import SLOW_PAUSE
from kvstore.types import Op
from tests.core.rig import Rig, chain


def busy(rig: Rig, seconds: float, each: float = 0.5) -> None:
    """Steps in which prompts are stored, and all ends but growth."""
    for number in range(round(seconds / each)):
        name = f"new-{rig.now:.1f}-{number}"
        grant = rig.core.prepare_store(chain(name, 2), name)
        if grant is not None:
            rig.core.complete_store(grant.keys, name)
        rig.core.on_request_finished(name)
        rig.step()
        for move in rig.under_way(Op.CASCADE):
            rig.end(move)
        rig.step(each)


def test_growth_that_takes_long_costs_copies_of_new_chunks_and_no_entry() -> None:
    old = chain("old", 4)
    rig = Rig(rows=8, on=[old], segment_slots=4, max_segments=4, deadline=1.0, max_wait=60.0)
    busy(rig, 30.0)
    (growth,) = rig.under_way(Op.GROW)
    tier = rig.core.tiers[0]
    assert set(tier.entries) == set(old)
    assert rig.stats.tiers[0].evicted == 0
    assert rig.stats.tiers[0].refused > 0
    assert rig.stats.stored > 40, "host memory takes new chunks all the while"
    assert rig.core.unsaved == 0
    rig.end(growth)
    busy(rig, 2.0)
    assert set(tier.entries) > set(old), "it stores again"
    assert rig.stats.tiers[0].evicted == 0


def test_growth_that_never_ends_makes_new_chunks_take_the_place_of_old() -> None:
    rig = Rig(rows=8, on=[chain("old", 4)], segment_slots=4, max_segments=4, max_wait=10.0)
    busy(rig, 9.0)
    assert rig.stats.tiers[0].evicted == 0
    busy(rig, 4.0)
    assert rig.stats.tiers[0].evicted > 0


def test_growth_that_failed_makes_new_chunks_take_the_place_of_old() -> None:
    old = chain("old", 4)
    rig = Rig(rows=8, on=[old], segment_slots=4, max_segments=4, deadline=1.0)
    (growth,) = rig.step()
    rig.end(growth, segments=[])
    busy(rig, 2.0)
    assert rig.stats.tiers[0].evicted > 0


def test_a_slow_tier_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    rig = Rig(rows=16, on=[chain("old", 4)], segment_slots=4, max_segments=64, deadline=1.0)
    for _ in range(3):
        busy(rig, 4.0)
        assert rig.stats.tiers[0].slow
        assert not rig.stats.tiers[0].stalled
        for growth in rig.under_way(Op.GROW):
            rig.end(growth)
    busy(rig, 4.0)
    for _ in range(round(SLOW_PAUSE) + 10):
        rig.end_all()
        rig.step(0.4)
    for _ in range(round(SLOW_PAUSE) * 3):
        rig.step(0.4)
    assert not rig.stats.tiers[0].slow
    assert [line.split(":")[0] for line in rig.log] == [
        "tier tier0 is slow",
        "tier tier0 is not slow any more",
    ]


def test_copies_that_take_long_are_told_too() -> None:
    rig = Rig(rows=16, in_flight=8, deadline=1.0)
    rig.put(chain("a", 4))
    rig.step()
    rig.put(chain("b", 4))
    rig.step()
    first, second = rig.under_way(Op.CASCADE)
    rig.wait(0.8)
    rig.end(second)
    rig.wait(1.0)
    rig.put(chain("c", 1), "w")
    rig.step()
    rig.end(rig.under_way(Op.CASCADE)[-1])
    rig.wait(0.5)
    assert rig.stats.tiers[0].slow
    rig.end(first)


def test_copies_that_stand_behind_reads_are_not_slow() -> None:
    prompts = [chain(f"p{number}", 2) for number in range(6)]
    rig = Rig(rows=32, on=[[key for keys in prompts for key in keys]], deadline=1.0)
    rig.put(chain("a", 4))
    rig.step()
    for number, keys in enumerate(prompts):
        assert rig.ask(keys, f"r{number}") is None
    for move in [*rig.step()]:
        rig.wait(0.8)
        rig.end(move)
    rig.step()
    assert rig.log == []


def test_a_caller_that_slept_does_not_take_its_own_sleep_for_a_slow_tier() -> None:
    rig = Rig(rows=16, deadline=1.0)
    rig.put(chain("a", 4))
    rig.step()
    rig.step(60.0)
    rig.step(0.1)
    assert rig.log == []
