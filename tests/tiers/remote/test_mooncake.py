"""The Mooncake store against a real master."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import kvstore
from kvstore.assembly import rows_for
from kvstore.config import Config, TierConfig
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.base import Tier
from kvstore.tiers.remote.mooncake import MooncakeTier
from kvstore.types import TierPlace
from tests.patience import PATIENCE
from tests.tiers.remote.servers import MooncakeMaster, ServerContract, mooncake_master

store = pytest.importorskip("mooncake.store", exc_type=ImportError)

# Its own calls give up after half a minute otherwise.
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "2000")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

POOL_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with mooncake_master() as running:
        yield running


@pytest.fixture(scope="module")
def host(master: MooncakeMaster) -> Iterator[Any]:
    """A host that gives its memory to the pool."""
    engine = store.MooncakeDistributedStore()
    metadata = "P2PHANDSHAKE"
    assert not engine.setup("127.0.0.1", metadata, POOL_BYTES, 2**24, "tcp", "", master.address)
    yield engine
    engine.close()


class TestMooncake(ServerContract):
    # The engine's own limit comes first; to reach its master may take longer.
    timeout = 6.0

    @pytest.fixture(autouse=True)
    def _use(self, master: MooncakeMaster, host: Any) -> None:
        self.server, self.host = master, host
        host.remove_all(True)

    def new_tier(self, place: TierPlace) -> Tier:
        return MooncakeTier(place, master=self.server.address, timeout_s=self.timeout)

    def values(self) -> Mapping[str, bytes]:
        return {name: self.host.get(name) for name in self.server.names()}

    def put(self, name: str, value: bytes) -> None:
        self.host.remove(name, True)
        if value:
            # It has no empty values.
            assert not self.host.put(name, value)

    def start(self) -> None:
        super().start()
        # The host comes back to its master by itself, and gives it its memory anew.
        end = time.monotonic() + PATIENCE
        while self.host.put("probe", b"probe"):
            assert time.monotonic() < end
            time.sleep(0.1)
        self.host.remove("probe", True)


class TestMooncakeBehindRows(TestMooncake):
    """The same where records lie behind payloads, but for what moves no bytes."""

    chunk_bytes = 8192
    tail_bytes = 4096


MOVES = "was_written another_process that_chunk_alone stays_as_it_is their_own found_bad"
MOVES += " the_value_of_another while_a_call_waits"
for name in dir(TestMooncakeBehindRows):
    if name.startswith("test_") and not any(part in name for part in MOVES.split()):
        setattr(TestMooncakeBehindRows, name, None)


async def test_hosts_with_and_without_room_behind_rows_exchange_chunks(
    master: MooncakeMaster, host: Any
) -> None:
    place = TierPlace("exchange", {}, 8192)
    benches = [
        TierBench(MooncakeTier(place, master=master.address, timeout_s=6.0), 4, 8192, 8192, tail)
        for tail in (0, 4096)
    ]
    for number, bench in enumerate(benches):
        assert all((await bench.store([key_of(number)], [0])).ok)
    for bench in benches:
        keys = [key_of(number) for number in range(len(benches))]
        assert (await bench.fetch(keys, [0] * len(keys))) == [True] * len(keys)
        assert all(bench.holds(row, key) for row, key in enumerate(keys))
    for bench in benches:
        await bench.close()


async def test_two_stores_at_once_over_the_same_rows_do_not_take_each_others_records(
    master: MooncakeMaster, host: Any
) -> None:
    """Only one of them may write behind rows."""
    keys = [key_of(number) for number in range(64)]
    rows = list(range(len(keys)))
    tiers = [
        MooncakeTier(TierPlace(name, {}, 8192), master=master.address, timeout_s=6.0)
        for name in ("first", "second")
    ]
    bench = TierBench(tiers[0], len(keys), 8192, 8192, 4096)
    tiers[1].open(bench.region)
    bench.fill(keys)
    for _ in range(8):
        told = await asyncio.gather(*(tier.write(keys, rows, rows) for tier in tiers))
        assert [set(one.ok) for one in told] == [{True}, {True}]
        for tier in tiers:
            bench.region.array[:] = 0
            assert all((await tier.read(keys, rows, rows)).ok)
            assert all(bench.holds(row, key) for row, key in enumerate(keys))
            # So that the next round stores them again.
            assert await tier.erase(keys) is None
    await tiers[1].close([])
    await bench.close()


async def test_a_cache_on_disk_is_the_same_with_and_without_room_behind_rows(
    master: MooncakeMaster, host: Any, tmp_path: Path
) -> None:
    disk = {"type": "disk", "path": str(tmp_path), "capacity_bytes": "16MiB"}
    disk["segment_bytes"] = "4MiB"
    pool = {"type": "mooncake", "master": master.address}
    size, keys = 2**16, [key_of(number) for number in range(8)]
    payloads = [number.to_bytes() * size for number in range(len(keys))]
    config: dict[str, Any] = {"chunk_bytes": size, "cpu_bytes_to_use": "4MiB", "identity": {}}
    strides = []
    for tiers in ([disk, pool], [disk], [disk, pool]):
        async with kvstore.open(config | {"tiers": tiers}) as store:
            strides.append(store._region.stride)
            if len(strides) == 1:
                assert await store.put(keys, payloads) == len(keys)
                assert await store.flush(PATIENCE)
            async with store.get(keys, timeout=PATIENCE) as chunks:
                assert [bytes(chunk) for chunk in chunks] == payloads
    assert strides == [size + 4096, size, size + 4096]


@pytest.mark.parametrize(
    ("chunk_bytes", "tail_bytes"),
    [(2**18, 4096), (2**16, 4096), (2**16 - 4096, 0), (2**18 + 512, 0), (4096, 0)],
)
def test_rows_have_room_behind_them_for_large_chunks_of_whole_pages(
    chunk_bytes: int, tail_bytes: int
) -> None:
    config = Config(cpu_bytes_to_use=2**24, tiers=(TierConfig("mooncake"),))
    shape = rows_for(config, chunk_bytes)
    assert shape.tail_bytes == tail_bytes
    assert shape.size <= 2**24 < shape.size + shape.stride
    assert rows_for(evolve(config, tiers=()), chunk_bytes).tail_bytes == 0


PLACE = TierPlace("place", {"model": "tiny"}, 8000)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"master": "host"}, "must be a host and a port"),
        ({"protocol": "udp"}, "must be tcp or rdma"),
        ({"contribute_bytes": -1}, "contribute_bytes"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MooncakeTier(PLACE, **parameters)


async def test_a_pool_that_is_full_refuses_and_still_serves() -> None:
    place = TierPlace("full", {}, 2**20)
    with mooncake_master() as small:
        tier = MooncakeTier(place, master=small.address, contribute_bytes=16 * 2**20, timeout_s=20)
        bench = TierBench(tier, 8, 2**20, 2**20)
        refused = []
        async with asyncio.timeout(PATIENCE):
            for first in range(0, 4096, 8):
                keys = [key_of(n) for n in range(first, first + 8)]
                done = await bench.store(keys, [0] * 8)
                refused = [key for key, ok in zip(keys, done.ok, strict=True) if not ok]
                if refused:
                    assert "pool is full" in str(done.error)
                    break
        assert refused
        assert (await bench.fetch([key_of(0), refused[-1]], [0, 0]))[1] is False
        await bench.close()
