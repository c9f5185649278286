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
from tests.store.support import small


class TestPinned(ManagerContract):
    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        backend = PinnedBackend(16, self.blocks, self.block_bytes)
        return PolicyManager(backend, enable_events=True), backend.array


class TestMappedFile(ManagerContract):
    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        backend = MappedFileBackend(16, self.blocks, self.block_bytes, folder / "blocks")
        return PolicyManager(backend, enable_events=True), backend.array


class TestKVStoreHostAlone(ManagerContract):
    def new_manager(self, folder: Path) -> tuple[OffloadingManager, Places]:
        config = small(folder, self.blocks, eviction_policy="lru", keep_events=True)
        manager = KVStoreManager(config)
        return manager, manager.region.array


class TestKVStoreOverADisk(ManagerContract):
    forgets = False

    def new_manager(self, folder: Path, blocks: int | None = None) -> tuple[KVStoreManager, Places]:
        config = small(folder / "cache", blocks or self.blocks, 512, keep_events=True)
        manager = KVStoreManager(config)
        return manager, manager.region.array

    def test_more_than_host_memory_holds_is_there_after_a_restart(
        self, tmp_path: Path, form: str
    ) -> None:
        """Servers that call by lists never say where their steps end."""
        keys = keys_from(0, 5 * self.blocks)
        prompts = [keys[start : start + 8] for start in range(0, len(keys), 8)]
        for blocks in (2 * len(keys), self.blocks):
            bench = ManagerBench(*self.new_manager(tmp_path, blocks), by_lists=form == "by lists")
            for prompt in prompts:
                if blocks == self.blocks:
                    assert bench.load(prompt) == len(prompt)
                assert bench.store(prompt) == (prompt if blocks > self.blocks else [])
            bench.manager.shutdown()


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
