"""How chunks come back from slower tiers: in order, leased, as many as fit."""

from __future__ import annotations

from kvstore.core.residency.breaker import Breaker
from kvstore.types import Op
from tests.core.rig import Rig, chain


def test_a_prefix_is_fetched_by_one_move_in_order_from_neighbouring_slots() -> None:
    keys = chain("a", 6)
    rig = Rig(on=[keys])
    (move,) = rig.begin(keys)
    assert (move.op, move.keys, move.slots) == (Op.PROMOTE, keys, list(range(6)))
    assert len(set(move.rows)) == 6
    assert rig.ask(keys) is None
    assert rig.step() == [], "what is on its way is not fetched again"


def test_only_what_host_memory_lacks_is_fetched() -> None:
    keys = chain("a", 4)
    rig = Rig(on=[keys])
    rig.put([keys[1]])
    rig.begin(keys)
    assert rig.promotion.keys == [keys[0], keys[2], keys[3]]
    rig.settle()
    assert rig.ask(keys) == 4


def test_a_prefix_too_long_for_one_move_comes_in_several_so_that_its_progress_shows() -> None:
    keys = chain("a", 7)
    rig = Rig(rows=12, on=[keys], in_flight=3)
    moves = rig.begin(keys)
    assert [len(move.keys) for move in moves] == [3, 3, 1]
    assert [key for move in moves for key in move.keys] == keys
    for move in moves:
        assert rig.wait(0.9) == []
        assert rig.ask(keys) is None, "each part that arrives is movement"
        rig.end(move)
    rig.step()
    assert rig.ask(keys) == 7


def test_two_requests_for_one_prefix_share_one_fetch() -> None:
    keys = chain("a", 4)
    rig = Rig(on=[keys])
    assert rig.ask(keys, "r0") is None
    (move,) = rig.begin(keys, "r1")
    assert move.keys == keys
    rig.settle()
    assert (rig.ask(keys, "r0"), rig.ask(keys, "r1")) == (4, 4)


def test_promotions_are_granted_in_the_order_of_asking() -> None:
    chains = [chain(name, 4) for name in "abc"]
    rig = Rig(rows=12, on=[[key for keys in chains for key in keys]])
    busy = chain("busy", 4)
    rig.store(busy)
    rig.load(busy, "busy")
    for index, keys in enumerate(chains):
        assert rig.ask(keys, f"r{index}") is None
    assert [move.keys for move in rig.step()] == chains[:2]
    rig.settle()
    assert rig.ask(chains[2], "r2") is None, "the rows belong to those who came first"
    rig.core.on_request_finished("r0")
    assert [move.keys for move in rig.step()] == [chains[2]]


def test_who_stands_further_back_keeps_no_rows_from_who_stands_in_front() -> None:
    first, second = chain("a", 8), chain("b", 7)
    rig = Rig(rows=8, on=[first + second])
    rig.store(second[:6])
    assert rig.ask(first, "r0") is None
    assert rig.ask(second, "r1") is None
    rig.settle(0.01)
    assert rig.ask(first, "r0") == 8
    assert rig.ask(second, "r1") is None
    rig.core.on_request_finished("r0")
    rig.step()
    rig.settle(0.01)
    assert rig.ask(second, "r1") == 7


def test_a_request_that_needs_no_rows_is_not_held_up_by_one_that_does() -> None:
    first, second, shared = chain("a", 8), chain("b", 8), chain("c", 2)
    rig = Rig(rows=10, on=[first + second])
    rig.granted(shared, "w")
    rig.begin(first, "r0")
    assert rig.ask(second, "r1") is None
    assert rig.step() == []
    rig.begin(shared, "r2")
    rig.core.complete_store(shared, "w")
    rig.step()
    assert rig.ask(shared, "r2") == 2
    assert rig.ask(second, "r1") is None


def test_promotions_cannot_evict_each_other() -> None:
    chains = [chain(name, 5) for name in "ab"]
    rig = Rig(rows=8, on=[chains[0] + chains[1]])
    for index, keys in enumerate(chains):
        assert rig.ask(keys, f"r{index}") is None
    rig.settle()
    assert rig.ask(chains[0], "r0") == 5
    assert len(rig.load(chains[0], "r0")) == 5


