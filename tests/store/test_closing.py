"""However often it is cancelled, a store that closes lets go of its threads and its lane."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import put
from kvstore.api import store as api_store
from kvstore.api.store import Store
from kvstore.core.core import Core
from kvstore.engine.engine import end_engine
from kvstore.errors import KVStoreError
from kvstore.policies.lru import LRU
from kvstore.tiers import PinnedRegion
from kvstore.tiers.disk import DiskTier
from tests.patience import PATIENCE, TOO_LONG, until_async
from tests.store.support import (
    CHUNK,
    Open,
    cancel,
    contents,
    filled,
    hold,
    hurry,
    keys_of,
    on_disk,
    payloads,
    program,
    slow,
)

KEYS = keys_of("a", 4)


def io_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "-io-" in thread.name}


@pytest.fixture(autouse=True)
async def everything_is_free_afterwards(open_store: Open) -> AsyncIterator[None]:
    # Tests of disks that never answer leave threads behind.
    others = io_threads()
    yield
    # The last thing that a thread does is to tell that it has ended.
    await until_async(lambda: io_threads() <= others)
    async with open_store(disk=32) as store:
        assert "lane-0" in store.description


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("pause", [0.0, 0.02])
async def test_a_store_that_is_cancelled_while_it_drains_closes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, times: int, pause: float
) -> None:
    slow(monkeypatch, "write", 0.2)
    entered = asyncio.Event()

    async def use() -> None:
        async with open_store(
            disk=32, rows=16, write_queue_bytes=CHUNK, shutdown_timeout_s=TOO_LONG
        ) as store:
            await store.put(KEYS, payloads(KEYS))
            entered.set()

    using = asyncio.create_task(use())
    await entered.wait()
    await asyncio.sleep(0)
    for _ in range(times):
        using.cancel()
        await asyncio.sleep(pause)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(using, PATIENCE)
    monkeypatch.undo()


async def test_a_timeout_that_passes_while_it_closes_is_a_timeout(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(monkeypatch, "close")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, open_store(disk=32) as store:
            await store.put(KEYS, payloads(KEYS))
            loop = asyncio.get_running_loop()
            limit.reschedule(loop.time() + 0.1)
            loop.call_later(0.3, gate.set)
    monkeypatch.undo()


async def test_a_task_that_is_cancelled_while_its_store_is_in_use_and_again_while_it_closes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(monkeypatch, "close")
    inside = asyncio.Event()

    async def use() -> None:
        async with open_store(disk=32, holds=KEYS):
            inside.set()
            await asyncio.sleep(TOO_LONG)

    using = asyncio.create_task(use())
    await inside.wait()
    for _ in range(4):
        using.cancel()
        await asyncio.sleep(0.02)
        assert not using.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    monkeypatch.undo()


async def test_what_was_stored_on_disk_before_a_cancelled_close_is_found(
    open_store: Open,
) -> None:
    on_disk = asyncio.Event()

    async def use() -> None:
        async with open_store(disk=32, holds=KEYS) as store:
            assert await store.flush()
            on_disk.set()
            await asyncio.sleep(TOO_LONG)

    using = asyncio.create_task(use())
    await on_disk.wait()
    using.cancel()
    await asyncio.sleep(0)
    await cancel(using)
    async with open_store(disk=32) as store:
        assert await contents(store, KEYS) == payloads(KEYS)


async def test_calls_are_refused_as_soon_as_a_hasty_close_began(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(monkeypatch, "close")
    async with open_store(disk=32) as store:
        closing = asyncio.create_task(store.close())
        await until_async(lambda: store._driver.closed)
        with pytest.raises(KVStoreError, match="closed"):
            store.lookup_prefix(KEYS)
        gate.set()
        await closing


@pytest.mark.parametrize("later", [False, True], ids=["copying", "begun later"])
async def test_a_put_that_a_close_may_not_wait_for_says_so(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    begun, go_on, real = asyncio.Event(), asyncio.Event(), put.run_copy
    gate = hold(monkeypatch, "write")

    async def held(*arguments: Any) -> None:
        begun.set()
        await go_on.wait()
        await real(*arguments)

    async with open_store(rows=16, disk=32) as store:
        others = await filled(store, "others", 4)
        monkeypatch.setattr(put, "run_copy", held)
        putting = [] if later else [asyncio.create_task(store.put(KEYS, payloads(KEYS)))]
        if not later:
            await begun.wait()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0.01)
        if later:
            putting.append(asyncio.create_task(store.put(KEYS, payloads(KEYS))))
        go_on.set()
        with pytest.raises(KVStoreError, match="is being closed"):
            await putting[0]
        gate.set()
        await closing
    async with open_store(disk=32) as store:
        assert store.contains_prefix(others) == 4


async def stop_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """With chunks that wait to be copied there. Setting the events lets it go on."""
    gates = [hold(monkeypatch, method) for method in ("write", "read", "clear")]
    others = keys_of("others", 4)
    await store.put(others, payloads(others))
    return gates


def begin_call(store: Store, what: str) -> asyncio.Future[Any]:
    more = keys_of("more", 12)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "flush": store.flush,
        "reset": store.reset,
        "put": lambda: store.put(more, payloads(more)),
        "resolve": lambda: store.resolve(KEYS),
        "get": lambda: contents(store, KEYS),
    }
    return asyncio.ensure_future(calls[what]())


@pytest.mark.parametrize("what", ["flush", "reset", "put"])
async def test_a_call_that_is_cancelled_leaves_a_store_that_works(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with open_store(disk=32, rows=8, holds=KEYS) as store:
        await store.flush()
        gates = await stop_the_disk(store, monkeypatch)
        running = begin_call(store, what)
        await asyncio.sleep(0.05)
        assert not running.done()
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        for gate in gates:
            gate.set()
        fresh = keys_of("fresh", 4)
        await until_async(lambda: not store._core.in_flight)
        assert await store.put(fresh, payloads(fresh)) == 4
        assert await contents(store, fresh) == payloads(fresh)
        assert await store.flush(PATIENCE)


@pytest.mark.parametrize("what", ["flush", "reset", "put", "resolve", "get"])
async def test_a_call_that_is_cancelled_just_as_it_is_woken_ends(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with open_store(disk=32, rows=8, holds=KEYS) as store:
        await store.flush()
        await store.put(keys_of("wide", 8), payloads(keys_of("wide", 8)))
        # While the disk stands still a put waits for room for that long.
        hurry(store, 0.2)
        gates = await stop_the_disk(store, monkeypatch)
        hurry(store, TOO_LONG)
        running = begin_call(store, what)
        # It may be woken, and wait again, before it waits for the disk alone.
        await asyncio.sleep(0.01)
        await until_async(lambda: any(not waiter.done() for waiter in store._driver._waiters))
        assert not running.done()
        (waiter,) = (waiter for waiter in store._driver._waiters if not waiter.done())
        waiter.set_result(True)
        running.cancel()
        await asyncio.wait({running}, timeout=PATIENCE)
        assert running.cancelled()
        for gate in gates:
            gate.set()


async def test_an_open_that_is_cancelled_again_and_again_lets_go(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    regions: list[PinnedRegion] = []
    real, others = DiskTier.open, io_threads()

    def slow(self: DiskTier, region: PinnedRegion) -> Any:
        regions.append(region)
        entered.set()
        gate.wait(PATIENCE)
        return real(self, region)

    async def use() -> None:
        async with open_store(disk=32):
            raise AssertionError("it was cancelled")

    monkeypatch.setattr(DiskTier, "open", slow)
    opening = asyncio.create_task(use())
    await until_async(entered.is_set)
    for _ in range(3):
        opening.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({opening})
    assert opening.cancelled()
    gate.set()
    await until_async(lambda: io_threads() <= others and regions[0]._memory is None)
    monkeypatch.undo()


PROGRAM = """
    import asyncio, sys, threading, kvstore

    path, when = sys.argv[1:]
    size = 65536
    config = {
        "cpu_bytes_to_use": 64 * size,
        "chunk_bytes": size,
        "identity": {"model": "m"},
        "shutdown_timeout_s": 180.0,
        "record_trace": path + ".trace",
        "tiers": [
            {"type": "disk", "path": path, "segment_bytes": "8MiB", "capacity_bytes": "64MiB"}
        ],
    }

    async def use(opened):
        async with kvstore.open(config) as store:
            keys = [bytes([n]) * 32 for n in range(32)]
            await store.put(keys, [bytes(size)] * 32)
            opened.set()
            if when == "in use":
                await asyncio.sleep(3600)

    async def main():
        opened = asyncio.Event()
        using = asyncio.create_task(use(opened))
        await asyncio.wait_for(opened.wait(), 50)
        if when == "closing":
            await asyncio.sleep(0)
        # The loop ends, and cancels everything that is left.

    asyncio.run(main())
    for thread in threading.enumerate():
        if "-io-" in thread.name:
            thread.join(20.0)
    print([thread.name for thread in threading.enumerate() if "-io-" in thread.name])
    async def again():
        async with kvstore.open(config) as store:
            print("lane-0" in store.description)
    asyncio.run(again())
