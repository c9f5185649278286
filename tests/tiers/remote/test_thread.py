"""Calls that block, in threads of their own."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvstore.concurrency import outlast
from kvstore.tiers.remote.client import StoreError
from kvstore.tiers.remote.loop import in_thread

pytestmark = pytest.mark.asyncio


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_call_that_gives_way_leaves_everybody_else_where_they_were() -> None:
    before = priority()
    assert await in_thread(priority, before + 3) == before + 3
    assert await outlast(in_thread(priority, before + 3)) == before + 3
    assert await in_thread(priority) == before
    assert priority() == before


async def test_what_a_call_raises_is_an_error_of_the_store() -> None:
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        await in_thread(lambda: 1 / 0)

    def refuses() -> None:
        raise StoreError("as it is")

    with pytest.raises(StoreError, match="^as it is$"):
        await outlast(in_thread(refuses))


async def test_a_call_that_uses_memory_is_awaited_though_it_is_cancelled() -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        goes_on.wait(60)
        ended.set()

    task = asyncio.create_task(outlast(in_thread(work)))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
