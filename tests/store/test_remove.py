"""What is removed is gone: at once for lookups, and for good on disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.api.store import Store
from kvstore.errors import KVStoreError
from kvstore.tiers.disk import DiskTier
from tests.patience import PATIENCE, until_async
from tests.store.support import (
    Open,
    answer,
    busy,
    cancel,
    contents,
    filled,
    hold,
    keys_of,
    on_disk,
    payload,
    payloads,
    small,
    waits,
)

A, B = keys_of("a", 6), keys_of("b", 6)


def flowing(tmp_path: Path, flow: str) -> dict[str, Any]:
    (tier,) = small(tmp_path / "cache", disk=64)["tiers"]
    return {"tiers": [{**tier, "flow": flow}]}


async def sound(store: Store) -> None:
    assert await store.flush(PATIENCE)
    assert busy(store) == 0
    assert not store._core.hidden
    assert store.stats().illegal == 0


@pytest.mark.parametrize("flow", ["write-through", "demote", "exclusive"])
async def test_what_is_removed_is_missed_now_and_after_a_restart(
    open_store: Open, flow: str, tmp_path: Path
) -> None:
    async with open_store(rows=8, **flowing(tmp_path, flow)) as store:
        await store.put(A, payloads(A))
        await store.put(B, payloads(B))
        await store.flush(PATIENCE)
        assert await store.remove([A[2], A[2], A[4], b"nobody"]) == 2
        assert store.contains_prefix(A) == 2
        assert await store.resolve(A) == 2
        assert store.contains_prefix(A[3:4]) == 1
        assert await contents(store, B) == payloads(B)
        assert await store.remove([A[2]]) == 0
        await sound(store)
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(A) == 2
        assert await contents(store, A[3:4]) == payloads(A[3:4])
        assert await store.resolve(A[4:]) == 0
        assert await contents(store, B) == payloads(B)


async def test_events_tell_of_it(open_store: Open) -> None:
    async with open_store(rows=8, disk=64, keep_events=True, holds=A[:2]) as store:
        await store.flush(PATIENCE)
        store.take_events()
        await store.remove(A[:1])
        told = [(event.keys, event.medium, event.removed) for event in store.take_events()]
        assert told == [([A[0]], "host", True), ([A[0]], "disk", True)]


@pytest.mark.parametrize("disk", [0, 64])
async def test_other_bytes_can_be_put_afterwards(open_store: Open, disk: int) -> None:
    other = [payload(key + b"other") for key in A]
    async with open_store(rows=8, disk=disk, holds=A) as store:
        assert await store.put(A, other) == 6
        assert await contents(store, A) == payloads(A)
        assert await store.remove(A) == 6
        assert await contents(store, A) == []
        assert await store.put(A, other) == 6
        assert await contents(store, A) == other
        await sound(store)
    if disk:
        async with open_store(rows=8, disk=disk) as store:
            assert await contents(store, A) == other


async def test_a_displaced_copy_does_not_come_back(open_store: Open, tmp_path: Path) -> None:
    """An exclusive tier leaves the record where it was when the chunk goes to host memory."""
    await on_disk(open_store, A, rows=8, disk=64)
    async with open_store(rows=6, **flowing(tmp_path, "exclusive")) as store:
        assert await contents(store, A) == payloads(A)
        assert store.stats().tiers[0].chunks == 0
        assert await store.remove(A) == 6
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(A) == 0


async def test_a_lease_goes_on_and_a_put_waits_for_it(open_store: Open) -> None:
    other = [payload(key + b"other") for key in A]
    async with open_store(rows=8, disk=64, holds=A) as store:
        async with store.get(A) as chunks:
            assert await store.remove(A, timeout=PATIENCE) == 6
            assert store.lookup_prefix(A) == 0
            putting = await waits(store.put(A, other), 0.1)
            assert [bytes(chunk) for chunk in chunks] == payloads(A)
        assert await putting == 6
        assert await contents(store, A) == other
        await store.flush(PATIENCE)
        await sound(store)
    async with open_store(rows=8, disk=64) as store:
        assert await contents(store, A) == other


async def test_what_is_being_read_is_a_miss_and_its_places_come_back(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_disk(open_store, A, rows=8, disk=64)
    async with open_store(rows=8, disk=64) as store:
        gate = hold(monkeypatch, "read")
        getting = asyncio.create_task(contents(store, A))
        await until_async(lambda: store.stats().waiting == 1)
        removing = await waits(store.remove(A[3:]))
        assert store.lookup_prefix(A[3:]) == 0
        gate.set()
        assert await removing == 3
        assert await getting == payloads(A[:3])
        assert store.stats().chunks == 3
        await sound(store)
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(A) == 3


async def test_what_is_being_written_is_erased_when_it_has_been_written(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rows=8, disk=64) as store:
        gate = hold(monkeypatch, "write")
        await store.put(A, payloads(A))
        removing = await waits(store.remove(A[3:]))
        assert store.lookup_prefix(A) == 3
        gate.set()
        assert await removing == 3
        await sound(store)
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(A) == 3
        assert await store.resolve(A[3:]) == 0


@pytest.mark.parametrize("disk", [0, 64])
async def test_a_put_that_waits_for_room_stores_nothing_of_it(open_store: Open, disk: int) -> None:
    """Also where the removal has ended before it is the put's turn."""
    async with open_store(rows=4, disk=disk) as store:
        others = await filled(store, "other", 4)
        async with store.get(others) as chunks:
            assert len(chunks) == 4
            first = asyncio.create_task(store.put(A[:2], payloads(A[:2])))
            second = asyncio.create_task(store.put(A[2:4], payloads(A[2:4])))
            await asyncio.sleep(0.05)
            assert await store.remove([A[0], A[3]]) == 0
            assert not first.done()
        assert (await first, await second) == (0, 1)
        assert store.contains([A[0], A[3]]) == [False, False]
        assert store.contains([A[2]]) == [True]
        assert await store.put([A[0]], payloads([A[0]])) == 1