def test_requests_each_as_large_as_the_pool_all_get_everything_one_after_the_other() -> None:
    prompts = {f"r{index}": chain(f"p{index}", 8) for index in range(8)}
    rig = Rig(rows=8, on=[[key for keys in prompts.values() for key in keys]])
    served: list[str] = []
    for _ in range(200):
        for request, keys in prompts.items():
            if request in served:
                continue
            answer = rig.ask(keys, request)
            if answer is None:
                continue
            assert answer == 8, f"{request} got {answer} of 8 chunks"
            rig.load(keys, request)
            rig.core.complete_load(set(keys), request)
            rig.core.on_request_finished(request)
            served.append(request)
        rig.step(0.05)
        rig.end_all()
    assert served == list(prompts)
    assert rig.stats.timeouts == rig.stats.truncations == 0


def test_a_prefix_larger_than_the_pool_keeps_the_part_that_is_there() -> None:
    keys = chain("a", 12)
    rig = Rig(rows=8, on=[keys])
    rig.store(keys[:5])
    assert rig.resolve(keys) == 8


def test_a_prefix_waits_for_rows_that_others_are_about_to_give_back() -> None:
    mine, theirs = chain("a", 8), chain("b", 4)
    rig = Rig(rows=8, on=[mine])
    rig.store(theirs)
    assert rig.ask(theirs, "other") == 4
    rig.load(theirs, "other")
    assert rig.ask(mine) is None
    rig.settle()
    assert rig.ask(mine) is None, "four of eight are there, and rows will come"
    rig.core.complete_load(theirs, "other")
    rig.settle()
    assert rig.ask(mine) == 8


def test_a_prefix_gets_what_fits_when_others_keep_their_rows() -> None:
    mine, theirs = chain("a", 8), chain("b", 5)
    rig = Rig(rows=8, on=[mine])
    rig.store(theirs)
    assert rig.ask(theirs, "other") == 5
    rig.load(theirs, "other")
    assert rig.ask(mine) is None
    rig.settle()
    rig.wait(1.2)
    assert rig.ask(mine) == 3
    assert rig.stats.timeouts == 1


def busy_with_others(rig: Rig, rows: int = 4, *, tells: bool = True) -> None:
    """So many of the eight rows are being loaded by another request; the server tells it idles."""
    theirs = chain("theirs", rows)
    if tells:
        rig.core.server_computes(False, rig.now)
    rig.store(theirs)
    assert rig.ask(theirs, "other") == rows
    rig.load(theirs, "other")


def wait_asking(rig: Rig, seconds: float, asking: dict[str, list[bytes]]) -> None:
    """Steps of 0.1 s in which the server asks for requests that wait."""
    for _ in range(round(seconds / 0.1)):
        for name, keys in asking.items():
            rig.ask(keys, name)
        rig.step(0.1)


def test_rows_are_waited_for_no_longer_than_it_takes_to_compute_what_is_missing() -> None:
    mine = chain("a", 8)
    rig = Rig(rows=8, on=[mine], recompute=0.1)
    busy_with_others(rig)
    assert rig.ask(mine) is None
    rig.settle()
    wait_asking(rig, 0.3, {"r": mine})
    assert rig.ask(mine) is None, "four chunks are computed in 0.4 s"
    wait_asking(rig, 0.3, {"r": mine})
    assert rig.ask(mine) == 4
    assert (rig.stats.truncations, rig.stats.timeouts) == (1, 0)


def test_the_last_of_those_that_wait_for_rows_is_left_to_the_server_first() -> None:
    first, second = chain("a", 8), chain("b", 4)
    rig = Rig(rows=8, on=[first + second], recompute=0.1, deadline=2.0)
    busy_with_others(rig)
    asking = {"first": first, "second": second}
    assert rig.ask(first, "first") is None
    assert rig.ask(second, "second") is None
    rig.settle()
    wait_asking(rig, 0.6, asking)
    assert rig.ask(second, "second") == 0
    assert rig.ask(first, "first") is None, "the server computes the other"
    rig.core.server_computes(True, rig.now)
    wait_asking(rig, 0.5, {"first": first})
    assert rig.ask(first, "first") == 4
    assert (rig.stats.truncations, rig.stats.timeouts) == (2, 0)
    rig.core.on_request_finished("first")
    rig.core.complete_load(chain("theirs", 4), "other")
    rig.settle()
    assert rig.ask(second, "third") is None, "who comes later is not concerned"
    assert rig.resolve(second, "third") == 4


