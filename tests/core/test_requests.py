"""Names of requests: reused, finished and forgotten without a trace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.policies import AdmissionFilter
from kvstore.types import Op
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
    assert rig.core._pool.busy == 4
    rig.core.on_request_finished("r")
    assert rig.core._pool.busy == 0, "the leases of both have ended"


def test_a_name_that_is_reused_while_its_chunks_are_on_their_way_is_another_request() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    for _ in range(3):
        assert rig.ask(keys) is None
        rig.step()
        rig.core.on_new_request("r")
        assert not rig.core.is_waiting("r")
    rig.settle()
    assert rig.core._pool.busy == 0
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
        assert rig.core._pool.busy == 0


def test_finishing_an_unknown_request_is_harmless() -> None:
    rig = Rig()
    rig.core.on_request_finished("never seen")
    rig.core.on_new_request("never seen")
    assert not rig.core._requests


def test_what_is_asked_for_after_moves_were_handed_out_in_the_same_step_is_fetched_too() -> None:
    here, below = chain("a", 2), chain("b", 2)
    rig = Rig(on=[below])
    rig.put(here)
    rig.settle()
    rig.load(here)
    assert rig.ask(here) == 2
    rig.flush()
    assert rig.ask(below) is None
    rig.step()
    assert [move.keys for move in rig.under_way(Op.PROMOTE)] == [below]


def test_a_request_that_stores_is_answered_for_good() -> None:
    """Its wait and its leases end: it has computed what it needed."""
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    rig.resolve(keys)
    assert rig.core._pool.busy == 4
    assert rig.core.prepare_store(chain("b", 1), "r") is not None
    assert rig.core._pool.busy == 1
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


class Counting(AdmissionFilter):
    """Admits everything and remembers nothing."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__(8, 1)

    def asked(self, keys: Sequence[bytes]) -> None:
        return

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [True] * len(keys)

    def clear(self) -> None:
        return


def kept(rig: Rig) -> int:
    """Requests that the core remembers, and every key of them."""
    core, requests = rig.core, rig.core._requests.values()
    chains = [chain for one in requests for chain in (one.chain, one.ended) if chain is not None]
    keys = sum(len(chain.known) for chain in chains) + sum(len(one.counted) for one in requests)
    queues = (core._queue.waiting, core._queue.answered, core._stores._deferred, core._uses._loaded)
    return len(requests) + keys + sum(map(len, queues))


def rig_of_filter(monkeypatch: pytest.MonkeyPatch, rows: int) -> Rig:
    monkeypatch.setattr("kvstore.core.step.MOST_REQUESTS", 100)
    monkeypatch.setattr("kvstore.core.usage.MAX_ASKED", 60)
    monkeypatch.setattr("kvstore.core.usage.MAX_KEYS", 60)
    monkeypatch.setattr("kvstore.core.usage.MOST_UNTOLD", 20)
    rig = Rig(rows=rows, lease=0.5, deadline=0.1, max_wait=0.2)
    rig.core._chains.filters.append(Counting())
    rig.core._lookups._counts = True
    return rig


@pytest.mark.parametrize(
    "act", ["miss", "defer", "hit", "load", "load nothing", "store", "store nothing", "defer store"]
)
def test_requests_that_never_end_leave_a_bounded_trace(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of_filter(monkeypatch, rows=8)
    here = chain("here", 4)
    rig.put(here)
    rig.settle()
    rig.core.on_request_finished("writer")
    if act == "defer store":
        rig.load(here)
    for number in range(1000):
        name = f"never-ends-{number}"
        if act == "miss":
            rig.ask(chain(name, 3), name)
        elif act == "defer":
            tier = rig.core.tiers[0]
            tier.entries.setdefault(chain("below", 1)[0], 63)
            rig.ask([*here, *chain("below", 1)], name)
        elif act.startswith(("hit", "load")):
            keys = here if act != "load nothing" else []
            rig.ask(keys, name)
            if act != "hit":
                rig.load(keys, name)
                rig.core.complete_load(keys, name)
        elif act.startswith("store"):
            keys = chain(name, 2) if act == "store" else []
            grant = rig.core.prepare_store(keys, name)
            if grant is not None:
                rig.core.complete_store(grant.keys, name)
        else:
            rig.core.prepare_store(chain(name, 8), name)
        rig.step(0.1)
        for move in list(rig.moves):
            rig.end(move)
    assert kept(rig) < 500
