"""Every manager passes the suite of managers, over every backend and with every policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.connector.backend import MappedFileBackend, PinnedBackend
from kvstore.connector.contract import OffloadingManager
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.single_tier import PolicyManager
from kvstore.policies import policy_names
from kvstore.testing.manager import ManagerBench, ManagerContract, Places, keys_from


class PolicyManagerContract(ManagerContract):
    policy = "lru"

    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        backend = PinnedBackend(16, self.blocks, self.block_bytes)
        return PolicyManager(backend, self.policy, enable_events=True), backend.array


class TestLRU(PolicyManagerContract):
    pass


class TestARC(PolicyManagerContract):
    policy = "arc"


class TestHitDensity(PolicyManagerContract):
    policy = "hit-density"


class TestMappedFile(ManagerContract):
    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        backend = MappedFileBackend(16, self.blocks, self.block_bytes, folder / "blocks")
        return PolicyManager(backend, enable_events=True), backend.array


class TestKVStoreHostAlone(ManagerContract):
    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        manager = KVStoreManager(
            {
                "cpu_bytes_to_use": self.blocks * self.block_bytes,
                "chunk_bytes": self.block_bytes,
                "eviction_policy": "lru",
                "keep_events": True,
            }
        )
        return manager, manager.region.array


class TestKVStoreOverADisk(ManagerContract):
    forgets = False

    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        manager = KVStoreManager(
            {
                "cpu_bytes_to_use": self.blocks * self.block_bytes,
                "chunk_bytes": self.block_bytes,
                "identity": {"model": "m"},
                "keep_events": True,
                "tiers": [
                    {
                        "type": "disk",
                        "path": str(folder / "cache"),
                        "capacity_bytes": "8MiB",
                        "segment_bytes": "1MiB",
                    }
                ],
            }
        )
        return manager, manager.region.array


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_serves_a_backend(policy: str) -> None:
    backend = PinnedBackend(16, 8, 4096)
    bench = ManagerBench(PolicyManager(backend, policy), backend.array, by_lists=True)
    for number in range(40):
        keys = keys_from(7 * (number % 5), 6)
        bench.load(keys)
        bench.store(keys)
    assert backend.get_num_free_blocks() <= 2
    bench.manager.shutdown()
