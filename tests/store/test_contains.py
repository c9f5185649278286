"""What is here can be asked without asking for it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from kvstore.errors import KVStoreError
from tests.patience import PATIENCE, until_async
from tests.store.support import Open, contents, hold, keys_of, on_disk, payloads

A, B = keys_of("a", 6), keys_of("b", 4)


async def test_it_tells_of_host_memory_and_of_the_disk_and_changes_nothing(
    open_store: Open,
) -> None:
    await on_disk(open_store, A[:4], rows=8, disk=64, keep_events=True)
    async with open_store(rows=8, disk=64, keep_events=True, holds=B[:2]) as store:
        assert await store.flush(PATIENCE)
        store.take_events()
        before = asdict(store.stats())
        order = list(store._assembly.recency()[0])
        assert store.contains_prefix(A) == 4
        assert store.contains_prefix(B) == 2
        assert store.contains_prefix([*B[:2], *A]) == 6
        assert store.contains_prefix([B[2], *B]) == 0
        assert store.contains_prefix([]) == 0
        assert store.contains_prefix(tuple(A[:2])) == 2
        assert store.contains([B[3], A[0], B[1], A[5]]) == [False, True, True, False]
        assert store.contains([]) == []
        await asyncio.sleep(0.05)
        assert asdict(store.stats()) == before
        assert list(store._assembly.recency()[0]) == order
        assert store.take_events() == []
        assert not store._core._requests
        assert await contents(store, A) == payloads(A[:4])


async def test_it_is_no_use_of_a_chunk(open_store: Open) -> None:
    async with open_store(rows=4, eviction_policy="lru") as store:
        for key in A[:4]:
            await store.put([key], payloads([key]))
        for _ in range(10):
            assert store.contains_prefix(A[:1]) == 1
            assert store.contains(A[:1]) == [True]
        await store.put(B[:1], payloads(B[:1]))
        assert store.contains_prefix(A[:1]) == 0
        assert store.contains_prefix(A[1:4]) == 3


async def test_what_is_not_whole_does_not_count(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_disk(open_store, A, rows=8, disk=64)
    async with open_store(rows=8, disk=64) as store:
        gate = hold(monkeypatch, "read")
        waiting = asyncio.create_task(contents(store, A))
        await until_async(lambda: store.stats().waiting == 1)
        # It is on its way to host memory, and on the disk still.
        assert store.contains_prefix(A) == 6
        gate.set()
        assert await waiting == payloads(A)
        # Host memory is being written to, in a step that keeps nobody's hits.
        store._driver.begin()
        grant = store._core.prepare_store(B, "r")
        assert grant is not None
        assert store.contains_prefix(B) == 0
        store._core.complete_store(B, "r")
        assert store.contains_prefix(B) == 4


async def test_a_tier_that_does_not_answer_does_not_count(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_disk(open_store, A, rows=8, disk=64)
    async with open_store(rows=8, disk=64, deadline_s=0.1) as store:
        gate = hold(monkeypatch, "read")
        assert store.contains_prefix(A) == 6
        assert await contents(store, A) == []
        # Time passes for a store when somebody calls it.
        await until_async(lambda: store.lookup_prefix(B) == 0 and store.stats().tiers[0].stalled)
        assert store.contains_prefix(A) == 0
        gate.set()
        await until_async(lambda: not store.stats().tiers[0].stalled)
        assert store.contains_prefix(A) == 6


async def test_nothing_is_told_by_a_store_that_is_closed_or_reset(open_store: Open) -> None:
    async with open_store(rows=8, disk=64, holds=A) as store:
        await store.reset()
        assert store.contains_prefix(A) == 0
    with pytest.raises(KVStoreError, match="closed"):
        store.contains_prefix(A)