def test_a_request_that_the_server_has_no_place_for_is_not_left_to_it() -> None:
    mine = chain("a", 8)
    rig = Rig(rows=8, on=[mine], recompute=0.01)
    busy_with_others(rig)
    assert rig.ask(mine) is None
    rig.settle()
    rig.wait(0.6)
    rig.core.complete_load(chain("theirs", 4), "other")
    assert rig.resolve(mine) == 8
    assert rig.stats.truncations == 0


def test_a_server_that_does_not_tell_whether_it_computes_waits_until_the_deadline() -> None:
    mine = chain("a", 8)
    rig = Rig(rows=8, on=[mine], recompute=0.1)
    busy_with_others(rig, tells=False)
    assert rig.ask(mine) is None
    rig.settle()
    wait_asking(rig, 0.9, {"r": mine})
    assert rig.ask(mine) is None
    wait_asking(rig, 0.3, {"r": mine})
    assert rig.ask(mine) == 4
    assert (rig.stats.truncations, rig.stats.timeouts) == (0, 1)


def test_while_the_server_computes_for_others_rows_are_waited_for() -> None:
    mine = chain("a", 8)
    rig = Rig(rows=8, on=[mine], recompute=0.1, deadline=2.0)
    busy_with_others(rig)
    assert rig.ask(mine) is None
    rig.settle()
    rig.core.server_computes(True, rig.now)
    wait_asking(rig, 0.9, {"r": mine})
    assert rig.ask(mine) is None
    rig.core.server_computes(False, rig.now)
    wait_asking(rig, 0.3, {"r": mine})
    assert rig.ask(mine) is None
    wait_asking(rig, 0.3, {"r": mine})
    assert rig.ask(mine) == 4
    assert (rig.stats.truncations, rig.stats.timeouts) == (1, 0)


def test_chunks_on_their_way_are_waited_for_when_no_more_rows_are() -> None:
    mine = chain("a", 8)
    rig = Rig(rows=8, on=[mine], recompute=0.1)
    busy_with_others(rig, 3)
    assert rig.ask(mine) is None
    wait_asking(rig, 0.5, {"r": mine})
    assert rig.ask(mine) is None, "five are being read"
    assert rig.stats.truncations == 1, "the other three are not waited for any more"
    rig.settle()
    assert rig.ask(mine) == 5
    assert (rig.stats.truncations, rig.stats.timeouts) == (1, 0)


def test_chunks_that_others_find_at_every_step_are_not_waited_for() -> None:
    mine, hot = chain("a", 6), chain("hot", 4)
    rig = Rig(rows=8, on=[mine], deadline=1.0)
    rig.store(hot)
    answer: int | None = None
    while answer is None:
        answer = rig.ask(mine)
        assert rig.ask(hot, "other") == 4
        rig.step(0.01)
        rig.end_all()
    assert (answer, rig.stats.truncations, rig.stats.timeouts) == (4, 1, 0)


def test_chunks_that_others_found_in_one_step_make_room_in_the_next() -> None:
    mine, hot = chain("a", 6), chain("hot", 4)
    rig = Rig(rows=8, on=[mine], deadline=1.0)
    rig.store(hot)
    assert rig.ask(mine) is None
    assert rig.ask(hot, "other") == 4
    assert rig.resolve(mine) == 6
    assert rig.stats.truncations == 0


def test_a_request_that_gets_its_rows_one_by_one_is_not_cut_short() -> None:
    mine, hot = chain("a", 8), chain("hot", 4)
    rig = Rig(rows=8, on=[mine], deadline=1.0)
    rig.store(hot)
    for left in (4, 3, 2, 1, 0):
        assert rig.ask(mine) is None
        assert rig.ask(hot[:left], "other") == left
        rig.step(0.01)
    rig.settle()
    assert rig.ask(mine) == 8


