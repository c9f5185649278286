"""Tenants do not wait for one another's rows."""

from __future__ import annotations

import pytest

from kvstore.core import HostPool
from kvstore.core.promotion import Grants
from kvstore.policies.lru import LRU
from kvstore.policies.shares import Share, Shares, tenant_keys
from kvstore.policies.tenants import Tenants
from kvstore.types import Op
from tests.core.rig import Rig, chain

SHARES = Shares({"a": Share(guaranteed=0.5), "b": Share(guaranteed=0.5)}, partitions=1)


def keys_of(tenant: str, name: str, length: int) -> list[bytes]:
    return tenant_keys(tenant, chain(name, length))


def rig_of(rows: int, *on: list[bytes]) -> Rig:
    held = [key for keys in on for key in keys]
    return Rig(rows=rows, on=[held], policy=Tenants(rows, LRU, SHARES, lambda: 0.0))


def coming(rig: Rig) -> list[bytes]:
    return [key for move in rig.under_way(Op.PROMOTE) for key in move.keys]


def wait_for_own_rows(rig: Rig, loaded: list[bytes], wanted: list[bytes]) -> None:
    """The device reads all rows of `a`, which wants more; both tenants have filled their shares."""
    rig.put(keys_of("b", "y", 4))
    rig.begin(loaded, "loads")
    rig.settle()
    assert rig.ask(loaded, "loads") == 4
    rig.core.prepare_load(loaded, "loads")
    rig.begin(wanted, "waits")


def test_one_that_waits_for_its_own_rows_keeps_nobody_else_waiting() -> None:
    loaded, wanted, other = (
        keys_of("a", "loaded", 4),
        keys_of("a", "wanted", 4),
        keys_of("b", "x", 4),
    )
    rig = rig_of(8, loaded, wanted, other)
    wait_for_own_rows(rig, loaded, wanted)
    assert rig.ask(wanted, "waits") is None
    rig.begin(other, "other")
    assert coming(rig) == other
    grant = rig.core.prepare_store(keys_of("a", "new", 1), "stores")
    assert grant is None, "its own rows are waited for"


def test_a_store_is_not_kept_waiting_by_another_tenants_prefix() -> None:
    loaded, wanted = keys_of("a", "loaded", 4), keys_of("a", "wanted", 4)
    rig = rig_of(8, loaded, wanted)
    wait_for_own_rows(rig, loaded, wanted)
    new = keys_of("b", "new", 4)
    grant = rig.granted(new, "stores")
    assert grant.keys == new


def test_what_waits_for_its_copy_leaves_without_it_where_one_tenant_has_most() -> None:
    pool = HostPool(8, Tenants(8, LRU, SHARES, lambda: 0.0))
    keys = {"a": keys_of("a", "x", 2), "b": keys_of("b", "y", 5)}
    for its in keys.values():
        pool.begin_step()
        chunks = pool.reserve(its, -1, "r")
        pool.fill(chunks)
        pool.queue(chunks, 0)
        for key in its:
            pool.policy.remove(key)
        pool.give_up(its)
    pool.begin_step()
    pool.reclaim(4, uncopied=True)
    assert pool.free == 4
    assert all(key in pool.chunks for key in keys["a"])


def test_a_prefix_larger_than_a_share_is_answered_with_what_fits() -> None:
    long = keys_of("a", "long", 8)
    rig = rig_of(8, long)
    rig.put(keys_of("b", "y", 4))
    assert rig.ask(long, "asks") is None
    for _ in range(6):
        rig.step(0.01)
        for move in rig.under_way(Op.PROMOTE):
            rig.end(move)
    assert rig.ask(long, "asks") == 4
    assert rig.stats.timeouts == 0


def tenants_of(capacity: int, **shares: Share) -> Tenants:
    return Tenants(capacity, LRU, Shares(shares, partitions=2), lambda: 0.0)


def test_copies_for_which_a_tenant_gets_no_place_keep_nobody_else_waiting() -> None:
    shares = {"a": Share(guaranteed=0.45), "b": Share(guaranteed=0.45), "c": Share(maximal=0.1)}
    held = [*keys_of("a", "old", 16), *keys_of("b", "old", 14), *keys_of("c", "old", 2)]
    rig = Rig(
        rows=128,
        on=[held],
        segment_slots=32,
        policy=tenants_of(128, **shares),
        tier_policy=tenants_of(32, **shares),
    )
    # What `c` has on disk cannot leave.
    rig.core.pin(keys_of("c", "old", 2), rig.now + 1000, host=False)
    rig.put(keys_of("c", "new", 70))
    rig.run(1.0)
    for number in range(20):
        new = keys_of("ab"[number % 2], f"new{number}", 2)
        rig.put(new, f"{number}")
        rig.core.on_request_finished(f"{number}")
        rig.run(0.5)
        assert not rig.core.tiers[0].index.lacks(new[0])
    assert sum(key in rig.core.tiers[0].entries for key in keys_of("c", "old", 2)) == 2


