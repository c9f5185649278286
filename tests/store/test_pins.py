"""Pins and prefetches on a real disk; copies that outlive a lease; numbers of what was done."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from kvstore.errors import BlockKeyError, KVStoreError, LeaseEndedError
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, Open, contents, filled, keys_of, on_disk, payloads

A, B, C = keys_of("a", 4), keys_of("b", 8), keys_of("c", 8)


async def test_what_is_pinned_stays_in_host_memory_until_its_time_is_over(
    open_store: Open,
) -> None:
    async with open_store(rows=8, eviction_policy="lru", holds=A) as store:
        assert store.pin(A, math.inf) == 4
        for keys in (B, C):
            # What fits beside it, at once: nobody waits for a pin to end.
            assert await asyncio.wait_for(store.put(keys, payloads(keys)), PATIENCE) == 4
        assert await contents(store, A) == payloads(A)
        assert store.stats().pinned_rows == 4
        assert store.unpin(A) == 4
        assert store.pin(A, 0.1) == 4
        await asyncio.sleep(0.1)
        await store.put(B, payloads(B))
        assert store.contains_prefix(A) == 0
        assert store.stats().pinned_rows == 0


async def test_what_is_pinned_stays_on_disk_and_is_found_after_a_restart(open_store: Open) -> None:
    async with open_store(rows=8, disk=16, holds=A) as store:
        assert store.pin(A, math.inf, host=False) == 4
        for prompt in range(32):
            await filled(store, f"others {prompt}", 8)
            await store.flush(PATIENCE)
        assert store.stats().tiers[0].evicted > 0
        assert store.stats().tiers[0].pinned == 4
        assert await contents(store, A) == payloads(A)
        assert store.unpin(A) == 4
        assert store.unpin(A) == 0
    async with open_store(rows=8, disk=16) as store:
        assert store.stats().pins == 0
        assert await contents(store, A) == payloads(A)


async def test_the_part_of_the_store_that_may_be_pinned_is_configured(open_store: Open) -> None:
    async with open_store(rows=8, pinned_share=0.25, holds=A) as store:
        assert store.pin(A, 60.0) == 2
        assert store.pin(B, 60.0) == 0
        assert store.pin(A[:1], 60.0) == 1
    async with open_store(rows=8, pinned_share=0) as store:
        assert store.pin(A, 60.0) == 0


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, None, "5", True])
async def test_bad_seconds_are_refused(open_store: Open, seconds: object) -> None:
    async with open_store(rows=8) as store:
        with pytest.raises(KVStoreError, match="seconds must be a number above 0"):
            store.pin(A, seconds)  # type: ignore[arg-type]
        with pytest.raises(BlockKeyError):
            store.pin("abc", 5.0)  # type: ignore[arg-type]
        assert store.stats().pins == 0


async def test_what_is_prefetched_comes_by_itself(open_store: Open) -> None:
    await on_disk(open_store, B, rows=32, disk=64)
    async with open_store(rows=32, disk=64) as store:
        assert store.prefetch([*B, *C]) == 8
        await until_async(lambda: store.stats().chunks == 8 and store.stats().busy_rows == 0)
        assert store.lookup_prefix(B) == 8
        assert store.prefetch(B) == 0
        stats = store.stats()
        assert (stats.prefetched, stats.deferrals, stats.misses) == (8, 0, 0)
        assert await contents(store, B) == payloads(B)


async def test_a_conversation_that_pauses_makes_room_and_comes_back(open_store: Open) -> None:
    async with open_store(rows=16, disk=64, holds=B) as store:
        assert store.demote(B) == 8
        await until_async(lambda: store.stats().chunks == 0)
        assert store.contains_prefix(B) == 8
        assert store.prefetch(B) == 8
        await until_async(lambda: (store.stats().chunks, store.stats().busy_rows) == (8, 0))
        assert await contents(store, B) == payloads(B)
        assert store.stats().deferrals == 0


async def test_a_copy_outlives_the_lease_and_an_array_over_a_chunk_cannot_be_written(
    open_store: Open,
) -> None:
    async with open_store(rows=8, disk=64, holds=A) as store:
        async with store.get(A) as chunks:
            body = chunks.copy()
            assert list(chunks.sources) == ["host"] * 4
            array = np.frombuffer(chunks[0], np.float16)
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            del array
        assert body == payloads(A)
        with pytest.raises(LeaseEndedError):
            chunks.copy()
    async with open_store(rows=8, disk=64) as store, store.get(A) as chunks:
        assert list(chunks.sources) == ["disk"] * 4


async def test_statistics_tell_bytes_and_times(open_store: Open) -> None:
    async with open_store(rows=8, disk=64, holds=A) as store:
        await store.flush(PATIENCE)
        stats = store.stats()
        assert (stats.chunk_bytes, stats.stored_bytes) == (CHUNK, 4 * CHUNK)
        assert stats.tiers[0].written_bytes == 4 * CHUNK
        assert stats.tiers[0].writes.count >= 1
        assert 0 < stats.tiers[0].writes.mean < PATIENCE
    async with open_store(rows=8, disk=64) as store:
        await contents(store, A)
        stats = store.stats()
        assert (stats.loaded_bytes, stats.tiers[0].read_bytes) == (4 * CHUNK, 4 * CHUNK)
        assert stats.waits.count == 1
        assert 0 < stats.waits.quantile(0.5) <= PATIENCE


async def test_what_is_unpinned_as_cold_leaves_first(open_store: Open) -> None:
    async with open_store(rows=16, eviction_policy="lru", holds=B) as store:
        await store.put(A, payloads(A))
        assert store.pin(A, math.inf) == 4
        assert store.unpin(A, cold=True) == 4
        await store.put(C, payloads(C))
        assert store.contains_prefix(A) == 0
        assert await contents(store, B) == payloads(B)