def test_rows_that_a_reset_left_with_their_moves_are_waited_for() -> None:
    old, keys = chain("old", 4), chain("a", 8)
    rig = Rig(rows=8, on=[old, ()], deadline=1.0)

    def far_tier_works() -> None:
        for _ in range(4):
            rig.step(0.01)
            for move in [move for move in rig.moves if move.tier == 1]:
                rig.end(move)

    (stuck,) = rig.begin(old, "old")
    rig.core.reset()
    far_tier_works()
    for part in (keys[:4], keys[4:], chain("other", 4)):
        rig.put(part)
        far_tier_works()
    assert set(rig.core.tiers[1].entries) >= set(keys)
    assert rig.ask(keys) is None
    far_tier_works()
    assert rig.ask(keys) is None, "four rows will come back"
    rig.end(stuck)
    rig.settle()
    assert rig.ask(keys) == 8


def test_a_chunk_that_its_tier_lost_while_a_request_waited_ends_its_prefix() -> None:
    first, second = chain("a", 8), chain("b", 8)
    rig = Rig(rows=8, on=[first + second], segment_slots=16)
    assert rig.ask(first, "r0") is None
    rig.begin(second, "r1")
    rig.core.tiers[0].forget([second[5]])
    rig.arrive()
    rig.core.on_request_finished("r0")
    rig.settle()
    assert rig.ask(second, "r1") == 5
    assert len(rig.core._pool.chunks) == 8, "no room was made for what cannot come"


def test_a_failed_block_is_forgotten_and_its_slot_used_again() -> None:
    keys = chain("a", 2)
    rig = Rig(on=[keys], segment_slots=2)
    rig.begin(keys)
    rig.arrive(failed={keys[1]})
    assert rig.core.lookup(keys[1], "another") is False
    new = chain("b", 1)
    rig.store(new)
    assert dict(rig.core.tiers[0].entries) == {keys[0]: 0, new[0]: 1}


def test_stores_do_not_take_the_rows_that_a_waiting_request_needs() -> None:
    cold = chain("cold", 4)
    rig = Rig(rows=8, on=[cold], deadline=1.0)
    rig.core.tiers[0].health.copies = Breaker(1e9)
    rig.core.tiers[0].health.copies.trip(rig.now)  # so that stored chunks may leave at once
    storing: list[tuple[int, str]] = []
    answer: int | None = None
    for step in range(60):
        while storing and storing[0][0] <= step - 3:
            name = storing.pop(0)[1]
            rig.core.complete_store(chain(name, 1), name)
        if step >= 20 and answer is None:
            answer = rig.ask(cold)
        while rig.core.prepare_store(
            chain(f"w{step}.{len(storing)}", 1), f"w{step}.{len(storing)}"
        ):
            storing.append((step, f"w{step}.{len(storing)}"))
        rig.step(0.05)
        rig.end_all()
    assert (answer, rig.stats.timeouts) == (4, 0)
    assert rig.stats.stored > 60, "stores go on before and after"


def test_a_store_of_what_is_there_needs_no_rows_and_waits_for_nobody() -> None:
    hot, first, second = chain("hot", 1), chain("a", 7), chain("b", 7)
    rig = Rig(rows=8, on=[first + second])
    rig.put(hot)
    rig.load(hot, "other")
    for request, keys in (("r0", first), ("r1", second)):
        assert rig.ask(keys, request) is None
    rig.step()
    grant = rig.granted(hot, "w")
    assert grant.keys == []


def test_the_fastest_tier_that_has_a_chunk_is_asked() -> None:
    near, far = chain("a", 3), chain("a", 6)
    rig = Rig(on=[near, far])
    moves = rig.begin(far)
    assert [(move.tier, move.keys) for move in moves] == [(0, near), (1, far[3:])]
    rig.settle()
    assert rig.ask(far) == 6


def test_a_chunk_is_fetched_from_the_next_tier_while_the_first_does_not_answer() -> None:
    stuck, keys = chain("stuck", 1), chain("a", 3)
    rig = Rig(on=[stuck + keys, keys])
    assert rig.ask(stuck, "victim") is None
    rig.wait(3.0)
    assert rig.stats.tiers[0].stalled
    (move,) = rig.begin(keys)
    assert (move.tier, move.keys) == (1, keys)


def test_promoted_chunks_are_touched_so_that_their_head_stays_longest() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=4, on=[keys])
    rig.resolve(keys)
    rig.core.on_request_finished("r")
    rig.step()
    rig.put(chain("b", 2))
    assert [rig.in_host(key) for key in keys] == [True, True, False, False]
