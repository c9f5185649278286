"""Names of requests: reused, finished and forgotten without a trace."""

from __future__ import annotations

from tests.core.rig import Rig, chain


def test_a_name_that_is_reused_in_the_same_step_is_another_request() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    assert rig.ask(keys) is None
    rig.core.on_request_finished("r")
    rig.core.on_new_request("r")
    assert rig.ask(keys) is None
    rig.settle()
    assert rig.ask(keys) == 4
    assert rig.core.pool.busy == 4
    rig.core.on_request_finished("r")
    assert rig.core.pool.busy == 0, "the leases of both have ended"


def test_a_name_that_is_reused_while_its_chunks_are_on_their_way_is_another_request() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    for _ in range(3):
        assert rig.ask(keys) is None
        rig.step()
        rig.core.on_new_request("r")
        assert not rig.core.is_waiting("r")
    rig.settle()
    assert rig.core.pool.busy == 0
    assert rig.ask(keys) == 4


def test_a_finished_request_leaves_nothing_whatever_it_had_begun() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=4, on=[keys])
    for steps in range(4):
        rig.ask(keys, f"r{steps}")
        for _ in range(steps):
            rig.step()
            for move in list(rig.moves):
                rig.end(move)
        rig.core.on_request_finished(f"r{steps}")
        rig.settle()
        assert not rig.core._requests
        assert rig.core.pool.busy == 0


def test_finishing_an_unknown_request_is_harmless() -> None:
    rig = Rig()
    rig.core.on_request_finished("never seen")
    rig.core.on_new_request("never seen")
    assert not rig.core._requests


def test_a_request_that_stores_is_answered_for_good() -> None:
    """Its wait and its leases end: it has computed what it needed."""
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    rig.resolve(keys)
    assert rig.core.pool.busy == 4
    assert rig.core.prepare_store(chain("b", 1), "r") is not None
    assert rig.core.pool.busy == 1
    assert rig.ask(keys) == 4


def test_a_request_that_loads_and_asks_again_starts_anew() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=4, on=[keys])
    rig.resolve(keys)
    rig.load(keys)
    rig.core.complete_load(keys, "r")
    rig.step()
    rig.put(chain("b", 4))
    rig.settle()
    assert rig.ask(keys) is None, "evicted since, and fetched once more"
    assert rig.resolve(keys) == 4


def test_the_statistics_are_a_snapshot() -> None:
    rig = Rig()
    before = rig.stats
    rig.put(chain("a", 3))
    rig.settle()
    rig.resolve(chain("a", 3))
    rig.load(chain("a", 3))
    assert (before.stored, rig.stats.stored) == (0, 3)
    assert (before.tiers[0].written, rig.stats.tiers[0].written) == (0, 3)
    assert (before.loaded_from, rig.stats.loaded_from) == ({}, {"host": 3})
