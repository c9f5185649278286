"""Tensors made from leased chunks: they hold the view object and release its buffer."""

from __future__ import annotations

import asyncio
import logging
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.api import lease as onlookers
from kvstore.errors import LeaseEndedError
from kvstore.tiers.pinned import PinnedRegion
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, Open, busy, keys_of, payloads, program, small

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:The given .* is not writable")

A, B = keys_of("a", 4), keys_of("b", 4)


def frombuffer(chunk: memoryview) -> Any:
    return torch.frombuffer(chunk, dtype=torch.uint8)


WAYS: dict[str, Callable[[memoryview], Any]] = {
    "frombuffer": frombuffer,
    "asarray": lambda chunk: torch.asarray(chunk, dtype=torch.uint8),
    "a part of a tensor": lambda chunk: frombuffer(chunk)[10:20],
    "of a slice": lambda chunk: frombuffer(chunk[10:20]),
    "of a view of the view": lambda chunk: frombuffer(memoryview(chunk)),
    "of a cast": lambda chunk: torch.frombuffer(chunk.cast("I"), dtype=torch.int32),
    "of an array": lambda chunk: torch.from_numpy(np.frombuffer(chunk, np.uint8)),
    "of an array's part": lambda chunk: torch.as_tensor(np.asarray(chunk)[5:]),
    "frombuffer, another type": lambda chunk: torch.frombuffer(chunk, dtype=torch.bfloat16),
    "of a view that is released": lambda chunk: _released(chunk),
    # None of a tensor, of which only the buffer is in use.
    "an array": lambda chunk: np.frombuffer(chunk, np.uint8),
    "part of an array": lambda chunk: np.frombuffer(chunk, np.uint8)[7:9],
    "a slice": lambda chunk: chunk[10:20],
    "a cast": lambda chunk: chunk.cast("f"),
    "a view of the view": memoryview,
}


def _released(chunk: memoryview) -> Any:
    with chunk:
        return frombuffer(chunk)


def bytes_of(held: Any) -> bytes:
    if isinstance(held, torch.Tensor):
        held = held.contiguous().view(torch.uint8).numpy()
    return bytes(held.tobytes())


@pytest.mark.parametrize("way", [*WAYS, "its own tensor"])
async def test_what_outlives_its_lease_keeps_its_bytes_and_its_row(
    open_store: Open, way: str
) -> None:
    async with open_store(rows=4, holds=A) as store:
        async with store.get(A) as chunks:
            held = WAYS[way](chunks[1]) if way in WAYS else chunks.tensor(1, torch.int32)
            expected = bytes_of(held)
        assert busy(store) == store.stats().watched_rows == 1
        assert await store.put(B, payloads(B), timeout=PATIENCE) == 3
        assert bytes_of(held) == expected
        del held
        await until_async(lambda: busy(store) == 0)
        assert await store.put(B, payloads(B), timeout=PATIENCE) == 4


async def test_a_view_in_a_variable_is_dead_and_keeps_its_row(open_store: Open) -> None:
    async with open_store(rows=4, holds=A) as store:
        async with store.get(A) as chunks:
            for view in chunks:
                bytes(view)
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        # It cannot be told from a tensor's.
        assert store.stats().watched_rows == 1
        del view
        await until_async(lambda: busy(store) == 0)


async def test_one_view_is_handed_out_for_a_chunk(open_store: Open) -> None:
    async with open_store(rows=4, holds=A) as store:
        async with store.get(A) as chunks:
            for same in (list(chunks), chunks[:], [chunks[n] for n in range(4)]):
                assert [a is b for a, b in zip(chunks, same, strict=True)] == [True] * 4
            del same
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert busy(store) == 0


async def test_only_what_stays_is_counted_and_told_once(
    open_store: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onlookers, "LINGER_SECONDS", 0.05)
    async with open_store(rows=4, holds=A) as store:

        async def loop() -> None:
            async with store.get(A) as chunks:
                for _view in chunks:
                    pass

        held = []
        with caplog.at_level(logging.WARNING, "kvstore"):
            await loop()
            await asyncio.sleep(0.2)
            assert (store.stats().outlived, caplog.records) == (0, [])
            for key in A[:2]:
                async with store.get([key]) as chunks:
                    held.append(frombuffer(chunks[0]))
            await until_async(lambda: store.stats().outlived == 2)
        (record,) = caplog.records
        assert record.__dict__["kvstore.event"] == "lease.outlived"
        held.clear()


async def test_a_tensor_of_a_window_keeps_its_bytes(open_store: Open) -> None:
    async with open_store(rows=4, disk=64) as store:
        keys = keys_of("long", 12)
        assert await store.put(keys, payloads(keys), durable=True) == 12
        tensors: list[Any] = []
        async with store.windows(keys, 1) as windows:
            async for chunks in windows:
                if len(tensors) < 2:
                    tensors.append(frombuffer(chunks[0]))
        assert [bytes_of(tensor) for tensor in tensors] == payloads(keys[:2])
        tensors.clear()
        await until_async(lambda: busy(store) == 0)


