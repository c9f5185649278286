"""Prefixes that are larger than host memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError, LeaseEndedError
from tests.patience import PATIENCE, until, until_async
from tests.store.support import CHUNK, small

KEYS = [b"key-%03d" % n + bytes(4) for n in range(100)]


def config(folder: Path, rows: int = 16) -> dict[str, Any]:
    return small(folder, rows, disk=256)


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[kvstore.Store]:
    """A store with all of KEYS on its disk, and few of them in host memory."""
    async with kvstore.open(config(tmp_path)) as store:
        await fill(store)
        yield store


async def fill(store: kvstore.Store, count: int = len(KEYS)) -> None:
    stored = await store.put(KEYS[:count], [bytes([n]) * CHUNK for n in range(count)])
    assert stored == count, store.stats()
    assert await store.flush()


@pytest.mark.parametrize("size", [1, 7, 8, 16, 200])
async def test_every_chunk_comes_once_in_order_through_little_host_memory(
    tmp_path: Path, size: int
) -> None:
    async with kvstore.open(config(tmp_path, rows=200 if size > 100 else 16)) as store:
        await fill(store)
        seen = []
        async with store.windows(KEYS, size) as windows:
            async for chunks in windows:
                assert len(chunks) <= size
                seen += [chunk[0] for chunk in chunks]
        assert seen == list(range(100))
        assert store.stats().busy_rows == 0


async def test_the_prefix_ends_where_a_chunk_is_missing(tmp_path: Path) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        await fill(store, 21)
        async with store.windows(KEYS, 8) as windows:
            sizes = [len(chunks) async for chunks in windows]
        assert sizes == [8, 8, 5]


@pytest.mark.parametrize(("leased", "size"), [(9, 4), (0, 16), (0, 40)])
async def test_windows_for_which_there_is_less_room_are_smaller_and_go_on(
    tmp_path: Path, leased: int, size: int
) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        await fill(store)
        others = [b"other-%d" % number + bytes(4) for number in range(leased)]
        await store.put(others, [bytes(CHUNK)] * leased)
        async with store.get(others) as held:
            assert len(held) == leased
            seen = []
            async with store.windows(KEYS, size) as windows:
                async for chunks in windows:
                    seen += [chunk[0] for chunk in chunks]
        assert seen == list(range(100))


async def test_there_is_no_window_after_a_reset(full: kvstore.Store) -> None:
    """What is stored then is of other weights, and no part of the same prefix."""
    async with full.windows(KEYS, 4) as windows:
        assert len(await anext(windows)) == 4
        resetting = asyncio.create_task(full.reset())
        await until_async(lambda: full.resets == 1)
        assert await full.put(KEYS[:8], [bytes([n]) * CHUNK for n in range(8)]) == 8
        with pytest.raises(StopAsyncIteration):
            await anext(windows)
    await asyncio.wait_for(resetting, PATIENCE)


async def test_who_stops_in_the_middle_leaves_nothing_leased(full: kvstore.Store) -> None:
    async with full.windows(KEYS, 8) as windows:
        async for chunks in windows:
            assert len(chunks) == 8
            break
    with pytest.raises(ZeroDivisionError):
        async with full.windows(KEYS, 8) as windows:
            async for _ in windows:
                raise ZeroDivisionError
    # What was on its way arrives.
    await until_async(lambda: not full.stats().busy_rows)


async def test_readers_that_want_more_than_half_do_not_wait_for_each_others_rows(
    tmp_path: Path,
) -> None:
    """Each would have a part, and lack the other's."""
    got, windowed = KEYS[:9], KEYS[50:59]
    async with kvstore.open(config(tmp_path, 6) | {"deadline_s": 5.0}) as store:
        for keys in (got, windowed):
            assert await store.put(keys, [bytes(CHUNK)] * 9, durable=True) == 9

        async def get() -> None:
            for _ in range(60):
                async with store.get(got):
                    pass

        async def window() -> None:
            for _ in range(15):
                async with store.windows(windowed, 4) as windows:
                    async for _ in windows:
                        await asyncio.sleep(0.002)

        await asyncio.gather(get(), window())
        assert store.stats().timeouts == 0


async def test_a_window_cannot_be_used_after_the_next_has_come(full: kvstore.Store) -> None:
    async with full.windows(KEYS, 8) as windows:
        kept = await anext(windows)
        await anext(windows)
        with pytest.raises(LeaseEndedError):
            kept[0]


async def test_the_next_window_is_on_its_way_while_one_is_used(tmp_path: Path) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        await fill(store)
    async with kvstore.open(config(tmp_path)) as store, store.windows(KEYS, 8) as windows:
        await anext(windows)
        await until_async(lambda: store.stats().tiers[0].promoted >= 16, "nobody fetches it")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"])
async def test_a_window_of_no_chunks_is_refused(full: kvstore.Store, size: object) -> None:
    with pytest.raises(KVStoreError, match="must be a whole number, 1 at least"):
        full.windows(KEYS, size)  # type: ignore[arg-type]


def test_without_asyncio_windows_do_the_same(tmp_path: Path) -> None:
    with kvstore.open_sync(config(tmp_path)) as store:
        assert store.put(KEYS, [bytes([n]) * CHUNK for n in range(100)]) == 100
        assert store.flush()
        seen = []
        with store.windows([*KEYS, b"unknown"], 8) as windows:
            for chunks in windows:
                seen += [chunk[0] for chunk in chunks]
        assert seen == list(range(100))
        with pytest.raises(ZeroDivisionError), store.windows(KEYS, 8) as windows:
            next(windows)
            raise ZeroDivisionError
        until(lambda: not store.stats().busy_rows)
        with pytest.raises(ZeroDivisionError), store.windows(KEYS, 8) as windows:
            next(windows)
            with kvstore.open_sync(config(tmp_path / "other")) as other:
                gone = other.windows(KEYS, 8)
                gone.__enter__()
            with gone:
                raise ZeroDivisionError
        with pytest.raises(KVStoreError, match="must be a whole number"):
            store.windows(KEYS, 0)


@pytest.mark.parametrize("raising", [True, False])
def test_a_window_of_a_store_that_was_closed_meanwhile_ends_with_its_block(
    tmp_path: Path, raising: bool
) -> None:
    store = kvstore.open_sync(config(tmp_path))
    store.put(KEYS[:4], [bytes(CHUNK)] * 4)
    wanted = pytest.raises(ZeroDivisionError) if raising else pytest.raises(KVStoreError)
    with wanted, store.windows(KEYS[:4], 2) as windows:
        chunks = next(windows)
        store.close()
        if raising:
            raise ZeroDivisionError
    with pytest.raises(LeaseEndedError):
        bytes(chunks[0])
