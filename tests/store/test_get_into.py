"""`get_into`: chunks copied into memory of the caller; chunks as arrays and tensors; opening."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.api import store as api
from kvstore.api.put import run_copy
from kvstore.errors import ConfigError, KVStoreError, LeaseEndedError
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, Open, busy, keys_of, on_disk, payload, payloads, small

torch = pytest.importorskip("torch")

KEYS = keys_of("a", 4)

TARGETS: dict[str, Callable[[int], Any]] = {
    "bytearrays": lambda count: [bytearray(CHUNK) for _ in range(count)],
    "parts of one buffer": lambda count: [
        memoryview(whole)[at * CHUNK : (at + 1) * CHUNK]
        for whole in [bytearray(count * CHUNK)]
        for at in range(count)
    ],
    "an array": lambda count: np.zeros((count, 2, CHUNK // 4), np.float16),
    "a tensor": lambda count: torch.zeros(count, 2, CHUNK // 4, dtype=torch.bfloat16),
}


def bytes_of(buffer: Any) -> bytes:
    if isinstance(buffer, torch.Tensor):
        return bytes(buffer.view(torch.uint8).numpy().tobytes())
    return bytes(buffer)


@pytest.mark.parametrize("kind", TARGETS)
async def test_what_there_is_is_copied_and_the_rest_left_alone(open_store: Open, kind: str) -> None:
    async with open_store(rows=16, holds=KEYS) as store:
        targets = TARGETS[kind](6)
        assert await store.get_into([*KEYS, *keys_of("b", 2)], targets) == 4
        assert [bytes_of(one) for one in targets] == [*payloads(KEYS), *[bytes(CHUNK)] * 2]
        assert busy(store) == 0
        assert store.stats().outlived == 0


async def test_a_prefix_may_be_larger_than_host_memory(open_store: Open) -> None:
    keys = keys_of("long", 40)
    await on_disk(open_store, keys, rows=8, disk=64)
    async with open_store(rows=8, disk=64) as store:
        for count in (0, 1, 5, 8, 40):
            targets = TARGETS["bytearrays"](count)
            assert await store.get_into(keys[:count], targets, timeout=PATIENCE) == count
            assert [bytes(one) for one in targets] == payloads(keys[:count])
            assert busy(store) == 0


def test_without_asyncio_it_does_the_same(tmp_path: Path) -> None:
    keys = keys_of("long", 40)
    with kvstore.open_sync(small(tmp_path, rows=8, disk=64)) as store:
        assert store.put(keys, payloads(keys), durable=True) == 40
        targets = TARGETS["a tensor"](40)
        assert store.get_into(keys, targets, timeout=PATIENCE) == 40
        assert [bytes_of(one) for one in targets] == payloads(keys)
        with pytest.raises(KVStoreError, match="4 keys but 3 buffers"):
            store.get_into(KEYS, TARGETS["bytearrays"](3))


async def test_when_it_is_cancelled_no_buffer_is_written_to_afterwards(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, real = threading.Event(), threading.Event(), run_copy

    async def slow(copy: Callable[[], None], size: int, threads: Executor) -> None:
        def held() -> None:
            begun.set()
            go_on.wait(PATIENCE)
            copy()

        await real(held, 2**30, threads)

    async with open_store(rows=16, holds=KEYS) as store:
        targets = TARGETS["bytearrays"](4)
        monkeypatch.setattr(api, "run_copy", slow)
        task = asyncio.create_task(store.get_into(KEYS, targets))
        await until_async(begun.is_set)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done(), "its thread still writes"
        assert busy(store) == 4
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [bytes(one) for one in targets] == payloads(KEYS)
        assert busy(store) == 0


async def test_copies_do_not_wait_for_what_else_the_loop_has_its_threads_for(
    tmp_path: Path,
) -> None:
    size = 2**20
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    executor = ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    try:
        executor.submit(go_on.wait, PATIENCE)
        async with kvstore.open(small(tmp_path, rows=8, disk=16, chunk_bytes=size)) as store:
            assert await store.put(KEYS, payloads(KEYS, size), timeout=PATIENCE) == 4
            targets = [bytearray(size) for _ in KEYS]
            assert await store.get_into(KEYS, targets, timeout=PATIENCE) == 4
        assert targets == payloads(KEYS, size)
        assert not go_on.is_set()
    finally:
        go_on.set()
        executor.shutdown()
        loop.set_default_executor(ThreadPoolExecutor())


@pytest.mark.parametrize("kind", ["one array twice", "an expanded tensor", "overlapping parts"])
async def test_buffers_to_write_to_that_share_memory_are_refused(
    open_store: Open, kind: str
) -> None:
    array, whole = np.zeros(CHUNK, np.uint8), bytearray(2 * CHUNK)
    targets: dict[str, Any] = {
        "one array twice": [array, array],
        "an expanded tensor": torch.zeros(1, CHUNK, dtype=torch.uint8).expand(2, CHUNK),
        "overlapping parts": [memoryview(whole)[:CHUNK], memoryview(whole)[100 : 100 + CHUNK]],
    }
    async with open_store(rows=16, holds=KEYS) as store:
        with pytest.raises(KVStoreError, match="share memory"):
            await store.get_into(KEYS[:2], targets[kind])


@contextmanager
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """An executor has one thread, which is busy, and the system gives no other."""
    executor, go_on = ThreadPoolExecutor(2), threading.Event()
    executor.submit(go_on.wait, PATIENCE)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield executor
    go_on.set()


async def test_a_copy_for_which_no_thread_can_be_started_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An executor has queued it by then, and hands it to a thread that becomes free."""
    made = 0

    def copy() -> None:
        nonlocal made
        made += 1

    with no_more_threads(monkeypatch) as executor:
        await run_copy(copy, 2**30, executor)
        assert made == 1
    executor.shutdown()
    assert made == 1, "it is made again, into rows that others have by now"


