"""A tier that a neighbour writes to: its chunks are used, and nothing is copied there."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import Core, HostPool, OwnedTier, PeerTier
from kvstore.policies import create_policy
from kvstore.types import NO_MOVE, Changes, Completion, Op, RecoveredTier
from tests.core.rig import Rig, chain


def rig_beside(neighbour: Sequence[bytes], rows: int = 8) -> Rig:
    """A rig with an empty tier of its own, and a neighbour's tier that holds these keys."""
    rig = Rig(rows=rows)
    own = OwnedTier(0, RecoveredTier("own", "disk", [], 64, [0], 1), create_policy("lru", 64), 64)
    entries = [(key, slot) for slot, key in enumerate(neighbour)]
    shared = PeerTier(1, RecoveredTier("theirs", "shared", entries, 64, (), 0), 64)
    pool = HostPool(rows, create_policy("lru", rows))
    rig.core = Core(
        pool,
        [own, shared],
        deadline=1.0,
        max_wait=10.0,
        lease=3.0,
        log=lambda line: rig.log.append(line.text),
    )
    rig.core.poll(rig.now)
    return rig


def tell(rig: Rig, appeared: Sequence[tuple[bytes, int]] = (), gone: Sequence[bytes] = ()) -> None:
    rig.core.poll(rig.now, [Completion(NO_MOVE, [], changes=Changes([*appeared], [*gone]), tier=1)])


def test_what_a_neighbour_had_at_the_start_is_found() -> None:
    keys = chain("a", 3)
    rig = rig_beside(keys)
    (move,) = rig.begin(keys)
    assert (move.tier, move.op, move.slots) == (1, Op.PROMOTE, [0, 1, 2])
    rig.settle()
    assert rig.ask(keys) == 3


def test_what_a_neighbour_stores_is_found_once_it_is_news() -> None:
    keys = chain("a", 3)
    rig = rig_beside([])
    assert rig.ask(keys) == 0
    rig.step()
    tell(rig, appeared=[(key, 10 + slot) for slot, key in enumerate(keys)])
    (move,) = rig.begin(keys)
    assert move.slots == [10, 11, 12]


def test_what_a_neighbour_evicts_is_a_miss() -> None:
    keys = chain("a", 3)
    rig = rig_beside(keys)
    tell(rig, gone=keys[1:])
    assert rig.resolve(keys) == 1


def test_what_a_neighbour_moved_is_read_from_its_new_place_and_told_once() -> None:
    (key,) = chain("a", 1)
    rig = rig_beside([key])
    (event,) = rig.core.take_events()
    assert (event.keys, event.removed) == ([key], False)
    tell(rig, appeared=[(key, 7)])
    assert rig.core.take_events() == []
    (move,) = rig.begin([key])
    assert move.slots == [7]


def test_an_entry_that_is_out_of_date_is_a_miss_of_that_block_and_no_fault() -> None:
    keys = chain("a", 3)
    rig = rig_beside(keys)
    rig.begin(keys)
    (move,) = rig.moves
    rig.finish(move, failed={keys[1]})
    assert rig.ask(keys) == 1
    assert rig.stats.tiers[1].failed_reads == 0
    assert rig.core.lookup(keys[1], "later") is False


def test_a_chunk_that_goes_while_it_is_read_does_no_harm() -> None:
    keys = chain("a", 3)
    rig = rig_beside(keys)
    (move,) = rig.begin(keys)
    tell(rig, gone=keys)
    rig.end(move, failed=keys[2:])
    rig.settle()
    assert rig.ask(keys) == 2
    assert rig.core._pool.busy == 2


def test_nothing_is_copied_to_a_neighbour() -> None:
    keys = chain("a", 3)
    rig = rig_beside([])
    rig.put(keys)
    assert [move.tier for move in rig.step()] == [0]
    rig.settle()
    assert rig.core.unsaved == 0


def test_what_a_neighbour_keeps_is_not_written_a_second_time() -> None:
    keys = chain("a", 3)
    rig = rig_beside(keys[:2])
    rig.put(keys)
    (move,) = rig.step()
    assert move.keys == keys[2:]


def test_news_from_before_a_reset_are_not_news() -> None:
    keys = chain("a", 3)
    rig = rig_beside(keys)
    rig.core.reset()
    tell(rig, appeared=[(key, slot) for slot, key in enumerate(keys)])
    assert rig.ask(keys) == 0
    rig.settle()
    tell(rig, appeared=[(keys[0], 5)])
    assert rig.resolve(keys) == 1


def test_news_are_from_before_or_after_a_clearing_however_late_they_are_taken_in() -> None:
    keys = chain("a", 2)
    rig = rig_beside([])
    before = Changes([(keys[0], 1)])
    rig.core.reset()
    clearings = [move for _ in range(3) for move in rig.step() if move.op is Op.CLEAR]
    while not any(move.tier == 1 for move in clearings):
        for move in clearings:
            rig.end(move)
        clearings = [move for move in rig.step() if move.op is Op.CLEAR]
    after = Changes([(keys[1], 2)])
    (clearing,) = clearings
    rig.core.poll(
        rig.now,
        [
            Completion(NO_MOVE, [], changes=before, tier=1),
            Completion(clearing.id, []),
            Completion(NO_MOVE, [], changes=after, tier=1),
        ],
    )
    assert [*rig.core.tiers[1].entries.items()] == [(keys[1], 2)]
    assert before.taken
    assert after.taken


def test_events_of_a_neighbours_tier_are_told() -> None:
    keys = chain("a", 2)
    rig = rig_beside([])
    tell(rig, appeared=[(keys[0], 1), (keys[1], 2)])
    tell(rig, gone=[keys[0]])
    assert [(e.keys, e.medium, e.removed) for e in rig.core.take_events()] == [
        (keys, "shared", False),
        (keys[:1], "shared", True),
    ]
