"""File systems that are frozen for a snapshot while a store uses them."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading
import time
from pathlib import Path

import pytest

from kvstore.tiers.disk.io import IO_BACKENDS, IORequest, choose_backend
from tests.faults.conftest import Device
from tests.faults.support import SEGMENTS, SLOTS, Caller, calling, descriptors, running_loop
from tests.patience import PATIENCE, until_async

FROZEN_SECONDS = 2.0
"""Unless it is thawed before."""
USED_SECONDS = 0.4
STILL_SECONDS = 1.0
"""A loop that waits for the thaw stands still for longer."""

ALL = range(SLOTS)


async def use(caller: Caller, seconds: float) -> None:
    """Store and ask, as servers do."""
    end = time.monotonic() + seconds
    number = 1000
    while time.monotonic() < end:
        caller.forget_host()
        await asyncio.gather(
            caller.put(range(number, number + 4)), caller.get(ALL), caller.get([number])
        )
        number += 4
        # What any allocation may do: it waits for nobody who waits for the disk.
        mmap.mmap(-1, mmap.PAGESIZE).close()


@pytest.mark.parametrize("io", sorted(IO_BACKENDS))
async def test_a_frozen_file_system_holds_up_neither_the_loop_nor_the_process(
    device: Device, io: str
) -> None:
    async with calling(device.place, io=io) as caller:
        # Every slot has held something: writing to it erases a record first.
        for first in range(0, SEGMENTS * SLOTS, SLOTS):
            await caller.save(range(first, first + SLOTS))
        await caller.save(ALL)
        # Freezing it may take long where others write: that stands outside.
        with device.frozen(FROZEN_SECONDS):
            async with running_loop(STILL_SECONDS):
                await use(caller, USED_SECONDS)
        async with running_loop(STILL_SECONDS):
            # Thawed: all is as it was.
            await until_async(lambda: not caller.asked().stalled)
            await until_async(lambda: caller.store._core.unsaved == 0)
            assert await caller.save(range(100, 104)) == set(range(100, 104))
        caller.look()
        held = [int(key[6:12]) for key in caller.on_disk]
        caller.forget_host()
        assert await caller.each(held, times=2) == set(held)


async def test_a_neighbour_is_followed_while_the_file_system_is_frozen(device: Device) -> None:
    async with calling(device.place) as owner, calling(device.place) as follower:
        await owner.save(ALL)
        await until_async(lambda: follower.asked() and follower.stats.tiers[1].chunks == SLOTS)
        with device.frozen(FROZEN_SECONDS):
            async with running_loop(STILL_SECONDS):
                assert await follower.each(ALL, times=2) == set(ALL)
                await asyncio.sleep(USED_SECONDS)
        await owner.save(range(100, 108))
        await until_async(lambda: follower.asked() and follower.stats.tiers[1].chunks >= SLOTS + 8)


async def test_a_store_that_is_closed_while_the_file_system_is_frozen_ends_in_time(
    device: Device,
) -> None:
    before = descriptors()
    with contextlib.ExitStack() as frozen:
        async with running_loop(STILL_SECONDS), calling(device.place) as caller:
            await caller.save(ALL)
            # For longer than closing may take.
            await asyncio.to_thread(frozen.enter_context, device.frozen(20.0))
            await caller.put(range(100, 108))
    # A call that was left behind ends at the thaw, and then its files are closed.
    await until_async(lambda: descriptors() <= before)
    async with calling(device.place) as again:
        assert again.lane == 0
        assert await again.each(ALL, times=2) == set(ALL)


async def test_a_store_is_opened_on_a_frozen_file_system_as_soon_as_it_thaws(
    device: Device,
) -> None:
    async with calling(device.place) as caller:
        await caller.save(ALL)
    with device.frozen(FROZEN_SECONDS):
        async with running_loop(STILL_SECONDS):
            opening = asyncio.ensure_future(_served(device.place))
            await asyncio.sleep(FROZEN_SECONDS / 2)
    async with running_loop(STILL_SECONDS):
        assert await opening == set(ALL)


async def _served(place: Path) -> set[int]:
    async with calling(place) as caller:
        return await caller.each(ALL, times=2)


@pytest.mark.parametrize("io", sorted(IO_BACKENDS))
def test_a_write_to_a_frozen_file_system_holds_up_its_own_thread_alone(
    device: Device, io: str
) -> None:
    backend = choose_backend(device.place, io)
    path = device.place / "file"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    device.sync()
    ended = threading.Event()
    with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as view:
        fd = backend.open(path)

        def write() -> None:
            backend.move_all([IORequest(fd, [view], 0)], load=False)
            ended.set()

        with device.frozen(FROZEN_SECONDS):
            began = time.monotonic()
            thread = threading.Thread(target=write)
            thread.start()
            while time.monotonic() < began + FROZEN_SECONDS / 4:
                time.sleep(0.01)
                mmap.mmap(-1, mmap.PAGESIZE).close()
            assert time.monotonic() < began + STILL_SECONDS
            assert not ended.is_set()
            # A thread that waits outside of any call waits in a page fault.
            waits_in = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0]
            assert int(waits_in) >= 0
        thread.join(PATIENCE)
        assert ended.is_set()
        backend.close(fd)
