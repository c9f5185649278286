"""How chunks reach slower tiers, and what a tier that cannot take them does to the rest."""

from __future__ import annotations

from kvstore.core.cascade import CASCADE_BATCH
from kvstore.core.residency.health import STORE_PAUSE
from kvstore.core.residency.slots import ASIDE_PAUSE, RETRY_PAUSE
from kvstore.types import Op
from tests.core.rig import Rig, chain


def test_a_chain_goes_to_neighbouring_slots_whatever_order_the_server_reports() -> None:
    rig = Rig(rows=8)
    keys = chain("a", 8)
    rig.granted(keys, "w")
    rig.core.complete_store(set(keys), "w")
    (move,) = rig.step()
    assert (move.keys, move.slots) == (keys, list(range(8)))


def test_what_a_tier_has_is_not_copied_there_again() -> None:
    keys = chain("a", 2)
    rig = Rig(rows=8, on=[keys])
    rig.put(keys)
    assert rig.step() == []


def test_what_was_promoted_is_not_copied_back() -> None:
    keys = chain("a", 2)
    rig = Rig(rows=8, on=[keys, ()])
    rig.resolve(keys)
    rig.step()
    assert rig.under_way(Op.CASCADE, 0) == rig.under_way(Op.CASCADE, 1) == []


def test_a_chunk_cannot_leave_while_it_is_copied() -> None:
    rig = Rig(rows=4)
    keys = chain("a", 4)
    rig.put(keys)
    rig.step()
    assert rig.core._pool.busy == 4
    assert rig.core.prepare_store(chain("b", 1), "w") is None
    rig.settle()
    assert rig.core._pool.busy == 0
    rig.put(chain("b", 4))


def test_a_chunk_that_waits_for_its_copy_leaves_for_a_load() -> None:
    cold = chain("cold", 3)
    rig = Rig(rows=4, on=[cold], in_flight=1)
    keys = chain("a", 4)
    rig.put(keys)
    rig.step()
    rig.begin(cold)
    assert sum(len(move.keys) for move in rig.under_way(Op.PROMOTE)) == 3
    assert rig.stats.shed == 3
    rig.settle()
    assert rig.ask(cold) == 3


def test_a_chunk_that_left_before_its_copy_and_came_back_is_copied_once() -> None:
    cold = chain("cold", 4)
    rig = Rig(rows=4, on=[cold], in_flight=4)
    keys = chain("a", 4)
    rig.put(keys)
    assert rig.ask(cold) is None
    others = {b"other-%d" % number: 60 + number for number in range(4)}
    rig.core.tiers[0].index.writing |= others  # no more than these may be on their way
    rig.settle()
    rig.core.tiers[0].index.writing.clear()
    assert rig.stats.shed == 4
    rig.core.on_request_finished("r")
    rig.step()
    rig.put(keys)
    moves = rig.step()
    assert [move.keys for move in moves] == [keys]
    rig.settle()
    assert set(rig.core.tiers[0].entries) == {*cold, *keys}


def test_the_end_of_a_prompt_does_not_displace_its_head_where_a_tier_cannot_grow_after_all() -> (
    None
):
    rig = Rig(rows=16, segment_slots=4, max_segments=4, in_flight=2)
    keys = chain("a", 12)
    rig.put(keys)
    for _ in range(50):
        for move in list(rig.moves):
            rig.end(move, segments=[] if move.op is Op.GROW else None)
        rig.step()
    assert set(rig.core.tiers[0].entries) == set(keys[:4])
    assert rig.stats.tiers[0].declined == 8


def test_copies_go_on_while_a_tier_is_read_from() -> None:
    cold = chain("cold", 8)
    rig = Rig(rows=16, on=[cold], in_flight=4)
    rig.begin(cold)
    assert sum(len(move.rows) for move in rig.under_way(Op.PROMOTE)) == 8
    rig.put(chain("a", 8))
    rig.step()
    assert [move.keys for move in rig.under_way(Op.CASCADE)] == [chain("a", 4)]


def test_one_copy_is_no_larger_than_a_batch() -> None:
    rig = Rig(rows=200, segment_slots=256, in_flight=200)
    rig.put(chain("a", 200))
    sizes = [len(move.keys) for move in rig.step() + rig.step()]
    assert max(sizes) == CASCADE_BATCH
    assert sum(sizes) == 200


def test_a_full_tier_evicts_the_end_of_the_oldest_chain() -> None:
    old = chain("old", 4)
    rig = Rig(rows=8, on=[old[::-1]], segment_slots=4)
    rig.store(chain("new", 2))
    assert sorted(rig.core.tiers[0].entries) == sorted([*old[:2], *chain("new", 2)])
    assert rig.stats.tiers[0].evicted == 2


