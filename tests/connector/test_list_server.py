"""A server that knows the interface by lists only, as published integrations use it.

It keeps a small device pool of blocks with a prefix cache of its own, looks prompts up
before it computes, loads what is offloaded, stores what it has computed, and never says
where its steps end. What a block holds follows from its key, so every byte is checked.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.connector.backend import PinnedBackend
from kvstore.connector.contract import OffloadingManager
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import HostLoadStoreSpec
from kvstore.connector.reuse import FilterReusedOffloadingManager
from kvstore.connector.single_tier import PolicyManager
from kvstore.testing.bench import key_of, payload_of
from tests.patience import PATIENCE, TOO_LONG, until

BLOCK_BYTES = 8192
DEVICE_BLOCKS = 48


class ListServer:
    """One request after the other is admitted; several run at once.

    Attributes:
        computed, loaded: blocks that were computed, and loaded instead.
    """

    def __init__(self, manager: OffloadingManager, places: Any) -> None:
        self.manager = manager
        self.places = places
        self.device = np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), np.uint8)
        self.free = list(range(DEVICE_BLOCKS))
        self.cached: OrderedDict[bytes, int] = OrderedDict()
        self.waiting: list[list[bytes]] = []
        self.copies: list[tuple[str, list[bytes], list[tuple[int, int]]]] = []
        self.computed = self.loaded = self.deferred = self.ended = 0

    def run(self, prompts: list[list[bytes]]) -> None:
        """Serve `prompts`; up to four wait at once."""
        rest, end = list(reversed(prompts)), time.monotonic() + TOO_LONG
        while rest or self.waiting or self.copies:
            assert time.monotonic() < end, "a prompt is deferred for ever"
            while rest and len(self.waiting) < 4:
                self.waiting.append(rest.pop())
            self.waiting = [keys for keys in self.waiting if not self.admit(keys)]
            self.copy()

    def admit(self, keys: list[bytes]) -> bool:
        """Serve one prompt, if its lookup is answered."""
        here = next((n for n, key in enumerate(keys) if key not in self.cached), len(keys))
        found = self.manager.lookup(keys[here:])
        if found is None:
            self.deferred += 1
            time.sleep(0.0005)
            return False
        self.manager.touch(keys)
        blocks = self.allocate(len(keys) - here, keys[:here])
        loading = keys[here : here + found]
        if loading:
            spec = self.manager.prepare_load(loading)
            assert isinstance(spec, HostLoadStoreSpec)
            pairs = list(zip(spec.block_ids.tolist(), blocks, strict=False))
            self.copies.append(("load", loading, pairs))
            self.copy()
        for key, block in zip(keys[here + found :], blocks[found:], strict=True):
            self.device[block] = np.frombuffer(payload_of(key, BLOCK_BYTES), np.uint8)
            self.computed += 1
        self.cached.update(zip(keys[here:], blocks, strict=True))
        self.loaded += found
        self.check(keys)
        out = self.manager.prepare_store(keys)
        if out is not None and out.keys_to_store:
            assert isinstance(out.store_spec, HostLoadStoreSpec)
            source = [self.cached[key] for key in out.keys_to_store]
            pairs = list(zip(source, out.store_spec.block_ids.tolist(), strict=True))
            self.copies.append(("store", out.keys_to_store, pairs))
        return True

    def allocate(self, count: int, keep: list[bytes]) -> list[int]:
        """Device blocks; the coldest that no copy reads are given up."""
        for key in keep:
            self.cached.move_to_end(key)
        if len(self.free) < count:
            self.copy(everything=True)
        while len(self.free) < count:
            self.free.append(self.cached.popitem(last=False)[1])
        return [self.free.pop() for _ in range(count)]

    def copy(self, everything: bool = False) -> None:
        """A worker's turn: what was ordered is copied, one order late at times."""
        last = None if everything else max(0, len(self.copies) - self.ended % 2) or None
        for kind, keys, pairs in self.copies[:last]:
            for source, target in pairs:
                if kind == "load":
                    self.device[target] = self.places[source, :BLOCK_BYTES]
                else:
                    self.places[target, :BLOCK_BYTES] = self.device[source]
            # Some servers name what has ended in any order.
            done = random.Random(len(keys)).sample(keys, len(keys))
            if kind == "load":
                self.manager.complete_load(done)
            else:
                self.manager.complete_store(done)
        del self.copies[:last]
        self.ended += 1

    def check(self, keys: list[bytes]) -> None:
        for key in keys:
            held = bytes(self.device[self.cached[key]])
            assert held == payload_of(key, BLOCK_BYTES), f"wrong bytes for {key.hex()}"


