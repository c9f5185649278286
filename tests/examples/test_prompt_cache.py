"""The part of the example server that asks kvstore, without a model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.http_server.cache import PromptCache, keys_of
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, Open, busy, cancel, payloads
from tests.store.support import keys_of as some_keys


def copies(chunks: Sequence[memoryview]) -> list[bytes]:
    return [bytes(chunk) for chunk in chunks]


def test_a_key_stands_for_all_tokens_up_to_its_end() -> None:
    tokens = list(range(40))
    keys = keys_of(tokens, 16)
    assert len(keys) == len(set(keys)) == 2
    assert all(len(key) == 36 and key.endswith(b"\0\0\0\0") for key in keys)
    assert keys_of(tokens[:32], 16) == keys
    assert keys_of([*tokens[:16], 99, *tokens[17:]], 16)[0] == keys[0]
    assert keys_of([99, *tokens[1:]], 16)[1] not in keys


async def test_what_was_saved_is_loaded(open_store: Open) -> None:
    keys = some_keys("a", 4)
    async with open_store() as store:
        cache = PromptCache(store)
        await cache.save("one", keys[:3], lambda: payloads(keys[:3]))
        assert await cache.load("two", keys, copies) == (3, payloads(keys[:3]))
        assert cache.held(keys) == 3
        assert await cache.load("two", [], copies) == (0, [])


async def test_a_cancelled_load_keeps_its_lease_until_the_copy_ends(open_store: Open) -> None:
    keys = some_keys("a", 2)
    began, go_on, read = threading.Event(), threading.Event(), []

    def copy(chunks: Sequence[memoryview]) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        read.extend(copies(chunks))

    async with open_store() as store:
        cache = PromptCache(store)
        await cache.save("one", keys, lambda: payloads(keys))
        cache.release("one")
        task = asyncio.create_task(cache.load("two", keys, copy))
        await until_async(began.is_set)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert busy(store) == 2
        assert not task.done()
        go_on.set()
        await cancel(task)
        assert read == payloads(keys)
        assert busy(store) == 0


async def test_a_fault_of_the_store_is_a_miss(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    keys = some_keys("a", 2)
    async with open_store() as store:
        cache = PromptCache(store)
        # Of another size than the store's chunks.
        await cache.save("one", keys, lambda: [bytes(CHUNK + 1)] * 2)
        assert "nothing is saved" in caplog.text
    # Closed.
    assert await cache.load("one", keys, copies) == (0, [])
    assert cache.held(keys) == 0
    assert "nothing is loaded" in caplog.text


async def test_a_damaged_disk_is_a_miss(open_store: Open, tmp_path: Path) -> None:
    keys = some_keys("a", 4)
    async with open_store(disk=16) as store:
        await PromptCache(store).save("one", keys, lambda: payloads(keys))
    for segment in tmp_path.glob("cache/*/lane-*/*.safetensors"):
        with segment.open("r+b") as file:
            for place in range(0, segment.stat().st_size, CHUNK // 2):
                (byte,) = os.pread(file.fileno(), 1, place)
                os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), place)
    async with open_store(disk=16) as store:
        assert await PromptCache(store).load("two", keys, copies) == (0, [])
