"""Every built-in policy keeps the contract."""

from __future__ import annotations

from kvstore.policies import EvictionPolicy
from kvstore.policies.arc import ARC
from kvstore.policies.fifo import FIFO
from kvstore.policies.hitdensity import HitDensity
from kvstore.policies.lfu import LFU
from kvstore.policies.s3fifo import S3FIFO
from kvstore.policies.sieve import SIEVE
from kvstore.policies.wtinylfu import WTinyLFU
from kvstore.testing.policy import PolicyContract


class TestFIFO(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return FIFO(capacity)


class TestARC(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return ARC(capacity)


class TestLFU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return LFU(capacity)


class TestSIEVE(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return SIEVE(capacity)


class TestS3FIFO(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return S3FIFO(capacity)


class TestHitDensity(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return HitDensity(capacity)


class TestWTinyLFU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return WTinyLFU(capacity)
