"""A disk that others fill: what is stored stays, growth waits, nothing fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import PathUnusableError
from tests.faults.conftest import Device
from tests.faults.support import (
    CAPACITY,
    SEGMENT,
    SLOTS,
    Caller,
    calling,
    config_of,
    lane_bytes,
    lane_of,
    warned,
)
from tests.patience import until_async

MARGIN = 2 * 2**20


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, mount: Callable[..., Path]) -> Path:
    """A file system with room for the cache and hardly more."""
    if request.param == "ext4":
        device: Device = request.getfixturevalue("ext4")
        return device.place
    return mount("-t", "tmpfs", "-o", f"size={CAPACITY + MARGIN}", "tmpfs")


def fill(place: Path) -> Path:
    """Somebody writes until nothing fits any more."""
    file = place / "somebody's"
    with file.open("wb", buffering=0) as handle:
        for size in (2**20, 4096):
            with contextlib.suppress(OSError):
                while handle.write(b"x" * size) == size:
                    pass
    return file


async def test_a_disk_that_others_fill_keeps_what_it_has_and_takes_new_chunks_in_place_of_old(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(small / "cache") as caller:
        first = range(SLOTS // 4)
        assert await caller.save(first) == set(first)
        fill(small)
        for start in range(100, 100 + 3 * SLOTS, SLOTS):
            wave = range(start, start + SLOTS)
            assert await caller.save(wave) == set(wave), "nothing that fits in place was refused"
            caller.forget_host()
            assert await caller.get(wave) == SLOTS
        assert caller.disk.segments == 1
        assert caller.disk.errors > 0
        assert warned(caplog.records, "No space left on device")
        kept = range(100 + 2 * SLOTS, 100 + 3 * SLOTS)
    async with calling(small / "cache") as caller:
        assert await caller.get(kept) == SLOTS, "the disk is still full, and all of it is served"


async def test_a_reset_on_a_full_disk_gives_up_a_segment_and_is_durable(small: Path) -> None:
    wave, later = range(2 * SLOTS), range(100, 100 + SLOTS)
    async with calling(small / "cache") as caller:
        assert await caller.save(wave) == set(wave)
        fill(small)
        await caller.store.reset()
        assert await caller.save(later) == set(later)
    async with calling(small / "cache") as caller:
        assert await caller.each([*wave, *later], times=3) == set(later)


async def test_a_disk_that_has_room_again_is_used_again(small: Path) -> None:
    async with calling(small / "cache") as caller:
        theirs = fill(small)
        await caller.save(range(2 * SLOTS))
        assert caller.disk.segments == 1
        theirs.unlink()

        async def more(caller: Caller) -> None:
            for start in range(200, 200 + 8 * SLOTS, SLOTS):
                await caller.save(range(start, start + SLOTS))

        await more(caller)
        await until_async(lambda: caller.asked().segments >= 2)
        await more(caller)
        kept = range(200 + 6 * SLOTS, 200 + 8 * SLOTS)
        caller.forget_host()
        assert len(await caller.each(kept, times=3)) == len(kept)
        assert caller.disk.segments > 1


async def test_a_full_disk_without_a_cache_is_refused_with_the_reason(small: Path) -> None:
    fill(small)
    with pytest.raises(PathUnusableError, match="No space left on device"):
        async with kvstore.open(config_of(small / "cache")):
            pass
    assert not list(small.rglob("*.tmp"))


async def test_a_disk_with_room_for_less_than_a_segment_is_refused_and_left_as_it_was(
    small: Path,
) -> None:
    theirs = fill(small)
    with theirs.open("r+b") as file:
        file.truncate(theirs.stat().st_size - SEGMENT // 2)
    with pytest.raises(PathUnusableError, match="No space left on device"):
        async with kvstore.open(config_of(small / "cache")):
            pass
    assert lane_bytes(lane_of(small / "cache")) == 0, "part of a segment was left behind"
