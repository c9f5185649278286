"""The asyncio face: what goes in comes out, leases end, and nothing is left pinned."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.api.store import COPY_INLINE_BYTES, Store
from kvstore.core import Core, Pace
from kvstore.engine.engine import Engine
from kvstore.engine.loop_steps import RECHECK_SECONDS, Driver
from kvstore.errors import ConfigError, KVStoreError
from kvstore.policies import registry
from kvstore.policies.lru import LRU
from kvstore.policies.table import COMPILED
from kvstore.tiers import PinnedRegion, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.types import Completion, Move, Op
from tests.patience import PATIENCE, answered_async, until_async
from tests.store.support import (
    CHUNK,
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
    slow,
    waits,
)

# -- bytes ---------------------------------------------------------------------------------


BUFFERS: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "memoryview of floats": lambda raw: memoryview(raw).cast("f"),
    "uint8": lambda raw: np.frombuffer(raw, np.uint8),
    "float16": lambda raw: np.frombuffer(raw, np.float16),
    "int64": lambda raw: np.frombuffer(raw, np.int64),
    "matrix": lambda raw: np.frombuffer(raw, np.float32).reshape(32, 32),
    "bool": lambda raw: np.frombuffer(raw, np.bool_),
    "structured": lambda raw: np.frombuffer(raw, np.dtype([("k", "<f4"), ("v", "<f4")])),
    "every other row": lambda raw: np.repeat(
        np.frombuffer(raw, np.uint8).reshape(64, 64), 2, axis=0
    )[::2],
}


@pytest.mark.parametrize("kind", BUFFERS)
async def test_any_buffer_of_the_right_size_is_a_chunk(open_store: Open, kind: str) -> None:
    async with open_store() as store:
        (key,) = keys_of("a", 1)
        assert await store.put([key], [BUFFERS[kind](payload(key))]) == 1
        assert await contents(store, [key]) == [payload(key)]


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "uint8", "transposed", "with gradient"])
async def test_a_tensor_is_a_chunk(open_store: Open, kind: str) -> None:
    torch = pytest.importorskip("torch")
    (key,) = keys_of("a", 1)
    raw = torch.frombuffer(bytearray(payload(key)), dtype=torch.uint8)
    tensor: Any = {
        "bfloat16": lambda: raw.view(torch.bfloat16).reshape(4, -1),
        "float32": lambda: raw.view(torch.float32),
        "uint8": lambda: raw,
        "transposed": lambda: raw.reshape(64, 64).T.contiguous().T,
        "with gradient": lambda: torch.nn.Parameter(raw.view(torch.float32).nan_to_num(0.0)),
    }[kind]()
    expected = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    async with open_store() as store:
        assert await store.put([key], [tensor]) == 1
        assert await contents(store, [key]) == [expected]


async def test_a_chunk_that_is_no_multiple_of_a_page(open_store: Open) -> None:
    async with open_store(chunk_bytes=5000, rows=20, disk=16) as store:
        keys = keys_of("a", 3)
        assert await store.put(keys, payloads(keys, 5000)) == 3
        assert await contents(store, keys) == payloads(keys, 5000)


@pytest.mark.parametrize(
    "wrong",
    [
        b"too short",
        payload(b"k", CHUNK + 1),
        np.zeros(CHUNK, np.float32),
        np.array([object()] * 512),
        "text",
        None,
        7,
        memoryview(bytes(2 * CHUNK))[::2],
        type("Odd", (), {"detach": None, "untyped_storage": None})(),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
async def test_a_wrong_buffer_is_refused_and_nothing_is_stored(
    open_store: Open, wrong: object
) -> None:
    async with open_store() as store:
        keys = keys_of("a", 2)
        with pytest.raises(KVStoreError, match="a chunk must"):
            await store.put(keys, [payload(keys[0]), wrong])
        assert store.stats().chunks == 0
        assert await store.resolve(keys) == 0


async def test_a_tensor_without_bytes_is_refused(open_store: Open) -> None:
    torch = pytest.importorskip("torch")
    async with open_store() as store:
        with pytest.raises(KVStoreError, match="a chunk must"):
            await store.put(keys_of("a", 1), [torch.empty(CHUNK, device="meta")])


@pytest.mark.parametrize("count", [1, 3])
async def test_as_many_buffers_as_keys_are_needed(open_store: Open, count: int) -> None:
    async with open_store() as store:
        with pytest.raises(KVStoreError, match=f"2 keys but {count} buffers"):
            await store.put(keys_of("a", 2), [bytes(CHUNK)] * count)
        assert store.stats().chunks == 0


# -- prefixes ------------------------------------------------------------------------------


async def test_a_prefix_ends_where_it_is_not_known(open_store: Open) -> None:
    async with open_store() as store:
        keys = keys_of("a", 5)
        await store.put([keys[0], keys[1], keys[3]], payloads([keys[0], keys[1], keys[3]]))
        assert await store.resolve(keys) == 2
        async with store.get(keys) as chunks:
            assert list(chunks.keys) == keys[:2]
            assert len(chunks) == 2


async def test_nothing_can_be_put_and_got(open_store: Open) -> None:
    async with open_store() as store:
        assert await store.put([], []) == 0
        assert store.lookup_prefix([]) == 0
        async with store.get([]) as chunks:
            assert list(chunks) == []
        async with store.get(keys_of("unknown", 2)) as chunks:
            assert list(chunks) == []


# -- tiers ---------------------------------------------------------------------------------


async def test_what_is_read_once_for_many_is_counted_once_as_read(open_store: Open) -> None:
    keys = keys_of("a", 6)
    await on_disk(open_store, keys, disk=32)
    async with open_store(disk=32) as store, AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(store.get(keys))
        assert store.stats().loaded_from == {"disk": 6, "host": 24}
        await stack.aclose()
        await contents(store, keys)
        assert store.stats().loaded_from == {"disk": 6, "host": 30}


async def test_a_put_beside_leased_chunks_keeps_what_fits(open_store: Open) -> None:
    async with open_store(rows=6, deadline_s=0.05) as store:
        leased, keys = await filled(store, "leased", 5), keys_of("a", 3)
        async with store.get(leased):
            assert await store.put(keys, payloads(keys)) == 1
            assert store.lookup_prefix(keys) == 1
        assert await store.put(keys, payloads(keys)) == 3


async def test_prompts_with_room_for_one_all_get_everything(open_store: Open) -> None:
    prompts = [keys_of(f"prompt {number}", 6) for number in range(8)]
    await on_disk(open_store, *prompts)
    async with open_store(rows=6, disk=128) as store:

        async def use(keys: list[bytes]) -> list[bytes]:
            async with store.get(keys) as chunks:
                await asyncio.sleep(0.005)
                return [bytes(chunk) for chunk in chunks]

        got = await asyncio.gather(*(use(keys) for keys in prompts))
        assert got == [payloads(keys) for keys in prompts]
        assert busy(store) == 0


async def test_after_a_reset_nothing_is_there_nor_after_a_restart(open_store: Open) -> None:
    keys = keys_of("a", 6)
    async with open_store(disk=32, holds=keys) as store:
        await store.flush()
        await store.reset()
        assert await store.resolve(keys) == 0
        assert store.stats().chunks == 0
        assert await store.put(keys[:2], payloads(keys[:2])) == 2
    async with open_store(disk=32) as store:
        assert await contents(store, keys) == payloads(keys[:2])


async def test_what_is_leased_keeps_its_bytes_while_a_reset_and_new_stores_go_on(
    open_store: Open,
) -> None:
    async with open_store(rows=4) as store:
        old, new = await filled(store, "a", 2), keys_of("b", 4)
        async with store.get(old, "r") as chunks:
            resetting = asyncio.create_task(store.reset())
            await asyncio.sleep(0)
            assert store.lookup_prefix(old) == 0
            assert await store.put(new[:2], payloads(new[:2])) == 2
            # The same keys and the same name, while the old lease lasts.
            assert await store.put(new[:1], payloads(new[:1])) == 1
            async with store.get(new[:2], "r") as again:
                assert [bytes(chunk) for chunk in again] == payloads(new[:2])
            await filled(store, "c", 2)
            assert store.stats().free_rows == 0, "two rows are still leased"
            assert [bytes(chunk) for chunk in chunks] == payloads(old)
            assert not resetting.done()
        await asyncio.wait_for(resetting, PATIENCE)
        assert await store.put(new, payloads(new)) == 4


async def test_a_reset_does_not_wait_for_what_began_after_it(open_store: Open) -> None:
    async with open_store(rows=8) as store:
        keys = keys_of("a", 2)
        async with contextlib.AsyncExitStack() as leases:
            await store.put(keys, payloads(keys))
            async with store.get(keys):
                resetting = asyncio.create_task(store.reset())
                await asyncio.sleep(0)
                await store.put(keys, payloads(keys))
                await leases.enter_async_context(store.get(keys))
            await asyncio.wait_for(resetting, PATIENCE)


async def test_a_put_that_a_reset_overtakes_stores_no_more(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.api.put.COPY_INLINE_BYTES", 0)
    copying, go_on = threading.Event(), threading.Event()
    copyto = np.copyto

    def slow(target: Any, source: Any) -> None:
        copying.set()
        go_on.wait(PATIENCE)
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", slow)
    async with open_store(rows=4, disk=32) as store:
        keys = keys_of("a", 12)
        putting = asyncio.create_task(store.put(keys, payloads(keys)))
        assert await asyncio.to_thread(copying.wait, PATIENCE)
        resetting = await waits(store.reset())
        go_on.set()
        assert await putting == 0
        await asyncio.wait_for(resetting, PATIENCE)
        assert (store.stats().chunks, store.stats().free_rows) == (0, 4)


CLEARED_AGAIN = "kvstore.core.residency.base.RETRY_PAUSE"
"""Seconds until a disk that could not be cleared is asked again."""


async def test_a_reset_ends_also_when_the_disk_cannot_be_cleared_and_says_so(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLEARED_AGAIN, 0.1)
    async with open_store(disk=32) as store:
        keys = await filled(store, "a", 2)
        await store.flush()
        with monkeypatch.context() as broken:
            broken.setattr(DiskTier, "clear", answer(None))
            with pytest.raises(KVStoreError, match="cannot be cleared now"):
                await asyncio.wait_for(store.reset(), PATIENCE)
            assert store.lookup_prefix(keys) == 0
        # It is tried again, although nobody calls anything.
        await until_async(lambda: not store._core.uncleared)


async def test_a_reset_that_was_not_waited_for_is_made_while_the_store_is_idle(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLEARED_AGAIN, 0.1)
    async with open_store(disk=32) as store:
        await store.put(keys_of("a", 2), payloads(keys_of("a", 2)), durable=True)

        async def fails(self: DiskTier) -> None:
            await asyncio.sleep(0.2)

        with monkeypatch.context() as broken:
            broken.setattr(DiskTier, "clear", fails)
            with pytest.raises(TimeoutError):
                await store.reset(timeout=0.05)
            await until_async(lambda: not store._core.clearing)
            assert store._core.uncleared
        await until_async(lambda: not store._core.uncleared)


async def test_a_reset_that_was_not_waited_for_is_made_before_the_store_is_closed(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, amid = keys_of("before", 4), keys_of("amid", 4)
    async with open_store(disk=32) as store:
        await store.put(before, payloads(before), durable=True)
        slow(monkeypatch, "write", 0.3)
        await store.put(amid, payloads(amid))
        with pytest.raises(TimeoutError):
            await store.reset(timeout=0.05)
    async with open_store(disk=32) as store:
        assert await store.resolve(before) == 0


# -- cancellation ----------------------------------------------------------------------------


async def test_a_put_that_is_cancelled_while_it_copies_leaves_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * COPY_INLINE_BYTES
    gate = threading.Event()
    copyto = np.copyto

    def slow(*args: Any) -> None:
        gate.wait(PATIENCE)
        copyto(*args)

    async with open_store(chunk_bytes=size) as store:
        keys = keys_of("a", 2)
        monkeypatch.setattr(np, "copyto", slow)
        putting = asyncio.create_task(store.put(keys, payloads(keys, size)))
        await until_async(lambda: busy(store) == 2)
        for _ in range(3):
            putting.cancel()
            await asyncio.sleep(0.01)
            assert busy(store) == 2, "the thread still writes to the rows"
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert busy(store) == 0
        assert await store.resolve(keys) == 0
        assert await store.put(keys, payloads(keys, size)) == 2


@pytest.mark.parametrize("call", [contents, Store.resolve])
async def test_a_call_that_is_cancelled_while_it_waits_leaves_no_pin(
    open_store: Open,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Store, Sequence[bytes]], Coroutine[Any, Any, object]],
) -> None:
    keys = keys_of("a", 4)
    await on_disk(open_store, keys, disk=32)
    async with open_store(disk=32) as store:
        gate = hold(monkeypatch, "read")
        waiting = asyncio.create_task(call(store, keys))
        await until_async(lambda: store.stats().waiting == 1)
        await cancel(waiting)
        assert store.stats().waiting == 0
        gate.set()
        await until_async(lambda: busy(store) == 0)
        assert not store._core._requests


# -- the ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["get", "resolve", "lookup_prefix"])
async def test_many_who_wait_share_the_steps_that_wake_them(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    prompts = [keys_of(f"p{number}", 1) for number in range(40)]
    await on_disk(open_store, *prompts, disk=64)
    gate = hold(monkeypatch, "read")
    polls = 0
    real = Core.poll

    def poll(self: Core, *args: Any) -> None:
        nonlocal polls
        polls += 1
        real(self, *args)

    async def ask(keys: list[bytes]) -> int:
        if way == "get":
            return len(await contents(store, keys))
        if way == "resolve":
            return await store.resolve(keys)
        return await answered_async(lambda: store.lookup_prefix(keys), pause=0)

    async with open_store(rows=64, disk=64) as store:
        asking = [asyncio.create_task(ask(keys)) for keys in prompts]
        await asyncio.sleep(0.05)
        monkeypatch.setattr(Core, "poll", poll)
        began = time.monotonic()
        wakes, took = 0, 0.0
        while took < 0.1 or wakes < 50:
            wakes += 1
            store._driver.wake()
            await asyncio.sleep(0)
            took = time.monotonic() - began
        most = 20 + 1000 * took
        assert polls <= most, "a step a millisecond, whoever asks"
        assert polls < wakes * len(prompts) / 2, "every question is a step"
        gate.set()
        assert await asyncio.gather(*asking) == [1] * len(prompts)


async def test_many_lookups_of_one_turn_share_the_end_of_a_step(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs more the more requests wait."""
    keys = keys_of("many", 600)
    await on_disk(open_store, keys, rows=700, disk=700)
    async with open_store(rows=700, disk=700) as store:
        begun, ended, poll, flush = 0, 0, Core.poll, Core.flush

        def begin(self: Core, *given: Any) -> None:
            nonlocal begun
            begun += 1
            poll(self, *given)

        def end(self: Core, now: float) -> list[Move]:
            nonlocal ended
            ended += 1
            return flush(self, now)

        monkeypatch.setattr(Core, "poll", begin)
        monkeypatch.setattr(Core, "flush", end)

        got = await asyncio.gather(*(contents(store, [key]) for key in keys))
        assert [one for (one,) in got] == payloads(keys)
        assert ended < 0.8 * begun


