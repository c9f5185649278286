"""A tier on several devices: where chunks go, and what one device that fails costs."""

from __future__ import annotations

import itertools
from collections import Counter

from kvstore.core.residency.health import DEVICE_PAUSE, STORE_PAUSE
from kvstore.core.residency.slots import STRIPE_CHUNKS
from kvstore.types import Move, Op
from tests.core.rig import Rig, chain


def devices_of(move: Move, rig: Rig, stripes: int) -> list[int]:
    return [slot // rig.owned().slots.segment_slots % stripes for slot in move.slots]


def test_a_long_chain_is_spread_over_the_devices_in_runs() -> None:
    rig = Rig(rows=64, segments=4, stripes=2)
    rig.put(chain("a", 4 * STRIPE_CHUNKS), "a")
    (move,) = rig.step()
    devices = devices_of(move, rig, 2)
    assert Counter(devices) == {0: 2 * STRIPE_CHUNKS, 1: 2 * STRIPE_CHUNKS}
    changes = sum(a != b for a, b in itertools.pairwise(devices))
    assert changes == 1, "neighbours were torn apart"


def test_a_short_chain_stays_together() -> None:
    rig = Rig(rows=64, segments=4, stripes=4)
    rig.put(chain("a", STRIPE_CHUNKS - 1), "a")
    (move,) = rig.step()
    assert len(set(devices_of(move, rig, 4))) == 1


def test_devices_are_filled_evenly() -> None:
    rig = Rig(rows=64, segment_slots=32, segments=3, stripes=3)
    used: Counter[int] = Counter()
    for n in range(9):
        rig.put(chain(f"p{n}", 4), f"p{n}")
        for move in rig.step():
            used.update(devices_of(move, rig, 3))
        rig.settle()
    assert set(used.values()) == {12}


def test_every_slot_of_every_device_is_used_before_anything_is_evicted() -> None:
    rig = Rig(rows=64, segment_slots=16, segments=3, stripes=3)
    for n in range(3):
        rig.store(chain(f"p{n}", 16), f"p{n}")
    assert len(rig.core.tiers[0].entries) == 48
    assert rig.stats.tiers[0].evicted == 0
    rig.store(chain("more", 4), "more")
    assert len(rig.core.tiers[0].entries) == 48
    assert rig.stats.tiers[0].evicted == 4


def fail_on(rig: Rig, device: int, stripes: int) -> None:
    """End every copy under way; those to `device` fail."""
    for move in rig.under_way(Op.CASCADE):
        devices = devices_of(move, rig, stripes)
        rig.end(move, [k for k, d in zip(move.keys, devices, strict=True) if d == device])


def test_a_device_that_cannot_store_does_not_keep_the_others_from_it() -> None:
    rig = Rig(rows=64, segment_slots=32, segments=2, stripes=2)
    rig.put(chain("a", 2 * STRIPE_CHUNKS), "a")
    rig.step()
    fail_on(rig, 0, 2)
    rig.step()
    assert rig.log == ["a device of tier tier0 cannot store now: injected"]
    rig.put(chain("b", 2 * STRIPE_CHUNKS), "b")
    (move,) = rig.step(0.1)
    assert set(devices_of(move, rig, 2)) == {1}
    rig.settle()
    assert all(key in rig.core.tiers[0].entries for key in chain("b", 2 * STRIPE_CHUNKS))


def test_a_full_tier_with_a_device_that_cannot_store_goes_on_with_the_other() -> None:
    rig = Rig(rows=64, segment_slots=16, segments=2, stripes=2)
    rig.store(chain("a", 32), "a")
    rig.put(chain("b", 16), "b")
    rig.step()
    fail_on(rig, 0, 2)
    rig.step()
    for n in range(4):
        rig.store(chain(f"c{n}", 4), f"c{n}")
        assert all(key in rig.core.tiers[0].entries for key in chain(f"c{n}", 4))


def test_a_device_is_tried_again_later() -> None:
    rig = Rig(rows=64, segment_slots=32, segments=2, stripes=2)
    rig.put(chain("a", 2 * STRIPE_CHUNKS), "a")
    rig.step()
    fail_on(rig, 0, 2)
    rig.step()
    rig.wait(DEVICE_PAUSE + 1, each=1.0)
    rig.put(chain("b", 2 * STRIPE_CHUNKS), "b")
    (move,) = rig.step()
    assert set(devices_of(move, rig, 2)) == {0, 1}


def test_when_no_device_can_store_nothing_is_stored_for_a_while() -> None:
    rig = Rig(rows=64, segment_slots=32, segments=2, stripes=2)
    for name in "ab":
        rig.put(chain(name, 2 * STRIPE_CHUNKS), name)
        for move in rig.step():
            rig.end(move, move.keys)
    rig.step()
    assert rig.log[-1] == "tier tier0 cannot store now: injected"
    rig.put(chain("c", 4), "c")
    assert rig.step(STORE_PAUSE / 2) == []


def test_after_a_failure_one_chunk_tries_before_the_others_displace_anything() -> None:
    rig = Rig(rows=64, segment_slots=32, segments=1)
    rig.store(chain("kept", 32), "kept")
    rig.put(chain("a", 16), "a")
    for move in rig.step():
        rig.end(move, move.keys)
    rig.step()
    evicted = rig.stats.tiers[0].evicted
    for n in range(3):
        rig.wait(STORE_PAUSE + 1, each=1.0)
        rig.put(chain(f"try{n}", 8), f"try{n}")
        (move,) = rig.step()
        assert len(move.keys) == 1
        assert rig.step() == [], "a second one was sent before the first had come back"
        rig.finish(move, move.keys)
    # The slot of a copy that failed is free for the next.
    assert rig.stats.tiers[0].evicted == evicted
    rig.wait(STORE_PAUSE + 1, each=1.0)
    rig.put(chain("works", 8), "works")
    (move,) = rig.step()
    rig.end(move)
    rig.settle()
    assert all(key in rig.core.tiers[0].entries for key in chain("works", 8))
    assert rig.log[-1].startswith("tier tier0 stores again")
