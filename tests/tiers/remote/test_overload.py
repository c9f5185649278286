"""Stores behind a link that is slower than what is asked of them: late, and never away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.throttled_link import ThrottledLink
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace
from tests.tiers.remote.servers import ceph_gateway, redis_server

CHUNK = 2 * 2**20
MOVES, EACH = 8, 8
BYTES_PER_S = 64e6
"""All of it takes about 2.1 s: twice as long as a call may."""

TIMEOUT_S = 1.0


@pytest.fixture(params=["redis", "object"])
def tier(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreTier]:
    place = TierPlace("overload", {"test": str(tmp_path)}, CHUNK)
    if request.param == "redis":
        from kvstore.tiers.remote.redis import RedisTier

        with redis_server() as server:
            link = ThrottledLink(tmp_path, server.port, BYTES_PER_S)
            yield RedisTier(place, url=f"redis://127.0.0.1:{link.port}/0", timeout_s=TIMEOUT_S)
            link.stop()
        return
    with ceph_gateway() as gateway:
        from kvstore.tiers.remote.object import ObjectTier

        for name, value in gateway.environment.items():
            monkeypatch.setenv(name, value)
        link = ThrottledLink(tmp_path, gateway.port, BYTES_PER_S)
        yield ObjectTier(
            place, url=gateway.url, endpoint=f"http://127.0.0.1:{link.port}", timeout_s=TIMEOUT_S
        )
        link.stop()


async def test_all_chunks_arrive_however_many_moves_share_a_slow_link(tier: StoreTier) -> None:
    bench = TierBench(tier, MOVES * EACH, CHUNK, CHUNK)
    keys = [key_of(number) for number in range(MOVES * EACH)]
    rows = bench.fill(keys)
    parts = [slice(start, start + EACH) for start in range(0, len(keys), EACH)]
    slots = [0] * EACH
    written = await asyncio.gather(*(tier.write(keys[p], slots, rows[p]) for p in parts))
    assert [done.error for done in written] == [None] * MOVES
    assert [list(done.unread) for done in written] == [[]] * MOVES
    bench.smear(rows)
    read = asyncio.gather(*(tier.read(keys[p], slots, rows[p]) for p in parts))
    asked = asyncio.gather(*(tier.holds(keys[p]) for p in parts))
    assert [done.error for done in await asked] == [None] * MOVES
    assert [done.error for done in await read] == [None] * MOVES
    assert all(bench.holds(row, key) for row, key in zip(rows, keys, strict=True))
    await bench.close()