async def test_a_tier_that_cannot_erase_is_told_of(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rows=8, disk=64, holds=A) as store:
        await store.flush(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "erase", answer("the disk is read-only"))
            with pytest.raises(KVStoreError, match="records of 6 chunks could not be erased"):
                await store.remove(A)
        # Gone for this process, and to be put anew.
        assert store.contains_prefix(A) == 0
        await sound(store)
        # The records are known by their keys, not by what the store remembers.
        assert await store.remove(A) == 0
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(A) == 0


async def test_a_call_that_is_given_up_goes_on(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rows=8, disk=64, holds=A) as store:
        await store.flush(PATIENCE)
        gate = hold(monkeypatch, "erase")
        with pytest.raises(TimeoutError, match="remove took longer"):
            await store.remove(A[:3], timeout=0.05)
        task = asyncio.create_task(store.remove(A[1:4]))
        await asyncio.sleep(0.01)
        await cancel(task)
        assert store.contains_prefix(A) == 0
        gate.set()
        await until_async(lambda: not store._core.hidden)
        await sound(store)
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(A) == 0
        assert await store.resolve(A[4:]) == 2


async def test_a_reset_takes_a_removal_along(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rows=8, disk=64, holds=A) as store:
        await store.flush(PATIENCE)
        gates = [hold(monkeypatch, method) for method in ("erase", "clear")]
        removing = asyncio.create_task(store.remove(A))
        await asyncio.sleep(0.05)
        resetting = asyncio.create_task(store.reset())
        await asyncio.sleep(0.05)
        assert not removing.done(), "the disk has not forgotten"
        for gate in gates:
            gate.set()
        await resetting
        assert await asyncio.wait_for(removing, PATIENCE) == 6
        assert await store.put(A, payloads(A)) == 6
        await store.flush(PATIENCE)
        await sound(store)
    async with open_store(rows=8, disk=64) as store:
        assert await contents(store, A) == payloads(A)


