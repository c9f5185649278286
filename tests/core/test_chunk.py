"""The two tables of a chunk's life, every state with every event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core import HostPool
from kvstore.core.chunk import HOST, TIER, IllegalTransitionError, Life, Table
from kvstore.core.residency.index import Index
from kvstore.policies import create_policy

KEY = b"key"


def events_of(table: Table) -> list[str]:
    return list(dict.fromkeys(event for row in table.values() for event in row))


def pairs_of(table: Table) -> list[tuple[str, str]]:
    return [(state, event) for state in table for event in events_of(table)]


@pytest.mark.parametrize("table", [HOST, TIER], ids=["host", "tier"])
def test_every_state_can_be_reached_and_left(table: Table) -> None:
    following = {state: set(row.values()) for state, row in table.items()}
    assert set().union(*following.values()) == set(table)
    reached, todo = {"absent"}, ["absent"]
    while todo:
        for state in following[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(table)
    assert all(row.get("reset", state) == "absent" for state, row in table.items())


@pytest.mark.parametrize("table", [HOST, TIER], ids=["host", "tier"])
def test_what_a_table_lacks_raises_in_tests_and_is_counted_in_service(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = list(table)
    for state, event in pairs_of(table):
        life, number = Life(table), states.index(state)
        if event in table[state]:
            assert states[life.after(number, event)] == table[state][event]
            assert life.illegal == 0
            continue
        with pytest.raises(IllegalTransitionError, match=event):
            life.after(number, event)
        with monkeypatch.context() as patch:
            patch.setattr(Life, "raises", False)
            assert life.after(number, event) == -1
        assert life.illegal == 2


# -- host memory -----------------------------------------------------------------------------


class Host:
    """A pool whose chunk is in a state, and what may be done with it."""

    def __init__(self, state: str) -> None:
        self.pool = HostPool(1, create_policy("lru", 1))
        (self.chunk,) = self.pool.reserve([KEY], -1)
        if state == "absent":
            self.pool.discard(self.chunk)
        elif state != "filling":
            self.pool.fill([self.chunk])
        if state.startswith("leaving"):
            self.pool.policy.remove(KEY)
            self.pool.give_up([KEY])
        if state.endswith("pinned"):
            self.pool.pin([self.chunk])
        assert self.state == state

    @property
    def state(self) -> str:
        return list(HOST)[self.chunk.state]

    def leave(self) -> None:
        """A chunk leaves when the policy has forgotten it."""
        if KEY in self.pool.policy:
            self.pool.policy.remove(KEY)
        self.pool.leave([KEY])

    def unpin_one_of_two(self) -> None:
        if self.chunk.pins:
            self.pool.pin([self.chunk])
            self.pool.unpin([self.chunk])
        else:
            self.pool.life.apply("unpin", [self.chunk])


HOST_EVENTS: dict[str, Callable[[Host], object]] = {
    "reserve": lambda host: host.pool.life.apply("reserve", [host.chunk]),
    "fill": lambda host: host.pool.fill([host.chunk]),
    "fill for a request": lambda host: host.pool.fill_pinned([host.chunk]),
    "discard": lambda host: host.pool.discard(host.chunk),
    "pin": lambda host: host.pool.pin([host.chunk]),
    "unpin": Host.unpin_one_of_two,
    "unpin last": lambda host: host.pool.unpin([host.chunk]),
    "give up": lambda host: host.pool.give_up([KEY]),
    "use": lambda host: host.pool.life.apply("use", [host.chunk]),
    "leave": lambda host: host.leave(),
    "reset": lambda host: host.pool.reset(()),
}


def test_every_event_of_host_memory_is_tried() -> None:
    assert set(HOST_EVENTS) == set(events_of(HOST))


@pytest.mark.parametrize(("state", "event"), pairs_of(HOST))
def test_what_happens_in_host_memory_is_what_the_table_says(state: str, event: str) -> None:
    host = Host(state)
    if event in HOST[state]:
        HOST_EVENTS[event](host)
        assert host.state == HOST[state][event]
    elif not (state == "absent" and event in ("give up", "leave", "reset")):
        # Those name a key, and there is none.
        with pytest.raises(IllegalTransitionError):
            HOST_EVENTS[event](host)
        assert host.state == state


@pytest.mark.parametrize(("state", "event"), pairs_of(HOST))
def test_in_service_what_the_table_lacks_changes_nothing(
    state: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if event in HOST[state] or event in ("unpin", "reset") or state == "absent":
        return
    monkeypatch.setattr(Life, "raises", False)
    host = Host(state)
    pool = host.pool
    before = pool.free, pool.busy, pool.leaving, host.chunk.pins, list(pool.chunks)
    HOST_EVENTS[event](host)
    assert host.state == state
    assert pool.life.illegal == 1
    assert (pool.free, pool.busy, pool.leaving, host.chunk.pins, list(pool.chunks)) == before


# -- a tier ----------------------------------------------------------------------------------


class OnTier:
    """An index whose chunk is in a state."""

    def __init__(self, state: str) -> None:
        self.index = index = Index([], create_policy("lru", 4))
        if state in ("writing", "resident", "reading", "forgotten", "rewriting"):
            index.begin_writes([KEY], [0])
        if state in ("resident", "reading", "forgotten", "rewriting"):
            index.written([KEY])
        if state in ("reading", "forgotten", "rewriting"):
            index.begin_reads([KEY])
        if state in ("forgotten", "rewriting"):
            index.forget([KEY])
        if state == "rewriting":
            index.begin_writes([KEY], [1])
        assert self.state == state

    @property
    def state(self) -> str:
        return self.index.state_of(KEY)

    def end_one_of_two_reads(self) -> None:
        self.index.reading[KEY] += 1
        self.index.end_reads([KEY])


def appear(tier: OnTier) -> None:
    """Only what others write appears; nobody's policy knows it."""
    tier.index.appear([(KEY, 3)])


TIER_EVENTS: dict[str, Callable[[OnTier], object]] = {
    "write": lambda tier: tier.index.begin_writes([KEY], [2]),
    "written": lambda tier: tier.index.written([KEY]),
    "not written": lambda tier: tier.index.not_written(KEY),
    "read": lambda tier: tier.index.begin_reads([KEY]),
    "read ended": OnTier.end_one_of_two_reads,
    "last read ended": lambda tier: tier.index.end_reads([KEY]),
    "evict": lambda tier: tier.index.evict(1, ()) or tier.index.entries[KEY],
    "forget": lambda tier: tier.index.forget([KEY]),
    "relocate": lambda tier: tier.index.relocate(KEY, 3),
    "appear": appear,
    "reset": lambda tier: tier.index.reset(),
}


def test_every_event_of_a_tier_is_tried() -> None:
    assert set(TIER_EVENTS) == set(events_of(TIER))


@pytest.mark.parametrize(("state", "event"), pairs_of(TIER))
def test_what_happens_on_a_tier_is_what_the_table_says(state: str, event: str) -> None:
    tier = OnTier(state)
    if event in TIER[state]:
        TIER_EVENTS[event](tier)
        assert tier.state == TIER[state][event]
    elif event == "evict" and state == "reading":
        assert tier.index.evict(1, ()) == [], "the policy may not choose it"
        assert tier.state == state
    else:
        with pytest.raises((IllegalTransitionError, KeyError)):
            TIER_EVENTS[event](tier)
        assert tier.state == state