"""


@pytest.mark.parametrize("when", ["in use", "closing"])
def test_a_loop_that_ends_under_a_store_closes_it(tmp_path: Path, when: str) -> None:
    assert program(PROGRAM, tmp_path / "cache", when) == (0, "[]\nTrue\n", "")


async def test_leaving_on_another_loop_does_not_close_the_store(open_store: Open) -> None:
    opened = open_store(disk=32)
    store = await opened.__aenter__()
    with pytest.raises(KVStoreError, match="belongs to the loop of thread"):
        await asyncio.to_thread(lambda: asyncio.run(store.close()))
    assert await store.put(KEYS, payloads(KEYS)) == 4
    await opened.__aexit__(None, None, None)


async def test_calls_that_go_on_while_a_store_is_closed_leave_no_task(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job of the control socket, which asks again and again until it is told of the end."""
    monkeypatch.setattr(Core, "needs_steps", True)
    before = asyncio.all_tasks()
    async with open_store(disk=32) as store:

        async def poll() -> None:
            with contextlib.suppress(KVStoreError):
                while True:
                    await store._act(lambda core, now: None)
                    await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        await store.put(KEYS, payloads(KEYS))
    await polling
    assert store._upkeep is None
    assert asyncio.all_tasks() == before


async def test_the_order_of_what_is_on_disk_is_not_put_together_on_the_callers_loop(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    works = LRU.order

    def order(policy: LRU) -> Iterable[bytes]:
        threads.add(threading.current_thread().name)
        return works(policy)

    monkeypatch.setattr(LRU, "order", order)
    keys = keys_of("a", 6)
    await on_disk(open_store, keys, rows=8, disk=64)
    assert threads
    assert threading.current_thread().name not in threads


def cancel_others() -> None:
    """As a server's end does with all tasks of its loop."""
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


async def test_moves_that_are_cancelled_with_their_loop_hold_no_call_up(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = hold(monkeypatch, "write")
    async with open_store(disk=32, holds=KEYS) as store:
        await until_async(lambda: bool(store._core.targets[0].index.writing))
        cancel_others()
        await asyncio.sleep(0)
        gate.set()
        assert not await store.flush(PATIENCE)
        with pytest.raises(KVStoreError, match="cancelled together with other tasks"):
            await store.put(KEYS, payloads(KEYS), durable=True, timeout=PATIENCE)
        with pytest.raises(KVStoreError, match="cancelled together with other tasks"):
            await store.remove(KEYS, timeout=PATIENCE)
        other = await filled(store, "b", 1)
        async with store.get(other) as chunks:
            assert len(chunks) == 1
            # It may wait for the lease alone.
            with pytest.raises(TimeoutError):
                await store.reset(timeout=0.2)
        with pytest.raises(KVStoreError, match="cancelled together with other tasks"):
            await store.reset(timeout=PATIENCE)
    assert "cancelled together with other tasks" in caplog.text


async def test_what_is_put_after_others_were_cancelled_is_kept(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(monkeypatch, "write")
    async with open_store(disk=32, rows=16, holds=KEYS) as store:
        await until_async(lambda: bool(store._core.targets[0].index.writing))
        cancel_others()
        await asyncio.sleep(0)
        later = keys_of("b", 6)
        assert await store.put(later, payloads(later)) == len(later)
        asyncio.get_running_loop().call_later(0.1, gate.set)
    async with open_store(disk=32) as store:
        assert await contents(store, later) == payloads(later)


async def test_a_fault_in_the_core_keeps_no_store_open(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a policy of one's own. Everything is free afterwards, see above."""
    async with open_store(disk=32, holds=KEYS):

        def fails(*args: object) -> None:
            raise KeyError("a fault of one's own")

        monkeypatch.setattr(Core, "save", fails)
    assert "a step of closing failed" in caplog.text
    monkeypatch.undo()


@pytest.mark.parametrize("hurry", [False, True])
async def test_all_of_a_close_together_has_its_time(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, *, hurry: bool
) -> None:
    given: list[float] = []

    async def noted(engine: Any, recency: Any, seconds: float) -> bool:
        given.append(seconds)
        gate.set()
        return await end_engine(engine, recency, PATIENCE)

    monkeypatch.setattr(api_store, "end_engine", noted)
    monkeypatch.setattr(api_store, "END_SECONDS", 0.5)
    gate = hold(monkeypatch, "write")
    shutdown = TOO_LONG if hurry else 1.0
    async with open_store(disk=32, shutdown_timeout_s=shutdown, holds=KEYS) as store:
        if hurry:
            with pytest.raises(TimeoutError):
                await store.close(timeout=0.1)
    # What is left of it, and a little where nothing is.
    assert 0.5 < given[0] <= TOO_LONG if hurry else given == [0.5]
    monkeypatch.undo()
