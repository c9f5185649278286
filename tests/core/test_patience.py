"""How long the answer of a store is waited for, and by whom."""

from __future__ import annotations

import math

import pytest

from kvstore.core.residency.recompute import FIRST_PAUSE
from kvstore.core.residency.remote_answers import LEAST_PATIENCE, RISKED, Answers, Patience
from kvstore.types import Completion, Move, Op
from tests.core.rig import Rig, chain

CHUNKS = 100
COMPUTE = 0.01
WHOLE = CHUNKS * COMPUTE
"""Seconds in which a prompt of that many chunks is computed."""


def learned(asked: int, found: int, seconds: float, times: int = 100) -> Patience:
    patience = Patience()
    for _ in range(times):
        patience.answered(asked, found, seconds)
    return patience


def test_where_nobody_knows_how_fast_the_server_computes_the_deadline_alone_counts() -> None:
    assert learned(CHUNKS, 0, 5.0).lasts(CHUNKS, 0.0, 0.0) == math.inf


def test_a_new_store_is_waited_for_as_long_as_computing_takes() -> None:
    assert Patience().lasts(CHUNKS, COMPUTE, 0.0) == pytest.approx(WHOLE)


def test_what_a_store_saves_on_average_is_what_its_answer_may_take() -> None:
    half = learned(CHUNKS, CHUNKS // 2, 0.1)
    assert half.lasts(CHUNKS, COMPUTE, 0.0) == pytest.approx(WHOLE / 2, rel=0.05)
    # To read takes time too.
    assert half.lasts(CHUNKS, COMPUTE, COMPUTE / 2) == pytest.approx(WHOLE / 4, rel=0.05)


def test_a_quick_answer_is_waited_for_though_it_is_no_most_of_the_time() -> None:
    assert learned(CHUNKS, 0, 0.001).lasts(CHUNKS, COMPUTE, 0.0) == pytest.approx(RISKED * WHOLE)


def test_a_slow_answer_that_is_no_most_of_the_time_is_not() -> None:
    assert learned(CHUNKS, 0, 0.2).lasts(CHUNKS, COMPUTE, 0.0) == 0.0
    # A longer prompt has more to lose.
    assert learned(CHUNKS, 0, 0.2).lasts(10 * CHUNKS, COMPUTE, 0.0) > 0.0


def test_a_moment_is_always_waited() -> None:
    assert learned(1, 0, 0.001).lasts(1, 0.0001, 0.0) == LEAST_PATIENCE


@pytest.mark.parametrize("chunks", [1, 16, 1000])
def test_a_store_that_has_nothing_is_found_out_by_a_few_prompts(chunks: int) -> None:
    computing = 1.0
    patience = Patience()
    answers = 0
    while patience.lasts(chunks, computing / chunks, 0.0):
        answers += 1
        patience.answered(chunks, 0, 0.25 * computing)
    assert 4 <= answers <= 15


def test_a_store_that_has_come_to_have_chunks_is_waited_for_again() -> None:
    patience = learned(CHUNKS, 0, 0.2)
    for _ in range(40):
        patience.answered(CHUNKS, CHUNKS, 0.2)
    assert patience.lasts(CHUNKS, COMPUTE, 0.0) > 0.2


def test_how_long_answers_take_is_known_after_a_few() -> None:
    patience = learned(CHUNKS, CHUNKS, 0.001)
    for _ in range(12):
        patience.answered(CHUNKS, CHUNKS, 1.0)
    assert patience.seconds == pytest.approx(1.0, rel=0.05)


# -- in the core -----------------------------------------------------------------------------------


KEYS = chain("a", 8)


def slow_store(*, has: int, seconds: float) -> Rig:
    """Behind a store whose answers took so long and found so many of eight, again and again."""
    rig = Rig(rows=64, store=Answers(10_000), deadline=2.0, max_wait=20.0, lease=60.0)
    rig.core.computed(1000, 1000 * COMPUTE)
    teach(rig, has, seconds)
    return rig


def teach(rig: Rig, has: int, seconds: float) -> None:
    """Its store has answered so, again and again."""
    store = rig.core.tiers[-1].store
    assert store is not None
    for _ in range(1000):
        store.patience.answered(8, has, seconds)


def question(rig: Rig) -> Move:
    (move,) = rig.under_way(Op.ASK, 1)
    return move


def test_who_has_little_to_gain_does_not_wait_and_the_store_is_asked_all_the_same() -> None:
    rig = slow_store(has=0, seconds=0.3)
    rig.begin(KEYS, "r")
    assert rig.ask(KEYS, "r") == 0
    assert question(rig).keys == KEYS
    assert rig.core.stats().tiers[1].unawaited == 1


def test_what_such_a_question_finds_is_there_for_who_comes_later() -> None:
    rig = slow_store(has=0, seconds=0.3)
    rig.ask(KEYS, "r")
    rig.step(0.3)
    move = question(rig)
    rig.moves.remove(move)
    rig.ended.append(Completion(move.id, [True] * 8))
    rig.step()
    (promotion,) = rig.begin(KEYS, "later")
    assert promotion.op is Op.PROMOTE
    assert promotion.keys == KEYS


def test_a_request_goes_on_without_an_answer_that_takes_longer_than_it_is_worth() -> None:
    rig = slow_store(has=8, seconds=0.001)
    assert rig.ask(KEYS, "r") is None
    rig.step(0.05)
    assert rig.ask(KEYS, "r") is None
    # Eight chunks are computed in 0.08 s.
    rig.step(0.05)
    assert rig.ask(KEYS, "r") == 0
    assert rig.core.stats().tiers[1].unawaited == 0
    assert rig.core.stats().timeouts == 0


def test_a_prompt_that_is_on_disk_up_to_there_gets_that_part() -> None:
    rig = Rig(rows=64, on=[KEYS[:4]], store=Answers(100), deadline=2.0, max_wait=20.0)
    rig.core.computed(1000, 1000 * COMPUTE)
    teach(rig, 0, 0.3)
    moves = rig.begin(KEYS, "r")
    rig.finish(next(move for move in moves if move.op is Op.PROMOTE))
    assert rig.ask(KEYS, "r") == 4


def test_a_store_that_does_not_answer_teaches_not_to_wait_for_it() -> None:
    rig = Rig(rows=64, store=Answers(1000), deadline=1.0, max_wait=20.0)
    rig.core.computed(1000, 1000 * COMPUTE)
    waits = []
    for number in range(3):
        keys, began = chain(f"p{number}", 8), rig.now
        while rig.ask(keys, f"r{number}") is None:
            rig.step(0.01)
        waits.append(rig.now - began)
        # The question is given up at the deadline.
        rig.wait(0.4)
    assert max(waits) < 0.12, "as long as computing takes, and a step"
    keys = chain("last", 8)
    rig.begin(keys, "last")
    assert rig.ask(keys, "last") == 0


def test_what_made_reads_slow_is_not_held_against_answers_once_they_are_tried_again() -> None:
    rig = slow_store(has=8, seconds=0.05)
    store = rig.core.tiers[-1].store
    assert store is not None
    store.health.pace.replace(100, 10.0)
    rig.step()
    assert store.health.recompute.outpaced
    assert rig.ask(KEYS, "early") == 0
    rig.wait(FIRST_PAUSE + 0.2)
    assert rig.ask(KEYS, "r") is None
    rig.step(0.02)
    assert rig.ask(KEYS, "r") is None, "it waits for the answer"
    move = question(rig)
    rig.moves.remove(move)
    rig.ended.append(Completion(move.id, [True] * 8))
    rig.step()
    assert [move.op for move in rig.step()] == [Op.PROMOTE]
