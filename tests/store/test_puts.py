"""Puts are served in order, each chunk once; a flush ends with what was stored before it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.api.put import run_copy
from kvstore.api.store import COPY_INLINE_BYTES, Store
from kvstore.errors import KVStoreError
from kvstore.policies import AdmissionFilter, policy_names
from kvstore.tiers import Transfer
from kvstore.tiers.disk import DiskTier
from tests.patience import PATIENCE, TOO_LONG, until_async
from tests.store.support import (
    CHUNK,
    Open,
    busy,
    cancel,
    contents,
    filled,
    hold,
    keys_of,
    on_disk,
    payloads,
    slow,
    small,
    waits,
)

# -- buffers ---------------------------------------------------------------------------------


async def test_an_iterable_that_fills_one_buffer_again_and_again_is_refused(
    open_store: Open,
) -> None:
    keys, stage = keys_of("a", 3), bytearray(CHUNK)

    class Reader:
        def __init__(self, view: Callable[[], object]) -> None:
            self.view = view

        def __iter__(self) -> Iterator[object]:
            for data in payloads(keys):
                stage[:] = data
                yield self.view()

    readers = Reader(lambda: stage), Reader(lambda: memoryview(stage).toreadonly())
    async with open_store(rows=16) as store:
        for stages in (iter(readers[0]), *readers):
            with pytest.raises(KVStoreError, match="the same memory"):
                await store.put(keys, stages)
            assert store.contains_prefix(keys) == 0
        assert await store.put(keys, (bytearray(data) for data in payloads(keys))) == 3
        ring = bytearray(CHUNK + 8)
        with pytest.raises(KVStoreError, match="the same memory"):
            await store.put(keys[:2], (memoryview(ring)[at : at + CHUNK] for at in (0, 8)))
        for same in (itertools.repeat(stage, 3), (bytes(CHUNK) for _ in keys), [stage] * 3):
            assert await store.put(keys, same) == 3
        zeros = keys_of("fixed", 3)
        for fixed in (bytes(CHUNK), memoryview(bytes(CHUNK)), np.frombuffer(bytes(CHUNK), "u1")):
            assert await store.put(zeros, (fixed for _ in zeros)) == 3
        assert await store.put(zeros, dict.fromkeys(zeros, bytearray(CHUNK)).values()) == 3
        assert await store.put(keys_of("zeros", 3), [bytes(CHUNK)] * 3) == 3
        assert await contents(store, keys) == payloads(keys)


async def test_no_more_buffers_are_taken_than_there_are_keys(open_store: Open) -> None:
    asked = itertools.count()
    async with open_store(rows=8) as store:
        with pytest.raises(KVStoreError, match="2 keys but more buffers"):
            await store.put(keys_of("a", 2), (bytearray(CHUNK) for _ in asked))
    assert next(asked) == 3


@pytest.mark.parametrize("times", [2, 12])
async def test_of_a_key_that_stands_twice_the_first_buffer_counts(
    open_store: Open, times: int
) -> None:
    keys = keys_of("a", 2) * times
    given = [bytes([n]) * CHUNK for n in range(len(keys))]
    async with open_store(rows=4) as store:
        await store.put(keys, given)
        assert await contents(store, keys[:2]) == given[:2]


# -- flushing --------------------------------------------------------------------------------


async def test_a_flush_ends_while_others_go_on_putting(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, "write", 0.002)
    async with open_store(rows=64, disk=1024) as store:
        before = keys_of("before", 8)
        numbers = itertools.count()

        async def write() -> None:
            while True:
                await filled(store, f"later {next(numbers)}", 4)

        writers = [asyncio.create_task(write()) for _ in range(8)]
        try:
            await asyncio.sleep(0.02)
            for _ in range(3):
                await store.put(before, payloads(before))
                assert await store.flush(PATIENCE)
                assert all(key in store._core.tiers[0].entries for key in before)
                before = keys_of(f"before {next(numbers)}", 8)
        finally:
            for writer in writers:
                await cancel(writer)


async def test_a_flush_waits_for_each_chunk_that_was_stored_before(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = keys_of("early", 2), keys_of("late", 20)
    gate = hold(monkeypatch, "write", early)
    async with open_store(rows=64, disk=64, holds=early) as store:
        flushing = asyncio.create_task(store.flush())
        await store.put(late, payloads(late))
        await until_async(lambda: store.stats().tiers[0].written == 20)
        # As many have come since as were waited for.
        await asyncio.sleep(0.05)
        assert not flushing.done()
        gate.set()
        assert await asyncio.wait_for(flushing, PATIENCE)
        assert store.stats().tiers[0].written == 22


async def test_a_flush_does_not_wait_for_what_is_put_meanwhile(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = keys_of("early", 2), keys_of("late", 2)
    slow(monkeypatch, "write", 0.01)
    gate = hold(monkeypatch, "write", late)
    async with open_store(rows=64, disk=64, holds=early) as store:
        flushing = asyncio.create_task(store.flush())
        await asyncio.sleep(0)
        await store.put(late, payloads(late))
        assert await asyncio.wait_for(flushing, PATIENCE)
        assert store.stats().tiers[0].written == 2
        gate.set()


async def test_a_flush_saves_also_what_would_be_copied_only_when_given_up(
    open_store: Open, tmp_path: Path
) -> None:
    disk = {"type": "disk", "path": tmp_path, "capacity_bytes": 2**21, "segment_bytes": 2**20}
    async with open_store(rows=16, tiers=[{**disk, "flow": "demote"}]) as store:
        await filled(store, "a", 4)
        assert store.stats().tiers[0].chunks == 0
        assert await store.flush(PATIENCE)
        assert store.stats().tiers[0].chunks == 4


async def test_a_reset_ends_a_flush(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold(monkeypatch, "write")
    async with open_store(rows=16, disk=64) as store:
        await filled(store, "a", 4)
        flushing = asyncio.create_task(store.flush())
        await asyncio.sleep(0.01)
        resetting = asyncio.create_task(store.reset())
        gate.set()
        await asyncio.wait_for(resetting, PATIENCE)
        assert await asyncio.wait_for(flushing, PATIENCE)


# -- putting ---------------------------------------------------------------------------------


async def test_puts_that_wait_for_room_are_served_in_order(open_store: Open) -> None:
    async with open_store(rows=8) as store:
        leased = await filled(store, "leased", 8)
        served: list[str] = []

        async def put(name: str, count: int) -> int:
            keys = keys_of(name, count)
            stored = await store.put(keys, payloads(keys))
            served.append(name)
            return stored

        async with store.get(leased):
            puts = [
                asyncio.create_task(put(f"put {number}", 6 if number == 0 else 1))
                for number in range(6)
            ]
            await asyncio.sleep(0.05)
            assert not served
        assert await asyncio.wait_for(asyncio.gather(*puts), PATIENCE) == [6, 1, 1, 1, 1, 1]
        assert served == [f"put {number}" for number in range(6)]


async def test_a_put_that_does_not_wait_takes_the_room_that_there_is(open_store: Open) -> None:
    a, b, c = (keys_of(name, 6) for name in "abc")
    async with open_store(rows=8, eviction_policy="lru", holds=a) as store:
        async with store.get(a):
            stored = await asyncio.wait_for(store.put(b, payloads(b), wait=False), PATIENCE)
            assert stored == 2
            assert await contents(store, b) == payloads(b[:2])
            waiting = await waits(store.put(c, payloads(c)))
            fresh = keys_of("fresh", 1)
            stored = await asyncio.wait_for(store.put(fresh, payloads(fresh), wait=False), PATIENCE)
            assert stored == 0, "another put is first"
        assert await asyncio.wait_for(waiting, PATIENCE) == 6
        assert await store.put(a, payloads(a), wait=False) == 6
        assert busy(store) == 0


async def test_no_put_starves_while_others_go_on(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, "write", 0.001)
    async with open_store(rows=8, disk=4096, write_queue_bytes=2 * CHUNK) as store:
        turns = [0] * 12

        async def user(number: int) -> None:
            for turn in range(12):
                await filled(store, f"{number}/{turn}", 4)
                turns[number] += 1
                assert max(turns) - min(turns) <= 6, "some wait while others are served"

        await asyncio.gather(*(user(number) for number in range(12)))
        assert turns == [12] * 12


async def test_nothing_is_stored_twice_under_load(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, "write", 0.001)
    async with open_store(rows=8, disk=1024, write_queue_bytes=2 * CHUNK) as store:
        prompts = [keys_of(str(number), 20) for number in range(16)]
        found = await asyncio.gather(*(store.put(keys, payloads(keys)) for keys in prompts))
        assert found == [20] * 16
        assert store.stats().stored == 320
        assert await store.flush(PATIENCE)
        for keys in prompts:
            assert await contents(store, keys[:8]) == payloads(keys[:8])


async def test_wide_puts_without_a_disk_store_each_chunk_once(open_store: Open) -> None:
    size = COPY_INLINE_BYTES
    async with open_store(rows=8, chunk_bytes=size, deadline_s=0.5) as store:
        prompts = [keys_of(str(number), 6) for number in range(8)]
        await asyncio.gather(*(store.put(keys, payloads(keys, size)) for keys in prompts))
        assert store.stats().stored <= 48
        assert busy(store) == 0


async def test_what_found_no_room_is_counted_once_and_nothing_else(open_store: Open) -> None:
    async with open_store(rows=8, disk=64) as store:
        wide = await filled(store, "wide", 40)
        assert store.stats().chunks_refused == 0
    for wait in (True, False):
        async with open_store(rows=8, deadline_s=0.1) as store:
            assert await store.put(wide[:12], payloads(wide[:12]), wait=wait) == 8
            assert store.stats().chunks_refused == 4
            async with store.get(wide[:8]):
                others = keys_of("others", 3)
                assert await store.put(others, payloads(others), wait=wait) == 0
            assert store.stats().chunks_refused == 7


class EveryOther(AdmissionFilter):
    """Admits every other key, in the order in which it is asked about them."""

    name = "every other"

    def asked(self, keys: Sequence[bytes]) -> None:
        self.numbers = {key: number for number, key in enumerate(keys)}

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [self.numbers[key] % 2 == 0 for key in keys]

    def clear(self) -> None:
        self.numbers.clear()


async def test_what_was_not_wanted_is_not_counted_as_refused(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rows=8, deadline_s=0.1) as store:
        leased, keys = await filled(store, "leased", 6), keys_of("p", 8)
        every_other = EveryOther(8, CHUNK)
        every_other.asked(keys)
        monkeypatch.setattr(store._core._pool, "admission", every_other)
        async with store.get(leased):
            assert await store.put(keys, payloads(keys)) == 1
        stats = store.stats()
        assert (stats.stored - 6, stats.declined, stats.chunks_refused) == (2, 4, 2)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_put_of_what_another_is_copying_fills_all_rows_too(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    go_on = asyncio.Event()

    async def held(copy: Callable[[], None], size: int, threads: Executor) -> None:
        await go_on.wait()
        await run_copy(copy, size, threads)

    monkeypatch.setattr("kvstore.api.put.run_copy", held)
    async with open_store(rows=8) as store:
        keys = keys_of("p", 8)
        one = asyncio.create_task(store.put(keys, payloads(keys)))
        await until_async(lambda: len(store._core.chunks) == 8)
        other = asyncio.create_task(store.put(keys, payloads(keys)))
        for _ in range(5):
            await asyncio.sleep(0)
        if cancelled:
            await cancel(one)
        go_on.set()
        if not cancelled:
            assert await one == 8
        assert await asyncio.wait_for(other, PATIENCE) == 8
        assert store.stats().chunks_refused == 0


async def test_wide_puts_let_others_in_between(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, "write", 0.002)
    async with open_store(rows=8, disk=4096, write_queue_bytes=4 * CHUNK) as store:
        wide = keys_of("wide", 400)
        putting = asyncio.create_task(store.put(wide, payloads(wide)))
        await until_async(lambda: store.stats().stored >= 8)
        for number in range(4):
            await filled(store, f"small {number}", 2)
        assert store.stats().stored < 300, "the wide one is not done"
        assert await putting == 400


async def test_the_end_of_a_prompt_waits_for_rows_that_others_use(open_store: Open) -> None:
    async with open_store(rows=9) as store:
        leased, keys = await filled(store, "leased", 5), keys_of("wide", 7)
        async with store.get(leased):
            # Beside them only its own head may leave.
            putting = asyncio.create_task(store.put(keys, payloads(keys)))
            await until_async(lambda: store.contains_prefix(keys) == 4)
            await asyncio.sleep(0.02)
            assert not putting.done()
        assert await asyncio.wait_for(putting, PATIENCE) == 7


@pytest.mark.parametrize(("here", "viewed", "stored"), [(slice(4), 5, 4), (slice(2, 7), 4, 5)])
async def test_what_is_looked_at_for_an_unknown_time_is_not_waited_for(
    open_store: Open, here: slice, viewed: int, stored: int
) -> None:
    async with open_store(rows=9) as store:
        others, keys = keys_of("others", viewed), keys_of("p", 7)
        await store.put(others, payloads(others))
        await store.put(keys[here], payloads(keys[here]))
        async with store.get(others) as chunks:
            views = [chunks.array(number, "u1") for number in range(viewed)]
        for wait in (True, False):
            assert await store.put(keys, payloads(keys), wait=wait, timeout=PATIENCE) == stored
        del views


async def test_those_who_wait_in_vain_wait_at_the_same_time(open_store: Open) -> None:
    # One after the other they would wait for TOO_LONG.
    count = round(TOO_LONG / 0.5)
    async with open_store(rows=4, deadline_s=0.5) as store:
        leased = await filled(store, "leased", 4)
        async with store.get(leased):
            puts = [store.put(keys_of(str(n), 1), [bytes(CHUNK)]) for n in range(count)]
            waiting = asyncio.gather(*puts)
            assert await asyncio.wait_for(waiting, PATIENCE) == [0] * count


async def test_who_is_cancelled_while_it_waits_holds_nobody_up(open_store: Open) -> None:
    async with open_store(rows=4) as store:
        leased = await filled(store, "leased", 4)
        async with store.get(leased):
            puts = [
                asyncio.create_task(store.put(keys_of(str(n), 1), [bytes(CHUNK)])) for n in range(6)
            ]
            await asyncio.sleep(0.03)
            for doomed in (puts[0], puts[2], puts[5]):
                await cancel(doomed)
        left = [puts[1], puts[3], puts[4]]
        rest = await asyncio.wait_for(asyncio.gather(*left), PATIENCE)
        assert rest == [1, 1, 1]
        assert not store._puts.waiting
        assert busy(store) == 0
        assert not store._core._requests


async def on_disk_that_is_held(
    open_store: Open, keys: Sequence[bytes], monkeypatch: pytest.MonkeyPatch
) -> threading.Event:
    """Store chunks durably; from then on reads wait for the event that is returned."""
    await on_disk(open_store, keys, rows=8, disk=64)
    return hold(monkeypatch, "read")


async def being_read(store: Store, keys: Sequence[bytes]) -> None:
    """Begin to fetch chunks; return when some are on their way."""
    assert store.prefetch(keys) == len(keys)
    await until_async(lambda: any(key in store._core.chunks for key in keys))


@pytest.mark.parametrize("durable", [False, True])
async def test_a_put_amid_a_read_that_fails_stores_its_own_bytes(
    open_store: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a chunk is read, nobody knows whether its tier still has it whole."""
    keys = keys_of("a", 2)
    gate = await on_disk_that_is_held(open_store, keys, monkeypatch)
    held = DiskTier.read

    async def in_vain(self: DiskTier, keys: list[bytes], *rest: Any) -> Transfer:
        await held(self, keys, *rest)
        return Transfer([False] * len(keys), error=None)

    monkeypatch.setattr(DiskTier, "read", in_vain)
    async with open_store(rows=8, disk=64) as store:
        await being_read(store, keys)
        put = await waits(store.put(keys, payloads(keys), durable=durable), 0.02)
        gate.set()
        assert await asyncio.wait_for(put, PATIENCE) == 2
        assert await contents(store, keys) == payloads(keys)
    monkeypatch.undo()
    if durable:
        async with open_store(rows=8, disk=64) as store:
            assert await contents(store, keys) == payloads(keys)


