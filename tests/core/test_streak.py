"""Answers in a row that a server gives itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.core.rig import Rig, chain

KEYS = chain("a", 4)
CONTEXT = object()

WHATEVER_ELSE: dict[str, Callable[[Rig], object]] = {
    "another asks": lambda rig: rig.core.lookup(KEYS[0], "another"),
    "a step begins": lambda rig: rig.core.poll(1.0),
    "a step ends": lambda rig: rig.core.flush(1.0),
    "moves ended": lambda rig: rig.core.absorb(()),
    "it loads": lambda rig: rig.core.prepare_load(KEYS[:1], "r"),
    "a load ended": lambda rig: rig.core.complete_load(KEYS[:1], "another"),
    "somebody stores": lambda rig: rig.core.prepare_store(chain("b", 1), "w"),
    "a store ended": lambda rig: rig.core.complete_store(chain("b", 1), "w"),
    "it ends": lambda rig: rig.core.on_request_finished("r"),
    "keys are removed": lambda rig: rig.core.remove(KEYS[1:]),
    "all is forgotten": lambda rig: rig.core.reset(),
}


def stored(keys: Sequence[bytes]) -> Rig:
    rig = Rig()
    rig.core.prepare_store(keys, "w")
    rig.core.complete_store(keys, "w")
    rig.step()
    return rig


def test_a_streak_begins_with_a_hit_and_goes_on_with_the_next_ones() -> None:
    rig = stored(KEYS)
    assert rig.core.streak.whose is None
    assert rig.core.lookup(KEYS[0], "r") is True
    assert rig.core.streak.whose is None, "nobody has said that he can answer himself"
    rig.core.go_on(CONTEXT)
    assert rig.core.streak.whose is CONTEXT
    assert rig.core.lookup(KEYS[1], "r") is True
    assert rig.core.streak.whose is CONTEXT


@pytest.mark.parametrize("happens", WHATEVER_ELSE.values(), ids=WHATEVER_ELSE)
def test_a_streak_ends_with_whatever_else_happens(happens: Callable[[Rig], object]) -> None:
    rig = stored(KEYS)
    rig.core.lookup(KEYS[0], "r")
    rig.core.go_on(CONTEXT)
    happens(rig)
    assert rig.core.streak.whose is None


def test_while_keys_are_being_removed_the_core_answers_all() -> None:
    rig = stored(KEYS)
    rig.core.remove(KEYS[1:])
    rig.core.lookup(KEYS[0], "r")
    rig.core.go_on(CONTEXT)
    assert rig.core.streak.whose is None
    assert rig.core.lookup(KEYS[1], "r") is False


def test_what_a_server_has_answered_itself_can_be_loaded_until_the_step_ends() -> None:
    rig = Rig(rows=4)
    rig.core.prepare_store(KEYS, "w")
    rig.core.complete_store(KEYS, "w")
    rig.step()
    rig.core.lookup(KEYS[0], "r")
    rig.core.go_on(CONTEXT)
    for key in KEYS[1:]:
        rig.core.streak.note(key)
    rig.core.prepare_store(chain("b", 4), "others")
    assert len(rig.core.prepare_load(KEYS, "r")) == 4


def deferred(on: Sequence[bytes], asked: bytes) -> Rig:
    """A request that was told "ask again" of a key that a tier has, and goes on."""
    rig = Rig(on=(on,))
    assert rig.core.lookup(asked, "r") is None
    rig.core.go_on(CONTEXT)
    return rig


def test_a_streak_of_deferrals_knows_what_is_fetched_if_the_request_asks() -> None:
    rig = deferred(KEYS[:3], KEYS[0])
    assert rig.core.streak.whose is CONTEXT
    assert [key in rig.core.streak.below for key in KEYS] == [True, True, True, False]
    for key in KEYS[1:3]:
        rig.core.streak.note(key)
    rig.settle()
    assert [rig.core.lookup(key, "r") for key in KEYS] == [True, True, True, False]


def test_after_hits_alone_nothing_is_said_to_be_fetched() -> None:
    rig = stored(KEYS)
    rig.core.lookup(KEYS[0], "r")
    rig.core.go_on(CONTEXT)
    assert not any(key in rig.core.streak.below for key in KEYS)


def test_a_request_that_waits_has_no_streak() -> None:
    rig = deferred(KEYS, KEYS[0])
    rig.step()
    assert rig.core.lookup(KEYS[0], "r") is None
    rig.core.go_on(CONTEXT)
    assert rig.core.streak.whose is None


def test_who_was_answered_once_is_told_of_no_further_deferrals_by_a_streak() -> None:
    rig = deferred(KEYS[:2], KEYS[0])
    rig.settle()
    assert rig.core.lookup(KEYS[0], "r") is True
    assert rig.core.lookup(KEYS[1], "r") is None, "a second round of the same wait"
    rig.core.go_on(CONTEXT)
    assert rig.core.streak.whose is CONTEXT
    assert KEYS[1] not in rig.core.streak.below
