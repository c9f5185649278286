"""A library over a store that others share: real Redis, killed and frozen."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.config import Config
from kvstore.core.residency.remote_answers import MOST_ANSWERS, Answers
from kvstore.errors import ConfigError
from kvstore.tiers.remote.directory import DirectoryClient
from kvstore.tiers.remote.record import RECORD_BYTES
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, contents, filled, keys_of, payloads, small
from tests.tiers.remote.servers import RedisServer, redis_server

KEYS = keys_of("prompt", 6)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def host(folder: Path, server: RedisServer, *, disk: int = 0, **more: Any) -> dict[str, Any]:
    """One host: its memory, perhaps a disk of its own, and the store behind them."""
    config = small(folder, disk=disk)
    store = {"type": "redis", "url": server.url, "timeout_s": 0.5}
    return {**config, "tiers": [*config["tiers"], store], **more}


def values(folder: Path) -> list[str]:
    """The names of the values in a shared directory."""
    return [name for _, _, names in os.walk(folder) for name in names if len(name) > 40]


async def saved(store: Store) -> None:
    async with asyncio.timeout(PATIENCE):
        await store.flush()


async def test_a_share_of_a_capacity_keeps_to_each_tenant_what_is_guaranteed(
    tmp_path: Path,
) -> None:
    shared = {"type": "object", "url": (tmp_path / "shared").as_uri(), "capacity_bytes": "512KiB"}
    tenants = {"alice": {"guaranteed": 0.5}}
    config = {**small(tmp_path / "one", rows=32), "tenants": tenants, "tiers": [shared]}
    hers = kvstore.tenant_keys("alice", keys_of("hers", 12))
    async with kvstore.open(config) as one:
        assert await one.put(hers, payloads(hers)) == len(hers)
        await saved(one)
        async with kvstore.open(config) as other:
            for number in range(40):
                his = kvstore.tenant_keys("bob", keys_of(f"flood {number}", 8))
                await other.put(his, payloads(his))
                await saved(other)
            capacity = 512 * 1024 // (CHUNK + RECORD_BYTES)
            await until_async(lambda: len(values(tmp_path / "shared")) <= capacity)
            more = kvstore.tenant_keys("bob", keys_of("more", 1))
            assert await other.put(more, payloads(more)) == 1
            await saved(other)
            assert other.stats().tiers[-1].evicted > 0
    async with kvstore.open(config) as third:
        assert await third.resolve(hers) == len(hers)


async def test_a_store_that_stands_before_a_disk_is_refused_with_the_order(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    disk = {"type": "disk", "path": str(tmp_path), "capacity_bytes": 2**30}
    store = {"type": "redis"}
    for tiers, said in (
        ([store, disk], "tiers[0] is a store and comes before tiers[1], which is not"),
        ([disk, store, {**disk, "path": str(tmp_path / "2")}], "tiers[1] is a store"),
    ):
        with pytest.raises(ConfigError) as refused:
            Config.from_mapping({"cpu_bytes_to_use": 2**20, "tiers": tiers})
        assert said in str(refused.value)
        assert "disks first, stores last" in str(refused.value)
    both = {"cpu_bytes_to_use": 2**20, "tiers": [disk, store, store]}
    assert len(Config.from_mapping(both).tiers) == 3


async def test_a_host_that_starts_again_finds_what_it_had_on_its_disk_and_the_rest_in_the_store(
    tmp_path: Path, server: RedisServer
) -> None:
    async with kvstore.open(host(tmp_path / "one", server, disk=32)) as one:
        await one.put(KEYS[:3], payloads(KEYS[:3]))
        await saved(one)
    async with kvstore.open(host(tmp_path / "other", server, disk=32)) as other:
        await other.put(KEYS, payloads(KEYS))
        await saved(other)
    async with kvstore.open(host(tmp_path / "one", server, disk=32)) as again:
        assert again.lookup_prefix(KEYS[3:]) is None, "it has to ask"
        assert await again.resolve(KEYS) == 6
        async with again.get(KEYS) as chunks:
            assert [bytes(chunk) for chunk in chunks] == payloads(KEYS)
            assert list(chunks.sources) == ["disk"] * 3 + ["remote"] * 3


async def test_a_value_that_cannot_be_read_costs_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is not away: its other values are served, and the next write replaces this one."""
    good, bad = keys_of("good", 4), keys_of("bad", 1)
    directory = {"type": "object", "url": f"file://{tmp_path / 'share'}"}
    unreadable: set[str] = set()
    read = DirectoryClient._read

    def failing(self: Any, folder: int, at: str, size: int, name: str) -> Any:
        if name.endswith(tuple(unreadable)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, folder, at, size, name)

    monkeypatch.setattr(DirectoryClient, "_read", failing)
    settings = {**small(tmp_path, 16, disk=0), "tiers": [directory]}
    async with kvstore.open(settings) as first:
        for key in good + bad:
            await first.put([key], payloads([key]))
        await saved(first)
    unreadable.add(bad[0].hex())
    async with kvstore.open(settings) as second:
        for key in good:
            assert await contents(second, bad) == []
            assert await contents(second, [key]) == payloads([key])
            assert not second.stats().tiers[0].away
        unreadable.clear()
        assert await second.put(bad, payloads(bad)) == 1
        await saved(second)
    async with kvstore.open(settings) as third:
        assert await contents(third, bad) == payloads(bad)