@pytest.mark.parametrize("fails", ["while it waits for room", "while it copies"])
async def test_a_read_that_fails_before_a_put_has_ended_loses_nothing(
    open_store: Open, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, size = keys_of("a", 6), 2 * COPY_INLINE_BYTES
    async with open_store(rows=8, disk=64, chunk_bytes=size) as store:
        assert await store.put(keys[:2], payloads(keys[:2], size), durable=True) == 2
    gate = asyncio.Event()

    async def in_vain(self: DiskTier, keys: list[bytes], *rest: Any) -> Transfer:
        await gate.wait()
        return Transfer([False] * len(keys), error=None)

    monkeypatch.setattr(DiskTier, "read", in_vain)
    copyto = np.copyto

    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        copyto(*args)

    async with open_store(rows=8, disk=64, chunk_bytes=size) as store:
        others = keys_of("b", 6)
        assert await store.put(others, payloads(others, size)) == 6
        await being_read(store, keys[:2])
        monkeypatch.setattr(np, "copyto", slowly)
        async with contextlib.AsyncExitStack() as leased:
            if fails == "while it waits for room":
                await leased.enter_async_context(store.get(others))
            put = await waits(store.put(keys, payloads(keys, size)), 0.03)
            gate.set()
            await until_async(lambda: not all(store.contains(keys[:2])) or put.done())
        assert await asyncio.wait_for(put, PATIENCE) == 6
        async with store.get(keys) as chunks:
            assert [bytes(chunk) for chunk in chunks] == payloads(keys, size)


async def test_a_put_that_waits_for_a_read_holds_up_no_other_and_stores_the_rest(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("a", 12)
    gate = await on_disk_that_is_held(open_store, keys[:2], monkeypatch)
    async with open_store(rows=8, disk=64) as store:
        await being_read(store, keys[:2])
        put = asyncio.create_task(store.put(keys, payloads(keys)))
        await until_async(lambda: all(store.contains(keys)))
        assert not put.done()
        other = keys_of("b", 2)
        assert await asyncio.wait_for(store.put(other, payloads(other)), PATIENCE) == 2
        assert await store.put(keys, payloads(keys), wait=False) == 12
        gate.set()
        assert await asyncio.wait_for(put, PATIENCE) == 12
        assert await contents(store, keys[:4]) == payloads(keys[:4])


async def test_a_put_does_not_wait_for_ever_for_a_read(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("a", 4)
    gate = await on_disk_that_is_held(open_store, keys[:2], monkeypatch)
    async with open_store(rows=8, disk=64, deadline_s=0.2) as store:
        await being_read(store, keys[:2])
        # The tier is believed.
        assert await asyncio.wait_for(store.put(keys, payloads(keys)), PATIENCE) == 4
        gate.set()


async def test_two_puts_of_the_same_chunks_both_wait_for_them(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * COPY_INLINE_BYTES
    gate = threading.Event()
    copyto = np.copyto

    def held(*args: Any) -> None:
        gate.wait(PATIENCE)
        copyto(*args)

    monkeypatch.setattr(np, "copyto", held)
    async with open_store(rows=8, chunk_bytes=size) as store:
        keys = keys_of("a", 4)
        first = asyncio.create_task(store.put(keys, payloads(keys, size)))
        await until_async(lambda: busy(store) == 4)
        second = await waits(store.put(keys, payloads(keys, size)))
        gate.set()
        assert await asyncio.gather(*[first, second]) == [4, 4]
        assert store.stats().stored == 4


async def test_who_waits_for_room_when_the_store_closes_is_told(open_store: Open) -> None:
    async with open_store(rows=2) as store:
        leased = await filled(store, "leased", 2)
        lease = store.get(leased)
        await lease.__aenter__()
        puts = [
            asyncio.create_task(store.put(keys_of(str(n), 1), [bytes(CHUNK)])) for n in range(3)
        ]
        await asyncio.sleep(0.02)
    for putting in puts:
        with pytest.raises(KVStoreError, match="closed"):
            await asyncio.wait_for(putting, PATIENCE)
    await lease.__aexit__(None, None, None)


# -- prompts larger than the disk --------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "flow"),
    [("lru", "write-through"), ("lru", "demote")]
    + [(name, "exclusive") for name in policy_names()],
)
async def test_a_prompt_larger_than_the_disk_keeps_its_head_there(
    tmp_path: Path, policy: str, flow: str
) -> None:
    rows = 16
    config = small(tmp_path / "cache", rows, disk=64)
    (disk,) = config["tiers"]
    disk |= {"capacity_bytes": 4 * disk["segment_bytes"], "eviction_policy": policy, "flow": flow}
    keys = keys_of("long", 100)
    async with kvstore.open(config) as store:
        await store.put(keys, payloads(keys))
        await store.flush(PATIENCE)
        tier = store._core.tiers[0].stats()
        slots = tier.free + len(store._core.tiers[0].entries)
        assert tier.segments == tier.max_segments
    async with kvstore.open(config) as store:
        assert await store.resolve(keys) == rows
        found = 0
        async for chunks in store.windows(keys, rows // 2):
            assert list(map(bytes, chunks)) == payloads(keys[found:][: len(chunks)])
            found += len(chunks)
        assert rows < slots < len(keys)
        assert found >= slots - (0 if flow == "write-through" else rows)


@pytest.mark.parametrize("change", ["insert", "append", "clear"])
async def test_a_list_of_keys_that_changes_meanwhile_changes_nothing(
    open_store: Open, change: str
) -> None:
    whole = keys_of("prompt", 40)
    buffers = [bytearray(CHUNK) for _ in whole]
    async with open_store(disk=64) as store:
        calls: list[Callable[[list[bytes]], Coroutine[Any, Any, int]]] = [
            lambda keys: store.put(keys, payloads(whole), durable=True),
            lambda keys: store.get_into(keys, buffers),
        ]
        for begin in calls:
            given = list(whole)
            task = asyncio.ensure_future(begin(given))
            await asyncio.sleep(0)
            if change == "insert":
                given.insert(0, b"another")
            elif change == "append":
                given.append(b"another")
            else:
                given.clear()
            assert await task == 40
    assert [bytes(buffer) for buffer in buffers] == payloads(whole)
