"""Files that somebody removes, cuts, moves or overwrites under a running store."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from tests.faults.support import (
    CAPACITY,
    GEOMETRY,
    SEGMENT,
    SEGMENTS,
    SLOTS,
    Caller,
    calling,
    keys_of,
    lane_of,
    segment_of,
    slot_offset,
    warned,
)
from tests.patience import until_async

ALL = range(SLOTS)


def remove(folder: Path) -> None:
    """`rm -rf`, while the store may be making or removing files in it."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


async def go_on(caller: Caller) -> None:
    """Store more than the lane holds, whatever became of its files."""
    for start in range(5000, 5000 + (SEGMENTS + 1) * SLOTS, SLOTS):
        await caller.save(range(start, start + SLOTS))
        caller.forget_host()
        await caller.each(range(start, start + SLOTS))


async def test_a_segment_that_is_removed_serves_its_chunks_until_the_process_ends(
    folder: Path,
) -> None:
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        segment_of(folder).unlink()
        caller.forget_host()
        assert await caller.get(ALL) == SLOTS
        await go_on(caller)
    async with calling(folder) as caller:
        assert await caller.each(ALL) == set(), "they were removed, after all"
        assert await caller.save(ALL) == set(ALL)


@pytest.mark.parametrize("what", ["lane", "namespace", "cache"])
async def test_a_folder_that_is_removed_costs_no_more_than_what_was_in_it(
    folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        lane = lane_of(folder)
        remove({"lane": lane, "namespace": lane.parent, "cache": folder}[what])
        caller.forget_host()
        assert await caller.get(ALL) == SLOTS
        await go_on(caller)
        assert warned(caplog.records, "cannot allocate a segment: No such file or directory")
    async with calling(folder) as caller:
        assert caller.on_disk == set()
        assert await caller.save(ALL) == set(ALL)


@pytest.mark.parametrize(
    "length",
    [0, GEOMETRY.index_offset + 700, GEOMETRY.blocks_offset, slot_offset(5) + 4097, SEGMENT - 1],
)
async def test_a_segment_that_is_cut_serves_what_it_still_has_and_takes_new_chunks(
    folder: Path, length: int
) -> None:
    whole = {n for n in ALL if slot_offset(n + 1) <= length}
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        os.truncate(segment_of(folder), length)
        caller.forget_host()
        served = await caller.each(ALL)
        assert len(served) == len(whole)
        assert caller.disk.failed_reads == SLOTS - len(whole)
        await go_on(caller)
    async with calling(folder) as caller:
        kept = await caller.each(range(5000, 5000 + (SEGMENTS + 1) * SLOTS))
        # A header that was cut away takes its segment along.
        assert len(kept) >= (SEGMENTS - 1) * SLOTS
        caller.within_budget()


async def test_a_segment_that_grows_from_outside_gets_its_size_back_at_the_next_opening(
    folder: Path,
) -> None:
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        with segment_of(folder).open("ab") as file:
            file.write(b"x" * SEGMENT)
        caller.forget_host()
        assert await caller.get(ALL) == SLOTS
    async with calling(folder) as caller:
        assert await caller.get(ALL) == SLOTS
        assert segment_of(folder).stat().st_size == SEGMENT


async def test_a_segment_that_is_renamed_is_served_now_and_under_its_new_name(
    folder: Path,
) -> None:
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        segment_of(folder).rename(segment_of(folder, 7))
        caller.forget_host()
        assert await caller.get(ALL) == SLOTS
        assert await caller.save(range(100, 104)) == set(range(100, 104))
    async with calling(folder) as caller:
        assert await caller.get(ALL) == SLOTS
        await go_on(caller)


async def test_a_lane_that_is_moved_away_is_served_until_the_process_ends(folder: Path) -> None:
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        folder.rename(folder.with_name("elsewhere"))
        caller.forget_host()
        assert await caller.get(ALL) == SLOTS
        await go_on(caller)
    async with calling(folder.with_name("elsewhere")) as caller:
        assert await caller.each(range(5000, 5000 + (SEGMENTS + 1) * SLOTS))


@pytest.mark.parametrize("moved", ["cache", "lane"])
async def test_a_cache_that_is_made_where_another_was_moved_away_is_left_alone(
    folder: Path, moved: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = {"cache": folder, "lane": lane_of(folder)}[moved]
    gone = folder.with_name("elsewhere")
    async with calling(folder, share=False) as first:
        assert await first.save(ALL) == set(ALL)
        for _ in range(2):
            await first.store.reset()
        assert await first.save(ALL) == set(ALL)
        old.rename(gone)
        async with calling(folder, share=False) as second:
            assert second.lane == 0
            others = range(100, 100 + 2 * SLOTS)
            assert await second.save(others) == set(others)
            # It removes and makes segments of its own, as far as it can.
            assert await first.store.remove(keys_of(ALL)) == SLOTS
            first.store.compact("1GiB")
            for start in range(0, 6 * SLOTS, SLOTS):
                await first.save(range(1000 + start, 1000 + start + SLOTS))
            left = {path.name for path in lane_of(folder).glob("segment-*")}
            assert left == {f"segment-{number}.safetensors" for number in second.segments}
            with pytest.raises(KVStoreError, match="cannot be cleared now"):
                await first.store.reset()
            assert warned(caplog.records, "is another folder now")
    async with calling(folder, share=False) as caller:
        assert await caller.each(others, times=3) == set(others)
    if moved == "cache":
        async with calling(gone, share=False) as caller:
            assert await caller.each(ALL) == set(), "they were removed, and before a reset"


@pytest.mark.parametrize("seed", range(5))
async def test_bytes_that_are_overwritten_anywhere_are_misses(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with calling(folder) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        hurt: set[int] = set()
        with segment_of(folder).open("r+b") as file:
            for _ in range(5):
                size = chance.choice([1, 100, 20_000])
                offset = chance.randrange(GEOMETRY.blocks_offset, SEGMENT - size)
                file.seek(offset)
                file.write(chance.randbytes(size))
                hurt |= {n for n in ALL if offset < slot_offset(n + 1)} & {
                    n for n in ALL if slot_offset(n) < offset + size
                }
        served = await caller.each(ALL)
        assert len(served) >= SLOTS - len(hurt)
        assert caller.disk.failed_reads == SLOTS - len(served) > 0
        lost = set(ALL) - served
        assert await caller.save(lost) == lost


async def test_two_segments_that_changed_places_serve_right_bytes_or_none(folder: Path) -> None:
    async with calling(folder) as caller:
        await caller.save(range(2 * SLOTS))
        await until_async(lambda: caller.asked().segments > 1)
        await caller.save(range(100, 100 + 2 * SLOTS))
        kept = caller.on_disk.copy()
        spare = folder / "spare"
        segment_of(folder, 0).rename(spare)
        segment_of(folder, 1).rename(segment_of(folder, 0))
        spare.rename(segment_of(folder, 1))
        caller.forget_host()
        await go_on(caller)
    async with calling(folder) as caller:
        assert kept or caller.on_disk
        await caller.each([*range(2 * SLOTS), *range(100, 100 + 2 * SLOTS)])
        await caller.each(range(5000, 5000 + (SEGMENTS + 1) * SLOTS))


async def test_segments_that_changed_places_are_not_removed_for_each_other(folder: Path) -> None:
    async with calling(folder) as caller:
        parts = [range(start, start + SLOTS) for start in range(0, 3 * SLOTS, SLOTS)]
        for part in parts:
            assert await caller.save(part) == set(part)
        spare = folder / "spare"
        segment_of(folder, 0).rename(spare)
        segment_of(folder, 2).rename(segment_of(folder, 0))
        spare.rename(segment_of(folder, 2))
        assert await caller.store.remove(keys_of(parts[0])) == SLOTS
        caller.store.compact("1GiB")
        caller.forget_host()
        await caller.each(parts[1])
        left = set(parts[1]) | set(parts[2])
        await until_async(lambda: caller.asked().chunks == len(left))
        await asyncio.sleep(0.3)
    async with calling(folder) as caller:
        assert await caller.each(left, times=3) == left
        assert await caller.each(parts[0]) == set()


async def test_two_processes_in_one_lane_because_its_lock_was_removed_never_serve_wrong_bytes(
    folder: Path,
) -> None:
    async with calling(folder, share=False) as first:
        await first.save(ALL)
        (lane_of(folder) / "lock").unlink()
        async with calling(folder, share=False) as second:
            assert second.lane == first.lane == 0
            # Neither knows of the other's files.
            first.capacity = second.capacity = 2 * CAPACITY
            for start in range(0, 4 * SLOTS, SLOTS):
                await first.save(range(1000 + start, 1000 + start + SLOTS))
                await second.save(range(2000 + start, 2000 + start + SLOTS))
                for caller in (first, second):
                    caller.forget_host()
                    for base in (0, 1000, 2000):
                        await caller.each(range(base + start, base + start + SLOTS))
