"""The circuit breaker: every event in every state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.residency.breaker import Breaker, State

FIRST, LAST = 1.0, 8.0
OPEN, HALF, CLOSED = State.OPEN, State.HALF_OPEN, State.CLOSED


def breaker(state: State) -> Breaker:
    """Return one in this state; if it is not closed, its pause ends at 1 s."""
    made = Breaker(FIRST, LAST)
    if state is not CLOSED:
        made.trip(0.0)
    if state is HALF:
        assert made.probe(FIRST)
    return made


EVENTS: dict[str, Callable[[Breaker], bool | None]] = {
    "trip amid the pause": lambda it: it.trip(0.5),
    "trip after the pause": lambda it: it.trip(1.5),
    "probe amid the pause": lambda it: it.probe(0.5),
    "probe after the pause": lambda it: it.probe(1.5),
    "cancel": lambda it: it.cancel_probe(),
    "close": lambda it: it.close(),
    "ready amid the pause": lambda it: it.ready(0.5),
    "ready after the pause": lambda it: it.ready(1.5),
}
# For each event and state the state that follows and what is returned.
TABLE: dict[str, dict[State, tuple[State, bool | None]]] = {
    "trip amid the pause": {CLOSED: (OPEN, True), OPEN: (OPEN, False), HALF: (OPEN, False)},
    "trip after the pause": {CLOSED: (OPEN, True), OPEN: (OPEN, False), HALF: (OPEN, False)},
    "probe amid the pause": {CLOSED: (CLOSED, False), OPEN: (OPEN, False), HALF: (HALF, False)},
    "probe after the pause": {CLOSED: (CLOSED, False), OPEN: (HALF, True), HALF: (HALF, False)},
    "cancel": {CLOSED: (CLOSED, None), OPEN: (OPEN, None), HALF: (OPEN, None)},
    "close": {CLOSED: (CLOSED, False), OPEN: (CLOSED, True), HALF: (CLOSED, True)},
    "ready amid the pause": {CLOSED: (CLOSED, True), OPEN: (OPEN, False), HALF: (HALF, False)},
    "ready after the pause": {CLOSED: (CLOSED, True), OPEN: (OPEN, True), HALF: (HALF, True)},
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EVENTS)
def test_each_event_in_each_state(event: str, state: State) -> None:
    it = breaker(state)
    returned = EVENTS[event](it)
    assert (it.state, returned) == TABLE[event][state]
    assert it.closed == (it.state is CLOSED)


def test_pauses_double_with_each_failed_attempt_up_to_the_longest() -> None:
    it, now, pauses = breaker(OPEN), FIRST, []
    for _ in range(5):
        assert it.probe(now)
        it.trip(now)
        began = now
        while not it.ready(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [2.0, 4.0, 8.0, 8.0, 8.0]
    it.close()
    it.trip(now)
    assert it.ready(now + FIRST), "a success makes the next pause the first one again"


def test_a_success_of_another_kind_does_not_make_the_next_pause_the_first_one_again() -> None:
    it = breaker(HALF)
    assert it.close(proved=False)
    assert it.trip(1.0)
    assert not it.ready(1.0 + FIRST)
    assert it.ready(1.0 + 2 * FIRST)
    it.close(proved=False)
    it.close()
    it.trip(5.0)
    assert it.ready(5.0 + FIRST)


def test_a_failure_amid_a_pause_does_not_make_it_longer() -> None:
    it = breaker(OPEN)
    it.trip(0.9)
    assert it.ready(FIRST)


@given(st.lists(st.sampled_from(["trip", "probe", "cancel_probe", "close"]), max_size=30))
def test_a_caller_that_probes_never_makes_two_attempts_at_a_time(acts: list[str]) -> None:
    it, trying = Breaker(0.0), False
    for act in acts:
        done = getattr(it, act)(*([0.0] if act in ("trip", "probe") else []))
        if act == "probe":
            assert not (done and trying)
            trying |= done
        else:
            trying = False
        assert not trying or it.state is HALF