@pytest.mark.parametrize(("rows", "size"), [(8, 8), (8, 4), (8, 1), (8, 20)])
async def test_windows_go_on_beside_the_variable_of_a_loop(
    open_store: Open, rows: int, size: int
) -> None:
    keys, copies = keys_of("long", 20), list[bytes]()
    async with open_store(rows=rows, disk=64) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 20
        async with store.windows(keys, size) as windows:
            async for chunks in windows:
                for view in chunks:
                    copies.append(bytes(view))
    assert copies == payloads(keys)


async def test_windows_say_so_when_views_leave_no_row(open_store: Open) -> None:
    keys = keys_of("long", 20)
    async with open_store(rows=8, disk=64) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 20
        for size in (4, 8):
            copies = list[bytes]()

            async def read() -> None:
                async with store.windows(keys, size) as windows:  # noqa: B023
                    async for chunks in windows:
                        views = list(chunks)
                        copies.extend(map(bytes, views))  # noqa: B023

            if size == 4:
                await read()
                assert copies == payloads(keys)
            else:
                with pytest.raises(LeaseEndedError, match="keep all rows"):
                    await read()
                assert copies == payloads(keys[:8])


def test_synchronous_windows_go_on_beside_the_variable_of_a_loop(tmp_path: Any) -> None:
    keys, copies = keys_of("long", 20), list[bytes]()
    with kvstore.open_sync(small(tmp_path, rows=8, disk=64)) as store:
        assert store.put(keys, payloads(keys), durable=True) == 20
        with store.windows(keys, 8) as windows:
            for chunks in windows:
                for view in chunks:
                    copies.append(bytes(view))
    assert copies == payloads(keys)


ENDS = {
    "of an array the lease, then the store": """
        async with kvstore.open(config) as store:
            await store.put(keys, payloads)
            async with store.get(keys) as chunks:
                tensor = np.frombuffer(chunks[1], np.uint8)
    """,
    "the lease, then the store": """
        async with kvstore.open(config) as store:
            await store.put(keys, payloads)
            async with store.get(keys) as chunks:
                tensor = torch.frombuffer(chunks[1], dtype=torch.uint8)
    """,
    "the store, then the lease": """
        store = await kvstore.api.store.start(config)
        await store.put(keys, payloads)
        lease = store.get(keys)
        chunks = await lease.__aenter__()
        tensor = torch.frombuffer(chunks[1], dtype=torch.uint8)
        await store.close()
        await lease.__aexit__(None, None, None)
    """,
    "the store, and the lease never": """
        store = await kvstore.api.store.start(config)
        await store.put(keys, payloads)
        lease = store.get(keys)
        chunks = await lease.__aenter__()
        tensor = torch.frombuffer(chunks[1], dtype=torch.uint8)
        await store.close()
    """,
    "a synchronous store, then the lease": """
        store = kvstore.open_sync(config)
        store.put(keys, payloads)
        lease = store.get(keys)
        chunks = lease.__enter__()
        tensor = torch.frombuffer(chunks[1], dtype=torch.uint8)
        store.close()
        lease.__exit__(None, None, None)
    """,
    "a region, as a device's transfers use it": """
        region = PinnedRegion.private(4, size)
        region.row(1)[:] = payloads[1]
        tensor = torch.frombuffer(region.view, dtype=torch.uint8)[size : 2 * size]
        region.close()
    """,
}


def test_memory_stays_as_long_as_a_tensor_looks_at_it() -> None:
    mains = [
        f"async def main_{number}():\n{textwrap.indent(textwrap.dedent(its).strip(), '    ')}\n"
        "    return tensor\n"
        for number, its in enumerate(ENDS.values())
    ]
    script = f"""
import asyncio, gc, warnings, kvstore, kvstore.api.store, numpy as np, torch
from kvstore.tiers.pinned import PinnedRegion
warnings.simplefilter("ignore")
size = 1 << 20
keys, payloads = [bytes([n]) * 20 for n in range(4)], [bytes([n]) * size for n in range(4)]
config = dict(chunk_bytes=size, cpu_bytes_to_use=4 * size)

{"".join(mains)}
held = []
for main in ({", ".join(f"main_{number}" for number in range(len(mains)))}):
    held.append(asyncio.run(main()))
    gc.collect()
    for tensor in held:
        assert np.asarray(tensor).tobytes() == payloads[1], main
print("same")
"""
    assert program(script)[:2] == (0, "same\n")


def test_a_region_that_nobody_looks_at_is_given_back_at_once() -> None:
    region = PinnedRegion.private(4, CHUNK)
    memory = region._memory
    region.view, region.array, region.row(0)
    region.close()
    assert memory is not None
    assert memory.closed