def prompts_of(seed: int, count: int) -> list[list[bytes]]:
    """Conversations that come back, each time a little longer."""
    chance = random.Random(seed)
    lengths = {number: chance.randint(2, 12) for number in range(20)}
    prompts = []
    for _ in range(count):
        number = chance.randrange(20)
        lengths[number] = min(40, lengths[number] + chance.randint(0, 3))
        prompts.append([key_of(1000 * number + place) for place in range(lengths[number])])
    return prompts


def store_of(folder: Path | None, rows: int) -> KVStoreManager:
    tiers = []
    if folder is not None:
        tiers = [
            {
                "type": "disk",
                "path": str(folder),
                "capacity_bytes": "32MiB",
                "segment_bytes": "2MiB",
            }
        ]
    return KVStoreManager(
        {
            # What is on disk is loaded, however busy the disk is.
            "recompute_s": 0,
            "cpu_bytes_to_use": rows * BLOCK_BYTES,
            "chunk_bytes": BLOCK_BYTES,
            "identity": {"model": "m"},
            "deadline_s": PATIENCE,
            "max_wait_s": PATIENCE,
            "tiers": tiers,
        }
    )


def serve(manager: OffloadingManager, places: Any, prompts: list[list[bytes]]) -> ListServer:
    server = ListServer(manager, places)
    server.run(prompts)
    manager.shutdown()
    return server


def test_a_store_whose_host_memory_is_too_small_serves_it_from_disk(tmp_path: Path) -> None:
    manager = store_of(tmp_path, rows=64)
    server = ListServer(manager, manager.region.array)
    server.run(prompts_of(1, 300))
    assert server.loaded > server.computed
    assert server.deferred > 0, "nothing had to be fetched from disk"
    assert manager.stats().timeouts == 0
    manager.shutdown()


def test_a_restart_costs_nothing(tmp_path: Path) -> None:
    prompts = prompts_of(4, 100)
    first = store_of(tmp_path, rows=1024)
    server = serve(first, first.region.array, prompts)
    assert server.computed == len({key for prompt in prompts for key in prompt})
    second = store_of(tmp_path, rows=64)
    again = serve(second, second.region.array, prompts)
    assert again.computed == 0
    assert again.loaded > 0


def test_a_store_of_host_memory_alone_serves_it() -> None:
    manager = store_of(None, rows=200)
    server = serve(manager, manager.region.array, prompts_of(2, 300))
    assert server.loaded > 0
    assert server.deferred == 0


@pytest.mark.parametrize("policy", ["lru", "arc", "hit-density"])
def test_a_backend_with_a_policy_serves_it(policy: str) -> None:
    backend = PinnedBackend(16, 200, BLOCK_BYTES)
    server = serve(PolicyManager(backend, policy), backend.array, prompts_of(3, 300))
    assert server.loaded > 0


def test_a_filter_above_either_lets_in_what_comes_back() -> None:
    prompts = [[key_of(1000 * number)] for number in range(100)]
    backend = PinnedBackend(16, 50, BLOCK_BYTES)
    manager = FilterReusedOffloadingManager(PolicyManager(backend), store_threshold=2)
    server = ListServer(manager, backend.array)
    server.run(prompts)
    assert backend.get_num_free_blocks() == 50, "what was asked for once takes room"
    server.run(prompts[:60])
    assert backend.get_num_free_blocks() == 0
    manager.shutdown()


def test_copies_to_disk_go_on_although_the_server_has_nothing_to_do(tmp_path: Path) -> None:
    manager = store_of(tmp_path, rows=256)
    server = ListServer(manager, manager.region.array)
    server.run([[key_of(n) for n in range(40)]])
    until(lambda: manager.stats().tiers[0].chunks == 40)
    manager.shutdown()
