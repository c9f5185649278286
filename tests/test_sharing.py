"""Replicas on one machine share one warm cache: real processes, real lanes."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.types import NO_MOVE, Completion
from tests.patience import PATIENCE, until_async

CHUNK = 64 * 1024
KEYS = [b"key-%04d" % index + b"\0\0\0\0" for index in range(100)]

Open = Callable[..., AbstractAsyncContextManager[Store]]


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(64) * (CHUNK // 64)


def config(path: Path, **tier: Any) -> dict[str, Any]:
    disk = {"type": "disk", "path": str(path), "capacity_bytes": "8MiB", "segment_bytes": "1MiB"}
    return {
        "cpu_bytes_to_use": 32 * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": {"model": "tiny"},
        # A slow disk makes no misses.
        "deadline_s": PATIENCE,
        "max_wait_s": PATIENCE,
        "shutdown_timeout_s": PATIENCE,
        "tiers": [{**disk, **tier}],
    }


@pytest.fixture
def replica(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def open_replica(**tier: Any) -> AsyncIterator[Store]:
        async with kvstore.open(config(tmp_path, **tier)) as store:
            yield store

    return open_replica


async def put(store: Store, keys: list[bytes]) -> None:
    assert await store.put(keys, [payload(key) for key in keys]) == len(keys)
    assert await store.flush(PATIENCE)


async def held(store: Store, keys: list[bytes]) -> int:
    async with store.get(keys) as chunks:
        for key, chunk in zip(chunks.keys, chunks, strict=True):
            assert bytes(chunk) == payload(key)
        return len(chunks)


async def eventually(store: Store, keys: list[bytes], count: int) -> None:
    end = time.monotonic() + PATIENCE
    while await held(store, keys) != count:
        assert time.monotonic() < end, f"not {count} of {len(keys)} chunks"
        await asyncio.sleep(0.05)


async def test_what_another_process_stored_before_is_there_at_opening(
    tmp_path: Path, replica: Open
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parents[1])],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        assert child.stdout.readline() == "stored\n"
        async with replica() as store:
            assert "1 lanes of other processes with 20 chunks" in store.description
            assert await held(store, KEYS[:20]) == 20
            # And what it stores while both run is seen soon.
            print("more", file=child.stdin, flush=True)
            assert child.stdout.readline() == "stored\n"
            await eventually(store, KEYS[20:40], 20)
            assert store.stats().loaded_from == {"disk": 40}
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import kvstore
from tests.test_sharing import KEYS, config, put

async def main():
    async with kvstore.open(config(Path(sys.argv[1]))) as store:
        await put(store, KEYS[:20])
        print("stored", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await put(store, KEYS[20:40])
        print("stored", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_chunks_that_a_neighbour_keeps_are_not_written_twice(replica: Open) -> None:
    async with replica() as first, replica() as second:
        await put(first, KEYS[:20])
        await eventually(second, KEYS[:20], 20)
        await put(second, KEYS[20:25])
        # Out of the second's host memory, then stored by its server once more.
        await put(second, KEYS[40:80])
        before = second.stats().tiers[0].written
        await put(second, KEYS[:20])
        assert second.stats().tiers[0].written == before


async def test_chunks_that_their_owner_replaced_are_misses_and_no_errors(replica: Open) -> None:
    async with replica(capacity_bytes="2MiB") as first, replica() as second:
        await put(first, KEYS[:20])
        await eventually(second, KEYS[:20], 20)
        await put(second, KEYS[60:100])  # the second's host memory forgets the first's chunks
        await put(first, KEYS[20:45])  # the first's lane has room for 30
        count = await held(second, KEYS[:20])
        assert count < 20
        assert second.stats().tiers[1].failed_reads == 0


async def test_a_lane_whose_files_are_removed_is_forgotten(tmp_path: Path, replica: Open) -> None:
    async with replica() as first:
        await put(first, KEYS[:20])
    async with replica(lane=1) as second:
        assert await held(second, KEYS[:5]) == 5
        for file in tmp_path.glob("*/lane-0/segment-*"):
            file.unlink()
        await put(second, KEYS[60:100])
        await until_async(lambda: not second.stats().tiers[1].chunks, pause=0.05)
        assert await held(second, KEYS[5:20]) == 0


async def looked(store: Store) -> None:
    """Wait until the store has looked at the lanes of others, as it does by itself now and then."""
    (tier,) = [tier for tier in store._assembly.tiers if tier.is_peer]
    news = await tier.refresh()
    store._core.absorb([Completion(NO_MOVE, [], changes=news, tier=1)])


@pytest.mark.parametrize("ahead", [-5.0, 0.0, 5.0])
async def test_replicas_may_share_again_when_each_has_been_reset_whatever_their_clocks(
    replica: Open, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    both = {"share_after_reset": True}
    async with replica(**both) as first, replica(**both) as second:
        await put(first, KEYS[:20])
        await eventually(second, KEYS[:20], 20)
        await second.reset()
        await looked(second)
        assert await held(second, KEYS[:20]) == 0, "forgotten is forgotten"
        # The neighbour goes on with its old weights.
        clock = time.time_ns
        monkeypatch.setattr("time.time_ns", lambda: clock() + int(ahead * 1e9))
        await put(first, KEYS[20:40])
        await looked(second)
        assert await held(second, KEYS[:40]) == await held(second, KEYS[20:40]) == 0
        for part in (KEYS[:20], KEYS[20:40]):
            assert await held(first, part) == 20, "it has not been reset"
        # It is given the new ones, too.
        await first.reset()
        await put(first, KEYS[40:60])
        await looked(second)
        assert await held(second, KEYS[40:60]) == 20
        await put(second, KEYS[60:80])
        await looked(first)
        assert await held(first, KEYS[60:80]) == 20
        assert await held(first, KEYS[:40]) == await held(second, KEYS[:40]) == 0


async def test_who_has_not_been_reset_takes_nothing_of_who_has(replica: Open) -> None:
    async with replica() as first, replica() as second:
        await second.reset()
        await put(second, KEYS[:20])
        await looked(first)
        assert await held(first, KEYS[:20]) == 0
        # Who opens now belongs to the newest.
        async with replica() as third:
            assert await held(third, KEYS[:20]) == 20
            await put(third, KEYS[20:30])
            await looked(second)
            assert await held(second, KEYS[20:30]) == 10


async def test_a_slot_that_a_neighbour_rewrites_after_its_reset_is_a_miss_before_it_is_seen(
    replica: Open,
) -> None:
    async with replica() as first, replica() as second:
        await put(first, KEYS[:20])
        await eventually(second, KEYS[:20], 20)
        async with second.get(KEYS[:1]):
            pass
        # The second keeps nothing in host memory but still believes in the first's slots.
        second._core._pool.reset(())
        await first.reset()
        others = [payload(key)[::-1] for key in KEYS[:20]]
        assert await first.put(KEYS[:20], others) == 20
        assert await first.flush(PATIENCE)
        assert await held(second, KEYS[:20]) == 0


@pytest.mark.parametrize("joins", [True, False])
async def test_two_resets_at_once_end_in_one_epoch_only_where_that_is_wished(
    replica: Open, joins: bool
) -> None:
    async with replica(share_after_reset=joins) as first, replica(share_after_reset=joins) as other:
        await asyncio.gather(first.reset(), other.reset())
        await put(first, KEYS[:20])
        await looked(other)
        assert await held(other, KEYS[:20]) == (20 if joins else 0)


async def test_a_replica_that_was_reset_once_more_gives_nothing_to_the_next_change_of_weights(
    replica: Open,
) -> None:
    async with replica() as first, replica() as second:
        await first.reset()
        await first.reset()
        await put(first, KEYS[:20])
        await second.reset()
        await looked(second)
        assert await held(second, KEYS[:20]) == 0


async def test_a_lane_that_slept_through_a_reset_brings_nothing_back(replica: Open) -> None:
    async with replica(lane=0) as sleeper:
        await put(sleeper, KEYS[:20])
    async with replica(lane=1) as other:
        assert await held(other, KEYS[:20]) == 20
        await other.reset()
        await put(other, KEYS[20:30])
        async with replica(lane=0) as woken:
            assert await held(woken, KEYS[:20]) == 0
            assert await held(woken, KEYS[20:30]) == 10
        await looked(other)
        assert await held(other, KEYS[:20]) == 0


async def test_sharing_can_be_turned_off(replica: Open) -> None:
    async with replica() as first, replica(share=False) as second:
        await put(first, KEYS[:20])
        await asyncio.sleep(0.8)
        assert await held(second, KEYS[:20]) == 0
        assert len(second.stats().tiers) == 1


async def test_a_flipped_byte_in_a_neighbours_lane_is_a_miss(tmp_path: Path, replica: Open) -> None:
    async with replica() as first:
        await put(first, KEYS[:10])
    async with replica(lane=1) as second:
        (file,) = tmp_path.glob("*/lane-0/segment-0*")
        with file.open("r+b") as handle:
            handle.seek(4096 + 4096 + 3 * CHUNK + 100)
            handle.write(b"!")
        assert await held(second, KEYS[:10]) == 3
