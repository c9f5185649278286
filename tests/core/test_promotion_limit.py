"""Promotions under way hold a part of host memory only, however long a tier takes."""

from __future__ import annotations

from kvstore.core.chunk import FILLING
from kvstore.core.step import DEFAULT_PACE
from kvstore.types import Op
from tests.core.rig import Rig, chain


def on_their_way(rig: Rig) -> int:
    return sum(chunk.state == FILLING for chunk in rig.core._pool.chunks.values())


def test_a_tier_that_does_not_answer_leaves_rows_to_stores() -> None:
    prompts = [chain(f"p{number}", 6) for number in range(8)]
    rig = Rig(rows=16, on=[[key for keys in prompts for key in keys]], segment_slots=256)
    for number, keys in enumerate(prompts):
        assert rig.ask(keys, f"r{number}") is None
    rig.step()
    assert on_their_way(rig) == 12
    for number in range(30):
        rig.put(chain(f"new-{number}", 4), f"w{number}")
        rig.step(0.1)
        for move in rig.under_way(Op.CASCADE):
            rig.end(move)
        rig.step()
    assert on_their_way(rig) == 12
    assert rig.stats.chunks_refused == 0
    assert rig.stats.stores_deferred == 0


def test_a_prefix_that_is_longer_comes_whole_in_portions() -> None:
    keys = chain("a", 16)
    rig = Rig(rows=16, on=[keys])
    assert rig.ask(keys) is None
    assert [len(move.keys) for move in rig.step()] == [12]
    rig.arrive()
    assert rig.ask(keys) is None
    assert [len(move.keys) for move in rig.step()] == [4]
    rig.arrive()
    assert rig.ask(keys) == 16
    assert rig.stats.truncations == 0


def test_what_is_left_of_a_prefix_is_asked_for_while_its_first_portion_arrives() -> None:
    keys = chain("a", 16)
    rig = Rig(rows=16, on=[keys], in_flight=4)
    moves = rig.begin(keys)
    assert [len(move.keys) for move in moves] == [4, 4, 4]
    rig.end(moves[0])
    assert [len(move.keys) for move in [*rig.step(), *rig.step()]] == [4]


def test_one_tier_leaves_rows_to_another() -> None:
    silent, lively = chain("silent", 16), chain("lively", 2)
    rig = Rig(rows=16, on=[silent, lively])
    for number in range(8):
        assert rig.ask(silent[2 * number : 2 * number + 2], f"r{number}") is None
    rig.step()
    assert on_their_way(rig) == 12
    rig.begin(lively, "other")
    (move,) = rig.under_way(Op.PROMOTE, tier=1)
    rig.finish(move)
    assert rig.ask(lively, "other") == 2


def test_who_waits_for_the_tier_gets_its_rows_before_who_came_later() -> None:
    first, second = chain("a", 16), chain("b", 3)
    rig = Rig(rows=16, on=[first, second])
    rig.begin(first, "r0")
    assert rig.ask(second, "r1") is None
    assert not rig.under_way(Op.PROMOTE, tier=1)
    rig.settle(0.01)
    assert rig.ask(first, "r0") == 16
    assert rig.ask(second, "r1") is None
    rig.core.on_request_finished("r0")
    rig.step()
    rig.settle(0.01)
    assert rig.ask(second, "r1") == 3


def test_a_store_is_not_deferred_for_a_request_that_waits_for_its_tier() -> None:
    keys = chain("a", 16)
    rig = Rig(rows=16, on=[keys])
    rig.begin(keys)
    assert rig.core.waiting == 1
    grant = rig.granted(chain("new", 3), "w")
    assert len(grant.keys) == 3


def test_each_tier_has_its_own_share_where_a_prompt_lies_on_both() -> None:
    keys = chain("a", 16)
    rig = Rig(rows=16, on=[keys[1:], keys[:1]])
    rig.begin(keys)
    assert [len(move.keys) for move in rig.under_way(Op.PROMOTE, 0)] == [12]
    assert [len(move.keys) for move in rig.under_way(Op.PROMOTE, 1)] == [1]


def test_one_slow_read_says_little_of_a_thousand_others() -> None:
    """As the first one after a start: those that wait are not told to compute."""
    count = 100
    prompts = [chain(f"w{n}", 2) for n in range(count)]
    rig = Rig(
        rows=2 * count,
        on=[[key for keys in prompts for key in keys]],
        segment_slots=2 * count,
        max_wait=30.0,
    )
    answers: dict[int, int] = {}

    def ask() -> None:
        for n, keys in enumerate(prompts):
            if n not in answers and (found := rig.ask(keys, f"w{n}")) is not None:
                answers[n] = found

    ask()
    rig.step(0.4)
    rig.end(rig.under_way(Op.PROMOTE)[0])
    for _ in range(100):
        rig.step(0.01)
        ask()
        rig.settle()
    assert answers == dict.fromkeys(range(count), 2)


def test_chunks_that_are_here_are_leased_sooner_than_others_are_fetched() -> None:
    keys, count = chain("p", 320), 16
    rig = Rig(rows=1000, on=[keys], segment_slots=400, deadline=60.0, max_wait=60.0)
    waiting = {f"r{n}" for n in range(count)}
    steps = 0
    while waiting:
        waiting -= {name for name in waiting if rig.ask(keys, name) is not None}
        rig.step(0.001)
        rig.end_all()
        steps += 1
    assert steps <= 320 / DEFAULT_PACE.granted + count * 320 / DEFAULT_PACE.granted / 3 + 4
