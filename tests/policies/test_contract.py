"""Every built-in policy keeps the contract."""

from __future__ import annotations

from kvstore.testing.policy import PolicyContract
from policies import EvictionPolicy
from policies.arc import ARC
from policies.fifo import FIFO
from policies.hitdensity import HitDensity
from policies.lfu import LFU
from policies.s3fifo import S3FIFO
from policies.sieve import SIEVE
from policies.wtinylfu import WTinyLFU


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