def test_a_block_that_could_not_be_written_fails_alone_and_its_slot_is_set_aside() -> None:
    rig = Rig(rows=8, segment_slots=8)
    keys = chain("a", 4)
    rig.put(keys)
    (move,) = rig.step()
    rig.finish(move, failed={keys[1]})
    assert set(rig.core.tiers[0].entries) == {keys[0], keys[2], keys[3]}
    assert rig.owned().slots.free == 4
    assert rig.stats.tiers[0].set_aside == 1
    assert rig.core._pool.busy == 0
    (line,) = rig.log
    assert line == "slots of tier tier0 cannot be written and are set aside: injected"
    rig.put(chain("b", 4))
    (move,) = rig.step()
    assert not set(move.slots) & {1}, "nobody pauses, and the others are used"


def put_one_by_one(rig: Rig, names: str, bad: set[int]) -> int:
    """Put a chunk for each name, with a pause after each; how often a bad slot was written to."""
    tries = 0
    for name in names:
        rig.put(chain(name, 1), name)
        rig.step()
        for move in rig.under_way(Op.CASCADE):
            failed = bool(bad & set(move.slots))
            tries += failed
            rig.end(move, move.keys if failed else ())
        rig.wait(STORE_PAUSE + 2, each=1.0)
    return tries


def test_a_chunk_that_fails_alone_pauses_nobody_until_the_next_one_fails_too() -> None:
    rig = Rig(rows=8, segment_slots=16)
    for name in "ab":
        rig.put(chain(name, 1))
        (move,) = rig.step()
        rig.finish(move, move.keys)
    assert rig.log == [
        "slots of tier tier0 cannot be written and are set aside: injected",
        "tier tier0 cannot store now: injected",
    ]
    rig.put(chain("c", 1))
    assert rig.step() == []
    rig.wait(STORE_PAUSE + 1)
    for name in "def":
        rig.put(chain(name, 1))
        (move,) = rig.step()
        rig.finish(move, move.keys if name == "e" else ())
    assert set(rig.core.tiers[0].entries) == {chain("d", 1)[0], chain("f", 1)[0]}


def test_a_slot_that_cannot_be_written_is_tried_again_after_a_long_while_alone() -> None:
    rig = Rig(rows=8, segment_slots=16)
    assert put_one_by_one(rig, "abcdefgh", {2}) == 1
    assert len(rig.core.tiers[0].entries) == 7
    assert rig.stats.tiers[0].set_aside == 1
    rig.wait(ASIDE_PAUSE, each=10.0)
    assert rig.stats.tiers[0].set_aside == 0
    assert put_one_by_one(rig, "ijklmnop", {2}) == 1
    assert len(rig.core.tiers[0].entries) == 14
    # All others are in use: what is new displaces what is old.
    assert put_one_by_one(rig, "qrstuvwx", {2}) == 0
    assert len(rig.core.tiers[0].entries) == 15
    assert set(rig.core.tiers[0].entries) >= {chain(name, 1)[0] for name in "qrstuvwx"}


def test_no_more_than_an_eighth_of_the_slots_is_set_aside() -> None:
    rig = Rig(rows=64, segment_slots=32)
    for name in "abc":
        rig.put(chain(name, 16))
        rig.step()
        for move in rig.under_way(Op.CASCADE):
            rig.end(move, move.keys)
        rig.wait(STORE_PAUSE + 2, each=1.0)
    assert rig.stats.tiers[0].set_aside == 4
    assert rig.owned().slots.free == 28


def test_two_bad_slots_of_a_small_tier_do_not_keep_chunks_from_the_others() -> None:
    rig = Rig(rows=16, segment_slots=14)
    assert put_one_by_one(rig, "abcdefghijklmn", {2, 9}) == 2
    assert rig.stats.tiers[0].set_aside == 2
    assert len(rig.core.tiers[0].entries) == 12
    # All others are in use: what is new displaces what is old, and no copy fails.
    assert put_one_by_one(rig, "opqrst", {2, 9}) == 0
    assert set(rig.core.tiers[0].entries) >= {chain(name, 1)[0] for name in "opqrst"}


def test_a_failed_write_pauses_the_tier_and_lets_waiting_chunks_go() -> None:
    rig = Rig(rows=8, in_flight=2)
    keys = chain("a", 6)
    rig.put(keys)
    (move,) = rig.step()
    rig.finish(move, failed=set(move.keys))
    assert rig.core.unsaved == 0
    assert rig.log == ["tier tier0 cannot store now: injected"]
    rig.put(chain("b", 8))
    assert rig.wait(STORE_PAUSE - 0.5) == [], "nothing is copied for a while"
    assert rig.stats.tiers[0].refused == 4 + 8


def test_a_paused_tier_stores_again_after_the_pause() -> None:
    rig = Rig(rows=8)
    rig.put(chain("a", 2))
    (move,) = rig.step()
    rig.end(move, failed=set(move.keys))
    rig.wait(STORE_PAUSE + 0.2)
    rig.store(chain("b", 2))
    assert set(rig.core.tiers[0].entries) == set(chain("b", 2))
    (line,) = rig.log[1:]
    assert line.startswith("tier tier0 stores again; it had failed 2 times")
    rig.store(chain("c", 2))
    assert len(rig.log) == 2, "said once"


