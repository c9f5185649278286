"""Several servers behind a router, with caches of their own and a store that they share."""

from __future__ import annotations

import pytest

from kvstore.simulation import ROUTERS, Fleet, Setup, Trace, replay, replay_fleet
from tests.simulation.traces import conversations


def apart(trace: Trace, seconds: float = 100.0) -> Trace:
    """The same requests, so far apart that no answer of a store is remembered."""
    spread = enumerate(trace.requests)
    return Trace.of(trace.name, ((number * seconds, chunks) for number, chunks in spread))


def longest(trace: Trace) -> int:
    """Chunks of the longest prompt: with less host memory prompts are cut."""
    return max(map(len, trace.requests))


@pytest.mark.parametrize("disk", [0, 60])
@pytest.mark.parametrize("seed", range(4))
def test_one_server_without_a_store_is_a_replay(seed: int, disk: int) -> None:
    trace, setup = conversations(seed), Setup(30, disk)
    alone, fleet = replay(trace, setup), replay_fleet(trace, Fleet(1, setup))
    assert (fleet.host_hits, fleet.disk_hits) == (alone.host_hits, alone.disk_hits)
    assert fleet.accesses == alone.accesses
    assert fleet.store_hits == fleet.store_asked == fleet.store_read == fleet.store_written == 0


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("disk", [0, 60])
def test_with_a_store_for_all_every_chunk_is_computed_once(router: str, disk: int) -> None:
    trace = apart(conversations(1))
    outcome = replay_fleet(trace, Fleet(4, Setup(2 * longest(trace), disk), trace.unique, router))
    assert outcome.accesses - outcome.hits == trace.unique
    assert outcome.store_written == trace.unique
    assert outcome.store_read >= outcome.store_hits > 0
    assert outcome.store_evicted == 0


def test_without_a_store_servers_compute_what_others_have() -> None:
    trace = apart(conversations(2))
    alone = replay(trace, Setup(40)).hit_ratio
    scattered = replay_fleet(trace, Fleet(4, Setup(40))).hit_ratio
    together = replay_fleet(trace, Fleet(4, Setup(40), router="session")).hit_ratio
    assert scattered < alone < together, "four times the memory, where a conversation stays"


def test_a_router_that_keeps_conversations_together_spares_the_wire() -> None:
    trace = apart(conversations(3))
    read = {
        router: replay_fleet(trace, Fleet(4, Setup(100), trace.unique, router)).store_read
        for router in ROUTERS
    }
    assert read["session"] < 0.6 * read["round-robin"]
    assert read["prefix"] < 0.6 * read["round-robin"]


def test_a_store_with_less_room_keeps_what_was_used_last() -> None:
    trace = apart(conversations(4))
    setup, room = Setup(longest(trace)), trace.unique // 8
    whole = replay_fleet(trace, Fleet(4, setup, trace.unique))
    part = replay_fleet(trace, Fleet(4, setup, room))
    assert 0 < part.store_hits < whole.store_hits
    assert part.store_evicted > 0
    assert part.store_written - part.store_evicted <= room


def test_routers_share_the_load() -> None:
    trace = conversations(5)
    turns = replay_fleet(trace, Fleet(4, Setup(40)))
    prefix = replay_fleet(trace, Fleet(4, Setup(40), router="prefix"))
    assert turns.busiest < 1.2
    assert prefix.busiest < 1.5


def test_a_router_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"router 'luck': must be one of: round-robin"):
        replay_fleet(conversations(6), Fleet(2, Setup(4), router="luck"))