async def test_beside_many_gets_that_wait_a_put_waits_without_steps_of_its_own(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, more = keys_of("many", 80), keys_of("more", 16)
    async with open_store(rows=16, disk=200) as store:
        await store.put(keys, payloads(keys), durable=True)
        gate, steps, poll = hold(monkeypatch, "read"), 0, Core.poll

        def counted(self: Core, *given: Any) -> None:
            nonlocal steps
            steps += 1
            poll(self, *given)

        gets = [asyncio.create_task(contents(store, [key])) for key in keys]
        await until_async(lambda: len(store._driver._waiters) > 64)
        putting = asyncio.create_task(store.put(more, payloads(more)))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        with monkeypatch.context() as patched:
            patched.setattr(Core, "poll", counted)
            await asyncio.sleep(0.3)
        assert steps < 20 + 500 * (time.monotonic() - began)
        assert not putting.done()
        gate.set()
        assert [one for (one,) in await asyncio.gather(*gets)] == payloads(keys)
        await putting


async def test_a_put_that_does_not_wait_takes_what_others_have_just_hit(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where so many wait that lookups share the end of a step."""
    keys, here, more = keys_of("many", 80), keys_of("here", 100), keys_of("more", 16)
    await on_disk(open_store, keys, rows=180, disk=300)
    async with open_store(rows=180, disk=300) as store:
        await store.put(here, payloads(here), durable=True)
        gate = hold(monkeypatch, "read")
        gets = [asyncio.create_task(contents(store, [key])) for key in keys]
        await until_async(lambda: store._core.stats().busy_rows == len(keys))

        async def look() -> int:
            return sum(store.lookup_prefix([key]) == 1 for key in here)

        async def put() -> int:
            return await store.put(more, payloads(more), wait=False)

        hits, stored = await asyncio.gather(look(), put())
        assert (hits, stored) == (len(here), len(more))
        gate.set()
        await asyncio.gather(*gets)


async def test_closing_does_not_go_on_copying_after_its_time(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0

    async def slow(self: DiskTier, keys: Sequence[bytes], slots: Any, rows: Any) -> Transfer:
        nonlocal writes
        writes += 1
        await asyncio.sleep(0.5)
        return Transfer([True] * len(keys))

    monkeypatch.setattr(DiskTier, "write", slow)
    async with open_store(
        rows=64, disk=64, shutdown_timeout_s=0.12, write_queue_bytes=CHUNK
    ) as store:
        await filled(store, "a", 40)
    assert writes < 20, "copies went on for as long as there were any"


async def test_host_memory_must_hold_a_chunk() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use = 100: must hold at least one chunk"):
        async with kvstore.open({"cpu_bytes_to_use": 100, "chunk_bytes": CHUNK}):
            pass


async def test_when_the_second_tier_cannot_be_opened_the_first_is_let_go(tmp_path: Path) -> None:
    def disk(path: Path) -> dict[str, object]:
        return {"type": "disk", "path": path, "capacity_bytes": "1MiB", "segment_bytes": "64KiB"}

    (tmp_path / "file").write_text("a file")
    config = {"cpu_bytes_to_use": "1MiB", "chunk_bytes": CHUNK, "identity": {"model": "m"}}
    with pytest.raises(KVStoreError, match="file is a file"):
        async with kvstore.open(
            {**config, "tiers": [disk(tmp_path / "good"), disk(tmp_path / "file")]}
        ):
            pass
    async with kvstore.open({**config, "tiers": [disk(tmp_path / "good")]}) as store:
        assert "lane-0" in store.description


async def test_when_a_policy_cannot_be_built_the_disk_is_let_go(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fragile(LRU):
        name = "fragile"

        def __init__(self, capacity: int) -> None:
            raise MemoryError("of another package")

    monkeypatch.setitem(registry.POLICIES.classes, "fragile", Fragile)
    with pytest.raises(MemoryError):
        async with open_store(disk=32, eviction_policy="fragile"):
            pass
    async with open_store(disk=32) as store:
        assert "lane-0" in store.description


async def test_opening_does_not_hold_up_the_loop(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[threading.Thread] = []
    real = PinnedRegion.private

    def private(rows: int, row_bytes: int, tail_bytes: int) -> PinnedRegion:
        where.append(threading.current_thread())
        return real(rows, row_bytes, tail_bytes)

    monkeypatch.setattr(PinnedRegion, "private", private)
    async with open_store(disk=32):
        pass
    assert where
    assert threading.main_thread() not in where


# -- what it tells ---------------------------------------------------------------------------


async def test_no_events_are_kept_otherwise(open_store: Open) -> None:
    async with open_store() as store:
        keys = await filled(store, "a", 2)
        assert store.lookup_prefix(keys) == 2
        assert store.take_events() == []


async def test_it_describes_itself(open_store: Open) -> None:
    async with open_store(disk=32) as store:
        assert "host" in store.description
        assert "disk" in store.description
        assert "lru" in store.description
        assert COMPILED or "compiler" in store.description


async def test_it_says_so_where_its_tables_are_not_compiled(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.assembly.COMPILED", False)
    async with open_store(disk=32) as store:
        assert "installed without a C compiler" in store.description


async def test_a_store_without_steps_of_its_own_goes_on_until_all_is_done(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step leaves over waits for no other call."""
    slow = Pace(asked=4, told=2, granted=2, absorbed=2, copied=2, questions=2)
    defaults = Core.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "pace", slow)
    keys, others = keys_of("a", 40), keys_of("b", 60)
    async with open_store(rows=64, disk=160) as store:
        assert await store.put(keys, payloads(keys)) == 40
        assert await store.flush(PATIENCE)
        assert await store.put(others, payloads(others)) == 60
        assert await store.flush(PATIENCE)
        assert await store.resolve(keys) == 40
        async with store.get(keys) as chunks:
            assert [bytes(chunk) for chunk in chunks] == payloads(keys)
        store.release("nobody")
        assert store.stats().timeouts == 0


async def test_many_that_wait_cost_the_loop_no_more_than_one(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them looks now and then, and one step is enough for all."""
    gate, steps = asyncio.Event(), 0
    perform, step = Engine._perform, Driver._step

    async def slow(self: Engine, move: Move) -> Completion:
        if move.op is Op.PROMOTE:
            await gate.wait()
        return await perform(self, move)

    def counted(self: Driver) -> float:
        nonlocal steps
        steps += 1
        began = step(self)
        # As long as a step of a thousand takes.
        time.sleep(0.002)
        return began

    keys = keys_of("many", 64)
    await on_disk(open_store, keys, rows=128, disk=256)
    async with open_store(rows=128, disk=256) as store:
        monkeypatch.setattr(Engine, "_perform", slow)
        asking = [asyncio.create_task(store.resolve([key], key.hex())) for key in keys]
        await asyncio.sleep(0.1)
        monkeypatch.setattr(Driver, "_step", counted)
        await asyncio.sleep(0.5)
        assert steps <= 0.5 / (RECHECK_SECONDS / 2) + 10
        gate.set()
        assert await asyncio.gather(*asking) == [1] * 64


async def test_a_put_that_is_cancelled_beside_a_get_of_its_prompt_leaves_nothing_of_it(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name both are taken for one request, which goes on as long as either does."""
    gate, perform = asyncio.Event(), Engine._perform

    async def slow(self: Engine, move: Move) -> Completion:
        if move.op in (Op.PROMOTE, Op.CASCADE):
            await gate.wait()
        return await perform(self, move)

    keys, tail = keys_of("one", 8), keys_of("tail", 30)
    async with open_store(rows=16, disk=256) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 8
        others = keys_of("others", 16)
        assert await store.put(others, payloads(others), durable=True) == 16
        monkeypatch.setattr(Engine, "_perform", slow)
        for _ in range(3):
            gate.clear()
            getting = asyncio.create_task(contents(store, keys))
            await asyncio.sleep(0.02)
            putting = asyncio.create_task(store.put(keys + tail, payloads(keys + tail)))
            await asyncio.sleep(0.02)
            putting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await putting
            gate.set()
            assert await getting == payloads(keys)
            await store.put(others, payloads(others), durable=True)
        prompts = store._prompts
        known = {id(prompt) for prompt in prompts._open.values()}
        listed = {id(prompt) for its in prompts._rests.values() for prompt in its.values()}
        assert listed <= known
        assert prompts._keys == sum(len(prompt.keys) for prompt in prompts._open.values())


async def test_lookups_of_prompts_that_are_too_long_to_be_remembered_leave_nothing(
    open_store: Open,
) -> None:
    keys = [b"%08d" % number + bytes(4) for number in range(140_000)]
    async with open_store() as store:
        for _ in range(3):
            assert store.lookup_prefix(keys) == 0
        assert not store._prompts._leasing
