"""What is read as a hint, and what is ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.hints import MOST_ACTIONS, NO_HINTS, Hints, read_hints


@dataclass
class Action:
    action_type: Any
    payload: Any = field(default_factory=dict)
    action_version: Any = "1.0"
    action_id: str = "a"


@dataclass
class Envelope:
    actions: Any


def params(**hints: Any) -> dict[str, Any]:
    return {"other": 1, "kvstore": hints}


def test_a_request_without_hints_has_none() -> None:
    assert read_hints(None) == (NO_HINTS, 0, 0)
    assert read_hints({"do_remote_decode": True}, None) == (NO_HINTS, 0, 0)
    assert not NO_HINTS.at_end


def test_parameters_of_a_transfer_are_read() -> None:
    hints, taken, ignored = read_hints(
        params(retain_s=300, retain_host=True, demote=True, prefetch_after_s=50, store=False)
    )
    assert hints == Hints(300.0, True, False, True, 50.0, False)
    assert (taken, ignored, hints.at_end) == (5, 0, True)


def test_actions_are_read() -> None:
    envelope = Envelope(
        [
            Action("retain", {"ttl_s": 60, "host": True}),
            Action("demote"),
            Action("prefetch", {"after_s": 5}),
            Action("do_not_store"),
        ]
    )
    assert read_hints(None, envelope) == (Hints(60.0, True, False, True, 5.0, False), 4, 0)
    assert read_hints(None, Envelope([Action("prefetch")]))[0].prefetch_after_s == 0.0


def test_the_last_of_those_that_contradict_one_another_counts() -> None:
    both = Envelope([Action("retain", {"ttl_s": 60}), Action("release")])
    assert read_hints(None, both)[0] == Hints(release=True)
    other = Envelope([Action("release"), Action("retain", {"ttl_s": 60})])
    assert read_hints(None, other)[0] == Hints(retain_s=60.0)
    assert read_hints(params(retain_s=5), Envelope([Action("release")]))[0] == Hints(release=True)


@pytest.mark.parametrize(
    "hints",
    [
        {"retain_s": "5"},
        {"retain_s": 0},
        {"retain_s": -1.0},
        {"retain_s": True},
        {"retain_s": math.nan},
        {"retain_s": math.inf},
        {"retain_s": 1e30},
        {"retain_s": 10**400},
        {"demote": 1},
        {"release": "yes"},
        {"store": None},
        {"prefetch_after_s": []},
        {"no_such_hint": 1},
        {5: 5},
    ],
)
def test_a_malformed_parameter_is_ignored_and_counted(hints: dict[Any, Any]) -> None:
    assert read_hints({"kvstore": hints}) == (NO_HINTS, 0, 1)
    assert read_hints({"kvstore": {**hints, "demote": hints.get("demote", True)}})[2] == 1


@pytest.mark.parametrize(
    "action",
    [
        Action("retain"),
        Action("retain", {"ttl_s": 5, "more": 1}),
        Action("retain", None),
        Action("demote", {"now": True}),
        Action("demote", {}, "2.0"),
        Action("demote", {}, None),
        Action("unheard of"),
        Action(None),
        Action([]),
        "no action",
        None,
    ],
)
def test_a_malformed_action_is_ignored_and_counted(action: Any) -> None:
    assert read_hints(None, Envelope([action])) == (NO_HINTS, 0, 1)
    assert read_hints(None, Envelope([action, Action("demote")])) == (Hints(demote=True), 1, 1)


def test_what_is_no_table_and_no_envelope_is_ignored() -> None:
    assert read_hints({"kvstore": [1]}) == (NO_HINTS, 0, 1)
    assert read_hints("text", 5) == (NO_HINTS, 0, 1)
    assert read_hints(None, Envelope(5)) == (NO_HINTS, 0, 1)


def test_an_envelope_is_read_up_to_a_bound() -> None:
    assert read_hints(None, Envelope([Action("demote")] * 1000))[1:] == (
        MOST_ACTIONS,
        1000 - MOST_ACTIONS,
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ("retain_s", "retain_host", "release", "demote", "prefetch_after_s", "store", "x")
)
KINDS = st.sampled_from(("retain", "release", "demote", "prefetch", "do_not_store")) | ANYTHING


@given(
    table=st.dictionaries(NAMES, ANYTHING) | ANYTHING,
    actions=st.lists(st.builds(Action, KINDS, ANYTHING, ANYTHING), max_size=4),
)
def test_nothing_that_a_client_sends_raises(table: Any, actions: list[Action]) -> None:
    hints, taken, ignored = read_hints({"kvstore": table}, Envelope(actions))
    most = (len(table) if isinstance(table, dict) else table is not None) + len(actions)
    assert taken + ignored == most
    for seconds in (hints.retain_s, hints.prefetch_after_s):
        assert seconds is None or 0 <= seconds < math.inf
