"""Events tell, in order, what appeared on and left each medium."""

from __future__ import annotations

from kvstore.core.reports import PORTION, History
from tests.core.rig import Rig, chain


def follow(rig: Rig, known: dict[str, set[bytes]]) -> None:
    """Apply the events to what a listener knows."""
    for event in rig.core.take_events():
        there = known.setdefault(event.medium, set())
        for key in event.keys:
            assert (key in there) is event.removed, f"{event.medium}: {key!r} told twice"
            (there.remove if event.removed else there.add)(key)


def test_eviction_and_loss_are_told() -> None:
    keys = chain("a", 3)
    rig = Rig(rows=3, on=[keys], segment_slots=3)
    rig.resolve(keys[:2])
    rig.core.on_request_finished("r")
    rig.core.take_events()
    rig.begin(keys[2:], "r1")
    rig.arrive(failed=keys[2:])
    (event,) = rig.core.take_events()
    assert (event.keys, event.medium, event.removed) == (keys[2:], "disk", True)
    rig.put(chain("b", 3))
    events = rig.core.take_events()
    assert [(event.medium, event.removed, len(event.keys)) for event in events] == [
        ("host", True, 2),
        ("host", False, 3),
    ]


def test_what_was_there_at_the_start_is_told_in_portions_most_recently_used_first() -> None:
    keys = chain("old", 2 * PORTION + 1)
    rig = Rig(rows=2, on=[keys], segment_slots=len(keys))
    told = [[*event.keys] for _ in range(4) for event in rig.core.take_events()]
    assert [len(portion) for portion in told] == [PORTION, PORTION, 1]
    coldest_first = [*rig.core.tiers[0].entries]
    assert [key for portion in told for key in portion] == coldest_first[::-1]


def test_nothing_leaves_that_was_not_told_and_what_has_left_is_not_told_any_more() -> None:
    keys = chain("old", PORTION + 8)
    rig = Rig(rows=8, on=[keys], segment_slots=len(keys))
    before = [*rig.core.tiers[0].entries]
    known: dict[str, set[bytes]] = {}
    rig.store(chain("new", 8))
    displaced = set(before) - {*rig.core.tiers[0].entries}
    assert len(displaced) == 8
    for _ in range(3):
        follow(rig, known)
    assert known["disk"] == {*rig.core.tiers[0].entries}
    rig.core.reset()
    follow(rig, known)
    assert known == {"disk": set(), "host": set()}


def test_all_that_is_there_is_told_again_to_who_has_forgotten_it() -> None:
    keys = chain("old", PORTION + 8)
    rig = Rig(rows=8, on=[keys], segment_slots=len(keys))
    rig.store(chain("first", 8))
    known: dict[str, set[bytes]] = {}
    for _ in range(3):
        follow(rig, known)
    rig.store(chain("new", 3))
    rig.core.tell_again()
    known.clear()
    follow(rig, known)
    assert known["host"] == {*rig.core.chunks}
    rig.store(chain("newer", 4))
    for _ in range(3):
        follow(rig, known)
    assert known == {"disk": {*rig.core.tiers[0].entries}, "host": {*rig.core.chunks}}


def test_a_reset_before_all_is_told_tells_the_end_of_what_was_told() -> None:
    keys = chain("old", 2 * PORTION)
    rig = Rig(rows=8, on=[keys], segment_slots=len(keys))
    known: dict[str, set[bytes]] = {}
    follow(rig, known)
    assert len(known["disk"]) == PORTION
    rig.core.reset()
    follow(rig, known)
    assert known["disk"] == set()
    assert rig.core.take_events() == []


def test_what_left_and_came_back_before_all_was_told_is_gone_after_a_reset() -> None:
    events, here = History(), chain("old", 4 * PORTION)
    events.want(True, here)
    known: set[bytes] = set()

    def follow_all() -> None:
        for key, left in events.take():
            (known.discard if left else known.add)(key)

    follow_all()
    events.left(here[:1])
    events.came(here[:1])
    follow_all()
    assert here[0] in known
    events.all_left(here)
    follow_all()
    assert known == set()


def test_without_a_listener_nothing_is_kept() -> None:
    rig = Rig(rows=2, events=False)
    for wave in range(5):
        rig.store(chain(f"w{wave}", 2))
    assert rig.core.take_events() == []


def test_events_that_nobody_takes_are_bounded_and_the_loss_is_told_once() -> None:
    rig = Rig(on=())
    rig.core._pool.history = History(most=100)
    for number in range(200):
        rig.put(chain(f"p{number}", 2))
        rig.step()
    kept = [key for event in rig.core.take_events() for key in event.keys]
    assert 50 <= len(kept) <= 100
    assert rig.stats.events_lost + len(kept) == 200 * 2 + rig.stats.evicted
    assert kept[-1] == chain("p199", 2)[-1], "the newest are there"
    assert [line for line in rig.log if "events" in line] == [
        "events are not taken: the oldest are dropped, and counted"
    ]


def test_what_leaves_while_nobody_takes_what_was_there_is_bounded() -> None:
    events = History(most=100)
    events.want(True, chain("old", 50))
    for number in range(1000):
        events.left(chain(f"p{number}", 1))
    assert len(events.take()) <= 100
    assert not events._gone
    assert events.lost >= 1000 - 100 + 50
