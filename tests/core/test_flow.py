"""Write-through, demotion and exclusive tiers: when a chunk is copied, and what stays."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import Core, Flow, HostPool, OwnedTier
from kvstore.policies import create_policy
from kvstore.types import Op, RecoveredTier
from tests.core.rig import Rig, chain
from tests.core.test_chains import Gate


def demoting(
    flow: Flow = Flow.DEMOTE,
    rows: int = 4,
    slots: int = 16,
    reserve: int = 0,
    gate: Gate | None = None,
) -> Rig:
    rig = Rig(rows=rows, on=())
    opening = RecoveredTier("disk", "disk", [], slots, [0], 1)
    tier = OwnedTier(0, opening, create_policy("lru", slots), 64, gate, flow)
    pool = HostPool(rows, create_policy("lru", rows), reserve=reserve)
    rig.core = Core(pool, [tier], deadline=1.0, max_wait=10.0, lease=3.0)
    rig.core.poll(rig.now)
    return rig


def store(rig: Rig, keys: list[bytes], request: str = "writer") -> list[bytes]:
    """Offer until what can be stored is."""
    for _ in range(20):
        grant = rig.core.prepare_store(keys, request)
        if grant is not None:
            rig.core.complete_store(grant.keys, request)
            rig.core.on_request_finished(request)
            return grant.keys
        rig.settle()
    raise AssertionError("never granted")


def on_disk(rig: Rig) -> set[bytes]:
    return set(rig.core.tiers[0].entries)


def test_nothing_is_copied_while_there_is_room() -> None:
    rig = demoting()
    store(rig, chain("a", 4))
    rig.settle()
    assert on_disk(rig) == set()
    assert rig.core.unsaved == 0


def test_what_host_memory_gives_up_is_copied_before_it_goes() -> None:
    rig, old, young = demoting(), chain("a", 4), chain("b", 3)
    store(rig, old)
    rig.step()
    assert store(rig, young) == young
    rig.settle()
    assert on_disk(rig) == set(old[1:])
    assert rig.in_host(old[0])
    assert rig.stats.shed == 0


def test_a_chunk_on_its_way_out_is_still_a_hit_and_may_stay() -> None:
    rig, old = demoting(), chain("a", 4)
    store(rig, old)
    rig.step()
    assert rig.core.prepare_store(chain("b", 2), "b") is None
    rig.step()
    assert rig.ask(old) == 4
    rig.use(old)
    rig.settle()
    assert rig.core._pool.leaving == 0
    assert all(rig.in_host(key) for key in old)


def test_rows_are_kept_ready_ahead_of_need() -> None:
    rig, old, young = demoting(reserve=2), chain("a", 4), chain("b", 2)
    store(rig, old)
    rig.settle()
    assert on_disk(rig) == set(old[2:])
    assert all(rig.in_host(key) for key in old)
    grant = rig.granted(young, "b")
    assert grant.keys == young
    assert set(grant.evicted) == set(old[2:])


def test_the_copy_stays_so_that_giving_up_once_more_writes_nothing() -> None:
    rig, a, b = demoting(), chain("a", 4), chain("b", 4)
    for keys in (a, b):
        store(rig, keys)
        rig.settle()
    for round_ in range(3):
        for keys in (a, b):
            assert rig.resolve(keys, f"{keys[0]!r} {round_}") == 4
            rig.use(keys, f"{keys[0]!r} {round_}")
            rig.core.on_request_finished(f"{keys[0]!r} {round_}")
            rig.settle()
    assert on_disk(rig) == {*a, *b}
    assert rig.stats.tiers[0].written == 8


def test_an_exclusive_tier_gives_its_copy_up_at_promotion() -> None:
    rig, a, b = demoting(Flow.EXCLUSIVE), chain("a", 4), chain("b", 4)
    for keys in (a, b):
        store(rig, keys)
        rig.settle()
    assert on_disk(rig) == set(a)
    assert rig.resolve(a) == 4
    rig.settle()
    assert on_disk(rig) == set(b)
    assert all(rig.in_host(key) for key in a)


def test_an_exclusive_tier_keeps_what_is_only_being_stored() -> None:
    """The store may fail, and then it has the only copy."""
    rig, a = demoting(Flow.EXCLUSIVE, rows=16), chain("a", 4)
    store(rig, a)
    for name in "bcde":
        store(rig, chain(name, 4))
        rig.settle()
    assert on_disk(rig) >= set(a)
    while (grant := rig.core.prepare_store(a, "first")) is None:
        rig.settle()
    assert grant.keys == a
    rig.step()
    rig.core.prepare_store(a, "second")
    rig.step()
    rig.core.complete_store(grant.keys, "first", ok=False)
    rig.settle()
    assert all(key in on_disk(rig) or rig.in_host(key) for key in a)


def test_a_filter_decides_what_is_demoted() -> None:
    gate = Gate(least=2)
    rig, once, twice = demoting(gate=gate), chain("a", 2), chain("b", 2)
    store(rig, once)
    store(rig, twice)
    gate.asked(twice)
    rig.step()
    store(rig, chain("c", 4))
    rig.settle()
    assert on_disk(rig) == set(twice)
    assert rig.stats.tiers[0].declined == 2


def test_a_filter_decides_what_is_written_through() -> None:
    gate = Gate(least=2)
    rig, keys = demoting(Flow.WRITE_THROUGH, gate=gate), chain("a", 3)
    gate.asked(keys[:2])
    store(rig, keys)
    rig.settle()
    assert on_disk(rig) == set(keys[:2])


def test_all_can_be_saved_before_a_stop() -> None:
    rig, keys = demoting(), chain("a", 4)
    store(rig, keys)
    rig.core.save()
    assert rig.core.unsaved == 4
    rig.settle()
    assert on_disk(rig) == set(keys)
    rig.core.save()
    assert rig.core.unsaved == 0


def test_a_tier_that_cannot_store_does_not_hold_up_host_memory() -> None:
    rig = demoting()
    store(rig, chain("a", 4))
    rig.step()
    assert rig.core.prepare_store(chain("b", 2), "b") is None
    rig.step()
    (move,) = rig.under_way(Op.CASCADE)
    rig.finish(move, failed=move.keys)
    assert store(rig, chain("c", 4)) == chain("c", 4)
    assert on_disk(rig) == set()


def test_the_row_of_a_chunk_that_was_just_given_up_is_waited_for() -> None:
    rig, (head, middle, tail) = demoting(rows=2), chain("a", 3)
    store(rig, [middle])
    rig.settle()
    store(rig, [head])
    rig.settle()
    store(rig, [tail])
    rig.settle()
    assert on_disk(rig) == {middle}
    assert rig.in_host(head)
    assert rig.in_host(tail)
    # The tail answers "hit" at first, and then leaves for the middle.
    assert rig.resolve([head, middle, tail]) == 2
    assert rig.stats.truncations == 1


def test_chunks_that_are_asked_for_in_each_step_are_not_waited_for() -> None:
    """They have been copied ahead of need, and would leave if they were not kept."""
    for flow in (Flow.DEMOTE, Flow.EXCLUSIVE):
        rig, old, young, new = (
            demoting(flow, 8, reserve=2),
            chain("a", 2),
            chain("b", 6),
            chain("c", 2),
        )
        store(rig, old)
        store(rig, young)
        rig.settle()
        assert on_disk(rig) == set(old)
        for _ in range(5):
            assert rig.ask(old, "waits") == 2
            grant = rig.core.prepare_store(new, "writer")
            rig.settle()
            if grant is not None:
                break
        assert grant is not None, "six others may leave"
        assert grant.keys == new
        assert rig.ask(old, "waits") == 2


class Budget(Gate):
    """Counts what it admits."""

    spent = 0

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        self.spent += len(keys)
        return [True] * len(keys)


def test_a_store_that_is_offered_again_is_admitted_once() -> None:
    gate, keys, new = Budget(), chain("a", 4), chain("b", 2)
    rig = Rig(rows=4, on=())
    rig.core = Core(HostPool(4, create_policy("lru", 4), gate), [], deadline=1.0, lease=3.0)
    rig.core.poll(rig.now)
    store(rig, keys)
    assert rig.ask(keys, "reader") == 4
    rig.core.prepare_load(keys, "reader")
    before = gate.spent
    for _ in range(10):
        assert rig.core.prepare_store(new, "writer") is None
        rig.step()
    rig.core.complete_load(keys, "reader")
    rig.step()
    assert store(rig, new) == new
    assert gate.spent - before == 2
    rig.core.on_request_finished("writer")
    store(rig, chain("c", 1))
    assert gate.spent - before == 3