def test_a_batch_of_copies_is_of_one_tenant() -> None:
    rig = Rig(rows=32, on=[[]], segment_slots=64, policy=tenants_of(32, a=Share(), b=Share()))
    grants = [rig.core.prepare_store(keys_of(name, "x", 4), name) for name in ("a", "b")]
    for name, grant in zip("ab", grants, strict=True):
        assert grant is not None
        rig.core.complete_store(grant.keys, name)
    rig.step()
    batches = [{key[:8] for key in move.keys} for move in rig.under_way(Op.CASCADE)]
    assert [len(owners) for owners in batches] == [1, 1]


def test_host_memory_that_is_made_smaller_keeps_parts_of_what_is_left() -> None:
    rig = Rig(
        rows=64,
        policy=tenants_of(64, a=Share(guaranteed=0.5), b=Share(guaranteed=0.4)),
        tier_policy=LRU(1024),
        segment_slots=1024,
    )
    rig.put(keys_of("a", "old", 32))
    rig.put(keys_of("b", "old", 32))
    rig.run(1.0)
    rig.core.limit_rows(20)
    rig.run(20.0)
    assert rig.stats.rows == 20
    told = rig.stats.tenants
    assert told["a"].host_chunks >= 10
    assert told["b"].host_chunks >= 8
    for tenant in ("a", "b", "c"):
        grant = rig.granted(keys_of(tenant, "new", 1), tenant)
        assert len(grant.keys) == 1
        rig.core.complete_store(grant.keys, tenant)
        rig.run(0.5)


def test_what_is_beyond_a_maximum_and_may_not_leave_costs_nobody_else_a_chunk() -> None:
    shares = {"m": Share(maximal=0.25), "b": Share()}
    rig = Rig(
        rows=64,
        on=[keys_of("b", "disk", 20)],
        segment_slots=64,
        policy=tenants_of(64, **shares),
        tier_policy=tenants_of(64, **shares),
    )
    rig.put(keys_of("b", "host", 12))
    rig.run(1.0)
    mine = keys_of("m", "m", 28)
    rig.core.pin(mine, rig.now + 1000)
    rig.put(mine)
    rig.run(3.0)
    told = rig.stats.tenants
    assert told["m"].host_chunks > 16
    assert told["b"].host_chunks == 12
    assert told["b"].tier_chunks == 32
    rig.core.unpin(mine)
    rig.run(3.0)
    assert rig.stats.tenants["m"].host_chunks == 16
    assert rig.stats.tenants["m"].tier_chunks == 16
    assert rig.stats.tenants["b"].host_chunks == 12


def test_chunks_that_are_fetched_ahead_give_way_to_who_has_less() -> None:
    queued, asked = keys_of("m", "m", 16), keys_of("a", "a", 8)
    shares = {"a": Share(guaranteed=0.45), "b": Share(guaranteed=0.45)}
    rig = Rig(
        rows=32,
        on=[[*queued, *asked]],
        segment_slots=64,
        policy=tenants_of(32, **shares),
        tier_policy=LRU(64),
    )
    rig.put(keys_of("b", "b", 16))
    rig.run(1.0)
    rig.core.on_new_request("queued")
    rig.core.on_request_queued("queued", queued)
    rig.run(1.0, 0.02)
    rig.put(keys_of("b", "more", 8))
    for _ in range(10):
        found = rig.ask(asked, "asks")
        if found is not None:
            break
        rig.run(0.1)
    assert found == 8


def test_what_one_wants_to_have_fetched_keeps_nobody_else_waiting() -> None:
    hopeless, wanted = keys_of("c", "c", 16), keys_of("a", "a", 8)
    shares = {"a": Share(guaranteed=0.5), "c": Share(maximal=0.1)}
    for fetch in ("prefetch", "queued"):
        rig = Rig(
            rows=32,
            on=[[*hopeless, *wanted]],
            segment_slots=64,
            policy=tenants_of(32, **shares),
            tier_policy=LRU(64),
        )
        mine = keys_of("c", "mine", 3)
        rig.put(mine)
        rig.put(keys_of("a", "old", 29))
        rig.run(1.0)
        rig.core.pin(mine, rig.now + 1000)
        for keys, name in ((hopeless, "c"), (wanted, "a")):
            if fetch == "prefetch":
                rig.core.prefetch(keys)
            else:
                rig.core.on_request_queued(name, keys)
        rig.run(3.0)
        if fetch == "prefetch":
            # The first ones were as many as may wait.
            rig.core.prefetch(wanted)
            rig.run(3.0)
        assert all(rig.in_host(key) for key in wanted), fetch


