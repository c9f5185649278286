"""Encrypted values of a store: what opens them, and how much memory they take on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.remote.client import StoreClient
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.types import TierPlace
from tests.tiers.support import some_keys
from tests.world.share import SERVERS, ShareClient, ShareServer, ShareTier


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> ShareServer:
    """A store in memory."""
    monkeypatch.setitem(SERVERS, "share", ShareServer(Random(0)))
    return SERVERS["share"]


def bench_of(ring: KeyRing) -> TierBench:
    return TierBench(ShareTier(TierPlace("n", {}, 8000, ring), timeout_s=9.0), 4, 8192, 8000)


async def test_a_key_that_comes_later_opens_what_was_closed_before(tmp_path: Path) -> None:
    """Of two hosts one hears of a new key first."""
    rings = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.toml").write_text(f"'*' = ['{'22' * 32}']")
        (tmp_path / name / "keys.toml").chmod(0o600)
        rings.append(some_keys(tmp_path / name))
    one, other = map(bench_of, rings)
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


async def test_a_damaged_value_is_replaced_also_after_keys_have_changed(
    tmp_path: Path, server: ShareServer
) -> None:
    """Other keys make no damaged value a valid one. Found by the simulated world, seed 925."""
    ring = some_keys(tmp_path)
    bench, key = bench_of(ring), key_of(1)
    try:
        assert (await bench.store([key], [0])).ok == [True]
        ((name, (value, since)),) = server.values.items()
        server.values[name] = value[:RECORD_BYTES].ljust(len(value), b"\0"), since
        assert await bench.fetch([key], [0]) == [False]
        ring.changes += 1
        assert (await bench.tier.holds([key_of(2)])).ok == [False]
        assert (await bench.store([key], [0])).ok == [True]
        assert await bench.fetch([key], [0]) == [True]
    finally:
        await bench.close()


class SlowClient(ShareClient):
    """Takes a moment for each write."""

    async def put(
        self, names: Any, records: Any, payloads: Sequence[memoryview], **more: Any
    ) -> list[str | None]:
        before = [bytes(payload) for payload in payloads]
        await asyncio.sleep(0.005)
        assert before == [bytes(payload) for payload in payloads], "its memory was used by others"
        return await super().put(names, records, payloads, **more)


class SlowTier(ShareTier):
    def connect(self) -> StoreClient:
        return SlowClient(self.server)


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
