"""Encrypted values of a store: how much memory they take on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.remote.client import StoreClient
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace
from tests.tiers.support import some_keys

pytestmark = pytest.mark.asyncio


class SlowClient:
    """Takes a moment for each call."""

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [False] * len(names)

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        before = [bytes(payload) for payload in payloads]
        await asyncio.sleep(0.005)
        assert before == [bytes(payload) for payload in payloads], "its memory was used by others"
        return [None] * len(names)

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        return [None] * len(names)

    async def remove(self, names: Sequence[str]) -> None:
        pass

    async def close(self) -> None:
        pass


class SlowTier(StoreTier):
    @property
    def address(self) -> str:
        return "slow"

    def connect(self) -> StoreClient:
        return SlowClient()


async def test_no_more_memory_is_lent_than_calls_are_under_way(tmp_path: Path) -> None:
    place = TierPlace("contract", {}, 8000, some_keys(tmp_path))
    tier = SlowTier(place, timeout_s=60.0)
    bench = TierBench(tier, 64, 8192, 8000)
    try:
        keys = [key_of(number) for number in range(64)]
        writes = [bench.store(keys[at : at + 4], [0] * 4) for at in range(0, 64, 4)]
        done = await asyncio.gather(*writes)
        assert all(all(each.ok) for each in done)
        assert tier._sealer is not None
        assert len(tier._sealer._memory) <= tier.calls_at_once
    finally:
        await bench.close()
