"""Names of requests: reused, finished and forgotten without a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence, Sized

import pytest

from kvstore.core import Pace
from kvstore.core.request import MOST_LOOKED_AT, Request, Requests
from kvstore.types import Op
from tests.core.rig import Rig, chain
from tests.core.test_chains import Gate


def test_finishing_an_unknown_request_is_harmless() -> None:
    rig = Rig()
    rig.core.on_request_finished("never seen")
    rig.core.on_new_request("never seen")
    assert not rig.core._requests


def test_what_is_asked_for_after_moves_were_handed_out_in_the_same_step_is_fetched_too() -> None:
    here, below = chain("a", 2), chain("b", 2)
    rig = Rig(on=[below])
    rig.store(here)
    rig.load(here)
    assert rig.ask(here) == 2
    rig.flush()
    rig.begin(below)
    assert [move.keys for move in rig.under_way(Op.PROMOTE)] == [below]


def test_a_request_that_stores_is_answered_for_good() -> None:
    """Its wait and its leases end: it has computed what it needed."""
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    rig.resolve(keys)
    assert rig.core._pool.busy == 4
    rig.granted(chain("b", 1), "r")
    assert rig.core._pool.busy == 1
    assert rig.ask(keys) == 4


def test_a_request_that_loads_and_asks_again_starts_anew() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=4, on=[keys])
    rig.resolve(keys)
    rig.use(keys)
    rig.step()
    rig.store(chain("b", 4))
    assert rig.ask(keys) is None, "evicted since, and fetched once more"
    assert rig.resolve(keys) == 4


def test_the_statistics_are_a_snapshot() -> None:
    rig = Rig()
    before = rig.stats
    rig.store(chain("a", 3))
    rig.resolve(chain("a", 3))
    rig.load(chain("a", 3))
    assert (before.stored, rig.stats.stored) == (0, 3)
    assert (before.tiers[0].written, rig.stats.tiers[0].written) == (0, 3)
    assert (before.loaded_from, rig.stats.loaded_from) == ({}, {"host": 3})


def kept(rig: Rig) -> int:
    """Requests that the core remembers, and every key of them."""
    core, requests = rig.core, rig.core._requests.values()
    chains = [chain for one in requests for chain in (one.chain, one.ended) if chain is not None]
    keys = sum(len(chain.known) for chain in chains) + sum(len(one.counted) for one in requests)
    waits, loaded = core._queue, core._uses._loaded
    queues: list[Sized] = [waits.waiting, waits.answered, core._stores._deferred, loaded]
    return len(requests) + keys + sum(map(len, queues))


def rig_of_filter(monkeypatch: pytest.MonkeyPatch, rows: int) -> Rig:
    monkeypatch.setattr("kvstore.core.step.MOST_REQUESTS", 100)
    monkeypatch.setattr("kvstore.core.usage.MAX_ASKED", 60)
    monkeypatch.setattr("kvstore.core.usage.MAX_KEYS", 60)
    monkeypatch.setattr("kvstore.core.usage.MOST_UNTOLD", 20)
    rig = Rig(rows=rows, lease=0.5, deadline=0.1, max_wait=0.2)
    rig.core._chains.filters.append(Gate(least=0))
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
    rig.store(here)
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
                rig.use(keys, name)
        elif act.startswith("store"):
            keys = chain(name, 2) if act == "store" else []
            grant = rig.core.prepare_store(keys, name)
            if grant is not None:
                rig.core.complete_store(grant.keys, name)
        else:
            rig.core.prepare_store(chain(name, 8), name)
        rig.step(0.1)
        rig.end_all()
    assert kept(rig) < 500


def test_a_prompt_keeps_its_order_over_a_reset() -> None:
    keys = [b"k%d" % n + (b"\0\0\0\0", b"\0\0\0\1")[n % 2] for n in range(6)]
    rig = Rig(rows=16, on=[])
    rig.core.on_new_request("r", keys.index)
    rig.core.reset()
    rig.step()
    rig.core.prepare_store(keys[::2] + keys[1::2], "r")
    assert sorted(keys, key=lambda key: rig.core.chunks[key].order) == keys


def hearing(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> tuple[Rig, Gate]:
    """A rig with a filter, and a bound of what is kept of requests."""
    monkeypatch.setattr(f"kvstore.core.usage.{name}", most)
    rig, heard = Rig(rows=16, on=[]), Gate(least=0)
    rig.core._chains.filters.append(heard)
    rig.core._lookups._counts = True
    rig.store(chain("here", 8), "w")
    rig.core.on_request_finished("w")
    return rig, heard


def test_filters_hear_of_a_key_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, filter = hearing(monkeypatch, "MAX_ASKED", 10)
    for number in range(50):
        rig.ask([*chain("here", 8), *chain(f"a{number}", 1)], f"a{number}")
        for key in chain(f"b{number}", 13):
            rig.core.lookup(key, f"b{number}")
        rig.step(0.01)
        for name in "ab":
            rig.core.on_request_finished(f"{name}{number}")
        rig.step(0.01)
    assert not rig.core._requests
    assert rig.core._chains._asked_keys == 0
    filter.heard.clear()
    for name in "qzq":
        rig.ask(chain(name, 2), name)
        rig.step(0.01)
    assert len(filter.heard) == 2


def test_a_request_may_be_forgotten_while_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = hearing(monkeypatch, "MAX_KEYS", 6)
    here = chain("here", 4)
    rig.resolve(here, "s")
    rig.use(here, "s")
    rig.step(0.01)
    assert rig.core.lookup(here[0], "s")
    rig.core.extend_prompt("t", chain("t", 8))
    assert rig.core.lookup(b"nowhere\0\0\0\0", "s") is False


def test_a_silent_request_keeps_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.usage.MOST_UNTOLD", 20)
    rig, keys = Rig(rows=4, on=[]), chain("k", 4)
    rig.store(keys, "w")
    rig.resolve(keys, "silent")
    rig.load(keys, "silent")
    assert rig.core.prepare_store(chain("never again", 2), "silent too") is None
    for number in range(300):
        rig.resolve(keys, f"s{number}")
        rig.use(keys, f"s{number}")
        rig.core.on_request_finished(f"s{number}")
        assert rig.core.prepare_store(chain("noisy", 2), "noisy") is None
        rig.step(0.01)
    assert len(rig.core._uses._loaded) < 30
    assert len(rig.core._stores._deferred) == 2


@pytest.mark.parametrize("seed", range(6))
def test_of_requests_that_have_ended_nothing_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are reused while loads and stores of theirs are under way, bounds are small."""
    monkeypatch.setattr("kvstore.core.step.MOST_REQUESTS", 4 if seed % 3 == 0 else 1000)
    monkeypatch.setattr("kvstore.core.usage.MAX_KEYS", 12 if seed % 2 else 1000)
    rng = random.Random(seed)
    pace = Pace(asked=6, granted=3, linked=2, told=3)
    rig = Rig(rows=8, on=[chain("d", 12)], pace=pace)
    under_way: list[tuple[Callable[..., None], Sequence[bytes], str]] = []
    for _ in range(3000):
        name, keys = f"r{rng.randrange(6)}", chain(rng.choice("dxyz"), rng.randrange(1, 7))
        act = rng.random()
        if act < 0.4:
            found = rig.ask(keys, name)
            if found and rng.random() < 0.5:
                rig.core.prepare_load(keys[:found], name)
                under_way.append((rig.core.complete_load, keys[:found], name))
        elif act < 0.55:
            grant = rig.core.prepare_store(keys, name)
            if grant is not None:
                under_way.append((rig.core.complete_store, grant.keys, name))
        elif act < 0.7:
            rig.core.on_request_finished(name)
        elif act < 0.75:
            rig.core.on_new_request(name, params={"kvstore": {"demote": True}})
        elif act < 0.85 and under_way:
            complete, its, owner = under_way.pop(rng.randrange(len(under_way)))
            complete(its, owner)
        elif act < 0.86:
            rig.core.reset()
            rig.core.transfers_ended()
            under_way.clear()
        else:
            rig.end_all()
            rig.step(0.01)
    for complete, its, owner in under_way:
        complete(its, owner)
    for number in range(6):
        rig.core.on_request_finished(f"r{number}")
    rig.run(2.5, 0.05)
    core = rig.core
    assert not core._requests
    assert (core._chains._keys, core._chains._asked_keys, len(core._uses._loaded)) == (0, 0, 0)
    assert (core._pool.busy, core._hinted, core.illegal) == (0, 0, 0)
    assert not core._stores._deferred