def test_a_tier_where_every_other_write_fails_does_not_flood_the_log() -> None:
    rig = Rig(rows=8, in_flight=2)
    rig.put(chain("a", 8))
    failing = True
    for _ in range(100):
        rig.step(0.1)
        for move in rig.under_way(Op.CASCADE):
            rig.end(move, failed=set(move.keys) if failing else ())
            failing = not failing
        grant = rig.core.prepare_store(chain(f"b{rig.now}", 4), "w")
        if grant is not None:
            rig.core.complete_store(grant.keys, "w")
    assert 1 <= len(rig.log) <= 6, rig.log


def test_reads_go_on_while_a_tier_cannot_store() -> None:
    cold = chain("cold", 2)
    rig = Rig(rows=8, on=[cold])
    rig.put(chain("a", 2))
    (move,) = rig.step()
    rig.finish(move, failed=set(move.keys))
    assert rig.resolve(cold) == 2


def test_a_tier_asks_for_a_segment_before_it_needs_it() -> None:
    rig = Rig(rows=8, segment_slots=8, max_segments=2)
    rig.store(chain("a", 5))
    assert rig.owned().slots.segments == 2
    assert rig.owned().slots.free == 11


def test_a_tier_with_room_asks_for_no_segment() -> None:
    rig = Rig(rows=8, segment_slots=8, max_segments=2)
    rig.store(chain("a", 4))
    assert rig.owned().slots.segments == 1


def test_only_one_segment_is_asked_for_at_a_time() -> None:
    rig = Rig(rows=32, segment_slots=8, max_segments=4)
    rig.put(chain("a", 32))
    rig.wait(0.5)
    assert len(rig.under_way(Op.GROW)) == 1


def test_chunks_wait_for_a_segment_that_is_on_its_way_rather_than_evict() -> None:
    old = chain("old", 4)
    rig = Rig(rows=8, on=[old], segment_slots=4, max_segments=2)
    (grow,) = rig.step()
    rig.put(chain("new", 4))
    rig.step()
    assert set(rig.core.tiers[0].entries) == set(old)
    rig.end(grow)
    rig.settle()
    assert set(rig.core.tiers[0].entries) == {*old, *chain("new", 4)}


def test_a_tier_that_cannot_grow_goes_on_with_the_segments_it_has() -> None:
    old = chain("old", 4)
    rig = Rig(rows=8, on=[old], segment_slots=4, max_segments=2)
    rig.put(chain("new", 4))
    for _ in range(4):
        rig.step()
        for move in list(rig.moves):
            rig.end(move, segments=[])
    assert set(rig.core.tiers[0].entries) == set(chain("new", 4))
    assert rig.core.unsaved == 0
    rig.put(chain("newer", 8))


def test_a_tier_that_cannot_grow_is_asked_again_after_a_pause() -> None:
    rig = Rig(rows=8, on=[chain("old", 4)], segment_slots=4, max_segments=2)
    (grow,) = rig.step()
    rig.finish(grow, segments=[])
    assert rig.wait(RETRY_PAUSE - 0.2) == []
    (again,) = rig.wait(0.4)
    assert again.op is Op.GROW
    rig.finish(again)
    assert rig.owned().slots.segments == 2


def test_a_tier_that_became_smaller_while_it_was_to_grow_grows_as_soon_as_it_may() -> None:
    rig = Rig(rows=8, on=[chain("old", 4)], segment_slots=4, max_segments=2)
    (grow,) = rig.step()
    rig.owned().slots.limit([1])
    rig.end(grow, segments=[])
    assert rig.wait(RETRY_PAUSE / 2) == []
    rig.owned().slots.limit([2])
    (again,) = rig.step()
    assert again.op is Op.GROW


def test_a_tier_that_grew_after_all_evicts_no_more_than_it_must() -> None:
    old = chain("old", 4)
    rig = Rig(rows=16, on=[old], segment_slots=4, max_segments=3)
    (grow,) = rig.step()
    rig.end(grow, segments=[])
    rig.wait(RETRY_PAUSE + 0.5)
    (grow,) = rig.moves
    rig.finish(grow)
    rig.store(chain("new", 8))
    assert set(rig.core.tiers[0].entries) == {*old, *chain("new", 8)}


def test_a_tier_of_one_slot_holds_the_last_chunk_that_was_copied() -> None:
    rig = Rig(rows=4, segment_slots=1)
    keys = chain("a", 3)
    rig.store(keys)
    assert len(rig.core.tiers[0].entries) == 1
    assert rig.core.unsaved == 0


def test_a_slot_that_is_set_aside_is_used_where_there_is_no_other() -> None:
    rig = Rig(rows=8, segment_slots=1)
    assert put_one_by_one(rig, "ab", {0}) == 2
    rig.store(chain("c", 1))
    assert set(rig.core.tiers[0].entries) == set(chain("c", 1))
