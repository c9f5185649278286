"""Every built-in policy keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kvstore.policies import EvictionPolicy
from kvstore.policies.arc import ARC
from kvstore.policies.fifo import FIFO
from kvstore.policies.hitdensity import HitDensity
from kvstore.policies.lru import LRU
from kvstore.policies.migration import Migration
from kvstore.policies.s3fifo import S3FIFO
from kvstore.policies.sieve import SIEVE
from kvstore.testing.policy import PolicyContract, keys_of, nobody


class TestFIFO(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return FIFO(capacity)


class TestARC(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return ARC(capacity)


class TestSIEVE(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return SIEVE(capacity)


class TestS3FIFO(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return S3FIFO(capacity)


class TestHitDensity(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return HitDensity(capacity)


class HalfWay(Migration):
    """A migration that goes on by itself, and whose old policy still gets keys."""

    def __init__(self, old: EvictionPolicy, new: EvictionPolicy) -> None:
        super().__init__(old, new)
        self.spares_latest = False

    def restore(self, keys: Iterable[bytes]) -> None:
        self.old.restore(keys)

    def insert(self, key: bytes) -> None:
        # Every other key begins in the policy that is replaced.
        if (len(self.old) + len(self.new)) % 2:
            super().insert(key)
        else:
            self.old.insert(key)
        if len(self) % 5 == 0:
            self.go_on(1)


class TestMigrationFromLRU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return HalfWay(LRU(capacity), ARC(capacity))


class TestMigrationToLRU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return HalfWay(HitDensity(capacity), LRU(capacity))


class TestMigrationAmidAnother(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return HalfWay(HalfWay(SIEVE(capacity), FIFO(capacity)), S3FIFO(capacity))


@pytest.mark.parametrize("new", [LRU, ARC, SIEVE, S3FIFO, HitDensity])
def test_a_policy_that_takes_over_evicts_in_the_order_of_the_old_one(
    new: Callable[[int], EvictionPolicy],
) -> None:
    keys, old = keys_of(10), LRU(10)
    old.restore(keys)
    migration = Migration(old, new(10))
    while migration.left:
        migration.go_on(3)
    assert [(migration.new.evict(1, nobody) or [b""])[0] for _ in keys] == keys
