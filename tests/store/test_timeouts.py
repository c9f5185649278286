"""A call whose time is up says so, has ended, and holds nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstore.api.store import Store
from kvstore.errors import KVStoreError
from tests.patience import PATIENCE, TOO_LONG, until_async
from tests.store.support import CHUNK, Open, busy, contents, hold, keys_of, on_disk, payloads

KEYS, ON_DISK = keys_of("a", 4), keys_of("on disk", 4)


async def _get(store: Store, seconds: Any) -> None:
    async with store.get(ON_DISK, timeout=seconds):
        raise AssertionError("it was not there")


CALLS: dict[str, Callable[[Store, Any], Awaitable[object]]] = {
    "get": _get,
    "resolve": lambda store, seconds: store.resolve(ON_DISK, timeout=seconds),
    "put": lambda store, seconds: store.put(KEYS, payloads(KEYS), timeout=seconds),
    "reset": lambda store, seconds: store.reset(seconds),
}


@pytest.mark.parametrize("seconds", [0, 0.05])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_whose_time_is_up_names_itself_and_leaves_nothing_held(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, call: str, seconds: float
) -> None:
    await on_disk(open_store, ON_DISK)
    async with open_store(rows=4, disk=64) as store:
        gates = [hold(monkeypatch, method) for method in ("read", "write", "clear")]
        if call == "put":
            # Host memory is full of what waits for the disk.
            await store.put(keys_of("others", 4), payloads(keys_of("others", 4)))
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=f"^{call} took longer than {seconds:g} s$"):
            await CALLS[call](store, seconds)
        assert time.monotonic() - start < PATIENCE
        assert store.stats().waiting == 0
        for gate in gates:
            gate.set()
        await until_async(lambda: busy(store) == 0)
        assert await store.put(KEYS, payloads(KEYS), timeout=PATIENCE) == 4
        assert await contents(store, KEYS) == payloads(KEYS)
        assert await store.flush(PATIENCE)
        assert busy(store) == 0


async def test_a_put_whose_time_is_up_has_stored_whole_chunks_or_none(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = keys_of("wide", 32)
    async with open_store(rows=8, disk=64) as store:
        gate = hold(monkeypatch, "write")
        with pytest.raises(TimeoutError, match="put took longer"):
            await store.put(wide, payloads(wide), timeout=0.05)
        gate.set()
        assert await store.flush(PATIENCE)
        here = await contents(store, wide)
        assert 0 < len(here) < 32
        assert here == payloads(wide[: len(here)])


async def test_a_lease_whose_time_was_enough_lasts_longer_than_that(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store, store.get(KEYS, timeout=0.02) as chunks:
        await asyncio.sleep(0.05)
        assert [bytes(chunk) for chunk in chunks] == payloads(KEYS)


async def test_a_close_whose_time_is_up_closes_all_the_same(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(disk=64, write_queue_bytes=CHUNK) as store:
        gates = [hold(monkeypatch, method) for method in ("write", "close")]
        await store.put(KEYS, payloads(KEYS))
        for gate in gates:
            asyncio.get_running_loop().call_later(0.3, gate.set)
        with pytest.raises(TimeoutError, match="close took longer"):
            await store.close(0.05)
        with pytest.raises(KVStoreError, match="closed"):
            store.lookup_prefix(KEYS)
        await store.close()


async def test_a_cancellation_is_not_taken_for_a_timeout(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_disk(open_store, ON_DISK)
    async with open_store(disk=64) as store:
        gate = hold(monkeypatch, "read")
        with pytest.raises(TimeoutError) as outer:
            async with asyncio.timeout(0.02):
                await store.resolve(ON_DISK, timeout=TOO_LONG)
        assert str(outer.value) == ""
        gate.set()


@pytest.mark.parametrize(
    "wrong", ["1", b"1", [], float("nan"), True, 10**400], ids=lambda it: f"{it!r:.9}"
)
async def test_what_is_no_timeout_is_refused_and_nothing_is_begun(
    open_store: Open, wrong: Any
) -> None:
    async with open_store(rows=8) as store:
        for call in (*CALLS.values(), Store.flush):
            with pytest.raises(KVStoreError, match="timeout must be"):
                await call(store, wrong)
        assert store.stats().chunks == 0


@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
async def test_a_timeout_may_be_as_long_as_one_likes(open_store: Open, seconds: float) -> None:
    async with open_store() as store:
        assert await store.put(KEYS, payloads(KEYS), timeout=seconds) == 4
        assert await store.resolve(KEYS, timeout=seconds) == 4
        assert await store.flush(seconds)
        await store.reset(seconds)
