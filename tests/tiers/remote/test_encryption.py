"""Encrypted values of a store: how much memory they take on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

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


class Values(SlowClient):
    """A store in memory."""

    def __init__(self, values: dict[str, tuple[bytes, bytes]]) -> None:
        self._values = values

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._values for name in names]

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        for name, record, payload in zip(names, records, payloads, strict=True):
            if replace or name not in self._values:
                self._values[name] = record, bytes(payload)
        return [None] * len(names)

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        records: list[bytes | str | None] = []
        for name, payload in zip(names, payloads, strict=True):
            record, payload[:] = self._values[name]
            records.append(record)
        return records


class MemoryTier(StoreTier):
    values: ClassVar[dict[str, tuple[bytes, bytes]]] = {}

    @property
    def address(self) -> str:
        return "memory"

    def connect(self) -> StoreClient:
        return Values(self.values)


async def test_a_key_that_comes_later_opens_what_was_closed_before(tmp_path: Path) -> None:
    """Of two hosts one hears of a new key first."""
    MemoryTier.values.clear()
    rings = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.toml").write_text(f"'*' = ['{'22' * 32}']")
        (tmp_path / name / "keys.toml").chmod(0o600)
        rings.append(some_keys(tmp_path / name))
    one, other = (
        TierBench(MemoryTier(TierPlace("n", {}, 8000, ring), timeout_s=9.0), 4, 8192, 8000)
        for ring in rings
    )
    try:
        key = key_of(1)
        for name, ring, bench in (("one", rings[0], one), ("other", rings[1], other)):
            (tmp_path / name / "keys.toml").write_text(f"'*' = ['{'33' * 32}', '{'22' * 32}']")
            ring.look()
            if bench is one:
                assert (await one.store([key], [0])).ok == [True]
                assert await other.fetch([key], [0]) == [False]
                assert (await other.tier.holds([key])).ok == [False]
        assert (await other.tier.holds([key])).ok == [True]
        assert await other.fetch([key], [0]) == [True]
    finally:
        await one.close()
        await other.close()


async def test_a_damaged_value_is_replaced_also_after_keys_have_changed(tmp_path: Path) -> None:
    """Other keys make no damaged value a valid one. Found by the simulated world, seed 925."""
    MemoryTier.values.clear()
    ring = some_keys(tmp_path)
    bench = TierBench(MemoryTier(TierPlace("n", {}, 8000, ring), timeout_s=9.0), 4, 8192, 8000)
    key = key_of(1)
    try:
        assert (await bench.store([key], [0])).ok == [True]
        ((name, (record, payload)),) = MemoryTier.values.items()
        MemoryTier.values[name] = record, bytes(len(payload))
        assert await bench.fetch([key], [0]) == [False]
        ring.changes += 1
        assert (await bench.tier.holds([key_of(2)])).ok == [False]
        assert (await bench.store([key], [0])).ok == [True]
        assert await bench.fetch([key], [0]) == [True]
    finally:
        await bench.close()


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
        assert tier._coder is not None
        assert len(tier._coder.scratch._memory) <= tier.calls_at_once
    finally:
        await bench.close()