async def test_many_keys_amid_traffic(open_store: Open) -> None:
    async with open_store(rows=16, disk=256) as store:

        async def serve(number: int) -> None:
            keys = keys_of(f"kept {number}", 8)
            for _ in range(10):
                await store.put(keys, payloads(keys))
                found = await contents(store, keys)
                assert found == payloads(keys)[: len(found)]

        async def change(number: int) -> None:
            keys = keys_of(f"changing {number}", 8)
            for turn in range(10):
                bytes_now = [payload(key + b"%d" % turn) for key in keys]
                count = await store.put(keys, bytes_now)
                found = await contents(store, keys)
                assert found == bytes_now[: len(found)]
                assert len(found) <= count
                await store.remove(keys)
                assert store.contains_prefix(keys) == 0

        await asyncio.gather(*map(serve, range(4)), *map(change, range(4)))
        await store.flush(PATIENCE)
        await sound(store)
    async with open_store(rows=16, disk=256) as store:
        for number in range(4):
            assert await store.resolve(keys_of(f"changing {number}", 8)) == 0


# -- amid a reset --------------------------------------------------------------------------------


async def test_a_reset_that_the_disk_cannot_follow_is_told_to_who_resets_and_who_removes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    async def late(*_: Any) -> str:
        while not goes_on.is_set():
            await asyncio.sleep(0.001)
        return "too late"

    keys = keys_of("kept", 4)
    async with open_store(disk=32) as store:
        await store.put(keys, payloads(keys), durable=True)
        with monkeypatch.context() as broken:
            broken.setattr(DiskTier, "clear", answer(None))
            broken.setattr(DiskTier, "erase", late)
            removing = asyncio.create_task(store.remove(keys))
            await asyncio.sleep(0.02)
            asyncio.get_running_loop().call_later(0.05, goes_on.set)
            with pytest.raises(KVStoreError, match="cannot be cleared now"):
                await store.reset()
            with pytest.raises(KVStoreError, match="cannot be cleared now"):
                await removing
        assert store.contains_prefix(keys) == 0


async def test_what_is_removed_during_its_last_lease_leaves_when_that_ends(
    open_store: Open,
) -> None:
    async with open_store(rows=8, holds=A[:1]) as store:
        async with store.get(A[:1]):
            await store.remove(A[:1])
        await until_async(lambda: not store._core.hidden)
        assert store.stats().free_rows == 8


async def test_a_prefetch_goes_on_when_the_last_lease_ends(open_store: Open) -> None:
    async with open_store(rows=4, disk=64) as store:
        for keys in (A[:4], B[:4]):
            await store.put(keys, payloads(keys))
            assert await store.flush(PATIENCE)
        async with store.get(B[:4]):
            assert store.prefetch(A[:2]) == 2
            await asyncio.sleep(0.05)
        await until_async(lambda: A[0] in store._core.chunks)


async def test_a_put_of_chunks_that_leave_when_a_lease_ends_writes_no_other_again_and_again(
    tmp_path: Path, open_store: Open
) -> None:
    async with open_store(rows=6, **flowing(tmp_path, "exclusive")) as store:
        await store.put(A, payloads(A))
        async with store.get(A[:3]):
            await store.remove(A[:3])
            putting = await waits(store.put(A, payloads(A)), 0.3)
            assert store.stats().tiers[0].written <= len(A)
        assert await putting == len(A)
        await sound(store)


async def test_a_put_of_what_is_still_being_erased_writes_no_other_again_and_again(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, goes_on = keys_of("a", 8), hold(monkeypatch, "erase")
    async with open_store(rows=8, **flowing(tmp_path, "exclusive")) as store:
        await store.put(keys, payloads(keys))
        removing = asyncio.create_task(store.remove(keys[:1]))
        await until_async(lambda: keys[0] not in store._core.chunks)
        # What is copied ahead of need is on disk.
        await asyncio.sleep(0.05)
        putting = asyncio.create_task(store.put(keys, payloads(keys)))
        await asyncio.sleep(0.3)
        done, written = putting.done(), store.stats().tiers[0].written
        goes_on.set()
        await removing
        assert not done
        assert written <= len(keys)
        assert await putting == len(keys)
        await sound(store)
