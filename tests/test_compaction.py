"""Compaction of a cache that is in use: real files, real processes, real kills."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.errors import KVStoreError
from kvstore.maintenance.offline import purge
from kvstore.maintenance.survey import Fault, verify
from tests.patience import PATIENCE, until_async

CHUNK = 16 * 1024
SEGMENT = 300 * 1024  # 18 chunks
KEYS = [b"key-%04d" % index + b"\0\0\0\0" for index in range(144)]


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(64) * (CHUNK // 64)


def config(path: Path | list[Path], **tier: Any) -> dict[str, Any]:
    where = [str(one) for one in path] if isinstance(path, list) else str(path)
    disk = {"type": "disk", "path": where, "capacity_bytes": "4MiB", "segment_bytes": SEGMENT}
    return {
        "cpu_bytes_to_use": 16 * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": {"model": "tiny"},
        # A slow disk makes no misses.
        "deadline_s": PATIENCE,
        "max_wait_s": PATIENCE,
        "shutdown_timeout_s": PATIENCE,
        "tiers": [{**disk, **tier}],
    }


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("segment-*"))


async def fill(path: Path | list[Path]) -> None:
    async with kvstore.open(config(path)) as store:
        for start in range(0, len(KEYS), 12):
            assert await store.put(KEYS[start : start + 12], map(payload, KEYS[start:][:12])) == 12
            assert await store.flush(PATIENCE)


def thin_out(paths: list[Path]) -> list[bytes]:
    """Leave every sixth chunk; returns those that are left."""
    for path in paths:
        purge(path, key=[key for index, key in enumerate(KEYS) if index % 6])
    return KEYS[::6]


async def served(store: Store, keys: list[bytes]) -> int:
    """How many of `keys` are served; every one must be right."""
    count = 0
    for key in keys:
        async with store.get([key]) as chunks:
            assert all(bytes(chunk) == payload(key) for chunk in chunks)
            count += len(chunks)
    return count


async def until_fewer(path: Path, count: int) -> None:
    await until_async(
        lambda: len(files(path)) <= count, lambda: f"{len(files(path))} segments are left", 0.02
    )


@pytest.mark.parametrize("several", [False, True], ids=["one path", "two paths"])
async def test_sparse_segments_are_given_back_while_all_chunks_are_served(
    tmp_path: Path, several: bool
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"] if several else [tmp_path / "a"]
    where = paths if several else paths[0]
    await fill(where)
    kept = thin_out(paths)
    before = len(files(tmp_path))
    assert before >= 8
    async with kvstore.open(config(where, compaction_rate="1GiB")) as store:
        while len(files(tmp_path)) > 4:
            assert await served(store, random.sample(kept, 4)) == 4
            await asyncio.sleep(0.01)
        assert await served(store, kept) == len(kept)
        stats = store.stats().tiers[0]
        assert stats.relocated > 0
        assert stats.written_bytes == (stats.written + stats.relocated) * CHUNK
        assert stats.removed_segments == before - stats.segments
        assert stats.segments == len(files(tmp_path))
    async with kvstore.open(config(where)) as store:
        assert await served(store, kept) == len(kept)
    for path in paths:
        assert not [found for found in verify(path) if isinstance(found, Fault)]


async def test_it_can_be_begun_and_stopped(tmp_path: Path) -> None:
    await fill(tmp_path)
    kept = thin_out([tmp_path])
    async with kvstore.open(config(tmp_path)) as store:
        await asyncio.sleep(0.2)
        before = len(files(tmp_path))
        assert before >= 8, "nobody has asked for it"
        # Some segments in a second: there is more to do when it is stopped.
        store.compact(25 * CHUNK)
        await until_fewer(tmp_path, before - 1)
        store.compact(0)
        # What was under way ends, however slow the disk is.
        await until_async(lambda: not store._core.in_flight)
        left = len(files(tmp_path))
        await asyncio.sleep(0.5)
        assert len(files(tmp_path)) == left
        assert await served(store, kept) == len(kept)


async def test_the_room_it_gave_back_is_taken_again_when_it_is_needed(tmp_path: Path) -> None:
    await fill(tmp_path)
    thin_out([tmp_path])
    async with kvstore.open(config(tmp_path, compaction_rate="1GiB")) as store:
        await until_fewer(tmp_path, 4)
        for start in range(0, len(KEYS), 12):
            keys = KEYS[start : start + 12]
            assert await store.put(keys, map(payload, keys)) == 12
            assert await store.flush(PATIENCE)
        assert await served(store, KEYS) == len(KEYS)
        assert len(files(tmp_path)) >= 8


async def test_a_neighbour_that_follows_gets_right_bytes_or_misses(tmp_path: Path) -> None:
    await fill(tmp_path)
    kept = thin_out([tmp_path])
    async with (
        kvstore.open(config(tmp_path, compaction_rate="1GiB")) as store,
        kvstore.open(config(tmp_path, lane=1)) as neighbour,
    ):
        while len(files(tmp_path / "")) > 5:
            await served(neighbour, random.sample(kept, 4))
        assert await served(store, kept) == len(kept)
        end = time.monotonic() + PATIENCE
        while await served(neighbour, kept) < len(kept):
            assert time.monotonic() < end, "the neighbour never finds what was moved"
            await asyncio.sleep(0.2)


COMPACT = """
import asyncio, sys
import kvstore
from tests.test_compaction import config
from pathlib import Path

async def main():
    async with kvstore.open(config(Path(sys.argv[1]), compaction_rate="1GiB")) as store:
        print("open", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_kills_in_its_midst_lose_nothing(tmp_path: Path) -> None:
    await fill(tmp_path)
    kept = thin_out([tmp_path])
    rng = random.Random(1)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", COMPACT, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        await asyncio.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        process.stdout.close()
        assert not [found for found in verify(tmp_path) if isinstance(found, Fault)]
        async with kvstore.open(config(tmp_path)) as store:
            assert await served(store, kept) == len(kept)
    assert len(files(tmp_path)) < 8


async def test_each_tier_keeps_to_its_own_rate(tmp_path: Path) -> None:
    told = config(tmp_path / "fast", compaction_rate="1MiB")
    told["tiers"] += config(tmp_path / "still", compaction_rate=0)["tiers"]
    async with kvstore.open(told) as store:
        rates = {tier.name: tier.compactor.rate for tier in store._core.owned}
    assert rates[f"disk:{tmp_path / 'fast'}"] == 2**20 / CHUNK
    assert rates[f"disk:{tmp_path / 'still'}"] == 0


@pytest.mark.parametrize("rate", ["fast", "50 parsecs", -1, None, 1.5, True, object()])
async def test_a_rate_that_is_no_size_is_refused_as_every_other_setting(
    tmp_path: Path, rate: object
) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        with pytest.raises(KVStoreError, match="bytes_per_second = .*allowed|negative"):
            store.compact(rate)  # type: ignore[arg-type]


async def test_a_rate_may_be_written_as_every_other_size(tmp_path: Path) -> None:
    await fill(tmp_path)
    left = thin_out([tmp_path])
    before = len(files(tmp_path))
    async with kvstore.open(config(tmp_path)) as store:
        store.compact("50MiB")
        await until_fewer(tmp_path, before // 2)
        store.compact("0")
        assert await served(store, left) == len(left)
