"""A process that may not open any more files."""

from __future__ import annotations

import errno
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError, PathUnusableError
from kvstore.maintenance.offline import compact
from kvstore.tiers.disk.segment import Segment
from tests.faults.support import (
    CAPACITY,
    SEGMENTS,
    SLOTS,
    calling,
    config_of,
    descriptors,
    lane_bytes,
    lane_of,
    warned,
)
from tests.patience import until_async

ALL = range(SLOTS)


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Within the block, so many more files can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    limit, free = 0, 0
    while free < count:
        free += limit not in used
        limit += 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_descriptors_the_lane_stays_as_large_as_it_is_and_grows_later(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(folder) as caller:
        assert await caller.save(range(4)) == set(range(4))
        with descriptors_left(0):
            for start in range(100, 100 + 3 * SLOTS, SLOTS):
                wave = range(start, start + SLOTS)
                # Looking at the lane takes a descriptor, so the budget is looked at later.
                assert len(await caller.save(wave)) == SLOTS
                caller.forget_host()
                assert await caller.get(wave) == SLOTS
            assert caller.disk.segments == 1
            assert warned(caplog.records, "cannot allocate a segment: Too many open files")
        for start in range(200, 200 + 6 * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        await until_async(lambda: caller.asked().segments > 1)


MANY = range(8 * SEGMENTS * SLOTS)


async def large_lane(folder: Path) -> set[bytes]:
    """A lane of eight times the segments of other tests; returns what is in it."""
    async with calling(folder, capacity_bytes=8 * CAPACITY) as caller:
        caller.capacity *= 8
        for start in MANY[::SLOTS]:
            await caller.save(range(start, start + SLOTS))
        return caller.on_disk.copy()


async def test_a_capacity_that_was_lowered_is_kept_with_few_descriptors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await large_lane(folder)
    monkeypatch.setattr("kvstore.tiers.disk.volume.SPARE_DESCRIPTORS", 24)
    with descriptors_left(24):
        async with calling(folder) as caller:
            assert lane_bytes(lane_of(folder)) <= CAPACITY
            newest = MANY[-SEGMENTS * SLOTS :]
            assert await caller.each(newest, times=3) == set(newest)


async def test_a_lane_that_cannot_be_made_smaller_is_refused_and_leaves_no_file_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(segment: Segment) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), segment.path)

    kept = await large_lane(folder)
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "remove", fails)
        with pytest.raises(PathUnusableError, match="Input/output error"):
            async with kvstore.open(config_of(folder)):
                pass
    assert descriptors() == before
    async with calling(folder, capacity_bytes=8 * CAPACITY) as caller:
        caller.capacity *= 8
        assert caller.on_disk == kept


async def test_a_lane_with_more_segments_than_may_be_open_is_no_lane_of_foreign_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = await large_lane(folder)
    monkeypatch.setattr("kvstore.tiers.disk.volume.allow_descriptors", lambda more, what: None)
    with descriptors_left(48):
        (done,) = compact(folder)
        with pytest.raises(PathUnusableError, match="open files: 32 segments need two each"):
            async with kvstore.open(config_of(folder, capacity_bytes=8 * CAPACITY)):
                pass
    assert done.result is None
    assert "Too many open files" in (done.failed or "")
    assert not warned(caplog.records, "left alone")
    (done,) = compact(folder)
    assert done.result is not None
    assert not done.result.faults
    async with calling(folder, capacity_bytes=8 * CAPACITY) as caller:
        caller.capacity *= 8
        assert caller.on_disk == kept


async def test_a_lane_that_lacks_descriptors_and_cannot_be_listed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await large_lane(folder)
    listed = os.listdir

    def fails(*where: Any) -> list[str]:
        if sys.exc_info()[1] is not None and "lane-" in str(where[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(where[0]))
        return listed(*where)

    monkeypatch.setattr("kvstore.tiers.disk.volume.allow_descriptors", lambda more, what: None)
    with monkeypatch.context() as patch, descriptors_left(48):
        patch.setattr(os, "listdir", fails)
        with pytest.raises(PathUnusableError, match="open files.*raise the limit"):
            async with kvstore.open(config_of(folder, capacity_bytes=8 * CAPACITY)):
                pass
    async with calling(folder, capacity_bytes=8 * CAPACITY) as caller:
        caller.capacity *= 8
        assert caller.on_disk == kept


@pytest.mark.parametrize("left", [1, 3, 6, 7, 8, 9, 10, 12, 14])
async def test_a_lane_that_needs_more_descriptors_than_there_are_is_refused(
    folder: Path, left: int
) -> None:
    async with calling(folder) as caller:
        for start in range(0, 2 * SEGMENTS * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        kept = caller.on_disk.copy()
    refusal = "Too many open files"
    with descriptors_left(left):
        try:
            async with kvstore.open(config_of(folder)) as store:
                assert set(store._core.tiers[0].entries) == kept, "all or nothing"
        except KVStoreError as error:
            refusal = str(error)
    assert "Too many open files" in refusal
    async with calling(folder) as caller:
        assert caller.on_disk == kept, "nothing was lost by it"


@pytest.mark.parametrize("io", ["buffered", "mmap", "portable"])
async def test_a_full_lane_has_room_for_the_files_that_its_backend_keeps_open(
    io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of memory, where the mapping of a file keeps one more."""
    monkeypatch.setattr("kvstore.tiers.disk.volume.SPARE_DESCRIPTORS", 24)
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, descriptors_left(70):
        # As many as it is to have beside: it raises the limit by what it needs itself.
        async with calling(Path(place), capacity_bytes=8 * CAPACITY, io=io) as caller:
            caller.capacity *= 8
            for start in MANY[::SLOTS]:
                wave = range(start, start + SLOTS)
                assert len(await caller.save(wave)) == SLOTS
            assert caller.disk.segments == 8 * SEGMENTS
            assert len(caller.on_disk) == len(MANY)
