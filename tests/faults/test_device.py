"""Devices that lose their power or turn read-only under a running store."""

from __future__ import annotations

import os
import subprocess

import pytest

import kvstore
from kvstore.errors import PathUnusableError
from kvstore.maintenance.offline import compact, purge
from kvstore.maintenance.survey import survey
from tests.faults.conftest import Device
from tests.faults.support import SEGMENTS, SLOTS, calling, config_of, keys_of, warned
from tests.patience import until_async


async def test_after_a_power_cut_nothing_is_raised_and_what_was_synced_is_found_again(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    synced = range(SLOTS)
    async with calling(device.place / "cache") as caller:
        assert await caller.save(synced) == set(synced)
        device.sync()
        written = await caller.save(range(100, 100 + SLOTS))
        assert written
        caller.forget_host()
        device.cut_power()
        assert await caller.get(synced) == 0
        assert warned(caplog.records, "read of", "Input/output error")
        assert await caller.save(range(200, 200 + 4)) == set()
        assert await caller.get(range(200, 204)) == 4, "host memory has them"
        assert await caller.get(range(100, 104)) == 0
        assert caller.disk.failed_reads >= SLOTS
        assert caller.disk.failed_writes > 0
    device.restart()
    async with calling(device.place / "cache") as caller:
        assert await caller.get(synced) == SLOTS
        # What was not synced may be there or not; `each` fails if it is there and wrong.
        await caller.each(range(100, 100 + SLOTS))
        assert await caller.each(range(200, 204)) == set()
        assert await caller.save(range(300, 300 + SLOTS)) == set(range(300, 300 + SLOTS))


async def test_a_power_cut_amid_rewrites_leaves_right_bytes_or_nothing(device: Device) -> None:
    async with calling(device.place / "cache") as caller:
        for start in range(0, 4 * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        device.sync()
        for start in range(1000, 1000 + 3 * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        kept = caller.on_disk.copy()
        device.cut_power()
    device.restart()
    async with calling(device.place / "cache") as caller:
        assert caller.on_disk, "nothing at all has survived"
        served = await caller.each([*range(4 * SLOTS), *range(1000, 1000 + 3 * SLOTS)])
        assert served >= {n for n in range(4 * SLOTS) if b"chunk-%06d\0\0\0\0" % n in kept}


def lose_power(device: Device) -> None:
    """Cut the power when the journal has been written, and the data of other files has not."""
    with (device.place / "other").open("wb") as file:
        os.fsync(file.fileno())
    device.cut_power()


@pytest.mark.parametrize("serving", [False, True], ids=["offline", "while serving"])
async def test_a_power_cut_after_compaction_leaves_what_had_been_synced(
    device: Device, serving: bool
) -> None:
    cache = device.place / "cache"
    async with calling(cache) as caller:
        for start in range(0, SEGMENTS * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
    kept = range(0, SEGMENTS * SLOTS, 3)
    purge(cache, key=set(keys_of(range(SEGMENTS * SLOTS))) - set(keys_of(kept)))
    before = len(list(cache.rglob("segment-*")))
    device.sync()
    if serving:
        async with calling(cache, compaction_rate="1GiB"):
            await until_async(lambda: len(list(cache.rglob("segment-*"))) < before)
            lose_power(device)
    else:
        (done,) = compact(cache)
        assert done.result is not None
        assert done.result.moved > 0
        lose_power(device)
    device.restart()
    async with calling(device.place / "cache") as caller:
        assert await caller.get(kept) == len(kept)


async def test_what_was_purged_does_not_come_back_after_a_power_cut(device: Device) -> None:
    cache, all_keys = device.place / "cache", keys_of(range(SEGMENTS * SLOTS))
    async with calling(cache) as caller:
        for start in range(0, SEGMENTS * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
    purge(cache, key=[key for n, key in enumerate(all_keys) if n % 4])
    device.sync()
    (done,) = compact(cache)
    assert done.result is not None
    assert done.result.moved > 0
    purge(cache)
    device.cut_power()
    device.restart()
    async with calling(device.place / "cache") as caller:
        assert await caller.each(range(SEGMENTS * SLOTS)) == set()


async def test_a_file_system_that_turns_read_only_goes_on_serving(
    ext4: Device, caplog: pytest.LogCaptureFixture
) -> None:
    old = range(SLOTS)
    async with calling(ext4.place / "cache") as caller:
        assert await caller.save(old) == set(old)
        ext4.sync()
        ext4.turn_read_only()
        caller.forget_host()
        assert await caller.get(old) == SLOTS
        assert await caller.save(range(100, 104)) == set()
        assert await caller.get(range(100, 104)) == 4, "host memory has them"
        assert warned(caplog.records, "cannot store now", "Read-only file system") or warned(
            caplog.records, "cannot allocate a segment: Read-only file system"
        )
        assert caller.disk.failed_writes > 0
        await until_async(lambda: caller.asked().errors > 0)
    ext4.repair()
    async with calling(ext4.place / "cache") as caller:
        assert await caller.get(old) == SLOTS
        assert await caller.save(range(100, 104)) == set(range(100, 104))


async def test_a_read_only_file_system_is_refused_at_opening_and_can_be_surveyed(
    ext4: Device,
) -> None:
    async with calling(ext4.place / "cache") as caller:
        assert await caller.save(range(SLOTS)) == set(range(SLOTS))
    subprocess.run(["mount", "-o", "remount,ro", ext4.place], check=True)
    with pytest.raises(PathUnusableError, match="Read-only file system"):
        async with kvstore.open(config_of(ext4.place / "cache")):
            pass
    (namespace,) = survey(ext4.place / "cache")
    assert sum(segment.live for segment in namespace.lanes[0].segments) == SLOTS
    assert not namespace.faults
    subprocess.run(["mount", "-o", "remount,rw", ext4.place], check=True)
    async with calling(ext4.place / "cache") as caller:
        assert await caller.get(range(SLOTS)) == SLOTS