def test_shares_hold_while_a_policy_is_replaced() -> None:
    rig = Rig(
        rows=4096,
        policy=tenants_of(4096, a=Share(), m=Share()),
        tier_policy=LRU(65536),
        segment_slots=65536,
    )
    rig.put(keys_of("a", "old", 1800))
    rig.put(keys_of("m", "old", 2296))
    rig.run(3.0)
    rig.core.set_policy(None, tenants_of(4096, a=Share(), m=Share()))
    number = stored = 0
    while rig.core.changing:
        number += 1
        new = keys_of("m", f"{number}", 64)
        grant = rig.core.prepare_store(new, "stores")
        if grant is not None:
            stored += len(grant.keys)
            rig.core.complete_store(grant.keys, "stores")
        rig.run(0.1)
        assert rig.stats.tenants["a"].host_chunks == 1800
    assert stored > 64


def test_what_is_on_its_way_counts_for_guarantees_after_a_policy_was_replaced() -> None:
    """What a tenant has is a half of the tier, not of what the policies know at that moment."""
    shares = {"a": Share(guaranteed=0.5), "b": Share(weight=100)}
    held = keys_of("b", "old", 50) + keys_of("a", "old", 50)
    rig = Rig(
        rows=200, on=[held], segment_slots=100, in_flight=200, tier_policy=tenants_of(100, **shares)
    )
    rig.put(keys_of("b", "new", 50))
    rig.step(0.1)
    while sum(len(move.keys) for move in rig.under_way(Op.CASCADE)) < 50:
        rig.step(0.1)
    policy = rig.owned().index.policy
    assert policy.tenants()["b"] == 0, "its chunks made way for its own"
    rig.core.set_policy(0, tenants_of(100, **shares))
    rig.put(keys_of("b", "newer", 40), "another")
    for _ in range(5):
        rig.step(0.1)
    assert rig.owned().index.policy.tenants()["a"] == 50


@pytest.mark.parametrize("offered", [4, 5, 8, 9, 17, 40])
def test_a_store_of_more_than_there_is_room_for_gets_what_fits(offered: int) -> None:
    rig = rig_of(8)
    rig.put(keys_of("a", "old", 8))
    while rig.core.unsaved:
        rig.step(0.1)
        rig.settle()
    grant = rig.granted(keys_of("b", "new", offered), "s")
    assert len(grant.rows) == 4


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [1, 2, 10])
def test_a_small_tier_that_is_full_of_others_gets_chunks_too(slots: int, more: int) -> None:
    held = keys_of("a", "old", slots)
    shares = Shares({name: Share() for name in "abcdefgh"}, partitions=1)
    rig = Rig(
        rows=64,
        on=[held],
        segment_slots=slots,
        tier_policy=Tenants(slots, LRU, shares, lambda: 0.0),
    )
    for key in held:
        rig.core.touch([key])
    keys = keys_of("b", "new", slots + more)
    for key in keys:
        grant = rig.granted([key], "s")
        rig.core.complete_store(set(grant.keys), "s")
        rig.core.on_request_finished("s")
    for _ in range(50):
        rig.step(0.1)
        rig.settle()
    assert not rig.core.unsaved
    assert any(key in rig.owned().entries for key in keys)


def test_one_that_names_much_to_be_fetched_leaves_room_in_the_line() -> None:
    much, little = keys_of("a", "much", 40), keys_of("b", "x", 4)
    rig = rig_of(16, much, little)
    assert rig.core.prefetch(much) == 8
    assert rig.core.prefetch(little) == 4
    rig.run(2)
    assert all(map(rig.in_host, little))
    rig.run(20)
    assert not rig.core.is_prefetching()


@pytest.mark.parametrize("queued", [False, True])
def test_what_is_fetched_ahead_waits_for_no_request_of_another(queued: bool) -> None:
    loaded, wanted = keys_of("a", "loaded", 4), keys_of("a", "wanted", 4)
    other = keys_of("b", "x", 4)
    rig = rig_of(8, loaded, wanted, other)
    wait_for_own_rows(rig, loaded, wanted)
    if queued:
        rig.core.on_request_queued("queued", other)
    else:
        assert rig.core.prefetch(other) == 4
    for _ in range(6):
        assert rig.ask(wanted, "waits") is None
        rig.run(0.1)
    assert sum(map(rig.in_host, other)) >= 2


