"""Tenants do not wait for one another's rows."""

from __future__ import annotations

from kvstore.core import HostPool
from kvstore.policies.lru import LRU
from kvstore.policies.tenants import Share, Shares, Tenants, tenant_keys
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


def test_one_that_waits_for_its_own_rows_keeps_nobody_else_waiting() -> None:
    loaded, wanted, other = (
        keys_of("a", "loaded", 4),
        keys_of("a", "wanted", 4),
        keys_of("b", "x", 4),
    )
    rig = rig_of(8, loaded, wanted, other)
    # All rows of `a` are being read by the device, and both have filled their shares.
    rig.put(keys_of("b", "y", 4))
    assert rig.ask(loaded, "loads") is None
    rig.step()
    rig.settle()
    assert rig.ask(loaded, "loads") == 4
    rig.core.prepare_load(loaded, "loads")
    assert rig.ask(wanted, "waits") is None
    rig.step()
    assert rig.ask(wanted, "waits") is None
    assert rig.ask(other, "other") is None
    rig.step()
    assert coming(rig) == other
    grant = rig.core.prepare_store(keys_of("a", "new", 1), "stores")
    assert grant is None, "its own rows are waited for"


def test_a_store_is_not_kept_waiting_by_another_tenants_prefix() -> None:
    loaded, wanted = keys_of("a", "loaded", 4), keys_of("a", "wanted", 4)
    rig = rig_of(8, loaded, wanted)
    rig.put(keys_of("b", "y", 4))
    assert rig.ask(loaded, "loads") is None
    rig.step()
    rig.settle()
    assert rig.ask(loaded, "loads") == 4
    rig.core.prepare_load(loaded, "loads")
    assert rig.ask(wanted, "waits") is None
    rig.step()
    new = keys_of("b", "new", 4)
    grant = rig.core.prepare_store(new, "stores")
    assert grant is not None
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