async def test_a_store_for_which_no_thread_can_be_started_is_not_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, rows=8, disk=64)
    config["tiers"][0]["lane"] = 0
    refused = pytest.raises(KVStoreError, match="can't start new thread")
    with no_more_threads(monkeypatch) as executor, refused:
        await kvstore.open(config)
    executor.shutdown()
    async with kvstore.open(config):
        pass


async def test_chunks_of_before_and_after_a_reset_do_not_make_one_prefix(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("long", 32)
    async with open_store(rows=8, disk=64) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 32
        copied = 0

        async def then_reset(copy: Callable[[], None], size: int, threads: Executor) -> None:
            nonlocal copied
            await run_copy(copy, size, threads)
            copied += 1
            if copied == 2:
                monkeypatch.setattr(api, "run_copy", run_copy)
                resetting = asyncio.create_task(store.reset())
                await asyncio.sleep(0)
                after = asyncio.create_task(store.put(keys[8:], payloads(keys[8:])))
                tasks.extend([resetting, after])

        tasks: list[asyncio.Task[Any]] = []
        monkeypatch.setattr(api, "run_copy", then_reset)
        assert await store.get_into(keys, TARGETS["bytearrays"](32), timeout=PATIENCE) == 0
        await asyncio.gather(*tasks)


async def test_what_was_copied_by_the_end_of_the_time_counts(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("long", 32)
    async with open_store(rows=8, disk=64) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 32
        pieces = 0

        async def then_hang(copy: Callable[[], None], size: int, threads: Executor) -> None:
            nonlocal pieces
            pieces += 1
            if pieces == 3:
                await asyncio.Event().wait()
            await run_copy(copy, size, threads)

        monkeypatch.setattr(api, "run_copy", then_hang)
        targets = TARGETS["bytearrays"](32)
        count = await store.get_into(keys, targets, timeout=2.0)
        assert 0 < count < 32
        assert [bytes(one) for one in targets[:count]] == payloads(keys[:count])
        pieces = 2
        with pytest.raises(TimeoutError, match="get_into took longer than 0.2 s"):
            await store.get_into(keys, targets, timeout=0.2)


async def test_what_was_fetched_for_its_request_does_not_stand_in_its_way(
    open_store: Open,
) -> None:
    keys = keys_of("long", 40)
    await on_disk(open_store, keys, rows=8, disk=64)
    async with open_store(rows=8, disk=64) as store:
        assert await store.resolve(keys, "mine") == 8
        targets = TARGETS["bytearrays"](40)
        # As long as a request waits in vain, which `open_store` makes very long.
        assert await store.get_into(keys, targets, "mine", timeout=PATIENCE) == 40
        assert [bytes(one) for one in targets] == payloads(keys)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "too few": (lambda: [bytearray(CHUNK)] * 3, "4 keys but 3 buffers"),
    "another size": (lambda: [bytearray(CHUNK - 1)] * 4, "must have 4096 bytes, not 4095"),
    "bytes": (lambda: [bytes(CHUNK)] * 4, "read-only: bytes"),
    "a read-only array": (lambda: np.frombuffer(bytes(4 * CHUNK), "B").reshape(4, -1), "read-only"),
    "a transposed array": (
        lambda: [np.zeros((64, 64), np.uint8).T] * 4,
        "does not lie side by side .*: ndarray",
    ),
    "a transposed tensor": (
        lambda: [torch.zeros(64, 64, dtype=torch.uint8).T] * 4,
        "does not lie side by side .*: Tensor",
    ),
    "no iterable": (lambda: 5, "must be a list or another iterable of buffers, not int"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_what_cannot_be_written_to_is_refused_by_name(open_store: Open, kind: str) -> None:
    make, message = BAD[kind]
    async with open_store(holds=KEYS) as store:
        with pytest.raises(KVStoreError, match=message):
            await store.get_into(KEYS, make())


# -- arrays and tensors ----------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
async def test_a_chunk_is_an_array_or_a_tensor_of_a_type_and_a_shape(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        async with store.get(KEYS) as chunks:
            array = chunks.array(1, np.float16, (2, 8, -1))
            tensor = chunks.tensor(2, torch.bfloat16, (2, 8, 128))
            assert array.shape == tuple(tensor.shape) == (2, 8, 128)
            assert not array.flags.writeable
            assert bytes_of(array) == payload(KEYS[1])
            assert bytes_of(tensor) == payload(KEYS[2])
            assert chunks.tensor(0, torch.uint8).data_ptr() == chunks.array(0, "B").ctypes.data
            del array, tensor
        assert busy(store) == 0


async def test_where_kept_arrays_leave_no_row_the_rest_is_missing(open_store: Open) -> None:
    keys = keys_of("long", 10)
    async with open_store(rows=4, disk=64) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 10
        kept = []
        for key in keys[:4]:
            async with store.get([key]) as chunks:
                kept.append(chunks.array(0, "u1"))
        targets = [bytearray(CHUNK) for _ in keys]
        assert await asyncio.wait_for(store.get_into(keys[4:], targets[4:]), PATIENCE) == 0
        del chunks, kept[:]
        assert await store.get_into(keys, targets) == 10
        assert targets == payloads(keys)


@pytest.mark.parametrize("name", ["\0", "\0prefetch", ""])
async def test_any_text_is_a_name_of_a_request(open_store: Open, name: str) -> None:
    async with open_store(rows=2, disk=64) as store:
        assert await store.put(KEYS, payloads(KEYS), durable=True) == 4
        assert await asyncio.wait_for(store.resolve(KEYS[:2], name), PATIENCE) == 2
        store.release(name)


async def test_a_type_or_shape_that_does_not_fit_is_named(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        async with store.get(KEYS) as chunks:
            with pytest.raises(KVStoreError, match=r"4096 bytes is not of .*float32.* \(7, 5\)"):
                chunks.array(0, np.float32, (7, 5))
            with pytest.raises(KVStoreError, match=r"not of torch.float32 in the shape \(7, 5\)"):
                chunks.tensor(0, torch.float32, (7, 5))
            with pytest.raises(KVStoreError, match="is not of S5"):
                chunks.array(0, "S5")
            with pytest.raises(KVStoreError, match=r"not of u1 in the shape 7"):
                chunks.array(0, "u1", 7)
            assert chunks.array(0, "u1", CHUNK).shape == (CHUNK,)
            assert tuple(chunks.tensor(0, torch.uint8, CHUNK).shape) == (CHUNK,)
            with pytest.raises(TypeError):
                chunks.array(slice(0, 2), "u1")  # type: ignore[arg-type]
        for use in (chunks.array, chunks.tensor):
            with pytest.raises(LeaseEndedError):
                use(0, "B")


# -- opening, and what is shown --------------------------------------------------------------


async def test_a_store_may_be_opened_by_await(tmp_path: Path) -> None:
    store = await kvstore.open(small(tmp_path))
    assert await store.put(KEYS, payloads(KEYS)) == 4
    await store.close()
    async with await kvstore.open(small(tmp_path)) as store:
        assert await store.wait(KEYS) == 0
    with pytest.raises(KVStoreError, match="closed"):
        store.lookup_prefix(KEYS)
    with pytest.raises(KVStoreError, match="closed"):
        async with store:
            pass
    opening = kvstore.open(small(tmp_path))
    async with opening:
        with pytest.raises(KVStoreError, match="opens one store"):
            await opening


async def test_without_a_configuration_the_environment_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("", "_HOST", "_CHUNK_BYTES"):
        monkeypatch.delenv(f"KVSTORE_CONFIG{name}", raising=False)
    with pytest.raises(ConfigError, match="set KVSTORE_CONFIG"):
        await kvstore.open()
    monkeypatch.setenv("KVSTORE_CONFIG_HOST", "64KiB")
    monkeypatch.setenv("KVSTORE_CONFIG_CHUNK_BYTES", "4Ki")
    async with kvstore.open() as store:
        assert store.stats().rows == 16
    with pytest.raises(ConfigError), kvstore.open_sync({}):
        pass
    with kvstore.open_sync() as other:
        assert other.chunk_bytes == CHUNK


async def test_what_is_shown_of_a_store_a_lease_and_chunks(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path)) as store:
        await store.put(KEYS, payloads(KEYS))
        assert repr(store) == f"<Store, open: {store.description}>"
        lease = store.get(KEYS)
        assert repr(lease) == "<Lease, not begun>"
        async with lease as chunks:
            assert repr(chunks) == "<Chunks: 4 of 4.0 KiB>"
            assert repr(lease) == f"<Lease of {chunks!r}>"
        assert repr(chunks) == "<Chunks: 4, the lease has ended>"
        assert repr(lease) == "<Lease, ended>"
    assert repr(store) == f"<Store, closed: {store.description}>"
    with kvstore.open_sync(small(tmp_path)) as other:
        assert repr(other) == f"<SyncStore, open: {other.description}>"
        taken = other.get(KEYS)
        assert repr(taken) == "<SyncLease, not begun>"
        with taken:
            assert repr(taken) == "<SyncLease of <Chunks: 0 of 0 B>>"
    assert repr(other) == f"<SyncStore, closed: {other.description}>"


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("piecewise", [False, True])
async def test_of_a_prompt_larger_than_host_memory_and_disk_the_head_stays(
    tmp_path: Path, name: str | None, piecewise: bool
) -> None:
    """Also where it is read piece by piece before its rest is put."""
    if piecewise and name is None:
        pytest.skip("what is put after windows without a name is a prompt of its own")
    keys = keys_of("long", 480)
    config = small(tmp_path, rows=16, disk=80)
    found = []
    async with kvstore.open(config) as store:
        for _ in range(4):
            count = 0
            if piecewise:
                async with store.windows(keys, 4, name) as windows:
                    async for chunks in windows:
                        count += len(chunks)
            else:
                count = await store.get_into(keys, [bytearray(CHUNK) for _ in keys], name)
            found.append(count)
            await store.put(keys[count:], payloads(keys[count:]), name)
            if name is not None:
                store.release(name)
            assert await store.flush()
    assert found[0] == 0
    assert 300 <= min(found[1:]) < 480