async def test_a_store_of_which_nothing_can_be_read_is_away_though_it_answers_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose master answers and whose transfers all fail: it costs few reads, not each."""
    directory = {"type": "object", "url": f"file://{tmp_path / 'share'}"}
    settings = {**small(tmp_path, 64, disk=0), "tiers": [directory]}
    prompts = [keys_of(f"prompt {n}", 1) for n in range(24)]
    async with kvstore.open(settings) as first:
        for keys in prompts:
            await first.put(keys, payloads(keys))
        await saved(first)
    reads, read = 0, DirectoryClient._read

    def failing(self: Any, *where: Any) -> Any:
        nonlocal reads
        reads += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with kvstore.open(settings) as second:
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryClient, "_read", failing)
            for keys in prompts:
                assert await contents(second, keys) == []
                if second.stats().tiers[0].away:
                    break
            assert second.stats().tiers[0].away
            assert reads < 12
        assert DirectoryClient._read is read

        async def is_back() -> bool:
            return await contents(second, prompts[-1]) == payloads(prompts[-1])

        async with asyncio.timeout(PATIENCE):
            while not await is_back():
                await asyncio.sleep(0.05)


async def test_what_nobody_has_stored_is_a_miss_after_one_question(
    tmp_path: Path, server: RedisServer
) -> None:
    async with kvstore.open(host(tmp_path, server)) as store:
        assert await store.resolve(KEYS) == 0
        assert store.lookup_prefix(KEYS) == 0, "the answer is known"
        (tier,) = store.stats().tiers
        assert (tier.asked, tier.found, tier.unanswered) == (6, 0, 0)


@pytest.mark.parametrize("how", ["stop", "freeze"])
async def test_a_store_that_is_away_is_a_miss_soon_and_serves_when_it_is_back(
    tmp_path: Path, server: RedisServer, how: str
) -> None:
    async with kvstore.open(host(tmp_path, server)) as store:
        await store.put(KEYS, payloads(KEYS))
        await saved(store)
        getattr(server, how)()
        began = time.monotonic()
        assert await store.resolve(keys_of("others", 6)) == 0
        assert store.stats().tiers[0].away
        assert await store.resolve(KEYS) == 6, "host memory has them"
        # While the store is left alone, nobody asks it.
        asked = store.stats().tiers[0].asked
        assert await store.resolve(keys_of("more", 6)) == 0
        assert store.stats().tiers[0].asked == asked
        await store.put(keys_of("new", 2), payloads(keys_of("new", 2)))
        await saved(store)
        assert time.monotonic() - began < PATIENCE
        server.start()
        async with asyncio.timeout(PATIENCE):
            while store.stats().tiers[0].away:
                await asyncio.sleep(0.05)
                await store.resolve(keys_of(f"try {time.monotonic()}", 1))
        await store.put(keys_of("after", 2), payloads(keys_of("after", 2)))
        async with asyncio.timeout(PATIENCE):
            # Copies that failed are tried again after a pause.
            while store.stats().tiers[0].written < 8:
                await asyncio.sleep(0.1)
                await filled(store, f"late {time.monotonic()}", 1)


@pytest.mark.parametrize("how", ["stop", "freeze"])
async def test_it_opens_and_closes_while_the_store_is_away(
    tmp_path: Path, server: RedisServer, how: str
) -> None:
    getattr(server, how)()
    began = time.monotonic()
    async with kvstore.open(host(tmp_path, server)) as store:
        await store.put(KEYS, payloads(KEYS))
        assert await store.resolve(keys_of("others", 3)) == 0
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("reset", [False, True])
async def test_what_is_removed_is_gone_for_others_too(
    tmp_path: Path, server: RedisServer, reset: bool
) -> None:
    async with kvstore.open(host(tmp_path / "one", server)) as one:
        await one.put(KEYS, payloads(KEYS))
        await saved(one)
        if reset:
            await one.reset()
            await one.put(KEYS[:4], payloads(KEYS[:4]))
            await saved(one)
        await one.remove(KEYS[2:])
        assert await one.resolve(KEYS) == 2
        async with kvstore.open(host(tmp_path / "other", server)) as other:
            assert await other.resolve(KEYS) == 2


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("redis", {"eviction_policy": "arc"}, "eviction_policy"),
        ("redis", {"flow": "exclusive"}, "exclusive"),
        ("redis", {"colour": "red"}, "colour"),
        ("object", {"url": "s3://key:secret@bucket"}, "tier 'object': .*url"),
    ],
)
async def test_what_is_not_for_a_store_is_refused(
    tmp_path: Path, kind: str, more: dict[str, Any], said: str
) -> None:
    pytest.importorskip({"redis": "redis", "object": "obstore"}[kind])
    with pytest.raises(ConfigError, match=said):
        async with kvstore.open({**small(tmp_path), "tiers": [{"type": kind, **more}]}):
            pass


async def test_an_unnamed_lookup_that_is_repeated_finds_what_others_store_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engine.unnamed_requests.ANEW_SECONDS", 0.05)
    monkeypatch.setattr(Answers.__init__, "__defaults__", (MOST_ANSWERS, 0.05))
    tier = {"type": "object", "url": (tmp_path / "share").as_uri()}
    config = {**small(tmp_path), "tiers": [tier]}
    async with kvstore.open(config) as one, kvstore.open(config) as other:
        assert await other.resolve(KEYS) == 0
        await one.put(KEYS[:4], payloads(KEYS[:4]))
        await saved(one)
        async with asyncio.timeout(PATIENCE):
            while await other.resolve(KEYS) != 4:
                await asyncio.sleep(0.02)
        await one.put(KEYS, payloads(KEYS))
        await saved(one)
        async with asyncio.timeout(PATIENCE):
            while await other.resolve(KEYS) != 6:
                await asyncio.sleep(0.02)
        assert await contents(other, KEYS) == payloads(KEYS)
        assert other.stats().busy_rows == 0