def test_who_read_what_is_forgotten_with_a_reset() -> None:
    """A load that ends after it is nobody's: what is read later comes from the disk again."""
    keys = chain("k", 3)
    rig = Rig(rows=4, on=[keys])
    assert rig.resolve(keys, "before") == 3
    rig.load(keys, "before")
    era = rig.core.era
    rig.core.reset()
    rig.core.transfers_ended()
    rig.settle()
    rig.core.complete_load(keys, "before", era=era)
    for name, stored in (("again", keys), ("others", chain("o", 4))):
        rig.store(stored, name)
    assert rig.resolve(keys, "after") == 3
    rig.load(keys, "after")
    assert rig.stats.loaded_from == {"disk": 6}


def test_of_many_requests_that_cannot_be_forgotten_few_are_looked_at_in_a_step() -> None:
    requests = Requests()
    for number in range(3 * MOST_LOOKED_AT):
        requests.open(str(number))
    looked: list[str] = []

    def wanted(request: Request) -> bool:
        looked.append(request.id)
        return request.id == str(2 * MOST_LOOKED_AT)

    assert requests.oldest(wanted) is None
    assert len(looked) == MOST_LOOKED_AT
    assert requests.oldest(wanted) is None
    found = requests.oldest(wanted)
    assert found is not None
    assert looked == [str(number) for number in range(2 * MOST_LOOKED_AT + 1)]
