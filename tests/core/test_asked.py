"""A store: a tier that has to be asked what it has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from kvstore.core.async_lookup import MOST_KEYS
from kvstore.core.residency.health import FIRST_PAUSE, LAST_PAUSE
from kvstore.core.residency.remote_answers import Answers
from kvstore.types import NO_MOVE, Completion, Move, Op
from tests.core.rig import Rig, chain

KEYS = chain("a", 6)


def with_store(
    on: Sequence[Sequence[bytes]] = (), *, most: int = 1000, lasts: float = 60.0, rows: int = 8
) -> Rig:
    return Rig(rows=rows, on=on, store=Answers(most, lasts), deadline=1.0, lease=3.0)


def questions(rig: Rig) -> list[Move]:
    return rig.under_way(Op.ASK, len(rig.core.tiers) - 1)


def question(rig: Rig) -> list[bytes]:
    """The keys of the only question under way."""
    (move,) = questions(rig)
    return move.keys


def answer(rig: Rig, has: Collection[bytes] = ()) -> None:
    """The store says of each question under way that it has these alone."""
    for move in questions(rig):
        rig.moves.remove(move)
        rig.ended.append(Completion(move.id, [key in has for key in move.keys]))


def fail(rig: Rig) -> None:
    """No call under way is answered."""
    for move in list(rig.moves):
        rig.end(move, failed=move.keys, unread=move.keys)


def told(rig: Rig, keys: Sequence[bytes], has: Collection[bytes], request: str = "r") -> int:
    """What a request gets, from a store that answers at once and has these."""
    for _ in range(100):
        found = rig.ask(keys, request)
        if found is not None:
            return found
        rig.step()
        answer(rig, has)
        for move in [move for move in rig.moves if move.op is not Op.ASK]:
            rig.end(move)
        rig.step()
    raise AssertionError(f"{request} is deferred for ever")


# -- questions -------------------------------------------------------------------------------


def test_a_key_of_which_nobody_knows_is_asked_about_and_the_lookup_deferred() -> None:
    rig = with_store()
    rig.begin(KEYS)
    assert question(rig) == KEYS, "in the order of the prompt, in one question"
    assert rig.ask(KEYS) is None


def test_a_miss_of_the_store_costs_no_further_question_while_the_answer_counts() -> None:
    rig = with_store(lasts=60.0)
    assert told(rig, KEYS, has=()) == 0
    rig.core.on_request_finished("r")
    rig.step(30.0)
    assert rig.ask(KEYS, "later") == 0
    rig.core.on_request_finished("later")
    rig.step(31.0)
    assert rig.ask(KEYS, "much later") is None


def test_what_the_store_had_is_asked_about_again_when_the_answer_counts_no_more() -> None:
    rig = with_store(lasts=60.0)
    rig.begin(KEYS)
    answer(rig, has=KEYS)
    rig.step()
    assert rig.core.contains_prefix(KEYS) == 6
    for _ in range(61):
        rig.step(1.0)
    assert KEYS[5] not in rig.core.tiers[0].entries


def test_what_the_store_has_is_not_forgotten_while_a_request_waits_for_it() -> None:
    rig = with_store(lasts=60.0, rows=2)
    keys, others = KEYS[:2], chain("b", 2)
    assert told(rig, others, has=others, request="other") == 2
    rig.core.prepare_load(others, "other")
    rig.begin(keys, "first")
    answer(rig, has=keys)
    rig.core.on_request_finished("first")
    rig.step(59.5)
    assert rig.ask(keys) is None
    for _ in range(3):
        rig.step(0.3)
    assert not rig.under_way(Op.PROMOTE), "no row is free"
    rig.core.complete_load(others, "other")
    rig.core.on_request_finished("other")
    rig.step()
    assert rig.promotion.keys == keys


def test_nothing_is_fetched_behind_a_chunk_that_the_store_lacks() -> None:
    rig = with_store()
    rig.begin(KEYS)
    answer(rig, has=[key for key in KEYS if key != KEYS[2]])
    rig.step()
    rig.step()
    assert rig.promotion.keys == KEYS[:2]
    rig.arrive()
    assert rig.ask(KEYS) == 2
    assert rig.under_way(Op.PROMOTE) == []


def test_a_store_that_lacks_the_head_costs_no_fetch() -> None:
    rig = with_store()
    rig.begin(KEYS)
    answer(rig, has=KEYS[1:])
    rig.step()
    assert rig.ask(KEYS) == 0
    assert rig.under_way(Op.PROMOTE) == []


@pytest.mark.parametrize("positions", [KEYS.index, None, lambda key: 0])
def test_what_a_window_needs_is_fetched_though_the_head_is_nowhere(positions: Any) -> None:
    rig = with_store()
    rig.core.on_new_request("r", positions, one_group=True)
    for key in reversed(KEYS):
        assert rig.core.lookup(key, "r") is None
    rig.step()
    answer(rig, has=KEYS[2:5])
    rig.step()
    rig.step()
    assert set(rig.promotion.keys) == set(KEYS[2:5])


@pytest.mark.parametrize("asked", ["one by one", "as prefixes"])
def test_of_several_groups_each_gets_what_the_store_has(asked: str) -> None:
    rig = with_store(rows=16)
    groups = chain("b", 6), KEYS
    for keys in groups:
        if asked == "as prefixes":
            assert rig.ask(keys) is None
        for key in keys if asked == "one by one" else ():
            assert rig.core.lookup(key, "r") is None
    rig.step()
    answer(rig, has=[*groups[0][:4], *groups[1]])
    rig.step()
    rig.step()
    assert set(rig.promotion.keys) == {*groups[0][:4], *groups[1]}


def test_what_lies_behind_a_gap_is_found_once_the_gap_is_filled() -> None:
    """As when the device gets it from another request meanwhile, and the server asks from there."""
    rig = with_store()
    has = KEYS[1:]
    assert told(rig, KEYS, has) == 0
    assert told(rig, KEYS[1:], has) == 5


def test_a_store_is_not_believed_for_ever_to_have_what_a_faster_tier_serves() -> None:
    rig = with_store([KEYS], lasts=60.0)
    store = rig.core.tiers[1].store
    assert store is not None
    store.index.appear((key, 0) for key in KEYS)
    store.answers.has(KEYS, rig.now)
    for number in range(3):
        rig.step(25.0)
        rig.core.make_room(8)
        assert told(rig, KEYS, has=(), request=f"r{number}") == 6
        rig.core.on_request_finished(f"r{number}")
    assert not any(key in store.entries for key in KEYS)


def test_two_requests_with_the_same_keys_ask_once() -> None:
    rig = with_store()
    assert rig.ask(KEYS[:4], "one") is None
    rig.begin(KEYS, "two")
    assert [move.keys for move in questions(rig)] == [KEYS[:4], KEYS[4:]]
    rig.begin(KEYS, "three")
    assert len(questions(rig)) == 2
    answer(rig)
    rig.step()
    assert [rig.ask(KEYS, name) for name in ("one", "two", "three")] == [0, 0, 0]


def test_nobody_asks_about_what_another_tier_has() -> None:
    rig = with_store([KEYS[:3]])
    rig.begin(KEYS)
    assert question(rig) == KEYS[3:]
    assert rig.promotion.keys == KEYS[:3], "which comes meanwhile"
    answer(rig, has=KEYS[3:5])
    rig.arrive()
    rig.step()
    (rest,) = rig.under_way(Op.PROMOTE, 1)
    assert rest.keys == KEYS[3:5]
    rig.finish(rest)
    assert rig.ask(KEYS) == 5


def test_a_long_prompt_is_asked_about_in_portions() -> None:
    rig = with_store()
    keys = chain("long", MOST_KEYS + 1)
    rig.begin(keys)
    assert [len(move.keys) for move in questions(rig)] == [MOST_KEYS, 1]


def test_only_so_many_answers_are_kept() -> None:
    rig = with_store(most=4)
    keys = chain("many", 12)
    assert told(rig, keys, has=keys[:2]) == 2
    store = rig.core.tiers[0].store
    assert store is not None
    assert len(store.answers.absent) == 4
    assert told(rig, chain("more", 8), has=chain("more", 8), request="s") == 4
    assert len(store.entries) == 4


# -- stores ------------------------------------------------------------------------------------


def test_what_is_stored_is_copied_to_the_store_once() -> None:
    rig = with_store()
    rig.put(KEYS[:2])
    rig.step()
    (copy,) = rig.under_way(Op.CASCADE)
    assert copy.keys == KEYS[:2]
    rig.finish(copy)
    assert rig.core.contains_prefix(KEYS) == 2
    assert rig.core.unsaved == 0
    rig.put(KEYS[:2], "again")
    rig.step()
    assert not rig.under_way(Op.CASCADE)


def test_what_another_host_has_stored_meanwhile_is_not_copied_again() -> None:
    rig = Rig(rows=8, on=(), store=Answers(1000, 60.0), in_flight=2)
    rig.begin(KEYS, "asks")
    rig.put(KEYS, "w")
    rig.step()
    (copy,) = rig.under_way(Op.CASCADE)
    assert copy.keys == KEYS[:2], "the others wait"
    answer(rig, has=KEYS)
    rig.step()
    rig.end(copy)
    for _ in range(3):
        rig.step()
        assert not rig.under_way(Op.CASCADE)
    assert rig.core.unsaved == 0
    assert set(rig.core.tiers[0].entries) == set(KEYS)


def test_what_was_said_to_be_absent_is_there_once_it_was_copied() -> None:
    rig = with_store(rows=8)
    assert told(rig, KEYS, has=()) == 0
    rig.store(KEYS, "r")
    for other in ("b", "c"):
        rig.store(chain(other, 8), other)
    assert not rig.in_host(KEYS[0])
    rig.begin(KEYS, "later")
    assert not questions(rig)
    assert rig.promotion.keys == KEYS


def test_an_answer_that_comes_when_the_chunk_was_copied_meanwhile_does_not_undo_that() -> None:
    rig = with_store()
    rig.begin(KEYS[:2])
    rig.put(KEYS[:2], "w")
    rig.step()
    (copy,) = rig.under_way(Op.CASCADE)
    rig.finish(copy)
    answer(rig, has=())
    rig.step()
    assert KEYS[0] in rig.core.tiers[0].entries
    store = rig.core.tiers[0].store
    assert store is not None
    assert not [key for key in KEYS if key in store.entries and key in store.answers.absent]


def test_an_answer_does_not_prolong_the_wait_for_what_it_has_found() -> None:
    rig = with_store()
    assert rig.ask(KEYS) is None
    rig.wait(0.8)
    assert rig.ask(KEYS) is None
    answer(rig, KEYS)
    for _ in range(3):
        rig.step()
        assert rig.ask(KEYS) is None
    assert rig.under_way(Op.PROMOTE)
    rig.wait(0.3)
    assert rig.ask(KEYS) == 0


def test_what_others_wait_for_does_not_prolong_it() -> None:
    rig = with_store([chain("disk", 40)], rows=8)
    assert rig.ask(KEYS, "asks") is None
    for number in range(12):
        rig.ask(chain("disk", 40)[number * 3 : number * 3 + 3], f"r{number}")
        rig.step(0.1)
        for move in rig.under_way(Op.PROMOTE):
            rig.end(move)
        rig.ask(KEYS, "asks")
    rig.step()
    assert rig.ask(KEYS, "asks") == 0


def test_a_store_whose_calls_fail_is_left_alone_for_longer_and_longer() -> None:
    rig = with_store()
    rig.begin(KEYS)
    fail(rig)
    rig.step()
    assert rig.ask(KEYS) == 0
    pauses = []
    for attempt in range(8):
        waited = 0.0
        while not questions(rig):
            # Whoever comes meanwhile asks nobody, and does not wait.
            assert rig.ask(chain(f"{attempt}-{waited}", 3), f"{attempt}-{waited}") == 0
            rig.core.on_request_finished(f"{attempt}-{waited}")
            rig.step(0.5)
            waited += 0.5
        pauses.append(waited)
        assert question(rig) == KEYS[:1]
        assert rig.ask(KEYS, f"during-{attempt}") == 0, "nobody waits for a try"
        assert rig.stats.tiers[0].away
        fail(rig)
        rig.step()
    assert pauses[0] == pytest.approx(FIRST_PAUSE, abs=0.5)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LAST_PAUSE, abs=0.5)
    assert [line for line in rig.log if "is away" in line] == rig.log, "one line"
    assert len(rig.log) == 1


def test_a_store_that_answers_again_is_used_again() -> None:
    rig = with_store()
    rig.ask(KEYS)
    rig.step()
    fail(rig)
    rig.step()
    rig.wait(FIRST_PAUSE + 0.2)
    answer(rig)
    rig.step()
    assert [line for line in rig.log if "is back" in line]
    assert not rig.stats.tiers[0].away
    assert told(rig, chain("b", 3), has=chain("b", 3), request="s") == 3


def test_a_call_that_was_begun_before_a_store_went_away_does_not_bring_it_back() -> None:
    rig = with_store(rows=16)
    for name in ("a", "b", "c"):
        rig.begin(chain(name, 2), name)
    first, second, third = questions(rig)
    for move in (first, second, third):
        rig.moves.remove(move)
    nothing = [False] * 2
    rig.ended.append(Completion(first.id, nothing, error="away", unread=range(2)))
    rig.ended.append(Completion(second.id, nothing))
    rig.ended.append(Completion(third.id, nothing, error="away", unread=range(2)))
    rig.step()
    assert rig.stats.tiers[0].away
    assert len([line for line in rig.log if "is away" in line or "is back" in line]) == 1


def test_one_that_fails_again_later_is_left_alone_for_as_long_as_at_first() -> None:
    rig = with_store()
    for time in range(3):
        rig.ask(chain(f"{time}", 3), f"{time}")
        rig.step()
        fail(rig)
        rig.step()
        assert not rig.wait(FIRST_PAUSE - 0.2)
        assert len(rig.wait(0.4)) == 1
        answer(rig)
        rig.step()


def test_a_store_that_answers_and_fails_every_read_is_left_alone_for_longer_and_longer() -> None:
    rig = with_store()
    pauses: list[float] = []
    for time in range(7):
        keys, request = chain(f"{time}", 3), f"{time}"
        while rig.ask(keys, request) is None:
            rig.step(0.01)
            answer(rig, keys)
            for move in rig.under_way(Op.PROMOTE):
                rig.end(move, failed=move.keys, unread=move.keys)
        rig.core.on_request_finished(request)
        assert rig.stats.tiers[0].away
        waited = 0.0
        while rig.stats.tiers[0].away:
            rig.step(0.5)
            waited += 0.5
            answer(rig)
        pauses.append(waited)
    assert pauses[0] == pytest.approx(FIRST_PAUSE, abs=1.0)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LAST_PAUSE, abs=1.0)


def test_a_reset_while_a_store_is_tried_does_not_end_the_tries() -> None:
    rig = with_store()
    rig.ask(KEYS)
    rig.step()
    fail(rig)
    rig.wait(FIRST_PAUSE + 0.4)
    (tried,) = questions(rig)
    rig.core.reset()
    rig.finish(tried, failed=tried.keys, unread=tried.keys)
    for _ in range(50):
        rig.step(0.1)
        for move in rig.under_way(Op.CLEAR):
            rig.end(move)
    assert questions(rig)
    answer(rig)
    rig.step()
    assert not rig.stats.tiers[0].away


def test_nothing_is_copied_to_a_store_that_is_left_alone() -> None:
    rig = with_store()
    rig.ask(KEYS)
    rig.step()
    fail(rig)
    rig.step()
    rig.put(chain("b", 2), "w")
    rig.step()
    assert not rig.under_way(Op.CASCADE)
    assert rig.stats.tiers[0].refused == 2


def test_a_store_that_says_nothing_at_all_makes_nobody_wait_for_long() -> None:
    rig = with_store()
    for number in range(4):
        rig.ask(chain(f"p{number}", 3), f"p{number}")
        rig.wait(1.2)
    assert rig.stats.tiers[0].stalled
    assert rig.ask(KEYS) == 0
    for move in list(rig.moves):
        rig.end(move, failed=move.keys, unread=move.keys)
    rig.step()
    rig.wait(FIRST_PAUSE + 0.2)
    answer(rig)
    rig.step()
    assert told(rig, chain("b", 3), has=chain("b", 3), request="s") == 3


def test_a_chunk_that_has_left_the_store_is_a_miss_and_not_asked_about_again() -> None:
    rig = with_store()
    rig.ask(KEYS)
    rig.step()
    answer(rig, has=KEYS)
    rig.step()
    rig.step()
    rig.arrive(failed=KEYS[2:])
    assert rig.ask(KEYS) == 2
    rig.core.on_request_finished("r")
    rig.step()
    assert rig.ask(KEYS, "later") == 2
    rig.step()
    assert not questions(rig)


# -- a reset -------------------------------------------------------------------------------------


def test_a_closed_store_is_not_asked() -> None:
    rig = with_store()
    rig.core.reset(close_tiers=True)
    rig.step()
    assert rig.ask(KEYS) == 0
    assert rig.core.flush(rig.now) == []


def test_no_move_is_unknown() -> None:
    rig = with_store()
    rig.ended.append(Completion(NO_MOVE, []))
    rig.step()
    assert rig.stats.stray == 1


def test_a_question_of_which_a_part_was_answered_counts_and_the_store_is_left_alone() -> None:
    rig = with_store()
    rig.begin(KEYS)
    (move,) = questions(rig)
    rig.moves.remove(move)
    ok = [key in KEYS[:2] for key in KEYS]
    rig.ended.append(Completion(move.id, ok, error="too slow", unread=range(4, 6)))
    rig.step()
    assert rig.stats.tiers[0].away
    assert (rig.stats.tiers[0].found, rig.stats.tiers[0].unanswered) == (2, 2)
    store = rig.core.tiers[0].store
    assert store is not None
    assert [store.answers.is_absent(key, rig.core.now) for key in KEYS[3:5]] == [True, False]
