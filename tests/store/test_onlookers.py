"""Memory that is still looked at when its lease ends stays as it is until nobody looks any more."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.api.store import Store
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, Open, busy, contents, keys_of, payload, payloads, waits

A, B = keys_of("a", 4), keys_of("b", 4)


class Reader:
    """Copies a chunk in a thread, in two halves; the second when it is told to."""

    def __init__(self) -> None:
        self.began, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self.copy = b""

    def read(self, chunk: memoryview) -> None:
        array = np.frombuffer(chunk, np.uint8)
        first = array[: CHUNK // 2].tobytes()
        self.began.set()
        assert self.go_on.wait(PATIENCE)
        self.copy = first + array[CHUNK // 2 :].tobytes()
        del array, chunk
        self.ended.set()


async def cancelled_reader(store: Store, keys: list[bytes], number: int) -> Reader:
    """A task that leases `keys`, reads one of them in a thread, and is cancelled meanwhile."""
    reader = Reader()

    async def copy() -> None:
        async with store.get(keys) as chunks:
            await asyncio.to_thread(reader.read, chunks[number])

    task = asyncio.create_task(copy())
    await until_async(reader.began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return reader


async def test_a_chunk_that_a_call_of_the_system_still_sends_stays_until_it_is_sent(
    open_store: Open,
) -> None:
    """Such a call has the view's own buffer, so that the view cannot be released."""
    receiver, sender = os.pipe()
    size = fcntl.fcntl(sender, fcntl.F_SETPIPE_SZ, 4096)
    os.write(sender, bytes(size))
    began = threading.Event()

    def send(chunk: memoryview) -> None:
        began.set()
        sent = 0
        while sent < CHUNK:
            sent += os.write(sender, chunk[sent:] if sent else chunk)
        os.close(sender)

    async def copy() -> None:
        async with store.get(A) as chunks:
            await asyncio.to_thread(send, chunks[1])

    async with open_store(rows=4, holds=A) as store:
        with open(receiver, "rb") as file:
            task = asyncio.create_task(copy())
            await asyncio.to_thread(began.wait, PATIENCE)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await store.put(B, payloads(B)) == 3
            assert await asyncio.to_thread(file.read) == bytes(size) + payload(A[1])
        await until_async(lambda: busy(store) == 0)


async def hold(store: Store, keys: list[bytes]) -> np.ndarray:
    """An array that outlives its lease."""
    with pytest.raises(ZeroDivisionError):
        async with store.get(keys) as chunks:
            held = np.frombuffer(chunks[0], np.uint8)
            raise ZeroDivisionError
    return held


async def test_a_thread_whose_task_was_cancelled_reads_its_own_chunk_to_the_end(
    open_store: Open,
) -> None:
    async with open_store(rows=4) as store:
        assert await store.put(A, payloads(A)) == 4
        reader = await cancelled_reader(store, A, 1)
        # The other three rows are free for others at once.
        stored = await store.put(B, payloads(B), timeout=PATIENCE)
        held = busy(store)
        reader.go_on.set()
        await until_async(reader.ended.is_set)
        assert reader.copy == payload(A[1])
        assert (stored, held) == (3, 1)
        await until_async(lambda: busy(store) == 0)
        assert await store.put(B, payloads(B), timeout=PATIENCE) == 4
        assert await contents(store, B) == payloads(B)


async def test_rows_that_are_looked_at_are_counted_and_told_once(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(rows=8, holds=A) as store:
        await store.put(B, payloads(B))
        with caplog.at_level(logging.WARNING, "kvstore"):
            held = [await hold(store, keys) for keys in (A, B, A)]
        assert len([r for r in caplog.records if "outlived its lease" in r.message]) == 1
        stats = store.stats()
        assert (stats.outlived, stats.watched_rows, stats.busy_rows) == (3, 2, 2)
        del held[0]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert store.stats().watched_rows == 2
        held.clear()
        await until_async(lambda: busy(store) == 0)
        stats = store.stats()
        assert (stats.outlived, stats.watched_rows) == (3, 0)


def _in_a_thread(drop: Callable[[], object]) -> None:
    thread = threading.Thread(target=drop)
    thread.start()
    thread.join(PATIENCE)


@pytest.mark.parametrize("where", ["here", "in a thread", "in a cycle"])
async def test_nothing_stays_pinned_when_nobody_looks_any_more(
    open_store: Open, where: str
) -> None:
    async with open_store(rows=4, holds=A) as store:
        held: list[object] = [await hold(store, A)]
        # Neither the lease nor its chunks need to be remembered by anybody.
        gc.collect()
        assert busy(store) == 1
        if where == "here":
            held.clear()
        elif where == "in a thread":
            _in_a_thread(held.clear)
        else:
            held.append(held)
            del held
            _in_a_thread(lambda: [gc.collect()])
        await until_async(lambda: busy(store) == 0)
        assert store.stats().watched_rows == 0


@pytest.mark.parametrize("leases", [1, 2])
async def test_a_chunk_that_is_looked_at_twice_stays_until_both_are_done(
    open_store: Open, leases: int
) -> None:
    async with open_store(rows=4, holds=A) as store:
        if leases == 2:
            one, other = await hold(store, A), await hold(store, A)
        else:
            async with store.get([A[0], A[0]]) as chunks:
                one, other = (np.frombuffer(chunk, np.uint8) for chunk in chunks)
        assert store.stats().watched_rows == 1
        del one
        await asyncio.sleep(0.01)
        assert busy(store) == 1
        del other
        await until_async(lambda: busy(store) == 0)


async def test_a_name_may_be_released_and_used_again_while_its_rows_are_looked_at(
    open_store: Open,
) -> None:
    async with open_store(rows=4) as store:
        await store.put(A, payloads(A), "mine")
        async with store.get(A, "mine") as chunks:
            held = np.frombuffer(chunks[0], np.uint8)
        store.release("mine")
        async with store.get(A, "mine") as chunks:
            del held
            await asyncio.sleep(0.01)
            assert busy(store) == 4
            assert [bytes(chunk) for chunk in chunks] == payloads(A)
        store.release("mine")
        assert busy(store) == 0
        assert store.stats().stray == 0


async def test_a_reset_does_not_wait_for_who_looks_and_its_row_stays(open_store: Open) -> None:
    async with open_store(rows=4, holds=A) as store:
        held = await hold(store, A)
        await store.reset(timeout=PATIENCE)
        assert await store.put(B, payloads(B), timeout=PATIENCE) == 3
        assert held.tobytes() == payload(A[0])
        assert store.stats().watched_rows == 1
        del held
        await until_async(lambda: store.stats().watched_rows == 0)
        assert await store.put(B, payloads(B), timeout=PATIENCE) == 4
        assert store.stats().stray == 0


async def test_a_reset_waits_for_a_lease_until_only_onlookers_are_left(open_store: Open) -> None:
    async with open_store(rows=4, holds=A) as store:
        lease = store.get(A)
        chunks = await lease.__aenter__()
        held = np.frombuffer(chunks[0], np.uint8)
        resetting = await waits(store.reset())
        await lease.__aexit__(None, None, None)
        await asyncio.wait_for(resetting, PATIENCE)
        assert held.tobytes() == payload(A[0])


async def test_who_looks_when_the_store_closes_may_stop_looking_afterwards(
    open_store: Open,
) -> None:
    async with open_store(rows=4, disk=16, holds=A) as store:
        held = await hold(store, A)
    assert held.tobytes() == payload(A[0])
    del held
    await asyncio.sleep(0.01)
    assert busy(store) == 0
