"""A store belongs to one running loop; everybody else is refused, and harms nothing."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.api.store import Store
from kvstore.errors import KVStoreError
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, Open, busy, contents, keys_of, payloads
from tests.store.test_sync import CALLS as SYNC_CALLS

KEYS = keys_of("a", 4)


async def _lease(store: Store) -> None:
    async with store.get(KEYS):
        pass


CALLS: dict[str, Callable[[Store], Any]] = {
    # Those of the other face: nothing is awaited until `do` does it.
    **{name: call for name, call in SYNC_CALLS.items() if name != "enter"},  # type: ignore[misc]
    "lookup_prefix of nothing": lambda store: store.lookup_prefix([]),
    "a lease": lambda store: store.get(KEYS),
    "a lease of nothing": lambda store: store.get([]),
    "get": _lease,
    "close": lambda store: store.close(),
}


def in_thread(call: Callable[[], Any]) -> BaseException | None:
    """Make the call in another thread; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return raised[0] if raised else None


async def still_works(store: Store) -> None:
    assert await contents(store, KEYS) == payloads(KEYS)
    assert await store.flush(PATIENCE)
    assert busy(store) == 0


def do(store: Store, method: str) -> None:
    """Make a call; one that has to be awaited on a loop of its own."""
    answer = CALLS[method](store)
    if inspect.isawaitable(answer):

        async def wait() -> None:
            await answer

        asyncio.run(wait())


async def test_calls_from_another_thread_are_refused(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        for method in CALLS:
            error = in_thread(partial(do, store, method))
            assert isinstance(error, KVStoreError), method
            assert "belongs to the loop of thread 'MainThread'" in str(error), method
            assert "'another'" in str(error), method
            await still_works(store)


def test_calls_while_their_loop_does_not_run_are_refused(open_store: Open) -> None:
    """Also on another loop of the same thread."""
    loop = asyncio.new_event_loop()
    opened = open_store()
    store = loop.run_until_complete(opened.__aenter__())
    loop.run_until_complete(store.put(KEYS, payloads(KEYS)))
    try:
        for method in CALLS:
            with pytest.raises(KVStoreError, match="does not run here"):
                do(store, method)
            loop.run_until_complete(still_works(store))
    finally:
        loop.run_until_complete(opened.__aexit__(None, None, None))
        loop.close()


async def not_refused(store: Store, told: str) -> list[str]:
    """The calls that are not refused in these words."""
    left = []
    for method, call in CALLS.items():
        try:
            answer = call(store)
            if inspect.isawaitable(answer):
                await answer
            left.append(method)
        except KVStoreError as error:
            left += [method] * (told not in str(error))
    return left


async def test_calls_after_a_fork_are_refused(open_store: Open) -> None:
    async with open_store(disk=16, holds=KEYS) as store:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writer, repr(await not_refused(store, "belongs to process")).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            assert pipe.read() == "[]"
        assert os.waitpid(child, 0)[1] == 0
        await still_works(store)


async def test_calls_after_the_end_are_refused(open_store: Open) -> None:
    async with open_store() as store:
        await store.put(KEYS, payloads(KEYS))
    # Who asks what was, or lets go, is told.
    told = {"close", "stats", "release", "take_events", "drain_events"}
    assert set(await not_refused(store, "closed")) == told
    assert "host" in store.description


async def test_a_lease_that_is_left_on_another_loop_ends_at_home(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        lease = store.get(KEYS)
        chunks = await lease.__aenter__()
        assert busy(store) == 4
        error = in_thread(lambda: asyncio.run(lease.__aexit__(None, None, None)))
        assert isinstance(error, KVStoreError)
        await until_async(lambda: busy(store) == 0)
        with pytest.raises(KVStoreError, match="lease has ended"):
            chunks[0]
        await still_works(store)


async def test_a_lease_that_nobody_ends_ends_when_it_is_forgotten(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        lease = store.get(KEYS)
        await lease.__aenter__()
        assert busy(store) == 4
        del lease
        gc.collect()
        await until_async(lambda: busy(store) == 0)


async def test_a_lease_is_begun_once(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        lease = store.get(KEYS)
        async with lease:
            with pytest.raises(KVStoreError, match="begun once"):
                await lease.__aenter__()
        await still_works(store)


async def test_chunks_may_be_read_in_any_thread(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        async with store.get(KEYS) as chunks:
            read = await asyncio.to_thread(lambda: [bytes(chunk) for chunk in chunks])
            total = await asyncio.to_thread(
                lambda: sum(int(np.frombuffer(chunk, np.uint8).sum()) for chunk in chunks)
            )
        assert read == payloads(KEYS)
        assert total == sum(map(sum, read))


async def test_what_never_changes_can_be_read_anywhere(open_store: Open) -> None:
    async with open_store() as store:
        assert await asyncio.to_thread(lambda: store.chunk_bytes) == CHUNK
        assert "host" in await asyncio.to_thread(lambda: store.description)
