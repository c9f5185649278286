"""Waits and moves, one by one, for those who trace requests."""

from __future__ import annotations

from kvstore.core.reports import Outcome, SpanBegin, SpanEnd, SpanKind, Spans
from kvstore.core.residency.remote_answers import Answers
from kvstore.types import Completion, Op
from tests.core.rig import Rig, chain

KEYS = chain("a", 4)


def traced(rig: Rig) -> Rig:
    rig.core._spans.want()
    return rig


def test_nothing_is_kept_unless_it_is_wanted() -> None:
    rig = Rig(rows=8, on=[KEYS])
    rig.begin(KEYS)
    assert rig.core._spans.take() == []


def test_a_wait_and_the_promotion_that_it_waits_for() -> None:
    rig = traced(Rig(rows=8, on=[KEYS]))
    assert rig.ask(KEYS, "r") is None
    (move,) = rig.step(0.25)
    assert rig.core._spans.take() == [
        SpanBegin(SpanKind.DEFERRAL, "r", 100.0, 4, "r"),
        SpanBegin(SpanKind.PROMOTION, move.id, 100.0, 4, "r", 0),
    ]


def test_a_move_ends_when_it_ended_and_not_when_that_was_heard() -> None:
    rig = traced(Rig(rows=8, on=[KEYS]))
    rig.ask(KEYS, "r")
    (move,) = rig.step()
    rig.core._spans.take()
    rig.end(move, ended=rig.now + 0.5)
    rig.step(0.75)
    promotion, wait = rig.core._spans.take()
    assert promotion == SpanEnd(SpanKind.PROMOTION, move.id, 100.5, 4)
    assert wait == SpanEnd(SpanKind.DEFERRAL, "r", 100.75, 4, Outcome.COMPLETE)


def test_a_block_that_failed_is_told() -> None:
    rig = traced(Rig(rows=8, on=[KEYS]))
    rig.ask(KEYS, "r")
    (move,) = rig.step()
    rig.core._spans.take()
    rig.ended.append(Completion(move.id, [True, True, False, True], error="bad digest"))
    rig.step()
    promotion, wait = rig.core._spans.take()
    assert promotion == SpanEnd(SpanKind.PROMOTION, move.id, 100.0, 3, error="bad digest")
    assert isinstance(wait, SpanEnd)
    assert (wait.chunks, wait.outcome) == (3, Outcome.COMPLETE)


def test_a_wait_that_a_deadline_ends_says_so() -> None:
    rig = traced(Rig(rows=8, on=[KEYS], deadline=1.0))
    rig.ask(KEYS, "r")
    rig.step()
    rig.core._spans.take()
    rig.wait(1.2)
    (wait,) = rig.core._spans.take()
    assert isinstance(wait, SpanEnd)
    assert (wait.kind, wait.chunks, wait.outcome) == (SpanKind.DEFERRAL, 0, Outcome.DEADLINE)


def test_a_wait_whose_request_has_ended_says_so() -> None:
    rig = traced(Rig(rows=8, on=[KEYS]))
    rig.ask(KEYS, "r")
    rig.step(0.5)
    rig.core._spans.take()
    rig.core.on_request_finished("r")
    assert rig.core._spans.take() == [
        SpanEnd(SpanKind.DEFERRAL, "r", 100.5, 0, Outcome.GONE),
    ]


def test_the_question_to_a_store_belongs_to_its_request() -> None:
    rig = traced(Rig(rows=8, store=Answers(100), deadline=1.0))
    rig.ask(KEYS, "r")
    (move,) = rig.step()
    assert move.op is Op.ASK
    _, question = rig.core._spans.take()
    assert question == SpanBegin(SpanKind.QUESTION, move.id, 100.0, 4, "r", 1)
    rig.ended.append(Completion(move.id, [True, False, False, False]))
    rig.step()
    assert rig.core._spans.take()[0] == SpanEnd(SpanKind.QUESTION, move.id, 100.0, 1)


def test_a_copy_to_a_slower_tier_is_for_nobody_in_particular() -> None:
    rig = traced(Rig(rows=8, on=[[]]))
    rig.put(KEYS, "r")
    (move,) = rig.step()
    rig.finish(move)
    assert rig.core._spans.take() == [
        SpanBegin(SpanKind.CASCADE, move.id, 100.0, 4, None, 0),
        SpanEnd(SpanKind.CASCADE, move.id, 100.0, 4),
    ]


def test_a_wait_that_is_given_up_between_two_steps_does_not_end_before_it_began() -> None:
    rig = traced(Rig(rows=8, on=[KEYS]))
    assert rig.ask(KEYS) is None
    rig.now += 0.5
    rig.flush()
    rig.core.on_request_finished("r")
    waits = [one.at for one in rig.core._spans.take() if one.kind is SpanKind.DEFERRAL]
    assert waits == [100.5, 100.5]


def test_what_nobody_takes_is_bounded() -> None:
    spans = Spans(most=10)
    spans.want()
    for number in range(25):
        spans.wait_began(str(number), 1)
    kept = spans.take()
    assert len(kept) <= 10
    assert len(kept) + spans.lost == 25
    assert kept[-1].id == "24"