def test_what_finds_no_row_at_once_is_fetched_when_there_is_one() -> None:
    wanted = keys_of("b", "x", 4)
    rig = rig_of(16, wanted)
    rig.put(keys_of("b", "y", 16))  # Copies of these are under way.
    assert rig.core.prefetch(wanted) == 4
    rig.run(1)
    assert all(map(rig.in_host, wanted))


def test_queued_requests_of_one_leave_to_those_of_another_what_is_theirs() -> None:
    many = [keys_of("a", f"queued {number}", 4) for number in range(8)]
    one = keys_of("b", "x", 4)
    rig = rig_of(32, *many, one)
    for number, keys in enumerate(many):
        rig.core.on_request_queued(f"a{number}", keys)
    rig.core.on_request_queued("b", one)
    rig.run(5)
    assert all(map(rig.in_host, one))


def test_stores_of_who_has_its_part_end_no_lease_of_another() -> None:
    queued = keys_of("b", "x", 4)
    rig = rig_of(16, queued)
    rig.put(keys_of("a", "y", 9))
    rig.put(keys_of("b", "y", 3))
    rig.core.on_request_queued("queued", queued)
    rig.run(3)
    assert len(rig.core._requests["queued"].leases) == 4
    for number in range(20):
        rig.put(keys_of("a", f"new {number}", 2))
        rig.run(0.1)
    assert rig.stats.gave_way == 0
    assert len(rig.core._requests["queued"].leases) == 4


def test_a_request_waits_no_longer_because_others_are_busy() -> None:
    """Its own deadline holds, whatever moves for them."""

    def waited(*, busy: bool) -> float:
        loaded, wanted = keys_of("b", "loaded", 4), keys_of("b", "wanted", 4)
        mine = keys_of("a", "mine", 4)
        rig = Rig(
            rows=8,
            on=[[*loaded, *wanted]],
            policy=Tenants(8, LRU, SHARES, lambda: 0.0),
            deadline=1.0,
            max_wait=10.0,
        )
        rig.begin(loaded, "loads")
        rig.settle()
        assert rig.ask(loaded, "loads") == 4
        rig.core.prepare_load(loaded, "loads")
        rig.put(mine)
        began, number = rig.now, 0
        while rig.ask(wanted, "waits") is None:
            assert rig.now < began + 20
            if busy:
                number += 1
                assert rig.ask(mine, f"busy {number}") == 4
                rig.core.prepare_load(mine, f"busy {number}")
                rig.core.complete_load(mine, f"busy {number}")
                rig.core.on_request_finished(f"busy {number}")
            rig.run(0.1)
        return rig.now - began

    assert waited(busy=True) <= waited(busy=False) + 0.5 < 3


def test_each_prefetch_has_the_time_that_one_has() -> None:
    """That an earlier one found no row does not count, once it is over."""
    wanted = keys_of("b", "x", 4)
    rig = rig_of(16, wanted)
    loaded = keys_of("b", "y", 16)
    rig.put(loaded)
    for start in (0, 1):
        assert rig.core.prefetch(wanted) == 4
        rig.step(0.1)
        assert rig.core.is_prefetching(wanted)
        if not start:
            rig.core._prefetches.drop(wanted)
            rig.now += 100
    assert rig.core._prefetches._since
    assert all(rig.now - since < 1 for since in rig.core._prefetches._since.values())


def test_a_prefetch_that_has_no_turn_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = keys_of("b", "x", 4)
    rig = rig_of(16, wanted)
    with monkeypatch.context() as patched:
        patched.setattr(Grants, "ahead", lambda *_, **__: [])
        assert rig.core.prefetch(wanted) == 4
        rig.wait(8.0)
    rig.settle()
    assert all(map(rig.in_host, wanted))


def test_a_prefetch_is_over_where_others_may_have_its_rows_for_good() -> None:
    wanted, loaded = keys_of("b", "x", 4), keys_of("a", "y", 16)
    rig = rig_of(16, wanted)
    rig.store(loaded)
    assert rig.ask(loaded, "loads") == 16
    rig.core.prepare_load(loaded, "loads")
    assert rig.core.prefetch(wanted) == 4
    rig.wait(2.0)
    assert rig.core.is_prefetching(wanted)
    rig.wait(6.0)
    assert not rig.core.is_prefetching(wanted)
